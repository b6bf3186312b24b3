"""The slots of one worker process: the memory in which it collates and puts its answers."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock._memory.allocation import afresh
from penstock._memory.buffers import carved, carved_bytes
from penstock._memory.shared_memory import attach, create
from penstock._memory.slots import NO_SLOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from penstock._memory.allocation import Spec
    from penstock._memory.parcel import Parcel


_STEP = 65536  # the size of a slot is a multiple of this
_ROOM = 4096  # bytes kept after the arrays of a batch for the rest of it; if that needs more, the whole batch moves


class WorkerSlots:
    """The slots that this worker has made, and where the answer to the current task goes.

    The consumer tracks which slots are free.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, memoryview] = {}
        self._made = 0
        self._place = memoryview(b"")
        self._lent = NO_SLOT
        self._fd: int | None = None  # of `_slot`, if it is new
        self._slot = NO_SLOT
        self._memory: memoryview | None = None  # of `_slot`, or the place; None: none was needed yet
        self._used = 0

    def begin(self, place: memoryview, lent: int) -> None:
        """Begin the next task, with its place in the area, for a small answer, and the slot that was lent for a large
        one.
        """
        self._place, self._lent = place, lent
        self._memory, self._used = None, 0

    def allocate(self, specs: Sequence[Spec]) -> list[torch.Tensor]:
        """Memory for a batch where its answer will be; ordinary memory if there is not enough.

        Raises:
            OSError: No file descriptor.
        """
        nbytes = carved_bytes(specs)
        try:
            self._take(nbytes + _ROOM)
        except MemoryError:  # then the answer will not fit either, and `send` says so
            return afresh(specs)
        self._used = nbytes
        return carved(np.frombuffer(cast("Any", self._memory), np.uint8), specs)

    def send(self, parcel: Parcel) -> tuple[int, int, int, int, int | None]:
        """Write the answer: its slot (`NO_SLOT`: the place), the slot's size if it is new or 0, start, end, and a new
        slot's descriptor.

        Raises:
            MemoryError: It needs a new slot, and there is no memory for one.
            OSError: It needs a new slot, and there is no file descriptor for one.
        """
        # Behind the buffers in the same memory, if the rest fits there. Otherwise all of it moves.
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
        """Make ``_memory`` at least ``nbytes`` long; with ``other``, a different block than now."""
        if self._memory is not None and nbytes <= len(self._memory) and not other:
            return
        avoided = self._slot if other and self._memory is not None else None
        self._memory = None
        if self._fd is not None:  # it was made for this task and is too small; the consumer has not received it
            os.close(self._fd)
            self._fd = None
            del self._mapped[self._slot]
        lent = self._mapped.get(self._lent)
        if avoided != NO_SLOT and nbytes <= len(self._place):
            self._slot, self._memory = NO_SLOT, self._place
        elif avoided != self._lent and lent is not None and nbytes <= len(lent):
            self._slot, self._memory = self._lent, lent
        else:
            self._slot, self._memory, self._fd = self._new(nbytes)

    def _new(self, nbytes: int) -> tuple[int, memoryview, int]:
        # an eighth more, because the next batch may be a little larger
        size = -(-(nbytes + nbytes // 8) // _STEP) * _STEP
        try:
            fd = create(size)
            try:
                memory = attach(fd, size)
            except OSError:
                os.ftruncate(fd, 0)  # closing is not enough: torch leaves its descriptor of the file open
                os.close(fd)
                raise
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise MemoryError(
                f"no shared memory for a result of {nbytes} bytes ({error}). Keep fewer batches, prefetch less, use "
                f"smaller batches or fewer workers, or give the machine (or its container) more memory."
            ) from error
        number, self._made = self._made, self._made + 1
        self._mapped[number] = memory
        return number, memory, fd
