"""How samples become a batch, written in place: pure, and the same for every kind of worker.

The form of a sample teaches the form of its batch, which is that of ``default_collate``. Memory for a batch is asked for once, and
each sample is then written straight into its row, while it is still in the cache. A field that does not fit (strings, sparse
tensors, tensors that require grad, a shape that has changed) takes the ordinary way on its own, and the others stay in place. So does
whatever the user has registered, or replaced, in torch's ``default_collate_fn_map``.

Nothing is broadcast or converted on the way: a row is written only from a sample of exactly the type, dtype and shape expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from penstock._fetch.batch_schema import BatchSchema, OtherStructure, ordinary
from penstock._memory.allocation import afresh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._fetch.batch_schema import Filler
    from penstock._memory.allocation import Allocate


@final
class Collator:
    """Makes batches of samples, as ``default_collate`` does; dataclasses too. For any number of threads.

    Attributes:
        form: Of the last batch that fitted one; what the next batch is tried with.
    """

    def __init__(self) -> None:
        self.form: BatchSchema | None = None

    def __call__(self, samples: Sequence[Any], allocate: Allocate = afresh) -> Any:
        """The batch of ``samples``, one or more.

        Raises:
            Exception: What ``default_collate`` raises where they do not go together.
        """
        batch = BatchBuilder(self, len(samples), allocate)
        batch.add(samples)
        return batch.finish()


@final
class BatchBuilder:
    """One batch in the making, of up to ``rows`` samples.

    Args:
        collator: Knows the form of other batches, and learns that of this one.
        rows: At least 1.
        allocate: Called where there is anything to be written in place.

    Attributes:
        added: How many samples there are.
        step: How many to add at once, to be fast and to keep few.
    """

    def __init__(self, collator: Collator, rows: int, allocate: Allocate) -> None:
        self.added = 0
        self.step = 1
        self._collator = collator
        self._rows = rows
        self._allocate = allocate
        self._filler: Filler | None = None
        self._own: BatchSchema | None = None  # learned from this batch
        self._loose: list[Any] | None = None  # all samples, where they are not even of one structure
        form = collator.form
        if form is not None and form.holds:
            self._begin(form)

    def add(self, samples: Sequence[Any]) -> None:
        """The next samples."""
        if not samples:
            return
        if self._loose is not None:
            self._loose.extend(samples)
        else:
            self._write(samples)
        self.added += len(samples)

    def finish(self) -> Any:
        """The batch of all that were added; an ``IndexError`` of none, as from ``default_collate``."""
        if self._loose is not None or self._filler is None or not self.added:
            self._collator.form = None
            return ordinary(self._loose or [])
        astray = self._filler.astray()
        if astray or self._own is not None:
            self._collator.form = None if astray else self._own
        return self._filler.finish(self.added)

    def _begin(self, form: BatchSchema) -> None:
        memory = self._allocate([((self._rows, *shape), dtype) for shape, dtype in form.specs]) if form.specs else []
        self._filler = form.root.filler(iter(memory))
        self.step = form.step

    def _write(self, samples: Sequence[Any]) -> None:
        if self._filler is None:
            self._own = BatchSchema(samples[0])
            self._begin(self._own)
        assert self._filler is not None
        try:
            self._filler.add(samples)
        except OtherStructure:
            if self._own is None and not self.added:  # than other batches had
                self._filler = None
                self._write(samples)
            else:
                self._loose = [*(self._filler.row(row) for row in range(self.added)), *samples]
