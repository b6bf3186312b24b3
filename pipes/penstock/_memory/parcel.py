"""How a value travels between two processes through memory that both map.

A worker puts its answer in a *slot*: a shared-memory segment that the worker created and the consumer maps as well. The
worker collates the batch directly in the slot (`WorkerSlots.allocate`) and pickles it with the buffers out of band (PEP
574); only buffers that are not in the slot yet are copied into it. The consumer builds arrays and tensors that are
*views* of the slot. The life of a slot::

    worker: WorkerSlots ──answer──► consumer: SlotTable.view ──last view gone──► SlotTable.lend ──next task──► worker

No task waits for a slot: if a task gets none, or one that is too small, the worker makes a new one. The kernel frees
the memory when the worker's mapping, the consumer's mapping and the consumer's views are all gone, so a batch that the
user keeps outlives the worker and the pool.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
from functools import lru_cache
from itertools import chain
from operator import methodcaller
from struct import Struct
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from penstock._memory.buffers import IN_TORCH, aligned, bytes_of, dtype_name, tensor_over

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_HEAD = Struct("<QQQ")
"""Bytes of the pickle, number of buffers, and what the pickle is: `PICKLED`, or a description of them (`TENSORS`), or
nothing at all (`BYTES`).
"""

PICKLED, TENSORS, BYTES = range(3)
_NOTHING = np.empty(0, np.uint8)
LARGE = 4096
"""A list of ``bytes`` of at least this average size is not pickled, because the pickler would copy each twice."""


@lru_cache(maxsize=64)
def _places(count: int) -> Struct:
    """What follows the head: the place of each buffer, its offset in the memory and its bytes.

    The pickle follows them.
    """
    return Struct(f"<{2 * count}Q")


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

    __slots__ = ("_addresses", "_buffers", "_kind", "_lengths", "_places", "body")

    def __init__(self, value: Any, *, reducers: Mapping[type, Any] | None = None) -> None:
        self.body: memoryview
        flat = None if reducers is not None else _flat(value)
        self._kind = PICKLED
        if flat is not None:
            self._kind = TENSORS
            described, tensors, arrays = flat
            self.body = memoryview(pickle.dumps(described, 5))
            self._buffers = [pickle.PickleBuffer(cast("Any", array)).raw() for array in arrays]
            self._addresses = [tensor.data_ptr() for tensor in tensors]
        elif reducers is None and _is_large_bytes(value):
            self._kind = BYTES
            self.body = memoryview(b"")
            self._buffers = [memoryview(one) for one in value]
            self._addresses = [-1] * len(value)
        else:
            pickled = io.BytesIO()
            buffers: list[pickle.PickleBuffer] = []
            pickler = pickle.Pickler(pickled, 5, buffer_callback=buffers.append)
            pickler.dispatch_table = _REDUCERS if reducers is None else reducers
            pickler.dump(value)
            self.body = pickled.getbuffer()
            self._buffers = [buffer.raw() for buffer in buffers]
            self._addresses = [_address(raw) if raw.nbytes else -1 for raw in self._buffers]
        self._lengths = [raw.nbytes for raw in self._buffers]
        self._places: list[int] = []

    def end(self, memory: memoryview | None = None, start: int = 0) -> int:
        """Where the parcel ends if written to ``memory`` at ``start``; buffers that are in ``memory`` already stay in
        place.
        """
        begin, nbytes = (0, -1) if memory is None else (_address(memory), memory.nbytes)
        end = self._body(start) + len(self.body)
        self._places = []
        placed: dict[tuple[int, int], int] = {}  # the same memory travels once: all slices of a table have it
        for address, length in zip(self._addresses, self._lengths, strict=True):
            if length and 0 <= address - begin <= nbytes - length:
                self._places.append(address - begin)
                continue
            offset = aligned(end)
            if length and address > 0:
                offset = placed.setdefault((address, length), offset)
            self._places.append(offset)
            end = max(end, offset + length)
        return end

    def write(self, memory: memoryview, start: int = 0) -> None:
        """Write the parcel as `end` last laid it out; buffers that are in ``memory`` already are not copied.

        The memory may also be a new block of that size, if `end` was called without one.
        """
        count, body = len(self._buffers), self._body(start)
        _HEAD.pack_into(memory, start, len(self.body), count, self._kind)
        _places(count).pack_into(
            memory, start + _HEAD.size, *chain.from_iterable(zip(self._places, self._lengths, strict=True))
        )
        memory[body : body + len(self.body)] = self.body
        for raw, offset, length in zip(self._buffers, self._places, self._lengths, strict=True):
            if offset > start:
                memory[offset : offset + length] = raw

    def pieces(self) -> tuple[int, bytes, list[np.ndarray]]:
        """The arguments of `value_of`, for another transport.

        The buffers are uint8 arrays over the value's own memory.
        """
        return (
            self._kind,
            bytes(self.body),
            [np.frombuffer(raw, np.uint8) if raw.nbytes else _NOTHING for raw in self._buffers],
        )

    def _body(self, start: int) -> int:
        return start + _HEAD.size + _places(len(self._buffers)).size


_DTYPES = frozenset(IN_TORCH.values())


def _flat(value: Any) -> tuple[tuple[Any, ...], Sequence[torch.Tensor], list[np.ndarray]] | None:
    """A description of ``value``, its tensors and their memory, if it consists of plain tensors only; otherwise None.

    The description is their names (the keys of a dict, the type of a list or a tuple, None for a single tensor), shapes
    and dtypes. Pickling only that takes a third of the time.
    """
    kind = type(value)
    names: Any = None
    tensors: Sequence[Any] = [value]
    if kind is dict:
        names, tensors = [*value], [*value.values()]
    elif kind is list or kind is tuple:
        names, tensors = kind, value
    for one in tensors:
        if type(one) is not torch.Tensor or one.dtype not in _DTYPES or one.__dict__:
            return None
    if len(set(map(id, tensors))) != len(tensors):  # a tensor at two places stays one tensor
        return None
    try:
        arrays = [one.numpy() for one in tensors]
    except (TypeError, RuntimeError):  # gradients, sparse, conjugated, not on the CPU
        return None
    if not all(array.flags.c_contiguous for array in arrays):
        return None
    return (names, [array.shape for array in arrays], [dtype_name(one.dtype) for one in tensors]), tensors, arrays


def _is_large_bytes(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) == {bytes} and sum(map(len, value)) >= LARGE * len(value)


def unpack(memory: Any, start: int = 0) -> Any:
    """The value of the `Parcel` in ``memory`` (an array of uint8); its arrays and tensors are views of ``memory`` and
    keep it alive.

    Raises:
        Exception: Whatever unpickling raises.
    """
    nbytes, count, kind = _HEAD.unpack_from(memory, start)
    layout = _places(count)
    body = start + _HEAD.size + layout.size
    numbers = layout.unpack_from(memory, start + _HEAD.size)
    buffers = [memory[offset : offset + length] for offset, length in zip(numbers[::2], numbers[1::2], strict=True)]
    return value_of(kind, memory[body : body + nbytes], buffers)


def value_of(kind: int, body: Any, buffers: list[Any]) -> Any:
    """The value of the `Parcel` with these pieces; its arrays and tensors are views of the ``buffers``.

    Raises:
        Exception: Whatever unpickling raises.
    """
    if kind == BYTES:
        return [buffer.tobytes() for buffer in buffers]
    if kind == PICKLED:
        return pickle.loads(body, buffers=buffers)
    names, shapes, dtypes = pickle.loads(body)
    tensors = list(map(tensor_over, buffers, shapes, dtypes))
    if names is None:
        return tensors[0]
    return dict(zip(names, tensors, strict=True)) if type(names) is list else names(tensors)


def _address(memory: memoryview) -> int:
    """The address of ``memory``; -1 if it is read-only, because slots never are."""
    return -1 if memory.readonly else ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Send plain CPU memory out of band; leave any other tensor (gradients, sparse, quantized, attributes) to torch."""
    more = tensor.requires_grad or tensor.is_quantized or tensor.__dict__
    if more or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return reduce_as_torch(tensor)
    try:
        buffer = pickle.PickleBuffer(cast("Any", bytes_of(tensor)))
    except RuntimeError:
        return reduce_as_torch(tensor)
    return tensor_over, (buffer, tuple(tensor.shape), dtype_name(tensor.dtype))


