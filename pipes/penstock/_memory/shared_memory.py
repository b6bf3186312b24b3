"""Anonymous memory that two processes share."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import Any

import torch

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
