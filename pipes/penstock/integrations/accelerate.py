"""Accelerate: the loader as `Accelerator` wants one, for a training loop of your own.

``accelerator.prepare(loader)`` hands a `penstock.Loader` back as it is: nothing moves its batches, saves its state, or knows its last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from accelerate.utils import send_to_device  # type: ignore[import-untyped]

from penstock import Loader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelerate import Accelerator  # type: ignore[import-untyped]

T = TypeVar("T")


@final
class AccelerateLoader(Generic[T]):
    """A `Loader` whose batches come on the accelerator's device, and whose end `Accelerator.accumulate` sees.

    Iterate over this, and do not pass it to ``prepare`` (which would hand it back unchanged). Accelerate does not shard it: it does so
    itself. The last batch of an epoch synchronises gradients, however many there are in its window, also after a resume.

    Args:
        loader: Without ``endless``, epochs end; a loader that does not know its length is read one batch ahead for that, and
            its state still means the batch handed out last.
        accelerator: Where the batches go, and what is told of the last one.
        save: Save and load the loader with ``save_state`` and ``load_state``; False for evaluation.
        remainder: Samples of the last round, over all ranks, that ``gather_for_metrics`` keeps; -1: all of them.

    Raises:
        TypeError: ``loader`` is not a `penstock.Loader`.
    """

    def __init__(self, loader: Loader[T], accelerator: Accelerator, *, save: bool = True, remainder: int = -1) -> None:
        if not isinstance(loader, Loader):
            raise TypeError(
                f"AccelerateLoader takes a penstock.Loader, and {type(loader).__name__} came. A DataLoader goes to accelerator.prepare instead."
            )
        self.loader = loader
        self.accelerator = accelerator
        self._remainder = remainder
        self._window: _Window | None = None  # of the newest pass
        if save:
            accelerator.register_for_checkpointing(loader)

    def __iter__(self) -> Iterator[T]:
        """One epoch. Like the loader's own, it does nothing before its first ``next``."""
        self._window = window = _Window(self._remainder)  # One for each pass: an old pass that is closed late takes only its own away.
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

    def _batches(self, window: _Window) -> Iterator[T]:
        """The batches of an epoch; ``window`` knows the last one when it is handed out."""
        if self.loader.endless:
            yield from self.loader
        elif _sized(self.loader):
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
                self.loader.commit()
                yield batch
            if self._window is window:
                self.loader.end_epoch()  # Nobody else sees the end: it was read before the last batch was committed.


class _Window:
    """What `GradientState` asks of the loader it is in."""

    end_of_dataloader = False

    def __init__(self, remainder: int) -> None:
        self.remainder = remainder


def _sized(loader: Loader[Any]) -> bool:
    try:
        len(loader)
    except TypeError:
        return False
    return True
