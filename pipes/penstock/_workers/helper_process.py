"""A process of its own for one function, such as reading a sampler that draws from the global generators."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import select
import threading
import traceback
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, final

import torch

from penstock._errors import WorkerDied
from penstock._memory.modes import in_neutral_modes
from penstock._workers.forking import come_up, until_up
from penstock._workers.processes.deaths import cause_of, reaped, watch
from penstock._workers.processes.main_module import explained
from penstock._workers.processes.signals import let_forks_be_terminated, set_signals, signals_held

if TYPE_CHECKING:
    from collections.abc import Callable


@final
class HelperProcess:
    """Run ``make`` in a process of its own, named ``penstock-plan``, which dies with this one.

    One thread calls it; any thread may `end` it. The process starts at once, as multiprocessing's default for the platform has
    it: under fork it has the sampler as it is, else it is sent a pickle.

    Raises:
        WorkerDied: From a call: the process is gone. At once: see `until_up`.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context()
        method = context.get_start_method()

        def start(make: Any) -> tuple[int, int]:
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, make, os.getpid()), name="penstock-plan", daemon=True)
            with signals_held() if method != "forkserver" else contextlib.nullcontext():  # that serves others too
                self._process.start()
            # Other processes may hold copies of a pipe's or a sentinel's end; nobody can hold up a pidfd.
            self._death = watch(self._process)
            if self._death != self._process.sentinel:
                weakref.finalize(self, os.close, self._death)
            # Also where an interrupt comes before anybody holds this helper; and at exit before multiprocessing waits for it.
            self._finalizer = Finalize(self, _end, (self._process, self._death, os.getpid()), exitpriority=0)
            theirs.close()
            return self._process.pid or 0, self._pipe.fileno()

        if method == "fork":
            until_up(lambda: start(make), self._kill)
        else:
            start(pickle.dumps(make))

    def __call__(self, task: Any) -> Any:
        """``make(task)``."""
        try:
            self._pipe.send(task)
            said = None
            while said is None:  # which says that the process is up
                if self._pipe not in multiprocessing.connection.wait([self._pipe, self._death]):
                    raise EOFError
                said = self._pipe.recv()
            answer, error = said
        except (EOFError, OSError) as exc:
            raise WorkerDied(
                f"the helper process that plans epochs is gone: {cause_of(reaped(self._process))}. If the sampler cannot run in another "
                f"process, use plan_ahead=False: it then runs in this one, between two epochs."
            ) from exc
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """Kill the process and wait for it; whoever waits in a call is told `WorkerDied`."""
        self._finalizer()

    def _kill(self) -> None:
        self.end()
        self._pipe.close()


@in_neutral_modes  # a fork takes over those of the consumer
def _serve(pipe: multiprocessing.connection.Connection, make: Any, parent: int) -> None:
    """The helper process."""
    set_signals()
    let_forks_be_terminated()
    if not isinstance(make, bytes):
        come_up()  # alone: a process with two threads is not seen to hang
        pipe.send(None)
    threading.Thread(target=_die_with, args=(parent,), name="penstock-parent", daemon=True).start()
    torch.set_num_threads(1)
    refusal = None
    if isinstance(make, bytes):
        try:
            make = pickle.loads(make)
        except Exception as exc:
            refusal = _pickled(explained(exc) if isinstance(exc, AttributeError) else exc)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has gone
        while True:
            task = pipe.recv()
            try:
                answer = refusal or pickle.dumps((make(task), None))
            except Exception as exc:
                answer = _pickled(exc)
            pipe.send_bytes(answer)


def _end(process: Any, death: int, owner: int) -> None:
    if os.getpid() != owner:
        return
    if not multiprocessing.connection.wait([death], 0):  # else someone else may have reaped it, and another process bear its pid
        process.kill()
    reaped(process)


def _pickled(exc: Exception) -> bytes:
    exc.add_note(f"in the helper process:\n{''.join(traceback.format_tb(exc.__traceback__))}")
    try:
        answer = pickle.dumps((None, exc))
        pickle.loads(answer)  # Not every exception that can be pickled can be unpickled.
    except Exception:
        notes = "\n".join(exc.__notes__)
        return pickle.dumps((None, RuntimeError(f"{type(exc).__name__}: {exc}\n{notes}")))
    return answer


def _die_with(parent: int) -> None:
    """End this process when ``parent`` has: its pipe would not tell, because the parent's other children hold copies of it."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        fd = os.pidfd_open(parent)
        select.select([fd], [], [])
    except ProcessLookupError:
        pass  # it has already
    os._exit(1)
