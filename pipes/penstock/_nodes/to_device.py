"""ToDevice: batches on the device before the consumer asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

import torch

from penstock._memory.devices import can_pin, pin, resolve_device
from penstock._memory.modes import neutral_modes
from penstock._memory.tree import has_method, leaves, mapped
from penstock._nodes.node import is_mark
from penstock._nodes.reader_node import ReaderNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._nodes.node import BaseNode


T = TypeVar("T", covariant=True)


@final
class ToDevice(ReaderNode[T]):
    """Copy batches to ``device`` ahead of the consumer, on a separate stream, so that copies overlap with computing on the device.

    Each batch is pinned (unless it already is), copied without blocking, and delivered at once: the consumer's current stream waits for
    the copy, but the consumer does not. The batch's memory is not reused before that stream is done with it. A batch in transit counts
    as not delivered. On a device without streams (MPS), copies are plain; on the CPU, nothing is done at all.

    Args:
        source: Batches: tensors, dicts, lists, tuples and dataclasses of them, and objects whose class has a ``to(device)`` method, such
            as ``PackedSequence``; that method moves the whole object. Anything else stays as it is.
        device: For example ``"cuda"``, ``"cuda:1"``, ``"xpu"``, ``"mps"``, ``"cpu"``. Without an index, the current device of the thread
            that asks for the first batch.
        prefetch_factor: Batches ready on the device; its memory holds up to ``prefetch_factor + 2`` of them.
        run_ahead: Read into the next epoch before the consumer asks for it.

    Raises:
        ValueError: This machine has no such device.
    """

    __module__ = "penstock"

    def __init__(self, source: BaseNode[T], device: torch.device | str, prefetch_factor: int = 2, *, run_ahead: bool = True) -> None:
        self.device = resolve_device(device)
        self._given = device
        super().__init__(source, prefetch_factor, "penstock-device", run_ahead=run_ahead, threaded=self.device.type != "cpu")

    def details(self) -> dict[str, Any]:
        return {"device": self.device, **super().details()}

    def next(self) -> T:
        item: Any = super().next()
        return item.arrived() if isinstance(item, _Moved) else item  # type: ignore[no-any-return]

    def _converter(self) -> Callable[[Any], Any]:
        self.device = resolve_device(self._given)  # again, because this may be another process, or another device may be current
        return _Mover(self.device)


class _Moved(NamedTuple):
    """A batch in transit to ``device``. Once the ``events`` have happened, the ``tensors`` are there. Without streams both are empty."""

    batch: Any
    device: torch.device
    tensors: list[torch.Tensor]
    events: list[Any]

    def arrived(self) -> Any:
        """Return the batch for use on the current stream. The stream waits for the copy, and the memory is not reused before the stream is done.

        Objects with their own ``to`` are moved only now, in the consumer's thread, because we cannot see which tensors are in them.
        """
        if self.events:
            stream = torch.get_device_module(self.device).current_stream(self.device)
            for event in self.events:
                stream.wait_event(event)
            for tensor in self.tensors:
                tensor.record_stream(stream)
        with neutral_modes():
            return mapped(self.batch, self._moved_whole, "to")

    def _moved_whole(self, leaf: Any) -> Any:
        return leaf.to(self.device) if has_method(leaf, "to") and not isinstance(leaf, torch.Tensor) else leaf


class _Mover:
    """Starts the copy of a batch, in the reader thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pins = can_pin()
        self._streams: Any = torch.get_device_module(device)
        self._stream: Any = None

    def __call__(self, item: Any) -> Any:
        if is_mark(item):
            return item
        if not hasattr(self._streams, "Stream"):
            return _Moved(mapped(item, self._moved, "to"), self._device, [], [])
        if self._stream is None:
            self._streams.set_device(self._device)
            self._stream = self._streams.Stream(self._device)
        pinned = pin(item) if self._pins else item
        with self._streams.stream(self._stream):
            batch = mapped(pinned, self._moved, "to")
            events = [self._stream.record_event()]
        if self._there(item):
            events.append(self._streams.current_stream(self._device).record_event())  # tensors made on the device, by this thread's stream
        return _Moved(batch, self._device, self._there(batch), events)

    def _moved(self, leaf: Any) -> Any:
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    def _there(self, batch: Any) -> list[torch.Tensor]:
        """The tensors that are on the device, except inside objects that `arrived` moves as a whole."""
        return [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.device == self._device]
