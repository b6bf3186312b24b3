"""A transfer made by fsspec that reports its progress, can be aborted, and over HTTP resumes where it broke off; and
which errors may be temporary.
"""

from __future__ import annotations

import errno
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from penstock._files.paths import extra

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger("penstock")

SLOW_S: Final = 2.0
"""After this many seconds, log lines say how far the transfer is."""
LINE_S: Final = 10.0
"""Seconds between two lines."""
NO_PROGRESS_S: Final = 60.0
"""After so many seconds without a byte, a connection counts as broken."""
_PAUSES_S: Final = (0.5, 1.0, 2.0)
_CHUNK: Final = 2**20
_TEMPORARY: Final = (408, 429, *range(500, 600))

FINAL: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors that waiting does not resolve."""

NETWORK: Final = {
    *(
        "aiohttp.ClientError",
        "botocore.ConnectionError",
        "botocore.HTTPClientError",
        "botocore.IncompleteReadError",
        "http.HTTPException",
    ),
    *("httpx.TransportError", "httpx2.TransportError", "urllib3.HTTPError"),
}
"""The errors that the libraries under fsspec raise when a response breaks off: package and class. They are not
subclasses of `OSError`, though they should be.
"""


def may_be_temporary(exc: Exception) -> bool:
    """Whether waiting may resolve an error, as of a disk or a network."""
    if isinstance(exc, OSError):
        return not isinstance(exc, FINAL)
    return any(f"{kind.__module__.partition('.')[0]}.{kind.__name__}" in NETWORK for kind in type(exc).__mro__)


def transfer_callback(
    path: str, size: int, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic
) -> Any:
    """A callback for fsspec, which calls it for each part that arrives. It raises if the transfer must end.

    Args:
        path: What is fetched.
        size: Its size in bytes.
        is_over: Whether the transfer is no longer wanted. The next call then raises an `InterruptedError`.
        clock: Seconds.
    """
    due = clock() + SLOW_S

    # what the server reports now, which may be another size
    def check(reported_size: int, value: int, **_: Any) -> None:
        nonlocal due
        if is_over():
            raise InterruptedError(f"{path} is no longer wanted")
        if value > size:
            raise OSError(
                f"{path} returned at least {value} bytes instead of {size}: it has changed, or its server reported "
                f"another size before"
            )
        if (now := clock()) > due:
            due = now + LINE_S
            log.info("fetching %s: %d of %d bytes", path, value, size)

    return extra("fsspec.callbacks", f"{path!r}").Callback(size, hooks={"penstock": check})


def copy_over_http(filesystem: Any, url: str, to: str, callback: Any, version: Mapping[str, str]) -> None:
    """Copy a file over HTTP in one request, without a limit on its total time (aiohttp's is 300 s).

    If the connection breaks off, the next request asks for the rest.

    Args:
        filesystem: fsspec's, for HTTP.
        url: Of the file.
        to: The path of the copy.
        callback: See `transfer_callback`.
        version: The header that asks for one version of the file only; empty if the server cannot be asked for it.

    Raises:
        Exception: The fourth error in a row after which the copy is no longer than ever before; the server's refusal;
            or that of ``callback``.
    """
    limits = extra("aiohttp", f"{url!r}").ClientTimeout(total=None, sock_connect=NO_PROGRESS_S, sock_read=NO_PROGRESS_S)
    asyn, pauses, furthest = extra("fsspec.asyn", f"{url!r}"), iter(_PAUSES_S), 0
    with open(to, "wb", buffering=0) as file:

        async def get(begin: int) -> None:
            headers = headers_of(filesystem, version) | ({"Range": f"bytes={begin}-"} if begin else {})
            session = await filesystem.set_session()
            async with session.get(
                filesystem.encode_url(url), **{**filesystem.kwargs, "headers": headers, "timeout": limits}
            ) as answer:
                if answer.status == 404:
                    raise FileNotFoundError(errno.ENOENT, "the server does not have this file", url)
                answer.raise_for_status()
                if begin and answer.status != 206:  # it knows no ranges
                    _rewind(file, callback)
                while chunk := await answer.content.read(_CHUNK):
                    file.write(chunk)
                    callback.relative_update(len(chunk))

        while True:
            try:
                asyn.sync(filesystem.loop, get, file.tell())
                return
            except Exception as exc:
                # if it must end, this raises: the error may be the callback's own, and then no other request helps
                callback.call()
                if file.tell() > furthest:
                    furthest, pauses = file.tell(), iter(_PAUSES_S)
                pause = next(pauses, None)
                if pause is None or not may_be_temporary(exc) or getattr(exc, "status", 500) not in _TEMPORARY:
                    raise
                if not version:  # the rest might be of another one
                    _rewind(file, callback)
                time.sleep(pause)


def headers_of(opened: Any, version: Mapping[str, str]) -> dict[str, str]:
    """The headers of an HTTP request for a part of a file: those of fsspec's file or file system, and the version, if
    the server can be asked for it. A part of what is compressed on the way would be of no use.
    """
    return {**opened.kwargs.get("headers", {}), "Accept-Encoding": "identity", **version}


def _rewind(file: Any, callback: Any) -> None:
    file.seek(0)
    file.truncate()
    callback.absolute_update(0)
