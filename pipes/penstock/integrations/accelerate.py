"""Accelerate: adapts a `Loader` to an `Accelerator`, for your own training loop.

``accelerator.prepare(loader)`` returns a `penstock.Loader` unchanged: nothing moves its batches, saves its state, or
knows its last batch. ``prepare_data_loader`` and ``skip_first_batches`` would build a ``DataLoader`` from it, and are
refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, final

from accelerate.utils import send_to_device  # type: ignore[import-untyped]

from penstock import Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accelerate import Accelerator  # type: ignore[import-untyped]

T = TypeVar("T")


@final
class AccelerateLoader(Generic[T]):
    """A `Loader` that puts batches on the accelerator's device and tells `Accelerator.accumulate` which batch is the
    last.

    Iterate over it directly. ``prepare`` would return it unchanged, and ``prepare_data_loader`` and
    ``skip_first_batches`` are refused. Accelerate does not shard it: the loader shards itself. The last batch of an
    epoch synchronizes gradients even if its accumulation window is short, also after a resume.

    Args:
        loader: Shards itself. If it has no length and is not ``infinite``, it is read one batch ahead to find the last
            batch of an epoch; its state still describes the batch delivered last.
        accelerator: Supplies the device, and is notified of the last batch.
        save: Save and load the loader with ``save_state`` and ``load_state``; pass False for evaluation.
        remainder: Samples of the last round, over all ranks, that ``gather_for_metrics`` keeps; -1: all of them. A
            function gets the last batch and returns their number (None: all of them); the loader is then read one batch
            ahead, even if it has a length.

    Raises:
        TypeError: ``loader`` is not a `penstock.Loader`.
    """

    def __init__(
        self,
        loader: Loader[T],
        accelerator: Accelerator,
        *,
        save: bool = True,
        remainder: int | Callable[[T], int | None] = -1,
    ) -> None:
        if not isinstance(loader, Loader):
            raise TypeError(
                f"AccelerateLoader takes a penstock.Loader, not a {type(loader).__name__}. Pass a DataLoader to "
                f"accelerator.prepare instead."
            )
        self.loader = loader
        self.accelerator = accelerator
        self._remainder = remainder
        self._window: _Window | None = None  # belongs to the newest pass
        if save:
            accelerator.register_for_checkpointing(loader)

    def __iter__(self) -> Iterator[T]:
        """Iterate over one epoch. Like the loader's own iterator, it does nothing before its first ``next``."""
        # One per pass, so that an old pass that closes late removes only its own.
        self._window = window = _Window(-1 if callable(self._remainder) else self._remainder)
        self.accelerator.gradient_state._add_dataloader(window)
        try:
            for batch in self._batches(window):
                yield send_to_device(batch, self.accelerator.device, non_blocking=True)
        finally:
            self.accelerator.gradient_state._remove_dataloader(window)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def _rebuilt(self) -> NoReturn:
        raise AttributeError(
            "an AccelerateLoader has no dataset or batch_size attribute, because Accelerate would build a DataLoader "
            "from them without the loader's order, seed and position. It needs no prepare, prepare_data_loader or "
            "skip_first_batches: iterate over it. To read the attributes, use its .loader."
        )

    dataset = property(_rebuilt)
    batch_size = property(_rebuilt)

    def _batches(self, window: _Window) -> Iterator[T]:
        """The batches of one epoch; ``window`` is marked before the last one is delivered."""
        if self.loader.infinite:
            yield from self.loader
        elif _sized(self.loader) and not callable(self._remainder):
            for batch in self.loader:
                window.end_of_dataloader = bool(self.loader.is_last)
                yield batch
        else:
            self.loader.commit(0)
            batches, nothing = iter(self.loader), object()
            ahead: Any = next(batches, nothing)
            while ahead is not nothing:
                batch, ahead = ahead, next(batches, nothing)
                window.end_of_dataloader = ahead is nothing
                if ahead is nothing and callable(self._remainder):
                    kept = self._remainder(batch)
                    window.remainder = -1 if kept is None else kept
                self.loader.commit()
                yield batch
            if self._window is window:
                # the end was read before the last batch was committed, so it has to be passed on here
                self.loader.end_epoch()


class _Window:
    """The attributes that `GradientState` reads from its loader."""

    end_of_dataloader = False

    def __init__(self, remainder: int) -> None:
        self.remainder = remainder


def _sized(loader: Loader[Any]) -> bool:
    try:
        len(loader)
    except TypeError:
        return False
    return True
