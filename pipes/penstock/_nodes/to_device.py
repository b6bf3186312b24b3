"""ToDevice: batches on the device before the consumer requests them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

import torch

from penstock._memory.devices import Streams, can_pin, pin, resolve_device
from penstock._memory.modes import neutral_modes
from penstock._memory.tree import has_method, leaves, mapped
from penstock._nodes.node import is_marker
from penstock._nodes.reader_node import ReaderNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._nodes.node import BaseNode


T = TypeVar("T", covariant=True)


@final
class ToDevice(ReaderNode[T]):
    """Copy batches to ``device`` ahead of the consumer, on a separate stream, so that copies overlap with computing on
    the device.

    Each batch is pinned (unless it already is), copied without blocking, and delivered at once: the consumer's current
    stream waits for the copy, but the consumer does not. The batch's memory is not reused before that stream is done
    with it. A batch in transit counts as not delivered. On a device without streams (MPS), copies are plain. Where
    tensors cannot record streams, a copy waits for the work that the consumer has queued so far. On the CPU, batches
    pass through unchanged.

    Args:
        source: Batches: tensors, dicts, lists, tuples and dataclasses of them, and objects whose class has a
            ``to(device)`` method, such as ``PackedSequence``; that method moves the whole object. Anything else stays
            as it is.
        device: For example ``"cuda"``, ``"cuda:1"``, ``"xpu"``, ``"mps"``, ``"cpu"``. Without an index, the current
            device of the thread that asks for the first batch.
        prefetch_factor: Batches ready on the device; its memory holds up to ``prefetch_factor + 2`` of them.
        prefetch_next_epoch: Read into the next epoch before the consumer requests it.

    Raises:
        ValueError: This machine has no such device.
    """

    __module__ = "penstock.nodes"

    def __init__(
        self,
        source: BaseNode[T],
        device: torch.device | str,
        prefetch_factor: int = 2,
        *,
        prefetch_next_epoch: bool = True,
    ) -> None:
        self.device = resolve_device(device)
        self._given = device
        super().__init__(
            source,
            prefetch_factor,
            "penstock-device",
            prefetch_next_epoch=prefetch_next_epoch,
            threaded=self.device.type != "cpu",
        )

    def details(self) -> dict[str, Any]:
        return {"device": self.device, **super().details()}

    def next(self) -> T:
        item: Any = super().next()
        return item.arrived() if isinstance(item, _Moved) else item  # type: ignore[no-any-return]

    def again(self, item: Any) -> Any:
        with neutral_modes():
            return mapped(
                item,
                lambda leaf: leaf.to(self.device) if isinstance(leaf, torch.Tensor) or has_method(leaf, "to") else leaf,
                "to",
            )

    def _converter(self) -> Callable[[Any], Any]:
        # again, because this may be another process, or another device may be current
        self.device = resolve_device(self._given)
        return _Mover(self.device)


class _Moved(NamedTuple):
    """A batch in transit.

    Once the ``events`` have happened, the ``tensors`` are there. Without streams both are empty.
    """

    batch: Any
    mover: _Mover
    tensors: list[torch.Tensor]
    events: list[Any]

    def arrived(self) -> Any:
        """Return the batch for use on the current stream.

        The stream waits for the copy, and the memory is not reused before the stream is done.

        Objects with their own ``to`` are moved only now, in the consumer's thread, because we cannot see which tensors
        are in them.
        """
        if self.events:
            stream = self.mover.consumer = self.mover.streams.current()
            for event in self.events:
                stream.wait_event(event)
            if self.mover.streams.records:
                for tensor in self.tensors:
                    tensor.record_stream(stream)
        with neutral_modes():
            return mapped(self.batch, self._moved_whole, "to")

    def _moved_whole(self, leaf: Any) -> Any:
        return leaf.to(self.mover.device) if has_method(leaf, "to") and not isinstance(leaf, torch.Tensor) else leaf


@final
class _Mover:
    """Starts the copy of a batch, in the reader thread. Made in the consumer's thread.

    The allocator gives memory that the consumer has dropped to the next copy, although work on it may still be queued
    on the consumer's stream. ``record_stream`` makes the allocator wait for that work. Where it is not available, the
    copy itself waits for everything queued on the consumer's stream by the time that the memory is allocated, and a
    batch that is dropped after a jump is kept until its copy is over.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = Streams(device)
        self.consumer: Any = None if self.streams.own is None else self.streams.current()
        self._pins = can_pin()
        self._entered = False
        self._in_flight: deque[tuple[Any, Any]] = deque()

    def __call__(self, item: Any) -> Any:
        if is_marker(item):
            return item
        streams, own = self.streams, self.streams.own
        if own is None:
            return _Moved(mapped(item, self._sent, "to"), self, [], [])
        if not self._entered:
            streams.enter_thread()
            self._entered = True
        pinned = pin(item) if self._pins else item
        with streams.on_own():
            batch = mapped(pinned, self._sent if streams.records else self._sent_behind_the_consumer, "to")
            events = [own.record_event()]
        if not streams.records:
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
            self._in_flight.append((events[0], (pinned, batch)))
        if self._there(item):
            events.append(streams.current().record_event())  # tensors made on the device, by this thread's stream
        return _Moved(batch, self, self._there(batch), events)

    def _sent(self, leaf: Any) -> Any:
        return leaf.to(self.device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    def _sent_behind_the_consumer(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == self.device:
            return leaf
        there = torch.empty_like(leaf, device=self.device)
        self.streams.own.wait_event(
            self.consumer.record_event()
        )  # after the allocation: all work on this memory was queued before it was dropped
        return there.copy_(leaf, non_blocking=True)

    def _there(self, batch: Any) -> list[torch.Tensor]:
        """The tensors that are on the device, except inside objects that `arrived` moves as a whole."""
        return [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.device == self.device]
