"""How samples become a batch, written in place. Pure, and the same for every kind of worker.

The first sample determines the schema of the batch, which is that of ``default_collate``. A small batch is made at
once, a field at a time. For one that is large, or must lie in a certain place, memory is allocated once, and each
sample is written into its row while it is still in the cache. A field that cannot be written in place (strings, sparse
tensors, tensors that require grad, a shape that changed) goes through ``default_collate``, while the other fields are
still written in place. The same applies to types that the user registered or replaced in torch's
``default_collate_fn_map``.

Nothing is broadcast: a row is written only from a sample of exactly the expected type, dtype and shape. Only Python
numbers are converted, where torch converts them too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from penstock._errors import is_own_error
from penstock._fetch.batch_schema import BatchSchema, OtherStructure, collate_fields
from penstock._memory.allocation import afresh, anywhere

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from penstock._fetch.batch_schema import Filler
    from penstock._memory.allocation import Allocate, Spec


@final
class Collator:
    """Makes batches of samples, like ``default_collate``, but also of dataclasses. Safe for any number of threads.

    Attributes:
        schema: The schema of the last batch, if that batch matched it; the next batch tries it first.
    """

    def __init__(self) -> None:
        self.schema: BatchSchema | None = None

    def __call__(self, samples: Sequence[Any], allocate: Allocate = anywhere) -> Any:
        """The batch of ``samples``, one or more.

        Raises:
            Exception: Whatever ``default_collate`` raises if the samples cannot be combined.
        """
        batch = BatchBuilder(self, len(samples), allocate)
        batch.add(samples)
        return batch.finish()


@final
class BatchBuilder:
    """A batch under construction, of up to ``rows`` samples.

    Args:
        collator: Supplies the schema of earlier batches, and learns a new one from this batch.
        rows: At least 1.
        allocate: Called if at least one field consists of numbers.

    Attributes:
        added: Samples added so far.
        step: Samples to add per call: enough to be fast, but few enough to bound memory.
    """

    def __init__(self, collator: Collator, rows: int, allocate: Allocate) -> None:
        self.added = 0
        self.step = 1
        self._collator = collator
        self._rows = rows
        self._allocate = allocate
        self._filler: Filler | None = None
        self._own: BatchSchema | None = None  # learned from this batch
        self._fallback: list[Any] | None = None  # all samples, once their structures differ
        self._at_once: BatchSchema | None = None  # makes the batch of `_samples` in the end
        self._samples: list[Any] = []
        schema = collator.schema
        if schema is not None and schema.is_current:
            self._begin(schema)

    def add(self, samples: Sequence[Any]) -> None:
        """Add the next samples."""
        if not samples:
            return
        if self._at_once is not None:
            self._samples += samples
        elif self._fallback is not None:
            self._fallback.extend(samples)
        else:
            self._write(samples)
        self.added += len(samples)

    def finish(self) -> Any:
        """The batch of all samples added. Without samples it raises an ``IndexError``, like ``default_collate``."""
        if (schema := self._at_once) is not None and self.added:
            try:
                return schema.root.whole(self._samples)
            except Exception as exc:
                # the samples do not fit, or together they do not: in place, this is seen and learned
                if not is_own_error(exc):
                    raise
            self._at_once, self.added = None, 0
            self._in_place(schema, None)
            self.add(self._samples)
        if self._fallback is not None or self._filler is None or not self.added:
            self._collator.schema = None
            return collate_fields(self._fallback or [])
        fell_back = self._filler.fell_back()
        if fell_back or self._own is not None:
            self._collator.schema = None if fell_back else self._own
        return self._filler.finish(self.added)

    def _begin(self, schema: BatchSchema) -> None:
        allocate, rows = schema.anywhere  # as long as it would say the same again, it is not asked
        memory = (
            None
            if allocate is self._allocate and self._rows <= rows
            else self._allocate(self._specs(schema))
            if schema.specs
            else []
        )
        if memory is None and schema is self._collator.schema:
            schema.anywhere = self._allocate, self._rows
            self._at_once, self.step = schema, self._rows
        else:
            self._in_place(schema, memory)

    def _in_place(self, schema: BatchSchema, memory: list[torch.Tensor] | None) -> None:
        self._filler = schema.root.filler(iter(afresh(self._specs(schema)) if memory is None else memory))
        self.step = schema.step

    def _specs(self, schema: BatchSchema) -> list[Spec]:
        return [((self._rows, *shape), dtype) for shape, dtype in schema.specs]

    def _write(self, samples: Sequence[Any]) -> None:
        if self._filler is None:
            self._own = BatchSchema(samples[0])
            self._begin(self._own)
        assert self._filler is not None
        try:
            self._filler.add(samples)
        except OtherStructure:
            # the schema of an earlier batch does not match, so learn a new one
            if self._own is None and not self.added:
                self._filler = None
                self._write(samples)
            else:
                self._fallback = [*(self._filler.row(row) for row in range(self.added)), *samples]
