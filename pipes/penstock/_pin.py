"""PinMemory: batches in page-locked memory, from where a copy to the device needs no detour."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from penstock._memory import can_pin
from penstock._node import Node, State, is_mark
from penstock._pump import Pump
from penstock._stats import PinStatistics
from penstock._tree import leaves

if TYPE_CHECKING:
    from penstock._node import BaseNode

T = TypeVar("T", covariant=True)


@final
class PinMemory(Node[T]):
    """Copy batches into page-locked ("pinned") memory in one background thread, as ``DataLoader(pin_memory=True)`` does.

    Without an accelerator that has such memory there is nothing to pin for: items pass through unchanged, with one warning and no thread.

    Batches that lie in pinned memory already, as those of a `ParallelMapper` with ``pin_memory=True``, are handed on as they are.

    Args:
        source: Batches: tensors, containers of them, and objects with a ``pin_memory()`` method.
        prefetch_factor: Batches kept ready.
        run_ahead: Read into the next epoch before it is asked for.
    """

    def __init__(self, source: BaseNode[T], prefetch_factor: int = 1, *, run_ahead: bool = True) -> None:
        super().__init__(source)
        self._pump: Pump | None = None
        self._passed = 0
        if can_pin():
            self._pin = _Pin(torch.accelerator.current_device_index())
            self._pump = Pump(
                self.source,
                convert=self._pin,
                holds=None if run_ahead else is_mark,
                depth=prefetch_factor,
                name="penstock-pin",
            )
        else:
            warnings.warn("PinMemory: there is no accelerator to pin memory for, so batches pass through unchanged.", stacklevel=2)

    def reset(self, initial_state: State | None = None) -> None:
        super(Node, self).reset(initial_state)
        if self._pump is not None:
            self._pump.reset(initial_state)
        else:
            self.source.reset(initial_state)

    def next(self) -> T:
        if self._pump is not None:
            pinned: T = self._pump.next()
            return pinned
        item: T = next(self.source)
        self._passed += not is_mark(item)
        return item

    def get_state(self) -> State:
        return self.source.get_state() if self._pump is None else self._pump.state

    def start_of(self, epoch: int) -> State | None:
        return self.source.start_of(epoch)

    def remaining(self, state: State | None = None) -> int | None:
        return self.source.remaining(self.get_state() if state is None else state)

    def interrupt(self) -> None:
        if self._pump is None:
            self.source.interrupt()
        else:
            self._pump.interrupt()

    def shutdown(self) -> None:
        if self._pump is not None:
            self._pump.shutdown()
        self.source.shutdown()

    def statistics(self) -> tuple[Any, ...]:
        if self._pump is None:
            return (*self.source.statistics(), PinStatistics(0, self._passed))
        return (*self.source.statistics(), self._pump.statistics(), PinStatistics(self._pin.pinned, self._pin.already))


class _Pin:
    """Pins a batch; the first time, on the device that the consumer had chosen."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.ready = False
        self.pinned = self.already = 0

    def __call__(self, item: Any) -> Any:
        if is_mark(item):
            return item
        if not self.ready:
            torch.accelerator.set_device_index(self.device)
            torch.set_num_threads(1)
            self.ready = True
        here = [leaf.is_pinned() if isinstance(leaf, torch.Tensor) else not hasattr(leaf, "pin_memory") for leaf in leaves(item)]
        if all(here):
            self.already += 1
            return item
        self.pinned += 1
        return pin_memory(item)  # type: ignore[no-untyped-call]
