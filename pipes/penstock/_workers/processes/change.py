"""No change builds on one that an exception left half made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class Change:
    """Goes around every change to things that must agree with each other: ``with change.after(mend): ...``.

    Ctrl-C, or a signal handler that raises, may come between any two lines, and the user's loop may catch it and go on. What it came out
    of the middle of is mended before the next change begins, or before anyone looks (`settle`). An interrupted mending is done again.

    ``mend`` is passed in each time, not kept: it belongs to the object that keeps this one, and that circle would keep the user's dataset
    alive until the next garbage collection.
    """

    __slots__ = ("_torn",)

    def __init__(self) -> None:
        self._torn = False

    def settle(self, mend: Callable[[], None]) -> None:
        """Call ``mend`` if the last change was interrupted."""
        if self._torn:
            mend()
            self._torn = False  # not before: an interrupt in `mend` leaves it to be called again

    def after(self, mend: Callable[[], None]) -> Change:
        """Begin a change, once the last one is settled."""
        self.settle(mend)
        self._torn = True  # until the with statement ends well
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._torn = kind is not None
