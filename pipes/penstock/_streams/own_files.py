"""How penstock writes files of its own: caches, indexes and bookmarks. Anybody may have put links into their folders; none leads a write elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from typing import Any

_REFUSED = {errno.ELOOP, errno.EMLINK, errno.ENXIO}  # a link (by POSIX; on BSD), and a pipe that nobody reads


def open_own(path: str, flags: int) -> int:
    """Open a file of penstock's own without following a link or waiting for a pipe; its descriptor.

    Raises:
        OSError: It cannot be opened, or is no regular file; names it.
    """
    wanted = [getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")]
    try:
        fd = os.open(path, flags | sum(wanted), 0o666)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise refusal(path) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise refusal(path)
    return fd


def write_own(path: str, *parts: Any, sync: bool = False) -> None:
    """Write a file of penstock's own, and its folder: completely or not at all. A link that lies at its path is replaced.

    Args:
        path: Where to.
        parts: Buffers, one after another.
        sync: Whether to wait for the disk, so that a power failure leaves no file that is cut short.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:  # a new file, so it follows no link
            file.writelines(parts)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def refusal(path: str) -> OSError:
    """The error for what is not penstock's own."""
    return OSError(
        errno.ELOOP, "a link, a pipe or a device lies where penstock keeps a file of its own. Remove it (the folder may be a link)", path
    )
