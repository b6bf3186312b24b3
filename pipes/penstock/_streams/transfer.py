"""A transfer that fsspec makes: it says how far it is, and can be given up."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from penstock._streams.paths import extra
from penstock._streams.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOW_S: Final = 2.0
"""From when on a bar, or a line now and then, says how far it is."""


@contextlib.contextmanager
def transfer(path: str, size: int, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> Iterator[Any]:
    """A callback for fsspec, which calls it with each part that has come.

    Args:
        path: What is fetched.
        size: Its bytes.
        is_over: Whether nobody wants it any more. Then the next part raises an `InterruptedError`.
        clock: Seconds.
    """
    begun, most = clock(), size
    progress: list[Progress] = []

    def told(size: int, value: int, **_: Any) -> None:  # what a server says of its size may be another one by now
        if is_over():
            raise InterruptedError(f"{path} is not wanted any more")
        if value > most:
            raise OSError(
                f"{path} gave {value} bytes and more in place of {most}: it has changed, or its server said something else before"
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
