"""Makes sure that no change builds on one that an exception left half done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class Transaction:
    """Wraps every change to objects that must agree with each other: ``with transaction.begin(rollback): ...``.

    Ctrl-C, or a signal handler that raises, may come between any two lines, and the user's loop may catch it and
    continue. An interrupted change is rolled back before the next change begins, or before the state is read
    (`settle`). An interrupted rollback is repeated.

    ``rollback`` is passed in each time and not stored: it belongs to the object that holds this one, and that reference
    cycle would keep the user's dataset alive until the next garbage collection.
    """

    __slots__ = ("_inconsistent",)

    def __init__(self) -> None:
        self._inconsistent = False

    def settle(self, rollback: Callable[[], None]) -> None:
        """Call ``rollback`` if the last change was interrupted."""
        if self._inconsistent:
            rollback()
            self._inconsistent = False  # not before: an interrupt in `rollback` leaves it to be called again

    def begin(self, rollback: Callable[[], None]) -> Transaction:
        """Begin a change, once the last one is settled."""
        self.settle(rollback)
        # Set here and not in `__enter__`: an interrupt between the two would skip `__exit__`, and the mark must be
        # there by then. It stays until the with statement ends well.
        self._inconsistent = True
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._inconsistent = kind is not None
