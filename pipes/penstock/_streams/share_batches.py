"""ShareBatches: the batches that ``lanes`` workers of a `DataLoader` would make of an ``IterableDataset`` in its own
epochs, by slot.

A `DataLoader` asks its workers in turn, so batch j of worker k is slot ``j * lanes + k``, and an epoch is all slots
that are not empty. Only who reads a worker's share finds out where it ends. So a slot past the end is answered with
`Nothing`, which the `SlotSource` is told.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, final

from penstock._errors import SourceError, is_own_error
from penstock._fetch.fetch import Fetch
from penstock._fetch.held import EndOfWalk
from penstock._fetch.indices import Nothing
from penstock._fetch.sample import current
from penstock._streams.progress import Interruptions
from penstock._workers.lane_info import LaneInfo, seen_as
from penstock._workers.lifetime import Closing, process

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._streams.steps import ShardRun
    from penstock._streams.worker_shares import WorkerShares


@final
class ShareBatches:
    """Slot s is batch ``s div lanes`` of worker ``s mod lanes``, in the epoch of ``penstock.sample()``.

    ``transform`` and ``collate_fn`` see the worker info of the share, and ``transform`` sees the item as
    ``penstock.sample()``. For one thread at a time.

    Args:
        shares: Of the dataset.
        batch_size: Items in a batch; None: each item is a batch.
        drop_last: Whether a worker's last batch is dropped if it is short.
        collate_fn: See `Fetch`.
        transform: Applied to each item.
        seed: Seed of the shares.
    """

    sets_worker_info = True

    def __init__(
        self,
        shares: WorkerShares,
        batch_size: int | None,
        drop_last: bool,
        collate_fn: Callable[[Any], Any] | None,
        transform: Callable[[Any], Any] | None,
        seed: int,
    ) -> None:
        self.forward_lanes = shares.lanes
        self.copied_by_epoch = shares.copies
        self.shares = shares
        self.seed = seed
        self.size = batch_size or 1
        self.drop_last = drop_last
        self._batched = batch_size is not None
        self._fetch = Fetch(None, collate_fn)
        self._transform = transform
        self._start()

    def _start(self) -> None:
        self._pid = process.id
        self._lanes: dict[int, _Lane] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lanes": {}}

    def __getitem__(self, slot: int) -> Any:
        if self._pid != process.id:
            self._start()
        number, worker = divmod(slot, self.forward_lanes)
        loading = current.get()
        assert loading is not None
        lane = self._lanes.get(worker) or self._lanes.setdefault(worker, _Lane(self, worker))
        samples = lane.batch(loading.epoch, number, self._transform)
        if samples is None:
            return Nothing(loading.epoch, slot)
        assert lane.info is not None
        with seen_as(lane.info):
            return self._fetch.collate(samples) if self._batched else self._fetch.convert(samples[0])

    def slot_name(self, slot: int) -> str:
        """What messages call a slot."""
        number, worker = divmod(slot, self.forward_lanes)
        return f"{'batch' if self._batched else 'item'} {number} of {self.shares.label(worker)}"

    def close(self) -> None:
        """Close what is open."""
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()
        self.shares.copies.forget()


@final
class _Lane(EndOfWalk):
    """One worker's share of an epoch, batch after batch."""

    # Whenever it is not being read: `_run` yields item `_at` of epoch `_epoch` next, or is None.

    def __init__(self, of: ShareBatches, worker: int) -> None:
        self._of = of
        self._worker = worker
        self._run: ShardRun | None = None
        self._epoch = -1
        self._at = 0
        self._batches: int | None = None  # in this epoch, once known
        self._failed: tuple[int, Exception] | None = None  # the batch in this epoch that could not be read
        self.info: LaneInfo | None = None  # in this epoch
        self._interruptions = Interruptions()

    def batch(self, epoch: int, number: int, transform: Callable[[Any], Any] | None) -> list[Any] | None:
        """The samples of a batch; None if the share has fewer.

        Raises:
            SourceError: A batch before it could not be read.
        """
        size = self._of.size
        if epoch != self._epoch or self._at > number * size:
            self.close()
        if self._batches is not None and number >= self._batches:
            return None
        if self._failed is not None and number > self._failed[0]:
            raise SourceError(
                f"{self._of.shares.label(self._worker)} raised {type(self._failed[1]).__name__} earlier in epoch "
                f"{epoch}, so what it yields after that is unknown. Load a state from before the error, or choose "
                f"another epoch with set_epoch. A Stream(dataset, lanes=…, epoch_size=…, on_error='skip') goes on with "
                f"the worker's next pass instead."
            ) from self._failed[1]
        try:
            run = self._run or self._open(epoch, number * size)
            while self._at < number * size and next(run, _END) is not _END:
                self._at += 1
            if transform is None:
                samples = self._of.shares.seeding.several(partial(list, islice(run, size)))
            else:
                assert self.info is not None
                with seen_as(self.info):
                    samples = [run.applied(transform, item) for item in islice(run, size)]
            self._at, self._failed = self._at + len(samples), None
        except BaseException as exc:
            self.close()
            self._interruptions.add(exc, (epoch, number), self._of.shares.label(self._worker))
            if isinstance(exc, Exception) and is_own_error(exc):
                self._epoch, self._failed = epoch, (number, exc)
            raise
        if len(samples) < size:
            self._batches = self._at // size if self._of.drop_last else -(-self._at // size)
            if number >= self._batches:
                return None
        return samples

    def close(self) -> None:
        """Close the share that is open, and forget what is known of it."""
        run, self._run, self._epoch, self._at, self._batches, self._failed = self._run, None, -1, 0, None, None
        if run is not None:
            run.close()

    def _open(self, epoch: int, item: int) -> ShardRun:
        shares = self._of.shares
        self.info = shares.share(epoch, self._worker, self._of.seed).info(shares.dataset)
        run = shares.run(self._worker, epoch, self._of.seed, Closing())
        self._epoch, self._at, self._run = epoch, run.begin_near(item), run
        return run


_END: Final = object()
