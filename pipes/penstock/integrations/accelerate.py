"""Accelerate: adapts a `Loader` to an `Accelerator`, for your own training loop.

``AccelerateLoader(loader, accelerator)`` stands where a ``DataLoader`` would, and is passed to ``accelerator.prepare``
like one. A bare `penstock.Loader` is returned unchanged by ``prepare``: nothing moves its batches, saves its state, or
knows its last batch. ``prepare_data_loader`` and ``skip_first_batches`` would build a ``DataLoader`` from it, and are
refused.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, final

import numpy as np
import torch
from accelerate.utils import recursively_apply, send_to_device  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from penstock import Loader
from penstock.nodes import Batcher, Sharder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accelerate import Accelerator  # type: ignore[import-untyped]

T = TypeVar("T")
log = logging.getLogger("penstock")


@final
class AccelerateLoader(DataLoader[T]):
    """A `Loader` that counts, deals, moves and gathers its batches the way Accelerate does with a ``DataLoader``.

    Build it in the line of the ``DataLoader``. Before ``accelerator.prepare`` (or its first pass) its length is that of
    the whole data, as for a ``DataLoader``; afterwards it is that of this rank. ``prepare`` returns it as it is:
    Accelerate does not shard it, the loader shards itself. If ``split`` and ``tail`` were not passed to the loader, and
    it was not started, it gives each rank whole batches (``split="batches"``), and fills the last round
    (``tail="pad"``), leaves it out with ``drop_last``, or deals it as it is if the accelerator was built with
    ``even_batches=False``.

    The last batch of an epoch synchronizes gradients even if its accumulation window is short, also after a resume.
    ``gather_for_metrics`` returns each sample once, in the order of the data. On several ranks, a batch sampler's short
    last batch repeats its samples until it is whole.

    It is a ``DataLoader`` by type only. ``skip_first_batches`` is refused, because the loader resumes by its state.

    Args:
        loader: Shards itself. If it has no length and is not ``infinite``, it is read one batch ahead to find the last
            batch of an epoch; its state still describes the batch delivered last.
        accelerator: Supplies the device, and is notified of the last batch.
        save: Save and load the loader with ``save_state`` and ``load_state``; pass False for evaluation.
        remainder: Samples of the last round, over all ranks, that ``gather_for_metrics`` keeps; -1: all of them. None:
            those that are not repeated. A function gets the last batch and returns their number (None: all of them);
            the loader is then read one batch ahead, even if it has a length.

    Raises:
        TypeError: ``loader`` is not a `penstock.Loader`.
        ValueError: The accelerator was built with ``split_batches=True``, and there are several ranks.
    """

    def __init__(
        self,
        loader: Loader[T],
        accelerator: Accelerator,
        *,
        save: bool = True,
        remainder: int | Callable[[T], int | None] | None = None,
    ) -> None:
        if not isinstance(loader, Loader):
            raise TypeError(
                f"AccelerateLoader takes a penstock.Loader, not a {type(loader).__name__}. Pass a DataLoader to "
                f"accelerator.prepare instead."
            )
        ranks = accelerator.num_processes
        if ranks > 1 and accelerator.split_batches:
            raise ValueError(
                f"split_batches=True divides each batch of a DataLoader among the {ranks} ranks, but the batch_size of "
                f"a penstock.Loader is that of one rank. Leave split_batches out, and pass batch_size=your_batch_size "
                f"// accelerator.num_processes."
            )
        self.loader = loader
        self.accelerator = accelerator
        self._remainder = remainder
        self._begun = False
        self._pass: object = None  # the newest one
        nodes = list(loader.root.chain())
        self._sharder = next((node for node in nodes if isinstance(node, Sharder)), None)
        self._batcher = next((node for node in nodes if isinstance(node, Batcher)), None)
        self._in_order = all(getattr(node, "in_order", True) for node in nodes)
        if self._sharder is not None:
            self._ask(self._sharder, ranks)
        if save:
            accelerator.register_for_checkpointing(self)

    # What Accelerate asks of a DataLoader that was prepared.

    _is_accelerate_prepared = True  # by itself: `prepare` returns it as it is
    end_of_dataloader = False  # `GradientState` reads these two
    remainder = 0

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        """The loader's dataset; None if it was built from a graph."""
        return getattr(self.loader, "dataset", None)

    @property
    def batch_size(self) -> Any:  # type: ignore[override]
        """Samples per batch on this rank."""
        return self.loader.batch_size

    @property
    def batch_sampler(self) -> _EvenBatches:  # type: ignore[override]
        """What ``join_uneven_inputs`` reads. Not the user's batch sampler."""
        return _EvenBatches(self._sharder)

    def _rebuilt(self, value: Any = None) -> NoReturn:
        raise TypeError(
            "Accelerate would build a DataLoader from this AccelerateLoader, without its order, seed and position. "
            "Leave prepare_data_loader and skip_first_batches out: accelerator.prepare takes it as it is, and "
            "load_state restores its position. Other attributes are those of its .loader."
        )

    sampler = property(_rebuilt)
    multiprocessing_context = property(_rebuilt)

    # Iterating.

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        """Iterate over one epoch. Like the loader's own iterator, it does nothing before its first ``next``."""
        state = self.accelerator.gradient_state
        if self._pass is not None:  # an older pass was left, and may close late
            state._remove_dataloader(self)
        self._begun, self._pass = True, (mine := object())
        self.end_of_dataloader, self.remainder = False, 0
        self._fill = 1, 1  # samples that this rank's last batch has, and should have
        state._add_dataloader(self)
        try:
            for batch, remainder in self._batches():
                if remainder is not None and mine is self._pass:
                    self.end_of_dataloader, self.remainder = True, remainder
                yield send_to_device(batch, self.accelerator.device, non_blocking=True)
            if mine is self._pass and self._reads_ahead:
                # the end was read before the last batch was committed, so it has to be passed on here
                self.loader.end_epoch()
        finally:
            if mine is self._pass:
                self._pass = None
                state._remove_dataloader(self)

    def __len__(self) -> int:
        """Batches in a whole epoch: of all ranks before ``prepare`` and the first pass, of this one afterwards."""
        if self._sharder is None or self._begun or any(prepared is self for prepared in self.accelerator._dataloaders):
            return len(self.loader)
        with self._sharder.undivided():
            return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Loader.load_state_dict`. A state of the last batch continues with the next epoch, because scripts
        compute their first epoch from the number of batches.
        """
        self.loader.load_state_dict(state_dict)
        if self.loader.is_last and not self.loader.infinite:
            self.loader.end_epoch()

    @property
    def _reads_ahead(self) -> bool:
        return not self.loader.infinite and (callable(self._remainder) or not _sized(self.loader))

    def _batches(self) -> Iterator[tuple[T, int | None]]:
        """The batches of one epoch; and for the last one, what `GradientState` calls its remainder."""
        if self._reads_ahead:
            self.loader.commit(0)
            batches, nothing = iter(self.loader), object()
            ahead: Any = next(batches, nothing)
            while ahead is not nothing:
                batch, ahead = ahead, next(batches, nothing)
                last = ahead is nothing
                self.loader.commit()
                yield batch, self._told(batch, 0) if last else None
            return
        batches = iter(self.loader)
        while True:
            before = self.loader.here
            try:
                batch = next(batches)
            except StopIteration:
                return
            # of the loader's cursor, because `is_last` answers for an epoch that was requested meanwhile
            last = self.loader._reader.cursor.remaining == 0 and not self.loader.infinite
            remainder = self._told(batch, self._kept(before)) if last else None
            yield _filled(batch, *self._fill) if last else batch, remainder

    def _told(self, batch: T, kept: int) -> int:
        """What to keep of the last round, if nobody says anything else."""
        if self._remainder is None:
            return kept
        said = self._remainder(batch) if callable(self._remainder) else self._remainder
        return -1 if said is None else said

    def _ask(self, sharder: Sharder[Any], ranks: int) -> None:
        """Ask for Accelerate's way of dealing, and warn if another one was chosen."""
        even = self.accelerator.even_batches
        drop_last = self._batcher is not None and self._batcher.drop_last
        tail: Literal["pad", "drop", "exact"] = "drop" if drop_last else "pad" if even else "exact"
        in_turn = sharder.ask("batches", tail)
        if ranks == 1 or not self.accelerator.is_main_process or sharder.facts.sharded_by == "own":
            return
        chosen = sharder.split == "items" and not sharder.has_no_choice
        if self._batcher is not None and not in_turn and chosen:
            log.warning(
                "this loader deals single items to %d ranks, so what gather returns is in another order than the data, "
                "and gather_for_metrics does not remove what is repeated at an epoch's end. Leave split= out, or pass "
                "split='batches', and wrap the loader before its first batch.",
                ranks,
            )
        if even and sharder.tail == "exact":
            log.warning(
                "tail='exact' gives some of %d ranks a sample less in the last round, or no batch, and gather fails or "
                "waits forever there. Leave tail= out, because gather_for_metrics removes what is repeated; or pass "
                "even_batches=False to the Accelerator, and train inside accelerator.join_uneven_inputs.",
                ranks,
            )

    def _kept(self, before: Any) -> int:
        """How many samples of the last round are not repeated, over all ranks, as ``GradientState.remainder``: 0 if
        none is repeated, -1 if the repeated ones come between the others, or in another round. And how far to fill a
        batch sampler's short last batch.

        Args:
            before: Where the loader was before the last batch, or before it moved to the epoch.
        """
        sharder = self._sharder
        if sharder is None or sharder.ranks()[1] == 1 or sharder.tail != "pad" or sharder.facts.sharded_by == "own":
            return 0
        if not self._in_order:
            return -1
        source, world_size = sharder.upstream, sharder.ranks()[1]
        if before["epoch"] != (epoch := self.loader.here["epoch"]) or not source.left(before):
            before = source.start(epoch)
        left = source.left(before) or 0
        if self._batcher is not None or sharder.facts.in_rounds or not left:
            return 0 if left % world_size == 0 else left if sharder.split == "batches" else -1
        last = (source.left(source.start(epoch)) or 0) - left
        with self.loader._reader.still():
            items = source.peek(before, np.append(np.arange(last, last + world_size), 0))
        if not all(getattr(item, "is_batch", True) for item in items):
            log.warning("gather_for_metrics keeps the samples that are repeated: pass remainder=, or a batch_size.")
            return -1
        *sizes, full = map(len, items)
        if {*sizes[: left - 1]} <= {full} and sizes[left - 1] <= full:
            self._fill = sizes[sharder.ranks()[0]], full
        elif len({*sizes}) > 1:
            log.info("the last round of this epoch has batches of %s samples, which gather cannot join.", sizes)
        return sum(sizes[:left]) if left < world_size or sizes[-1] < full else 0


def _filled(batch: T, size: int, full: int) -> T:
    """A ``batch`` of ``size`` samples, which are repeated until there are ``full``."""

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        fits = tensor.ndim and len(tensor) == size
        return tensor[torch.arange(full, device=tensor.device) % size] if fits else tensor

    return batch if size == full else recursively_apply(fill, batch)


class _EvenBatches:
    """What ``join_uneven_inputs`` reads and sets of a prepared ``DataLoader``'s batch sampler."""

    def __init__(self, sharder: Sharder[Any] | None) -> None:
        self._sharder = sharder

    @property
    def even_batches(self) -> bool:
        return self._sharder is None or self._sharder.tail != "exact"

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        if value != self.even_batches:
            raise ValueError(
                f"join_uneven_inputs(even_batches={value}) cannot change how a penstock.Loader deals its last round. "
                f"Leave even_batches out there, and pass even_batches={value} to the DataLoaderConfiguration of the "
                f"Accelerator, or tail={'pad' if value else 'exact'!r} to the loader."
            )


def _sized(loader: Loader[Any]) -> bool:
    try:
        len(loader)
    except TypeError:
        return False
    return True
