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
import errno
import io
import os
import pickle
import struct
import tempfile
from collections import ChainMap
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from penstock._bytes import aligned, bytes_of, carved, carved_bytes, dtype_name, tensor_over
from penstock._memory import NO_SLOT
from penstock._pool import afresh

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock._pool import Spec

_PAGE = 65536  # bytes: slots grow in these steps
_ROOM = 4096  # bytes: what is left behind the arrays of a batch for the rest of it; where it needs more, all of it moves
_HEAD = struct.Struct("<QQ")  # bytes of pickle, number of buffers; then their places, then the pickle
_PLACE = struct.Struct("<QQ")  # where a buffer begins in the memory, and its bytes


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
    """A value, pickled and ready to be written into memory.

    Args:
        value: Plain CPU tensors and contiguous arrays in it go out of band; everything else is pickled as ever.
        reducers: How to pickle which types; default: as ever, but plain tensors out of band.

    Raises:
        Exception: Whatever pickling raises.
    """

    __slots__ = ("_body", "_buffers", "_places")

    def __init__(self, value: Any, *, reducers: Mapping[type, Any] | None = None) -> None:
        pickled = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler = pickle.Pickler(pickled, 5, buffer_callback=buffers.append)
        pickler.dispatch_table = _REDUCERS if reducers is None else reducers
        pickler.dump(value)
        self._body = pickled.getbuffer()
        self._buffers = [buffer.raw() for buffer in buffers]
        self._places: list[int] = []

    def end(self, memory: memoryview | None = None, start: int = 0) -> int:
        """Where it ends, written to ``memory`` from ``start`` on; what lies in ``memory`` already stays where it is."""
        self._places = self._lying(memory)
        end = start + _HEAD.size + _PLACE.size * len(self._buffers) + len(self._body)
        for number, raw in enumerate(self._buffers):
            if self._places[number] < 0:
                self._places[number] = aligned(end)
                end = aligned(end) + raw.nbytes
        return end

    def write(self, memory: memoryview, start: int = 0) -> None:
        """Write all that does not lie in ``memory`` yet; as `end` was last asked, or to fresh memory."""
        body = start + _HEAD.size + _PLACE.size * len(self._buffers)
        _HEAD.pack_into(memory, start, len(self._body), len(self._buffers))
        memory[body : body + len(self._body)] = self._body
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


# Slots, as the worker sees them.


class SlotMaker:
    """The slots that this worker has made, and where the answer to the task in hand goes. Which of them are free, the consumer knows."""

    def __init__(self) -> None:
        self._mapped: dict[int, memoryview] = {}
        self._made = 0
        self._place = memoryview(b"")
        self._lent = NO_SLOT
        self._fd: int | None = None  # of `_slot`, where it is new
        self._slot = NO_SLOT
        self._memory: memoryview | None = None  # of `_slot`, or the place; None: nothing was asked for
        self._used = 0

    def begin(self, place: memoryview, lent: int) -> None:
        """The next task: its place in the area, for a small answer, and the slot that was lent."""
        self._place, self._lent = place, lent
        self._memory, self._used = None, 0

    def allocate(self, specs: Sequence[Spec]) -> list[torch.Tensor]:
        """Memory for a batch, where its answer will lie; afresh, where there is not so much shared memory.

        Raises:
            OSError: No file descriptor.
        """
        nbytes = carved_bytes(specs)
        try:
            self._take(nbytes + _ROOM)
        except MemoryError:  # so the answer will not fit either, and says so
            return afresh(specs)
        self._used = nbytes
        return carved(np.frombuffer(cast("Any", self._memory), np.uint8), specs)

    def send(self, parcel: Parcel) -> tuple[int, int, int, int, int | None]:
        """Write the answer: slot or `NO_SLOT` for the place, its size where it is new, start and end, and a new slot's descriptor.

        Raises:
            MemoryError: A new slot was needed, and there is no memory for it.
            OSError: ... and no file descriptor for it.
        """
        start = self._used
        if self._memory is None or (end := parcel.end(self._memory, start)) > len(self._memory):
            start, end = 0, parcel.end()
            self._take(end, other=True)  # because the buffers may lie in this one
        assert self._memory is not None
        parcel.write(self._memory, start)
        fd, self._fd = self._fd, None
        return self._slot, 0 if fd is None else len(self._memory), start, end, fd

    def drop(self, numbers: list[int]) -> None:
        """Unmap slots that will not be lent again."""
        for number in numbers:
            self._mapped.pop(number, None)

    def _take(self, nbytes: int, *, other: bool = False) -> None:
        """Let ``_memory`` be of at least ``nbytes``, and if so wanted other than it is."""
        if self._memory is not None and nbytes <= len(self._memory) and not other:
            return
        taken = None if self._memory is None else self._slot
        self._memory = None
        if self._fd is not None:  # made for this task, and too small: nobody else knows of it
            os.close(self._fd)
            self._fd = None
            del self._mapped[self._slot]
        lent = self._mapped.get(self._lent)
        if nbytes <= len(self._place) and not (other and taken == NO_SLOT):
            self._slot, self._memory = NO_SLOT, self._place
        elif lent is not None and nbytes <= len(lent) and not (other and taken == self._lent):
            self._slot, self._memory = self._lent, lent
        else:
            self._slot, self._memory, self._fd = self._new(nbytes)

    def _new(self, nbytes: int) -> tuple[int, memoryview, int]:
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
        number, self._made = self._made, self._made + 1
        self._mapped[number] = attach(fd, size)
        return number, self._mapped[number], fd
