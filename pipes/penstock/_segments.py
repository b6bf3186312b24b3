"""Memory that two processes share, and how a value travels in it.

A worker's answer lies in a *slot*: a segment that the worker made and the consumer maps too. The worker pickles the answer with
its large buffers out of band (PEP 574), so that they are copied once, into the slot; the consumer builds arrays and tensors that
are *views* of it. What a loader pays for is page faults, not copying, so slots are used again and again. The life of a slot::

    worker: SlotMaker.take ──answer──► consumer: Slots.view ──last view gone──► Slots.lend ──next task──► worker

Invariant: a slot is lent to at most one task, and only while no array or tensor views it. Nobody waits for a slot: a task that
is lent none, or one too small, is answered in a new one. The memory itself is given back when the last of (worker's mapping,
consumer's mapping, consumer's views) is gone, so a batch that the user keeps outlives the worker and the pool.
"""

from __future__ import annotations

import copyreg
import errno
import io
import os
import pickle
import struct
import tempfile
import weakref
from collections import ChainMap, deque
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

NO_SLOT = -1
_ALIGN = 64  # bytes: a cache line, and what vector instructions and `torch` like
_PAGE = 65536  # bytes: slots grow in these steps
_HEAD = struct.Struct("<QQ")  # bytes of pickle, number of buffers; the buffers' lengths follow


# Segments.


