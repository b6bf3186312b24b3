"""How samples become a batch, written in place: pure, and the same for every kind of worker.

The form of a sample teaches the form of its batch, which is that of ``default_collate``. Memory for a batch is asked for once, and
each sample is then written straight into its row, while it is still in the cache. A field that does not fit (strings, sparse
tensors, tensors that require grad, a shape that has changed) takes the ordinary way on its own, and the others stay in place.

Nothing is broadcast or converted on the way: a row is written only from a sample of exactly the type, dtype and shape expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from penstock._form import Form, OtherStructure, collated
from penstock._pool import afresh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._form import Filler
    from penstock._pool import Allocate


@final
class Collator:
    """Makes batches of samples, as ``default_collate`` does; dataclasses too. For any number of threads.

    Attributes:
        form: Of the last batch that fitted one; what the next batch is tried with.
    """

    def __init__(self) -> None:
        self.form: Form | None = None

    def __call__(self, samples: Sequence[Any], allocate: Allocate = afresh) -> Any:
        """The batch of ``samples``, one or more.

        Raises:
            Exception: What ``default_collate`` raises where they do not go together.
        """
        batch = Collation(self, len(samples), allocate)
        for sample in samples:
            batch.add(sample)
        return batch.finish()


@final
class Collation:
    """One batch in the making, of up to ``rows`` samples.

    Args:
        collator: Knows the form of other batches, and learns that of this one.
        rows: At least 1.
        allocate: Called where there is anything to be written in place.
    """

    def __init__(self, collator: Collator, rows: int, allocate: Allocate) -> None:
        self._collator = collator
        self._rows = rows
        self._allocate = allocate
        self._pending: list[Any] = []  # samples not written yet
        self._step = 1  # they are written when there are so many
        self._filler: Filler | None = None
        self._written = 0
        self._own: Form | None = None  # learned from this batch
        self._ordinary = False  # the samples are not even of one structure: all of them are pending, to the end
        if collator.form is not None:
            self._begin(collator.form)

    def add(self, sample: Any) -> None:
        """The next sample."""
        self._pending.append(sample)
        if len(self._pending) >= self._step and not self._ordinary:
            self._write()

    def finish(self) -> Any:
        """The batch of all that were added. (Of none, ``default_collate`` makes an ``IndexError``.)"""
        if self._pending and not self._ordinary:
            self._write()
        if self._ordinary:
            self._collator.form = None
        if self._ordinary or self._filler is None or not self._written:
            return ordinary(self._pending)
        astray = self._filler.astray()
        if astray or self._own is not None:
            self._collator.form = None if astray else self._own
        return self._filler.finish(self._written)

    def _begin(self, form: Form) -> None:
        memory = self._allocate([((self._rows, *shape), dtype) for shape, dtype in form.specs]) if form.specs else []
        self._filler = form.root.filler(iter(memory))
        self._step = min(self._rows, form.step)

    def _write(self) -> None:
        if self._filler is None:
            self._own = Form(self._pending[0])
            self._begin(self._own)
        assert self._filler is not None
        try:
            self._filler.add(self._pending)
        except OtherStructure:
            if self._own is None and not self._written:  # than other batches had
                self._filler = None
                self._write()
            else:
                self._pending = [self._filler.row(row) for row in range(self._written)] + self._pending
                self._ordinary = True
        else:
            self._written += len(self._pending)
            self._pending = []


def ordinary(samples: Sequence[Any]) -> Any:
    """The batch of ``samples``, each field of it made by ``default_collate``."""
    filler = Form(samples[0], in_place=False).root.filler(iter(()))
    try:
        filler.add(samples)
    except OtherStructure:
        return collated(samples)
    return filler.finish(len(samples))
