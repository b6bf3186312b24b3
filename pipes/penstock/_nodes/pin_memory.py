"""PinMemory: batches in page-locked memory, which a device can copy from directly."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch

from penstock._memory.devices import can_pin, pin
from penstock._memory.tree import leaves
from penstock._nodes.node import is_marker
from penstock._nodes.reader_node import ReaderNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._nodes.node import BaseNode
    from penstock._statistics import NodeStatistics


T = TypeVar("T", covariant=True)


@final
class PinMemory(ReaderNode[T]):
    """Copy batches into page-locked ("pinned") memory in one background thread, as ``DataLoader(pin_memory=True)``
    does.

    Without an accelerator that uses such memory, items pass through unchanged, with one warning and no thread.

    Batches that are already in pinned memory (from a `ParallelMapper` with ``pin_memory=True``) or on a device pass
    through unchanged. An object with a ``pin_memory()`` method decides for itself.

    Args:
        source: Batches: tensors, containers of them, and objects with a ``pin_memory()`` method.
        prefetch_factor: Batches kept ready.
        prefetch_next_epoch: Read into the next epoch before the consumer requests it.
    """

    __module__ = "penstock.nodes"

    def __init__(self, source: BaseNode[T], prefetch_factor: int = 1, *, prefetch_next_epoch: bool = True) -> None:
        super().__init__(
            source, prefetch_factor, "penstock-pin", prefetch_next_epoch=prefetch_next_epoch, threaded=can_pin()
        )
        self._pin: _Pin | None = None
        self._passed = 0
        if not self._threaded:
            warnings.warn(
                "PinMemory: there is no accelerator to pin memory for, so batches pass through unchanged.", stacklevel=2
            )

    def next(self) -> T:
        item = super().next()
        self._passed += not self._threaded and not is_marker(item)
        return item

    def again(self, item: Any) -> Any:
        return pin(item) if self._threaded else item

    def _counted(self, elapsed_s: float, items: int) -> NodeStatistics:
        from penstock._statistics import PinStatistics

        pinned = (
            PinStatistics(0, self._passed) if self._pin is None else PinStatistics(self._pin.pinned, self._pin.already)
        )
        return dataclasses.replace(super()._counted(elapsed_s, items), pinned=pinned)

    def _converter(self) -> Callable[[Any], Any]:
        self._pin = _Pin()
        return self._pin


class _Pin:
    """Pins batches for the device that was current in the consumer's thread when this object was made."""

    def __init__(self) -> None:
        self.device = torch.accelerator.current_device_index()
        self.entered = False
        self.pinned = self.already = 0

    def __call__(self, item: Any) -> Any:
        if is_marker(item):
            return item
        if not self.entered:
            torch.accelerator.set_device_index(self.device)
            torch.set_num_threads(1)  # of this thread only: its copies must not take all cores
            self.entered = True
        if all(map(_needs_nothing, leaves(item, "pin_memory"))):
            self.already += 1
            return item
        self.pinned += 1
        return pin(item)


def _needs_nothing(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.device.type != "cpu" or leaf.is_pinned()
    return not hasattr(leaf, "pin_memory")
