"""An exception on its way from one process to another."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import NamedTuple, cast

from penstock._errors import SampleError, WorkerTraceback, hide_internal_frames


class RemoteError(NamedTuple):
    """An exception on its way: itself where it survives pickling, and in words."""

    pickled: bytes | None
    kind: str
    message: str
    trace: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Describe ``error``; pickled only if it also comes back as what it was."""
        pickled = None
        with contextlib.suppress(BaseException):  # a user's __reduce__ may raise anything
            body = pickle.dumps(error)
            again = pickle.loads(body)  # fails where the constructor takes other arguments
            if type(again) is type(error) and str(again) == str(error):
                pickled = body
        try:
            message = str(error)
        except BaseException:
            message = "(its message cannot be shown)"
        notes = getattr(error, "__notes__", ())
        notes = tuple(map(str, notes)) if isinstance(notes, list | tuple) else ()
        hide_internal_frames(error)
        trace = traceback.TracebackException.from_exception(error)
        trace.__notes__ = None  # the exception itself will show them
        return cls(pickled, type(error).__qualname__, message, "".join(trace.format()), notes)

    def short(self, nbytes: int) -> RemoteError:
        """The same, cut to fit ``nbytes`` in any case."""
        room = nbytes // 16  # up to 4 bytes a character, two texts
        pickled = self.pickled if self.pickled is not None and len(self.pickled) <= nbytes // 4 else None
        return RemoteError(pickled, self.kind[:200], self.message[:room], self.trace[-room:], ())

    def rebuilt(self, where: str, what: str) -> BaseException:
        """The exception as the consumer gets it; `Job.result` raises it."""
        error: BaseException | None = None
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # its class may be known to the worker only; a frozen dataclass bears no cause
                error = cast("BaseException", pickle.loads(self.pickled))
                error.__cause__ = WorkerTraceback(where, self.trace)
        if error is None or not isinstance(error.__cause__, WorkerTraceback):
            error = SampleError(
                f"{self.kind}: {self.message} (while doing {what} in {where}; this exception cannot be pickled, so it comes in words)"
            )
            error.__cause__ = WorkerTraceback(where, self.trace)
        if not hasattr(error, "__notes__"):
            for note in self.notes:
                error.add_note(note)
        return error
