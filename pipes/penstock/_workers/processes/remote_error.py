"""An exception on its way from a worker process to the consumer."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import TYPE_CHECKING, NamedTuple, cast

from penstock._errors import SampleError, WorkerTraceback, hide_internal_frames, is_own_error

if TYPE_CHECKING:
    from collections.abc import Callable


class RemoteError(NamedTuple):
    """An exception as text, and also pickled if that works. All fields are plain, so it can always be sent."""

    pickled: bytes | None
    kind: str
    message: str
    trace: str
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        error: BaseException,
        inherited: BaseException | None = None,
        dumps: Callable[[BaseException], bytes] = pickle.dumps,
    ) -> RemoteError:
        """Describe ``error``, and pickle it if unpickling restores it.

        Leave out ``inherited``, an exception that it did not come from.
        """
        _drop_context(error, inherited)
        pickled = None
        with contextlib.suppress(BaseException):  # a user's __reduce__ may raise anything
            body = dumps(error)
            again = pickle.loads(body)  # fails if the constructor's arguments are not ``error.args``
            if type(again) is type(error) and str(again) == str(error):
                pickled = body
        try:
            message = str(error)
        except BaseException:
            message = "(its message cannot be shown)"
        notes = getattr(error, "__notes__", ())
        notes = tuple(map(str, notes)) if isinstance(notes, list | tuple) else ()
        hide_internal_frames(error)  # after the pickle, which has no frames, and before they are formatted
        trace = traceback.TracebackException.from_exception(error)
        trace.__notes__ = None  # they are shown with the exception itself
        return cls(pickled, type(error).__qualname__, message, "".join(trace.format()), notes)

    def short(self, nbytes: int) -> RemoteError:
        """The same, cut so that it fits ``nbytes`` when pickled."""
        room = nbytes // 16  # two texts, with up to 4 bytes a character
        pickled = self.pickled if self.pickled is not None and len(self.pickled) <= nbytes // 4 else None
        return RemoteError(pickled, self.kind[:200], self.message[:room], self.trace[-room:], ())

    def rebuilt(self, where: str, what: str) -> BaseException:
        """The exception for the consumer, caused by its traceback in the worker.

        Args:
            where: The worker, in words.
            what: What it was doing, in words.

        Returns:
            Itself, or a `SampleError` with its words if it cannot be rebuilt here.
        """
        error: BaseException | None = None
        if self.pickled is not None:
            try:
                error = cast("BaseException", pickle.loads(self.pickled))
                error.__cause__ = WorkerTraceback(where, self.trace)
            except BaseException as exc:
                if not is_own_error(exc):
                    raise  # otherwise only the worker has its class, or it is a frozen dataclass, which takes no cause
        if error is None or not isinstance(error.__cause__, WorkerTraceback):
            error = SampleError(
                f"{self.kind}: {self.message} (raised during {what} in {where}; the exception cannot be pickled, so "
                f"only its text is shown)"
            )
            error.__cause__ = WorkerTraceback(where, self.trace)
        if not hasattr(error, "__notes__"):
            for note in self.notes:
                error.add_note(note)
        return error


def _drop_context(error: BaseException, inherited: BaseException | None) -> None:
    """Cut the chain of contexts where ``inherited`` begins."""
    while inherited is not None and error.__context__ is not None:
        if error.__context__ is inherited:
            error.__context__ = None
            return
        error = error.__context__