def create(nbytes: int) -> int:
    """A file descriptor of ``nbytes`` of new shared memory that has no name, so nothing can be left behind.

    The memory is reserved now: without that, a shortage would be a SIGBUS at some later write.

    Raises:
        OSError: There is not so much memory.
    """
    try:
        fd = os.memfd_create("penstock", os.MFD_CLOEXEC)  # not bounded by the size of /dev/shm, which containers keep at 64 MB
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
        _reserve(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reserve(fd: int, nbytes: int) -> None:
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that cannot reserve
            raise


def attach(fd: int, nbytes: int, *, private: bool = False) -> memoryview:
    """Map ``nbytes`` of ``fd``, which the caller may then close; unmapped when the last view is gone.

    By `torch.from_file`, because ``mmap.mmap`` keeps a file descriptor for each mapping (up to Python 3.12), and a user who
    keeps a thousand batches would run out of them. ``private`` maps copy-on-write.

    Raises:
        OSError: No memory, or no file descriptor, for it.
    """
    try:
        mapped: Any = torch.from_file(f"/dev/fd/{fd}", shared=not private, size=nbytes, dtype=torch.uint8).numpy()
    except RuntimeError as error:
        raise OSError(errno.EMFILE if f"({errno.EMFILE})" in str(error) else errno.ENOMEM, str(error)) from error
    return memoryview(mapped)


# Values.


class Parcel:
    """A value, pickled and ready to be written into ``nbytes`` of memory.

    Args:
        value: Plain CPU tensors and contiguous arrays in it go out of band; everything else is pickled as ever.
        reducers: How to pickle which types; default: as ever, but plain tensors out of band.

    Raises:
        Exception: Whatever pickling raises.
    """

    __slots__ = ("_body", "_buffers", "_start", "nbytes")

    def __init__(self, value: Any, *, reducers: Mapping[type, Any] | None = None) -> None:
        pickled = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler = pickle.Pickler(pickled, 5, buffer_callback=buffers.append)
        pickler.dispatch_table = _REDUCERS if reducers is None else reducers
        pickler.dump(value)
        self._body = pickled.getbuffer()
        self._buffers = [buffer.raw() for buffer in buffers]
        self._start = _HEAD.size + 8 * len(buffers)
        self.nbytes = _aligned(self._start + len(self._body)) + sum(_aligned(raw.nbytes) for raw in self._buffers)

    def write(self, memory: memoryview) -> None:
        """Copy everything into ``memory``, of at least ``nbytes`` bytes."""
        lengths = [raw.nbytes for raw in self._buffers]
        struct.pack_into(f"<QQ{len(lengths)}Q", memory, 0, len(self._body), len(lengths), *lengths)
        end = self._start + len(self._body)
        memory[self._start : end] = self._body
        for raw, nbytes in zip(self._buffers, lengths, strict=True):
            start = _aligned(end)
            end = start + nbytes
            memory[start:end] = raw


def unpack(memory: Any) -> Any:
    """The value that a `Parcel` wrote into ``memory`` (an array of uint8); its arrays and tensors are views of ``memory`` and keep it alive.

    Raises:
        Exception: Whatever unpickling raises.
    """
    body, count = _HEAD.unpack_from(memory)
    lengths = struct.unpack_from(f"<{count}Q", memory, _HEAD.size)
    begin = _HEAD.size + 8 * count
    end = begin + body
    buffers = []
    for nbytes in lengths:
        start = _aligned(end)
        end = start + nbytes
        buffers.append(memory[start:end])
    return pickle.loads(memory[begin : begin + body], buffers=buffers)


def _aligned(nbytes: int) -> int:
    return (nbytes + _ALIGN - 1) & -_ALIGN


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Plain CPU memory out of band; whatever is more than that (gradients, sparse, quantized, attributes) as torch does it."""
    more = tensor.requires_grad or tensor.is_quantized or tensor.__dict__
    if more or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    try:
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    except RuntimeError:  # a dtype without bytes of its own, a tensor without storage
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return _build_tensor, (pickle.PickleBuffer(cast("Any", flat)), str(tensor.dtype)[6:], tuple(tensor.shape))


def _build_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    # Shaped in NumPy where it has the type, because a tensor made by `view` would answer `_is_view()` with yes.
    if dtype in _IN_NUMPY:
        return torch.from_numpy(np.ndarray(shape, _IN_NUMPY[dtype], buffer))
    if not len(buffer):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(np.frombuffer(buffer, np.uint8)).view(getattr(torch, dtype)).reshape(shape)


_REDUCERS = ChainMap[type, Any]({torch.Tensor: _reduce_tensor}, copyreg.dispatch_table)
_IN_NUMPY = {
    name: np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128")
}


# Slots, as the worker sees them.


class SlotMaker:
    """The slots that this worker has made. Which of them are free, the consumer knows."""

    def __init__(self) -> None:
        self._mapped: dict[int, memoryview] = {}
        self._made = 0

    def take(self, nbytes: int, lent: int) -> tuple[int, memoryview, int | None]:
        """A slot of at least ``nbytes``: its number, its memory, and for a new one the file descriptor, to be sent and closed.

        Raises:
            MemoryError: A new slot was needed, and there is no memory for it.
            OSError: ... and no file descriptor for it.
        """
        memory = self._mapped.get(lent)
        if memory is not None and len(memory) >= nbytes:
            return lent, memory, None
        size = -(-(nbytes + nbytes // 8) // _PAGE) * _PAGE  # an eighth more, for batches that grow a little
        try:
            fd = create(size)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise MemoryError(
                f"no shared memory for a result of {nbytes} bytes ({error}). Keep fewer batches, prefetch less, use smaller batches or "
                f"fewer workers, or give the machine (or its container) more memory."
            ) from error
        memory = attach(fd, size)
        number, self._made = self._made, self._made + 1
        self._mapped[number] = memory
        return number, memory, fd

    def drop(self, numbers: list[int]) -> None:
        """Unmap slots that will not be lent again."""
        for number in numbers:
            self._mapped.pop(number, None)


# Slots, as the consumer sees them.


class SlotView(np.ndarray):
    """The one array from which every array and tensor over a slot descends; gone when the last of them is.

    A subclass made straight over a buffer, because NumPy shortens the chain of bases across arrays of the same type, and
    would leave this one out.
    """


class Slots:
    """Who holds the slots of one worker: the user (by views), a task (lent), or nobody (idle).

    The consumer thread calls every method but `count`. A view may die in any thread, under any lock, or in a forked child: all that
    happens then is one ``deque.append``, in C, on that process's own deque.

    Idle slots that `_PERIOD` tasks in a row could do without are dropped, so that a burst of kept batches is given back.
    """

    _PERIOD = 16

    def __init__(self) -> None:
        self._spare = 0  # the fewest slots that were idle since the last look
        self._until_look = self._PERIOD
        self._mapped: dict[int, memoryview] = {}
        self._watches: dict[int, weakref.KeyedRef[int, SlotView]] = {}
        self._freed: deque[weakref.KeyedRef[int, SlotView]] = deque()
        self._idle: list[int] = []
        self._dropped: deque[int] = deque()

    def add(self, number: int, fds: list[int], nbytes: int) -> None:
        """Map a slot that the worker has made; where that fails, the worker is told to drop it.

        Raises:
            OSError: No memory, or no file descriptor: then ``fds`` may be empty, because the kernel drops those that find no place.
        """
        try:
            if not fds:
                raise OSError(
                    errno.EMFILE,
                    "too many open files in this process, so no result can come in. Close some, or raise the limit (ulimit -n)",
                )
            self._mapped[number] = attach(fds[0], nbytes)
        except OSError:
            self._dropped.append(number)
            raise

    def view(self, number: int) -> SlotView:
        """The slot's memory (uint8), held until the last view of it is gone."""
        memory = self._mapped[number]
        base = np.ndarray.__new__(SlotView, (len(memory),), np.dtype(np.uint8), cast("Any", memory))
        self._watches[number] = weakref.KeyedRef(base, self._freed.append, number)
        return base

    def lend(self) -> int:
        """An idle slot for the next task, the most recently used; `NO_SLOT` where there is none."""
        while self._freed:
            number = self._freed.popleft().key
            del self._watches[number]
            self._idle.append(number)
        lent = self._idle.pop() if self._idle else NO_SLOT
        self._spare = min(self._spare, len(self._idle))
        self._until_look -= 1
        if not self._until_look:
            for number in self._idle[: self._spare]:
                self._drop(number)
            self._spare, self._until_look = len(self._idle), self._PERIOD
        return lent

    def give_back(self, number: int, *, useful: bool = True) -> None:
        """A slot that was lent and holds nothing; not ``useful`` where it was too small."""
        if number == NO_SLOT:
            return
        self._idle.append(number)
        if not useful:
            self._drop(number)

    def dropped(self, at_most: int) -> list[int]:
        """Slots that the worker must be told to unmap, once."""
        return [self._dropped.popleft() for _ in range(min(at_most, len(self._dropped)))]

    def count(self) -> tuple[int, int]:
        """Slots and bytes that are mapped here for this worker; from any thread."""
        mapped = list(self._mapped.values())
        return len(mapped), sum(map(len, mapped))

    def _drop(self, number: int) -> None:
        self._idle.remove(number)
        del self._mapped[number]
        self._dropped.append(number)