def pickled(value: Any) -> bytes:
    """``value`` for another process, in one piece.

    Raises:
        Exception: Whatever pickling raises.
    """
    pickler = pickle.Pickler(file := io.BytesIO(), 5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return file.getvalue()


def reduce_as_torch(tensor: torch.Tensor) -> Any:
    """What torch's own pickle of a tensor contains.

    For dtypes that have no storage class (uint16 to uint64, float8, complex32) it can be written but not read again,
    so here their memory is that of bytes, which can.
    """
    return _readable(tensor.__reduce_ex__(5))  # type: ignore[no-untyped-call]


def _readable(part: Any) -> Any:
    if type(part) is tuple:
        return tuple(map(_readable, part))
    if isinstance(part, torch.UntypedStorage):
        typed: Any = torch.storage.TypedStorage
        return typed(wrap_storage=part, dtype=torch.uint8, _internal=True)
    return _rebuilt if part is torch._utils._rebuild_tensor_v3 else part


@torch.no_grad()
def _rebuilt(*args: Any) -> Any:
    """A tensor of such a dtype, also one that requires gradients, for which torch's own function raises."""
    return torch._utils._rebuild_tensor_v3(*args)  # type: ignore[no-untyped-call]


def _reduce_forwarding(obj: Any) -> Any:
    """An object with a ``__getattr__`` may forward to an attribute that it does not have yet when it is asked for a
    ``__setstate__``, and so call itself without end. So it is not asked.
    """
    return (*object.__reduce_ex__(obj, 5), _restore)


def _restore(made: Any, state: Any) -> None:
    attributes, slots = state if type(state) is tuple else (state, None)
    if attributes:
        vars(made).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(made, name, value)


class Reducers(dict[type, Any]):
    """Reducers, falling back to the current ones of ``copyreg``, and then to ours for subclasses of tensors and for
    classes that forward.

    A ``ChainMap`` would run Python code for every tensor.
    """

    def __missing__(self, kind: type) -> Any:
        if kind not in copyreg.dispatch_table:
            if issubclass(kind, torch.Tensor):
                return reduce_as_torch
            usual = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
            forwards = hasattr(kind, "__getattr__") and not issubclass(kind, type)  # an enum's class has one too
            if usual and forwards and not hasattr(kind, "__setstate__"):
                return _reduce_forwarding
        return copyreg.dispatch_table[kind]


# those of NumPy's types as usual, but without a call of `__missing__` for each array
_AS_USUAL: dict[type, Any] = dict.fromkeys({np.ndarray, *np.sctypeDict.values()}, methodcaller("__reduce_ex__", 5))
_REDUCERS = Reducers(_AS_USUAL | {torch.Tensor: _reduce_tensor})
