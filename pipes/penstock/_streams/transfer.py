"""A transfer that fsspec makes: it says how far it is, and can be given up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, final

from fsspec.callbacks import Callback  # type: ignore[import-untyped]

from penstock._streams.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

SLOW_S: Final = 2.0
"""From when on a bar, or a line now and then, says how far it is."""


@final
class Transfer(Callback):  # type: ignore[misc]
    """Is told by fsspec of each part that has come.

    Args:
        path: What is fetched.
        size: Its bytes.
        is_over: Whether nobody wants it any more.
        clock: Seconds.
    """

    def __init__(self, path: str, size: int, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(size)
        self._path = path
        self._is_over = is_over
        self._clock = clock
        self._begun = clock()
        self._came = 0
        self._progress: Progress | None = None

    def relative_update(self, inc: int = 1) -> None:
        """So many bytes more have come.

        Raises:
            InterruptedError: It is given up.
        """
        if self._is_over():
            raise InterruptedError(f"{self._path} is not wanted any more")
        self._came += inc
        if self._progress is None and self._clock() - self._begun > SLOW_S:
            self._progress = Progress(f"fetching {self._path}", self.size, "bytes", first_s=0.0, clock=self._clock)
        if self._progress is not None:
            self._progress.at(self._came)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.clear()

    def __exit__(self, *exc: Any) -> None:
        self.close()
