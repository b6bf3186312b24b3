"""A transfer made by fsspec that reports its progress and can be aborted."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from penstock._streams.paths import extra
from penstock._streams.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOW_S: Final = 2.0
"""After this many seconds, a bar or occasional log lines show the progress."""


@contextlib.contextmanager
def transfer(path: str, size: int, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> Iterator[Any]:
    """A callback for fsspec, which calls it for each part that arrives.

    Args:
        path: What is fetched.
        size: Its size in bytes.
        is_over: Whether the transfer is no longer wanted. The next part then raises an `InterruptedError`.
        clock: Seconds.
    """
    begun, most = clock(), size
    progress: list[Progress] = []

    def told(size: int, value: int, **_: Any) -> None:  # the size reported by the server may have changed by now
        if is_over():
            raise InterruptedError(f"{path} is no longer wanted")
        if value > most:
            raise OSError(
                f"{path} returned at least {value} bytes instead of {most}: it has changed, or its server reported another size before"
            )
        if not progress and clock() - begun > SLOW_S:
            progress.append(Progress(f"fetching {path}", size, "bytes", first_s=0.0, clock=clock))
        for shown in progress:
            shown.at(value)

    try:
        yield extra("fsspec.callbacks", f"{path!r}").Callback(size, hooks={"penstock": told})
    finally:
        for shown in progress:
            shown.clear()
