"""Memory that two processes share, and how a value travels in it.

A worker's answer lies in a *slot*: a segment that the worker made and the consumer maps too. A batch is collated in the slot itself
(`SlotMaker.allocate`); it is then pickled with its buffers out of band (PEP 574), and those that do not lie there yet are copied
there. The consumer builds arrays and tensors that are *views* of it. The life of a slot::

    worker: SlotMaker ──answer──► consumer: Slots.view ──last view gone──► Slots.lend ──next task──► worker

Nobody waits for a slot: a task that is lent none, or one too small, is answered in a new one. The memory itself is given back when
the last of (worker's mapping, consumer's mapping, consumer's views) is gone, so a batch that the user keeps outlives the worker and
the pool.
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

_HEAD = struct.Struct("<QQ")  # bytes of pickle, number of buffers; then their places, then the pickle
_PLACE = struct.Struct("<QQ")  # where a buffer begins in the memory, and its bytes


# Values.


class Parcel:
    """A value, pickled and ready to be written into memory.

    Args:
        value: Plain CPU tensors and contiguous arrays in it go out of band; everything else is pickled as ever.
        reducers: How to pickle which types; default: as ever, but plain tensors out of band.

    Attributes:
        body: The pickle, without what goes out of band.

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
        """Where it ends, written to ``memory`` from ``start`` on; what lies in ``memory`` already stays where it is."""
        self._places = self._lying(memory)
        end = start + _HEAD.size + _PLACE.size * len(self._buffers) + len(self.body)
        for number, raw in enumerate(self._buffers):
            if self._places[number] < 0:
                self._places[number] = aligned(end)
                end = aligned(end) + raw.nbytes
        return end

    def write(self, memory: memoryview, start: int = 0) -> None:
        """Write all that does not lie in ``memory`` yet; as `end` was last asked, or to fresh memory."""
        body = start + _HEAD.size + _PLACE.size * len(self._buffers)
        _HEAD.pack_into(memory, start, len(self.body), len(self._buffers))
        memory[body : body + len(self.body)] = self.body
        for number, (raw, place) in enumerate(zip(self._buffers, self._places, strict=True)):
            _PLACE.pack_into(memory, start + _HEAD.size + _PLACE.size * number, place, raw.nbytes)
            if place > start:
                memory[place : place + raw.nbytes] = raw

    def _lying(self, memory: memoryview | None) -> list[int]:
        """Where in ``memory`` each buffer lies, or -1."""
        if memory is None:
            return [-1] * len(self._buffers)
        begin, nbytes = _address(memory), memory.nbytes
        places = [_address(raw) - begin if raw.nbytes else -1 for raw in self._buffers]
        return [place if 0 <= place <= nbytes - raw.nbytes else -1 for place, raw in zip(places, self._buffers, strict=True)]


def unpack(memory: Any, start: int = 0) -> Any:
    """The value that a `Parcel` wrote into ``memory`` (an array of uint8); its arrays and tensors are views of ``memory`` and keep it alive.

    Raises:
        Exception: Whatever unpickling raises.
    """
    nbytes, count = _HEAD.unpack_from(memory, start)
    places = [_PLACE.unpack_from(memory, start + _HEAD.size + _PLACE.size * number) for number in range(count)]
    body = start + _HEAD.size + _PLACE.size * count
    return pickle.loads(memory[body : body + nbytes], buffers=[memory[place : place + length] for place, length in places])


def _address(memory: memoryview) -> int:
    """Where it begins; -1 where it is read-only, and so not ours."""
    return -1 if memory.readonly else ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Plain CPU memory out of band; whatever is more than that (gradients, sparse, quantized, attributes) as torch does it."""
    more = tensor.requires_grad or tensor.is_quantized or tensor.__dict__
    if more or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    try:
        buffer = pickle.PickleBuffer(cast("Any", bytes_of(tensor)))
    except RuntimeError:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return tensor_over, (buffer, tuple(tensor.shape), dtype_name(tensor.dtype))


_REDUCERS = ChainMap[type, Any]({torch.Tensor: _reduce_tensor}, copyreg.dispatch_table)
