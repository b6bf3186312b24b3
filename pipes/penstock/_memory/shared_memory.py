"""Anonymous memory that two processes share."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import Any

import torch


def create(nbytes: int) -> int:
    """A file descriptor for ``nbytes`` of new shared memory without a name, so a killed program leaves nothing behind.

    The memory is reserved now; otherwise a shortage would be a SIGBUS at some later write.

    Raises:
        OSError: There is not enough memory, or no file descriptor left.
    """
    try:
        fd = os.memfd_create("penstock", os.MFD_CLOEXEC)  # not limited by /dev/shm, which is 64 MB in many containers
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
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # those two: the file system cannot reserve
            raise


def attach(fd: int, nbytes: int, *, private: bool = False) -> memoryview:
    """Map ``nbytes`` of ``fd``, which the caller may then close. The mapping ends when its last view is gone.

    This uses `torch.from_file` because ``mmap.mmap`` holds a file descriptor per mapping (up to Python 3.12), and a
    user who keeps a thousand batches would run out of them.

    Args:
        fd: From `create`.
        nbytes: How much of it to map.
        private: Map copy-on-write.

    Raises:
        OSError: No memory or no file descriptor is left for the mapping.
    """
    try:
        mapped: Any = torch.from_file(f"/dev/fd/{fd}", shared=not private, size=nbytes, dtype=torch.uint8).numpy()
    except RuntimeError as error:
        raise OSError(errno.EMFILE if f"({errno.EMFILE})" in str(error) else errno.ENOMEM, str(error)) from error
    return memoryview(mapped)
