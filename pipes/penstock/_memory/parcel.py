"""How a value travels between two processes through memory that both map.

A worker puts its answer in a *slot*: a shared-memory segment that the worker created and the consumer maps as well. The worker collates
the batch directly in the slot (`SlotMaker.allocate`) and pickles it with the buffers out of band (PEP 574); only buffers that are not in
the slot yet are copied into it. The consumer builds arrays and tensors that are *views* of the slot. The life of a slot::

    worker: SlotMaker ──answer──► consumer: SlotTable.view ──last view gone──► SlotTable.lend ──next task──► worker

Nobody waits for a slot: if a task is lent none, or one that is too small, the worker makes a new one. The kernel frees the memory when
the worker's mapping, the consumer's mapping and the consumer's views are all gone, so a batch that the user keeps outlives the worker
and the pool.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
import struct
from collections import ChainMap
from typing import TYPE_CHECKING, Any, cast

import torch

from penstock._memory.buffers import aligned, bytes_of, dtype_name, tensor_over

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEAD = struct.Struct("<QQ")  # bytes of the pickle, number of buffers; the buffers' places and the pickle follow
_PLACE = struct.Struct("<QQ")  # offset of a buffer in the memory, and its bytes


class Parcel:
    """A value, pickled and ready to be written into memory.

    Args:
        value: Plain CPU tensors and contiguous arrays in it go out of band; everything else is pickled as usual.
        reducers: A pickler's ``dispatch_table``; default: the usual one, with plain tensors out of band.

    Attributes:
        body: The pickle, without the out-of-band buffers.

    Raises:
        Exception: Whatever pickling raises.
    """

    __slots__ = ("_buffers", "_places", "body")

    def __init__(self, value: Any, *, reducers: Mapping[type, Any] | None = None) -> None:
        pickled = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler = pickle.Pickler(pickled, 5, buffer_callback=buffers.append)
        pickler.dispatch_table = _REDUCERS if reducers is None else reducers
        pickler.dump(value)
        self.body = pickled.getbuffer()
        self._buffers = [buffer.raw() for buffer in buffers]
        self._places: list[int] = []

    def end(self, memory: memoryview | None = None, start: int = 0) -> int:
        """Where the parcel ends if written to ``memory`` at ``start``; buffers that are in ``memory`` already stay in place."""
        self._places = self._places_in(memory)
        end = start + _HEAD.size + _PLACE.size * len(self._buffers) + len(self.body)
        for number, raw in enumerate(self._buffers):
            if self._places[number] < 0:
                self._places[number] = aligned(end)
                end = aligned(end) + raw.nbytes
        return end

    def write(self, memory: memoryview, start: int = 0) -> None:
        """Write the parcel as `end` last laid it out; buffers that are in ``memory`` already are not copied.

        The memory may also be a new block of that size, if `end` was called without one.
        """
        body = start + _HEAD.size + _PLACE.size * len(self._buffers)
        _HEAD.pack_into(memory, start, len(self.body), len(self._buffers))
        memory[body : body + len(self.body)] = self.body
        for number, (raw, place) in enumerate(zip(self._buffers, self._places, strict=True)):
            _PLACE.pack_into(memory, start + _HEAD.size + _PLACE.size * number, place, raw.nbytes)
            if place > start:
                memory[place : place + raw.nbytes] = raw

    def _places_in(self, memory: memoryview | None) -> list[int]:
        """The offset of each buffer in ``memory``; -1 for a buffer elsewhere."""
        if memory is None:
            return [-1] * len(self._buffers)
        begin, nbytes = _address(memory), memory.nbytes
        places = [_address(raw) - begin if raw.nbytes else -1 for raw in self._buffers]
        return [place if 0 <= place <= nbytes - raw.nbytes else -1 for place, raw in zip(places, self._buffers, strict=True)]


def unpack(memory: Any, start: int = 0) -> Any:
    """The value of the `Parcel` in ``memory`` (an array of uint8); its arrays and tensors are views of ``memory`` and keep it alive.

    Raises:
        Exception: Whatever unpickling raises.
    """
    nbytes, count = _HEAD.unpack_from(memory, start)
    places = [_PLACE.unpack_from(memory, start + _HEAD.size + _PLACE.size * number) for number in range(count)]
    body = start + _HEAD.size + _PLACE.size * count
    return pickle.loads(memory[body : body + nbytes], buffers=[memory[place : place + length] for place, length in places])


def _address(memory: memoryview) -> int:
    """The address of ``memory``; -1 if it is read-only, because slots never are."""
    return -1 if memory.readonly else ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Send plain CPU memory out of band; leave any other tensor (gradients, sparse, quantized, attributes) to torch."""
    more = tensor.requires_grad or tensor.is_quantized or tensor.__dict__
    if more or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    try:
        buffer = pickle.PickleBuffer(cast("Any", bytes_of(tensor)))
    except RuntimeError:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return tensor_over, (buffer, tuple(tensor.shape), dtype_name(tensor.dtype))


_REDUCERS = ChainMap[type, Any]({torch.Tensor: _reduce_tensor}, copyreg.dispatch_table)
