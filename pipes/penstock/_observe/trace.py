"""trace: a timeline of what loaders do, as a file for ui.perfetto.dev or chrome://tracing.

The file is a JSON object of the Trace Event Format (Google;
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Of it we use:

- an object with the key ``traceEvents``: a list of events, in any order; times ``ts`` and ``dur`` are numbers of
  microseconds, from any origin
- every event has ``ph``, ``pid`` and ``tid``; events of one ``pid`` and ``tid`` make a track
- ``"ph": "X"``, a complete event: ``name``, ``ts``, ``dur`` of at least 0. On one track two of them are apart, or one
  is inside the other
- ``"ph": "i"``, an instant: ``name``, ``ts``, and its scope ``s``: ``"g"``, ``"p"`` or ``"t"``
- ``"ph": "M"``, metadata: ``name`` is ``process_name``, ``thread_name`` or ``thread_sort_index``, and ``args`` has
  ``name`` or ``sort_index``
- ``args``, any JSON object, is shown when an event is chosen

The timestamps are those behind `statistics`: during a trace, the code that reads the clock also reports the event
(``traced``). The clock is ``time.perf_counter_ns``, which all processes of a machine share on Linux and macOS. Each
worker process writes its events to its own file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
import weakref
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Final, final

import numpy as np

from penstock._arguments import brief
from penstock._fetch.indices import Indices
from penstock._workers.meter import Listener, now, traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_MOST_INDICES: Final = 256
_under_way: list[str] = []


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what all loaders of this process do inside the ``with`` block, in a file for ui.perfetto.dev or
    chrome://tracing.

    There is a track for each loop over a loader, with its waits, training steps and epoch ends; one for each node that
    is read by workers or a thread; and one for each worker, with the sample indices of each batch. Worker processes are
    shown if they start inside the block.

    A trace grows by a few hundred bytes per batch and node, in memory until the end, so trace a few hundred batches
    rather than a whole run.

    Args:
        path: The file, written at the end, even after an error.

    Raises:
        RuntimeError: Another trace is running in this process.
        OSError: The file cannot be written. Raised before tracing if possible. An error inside the block takes
            precedence.
    """
    if _under_way:
        raise RuntimeError(f"a trace to {_under_way[0]} is running already. End it first.")
    open(path, "w").close()  # so that an unwritable path fails before the training
    folder = tempfile.mkdtemp(prefix="penstock-trace-")  # its end tells the worker processes that the trace has ended
    events: list[Any] = []
    _under_way.append(os.fspath(path))
    failure: BaseException | None = None
    try:
        traced.append(_Recorder(events.append, folder, now(), "training process"))
        yield
    except BaseException as exc:
        failure = exc
        raise
    finally:
        _under_way.clear()
        traced.clear()
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name)) as file:
                for line in file:
                    with contextlib.suppress(ValueError):  # the last line of a worker that was killed
                        events.append(json.loads(line))
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with open(path, "w") as file:
                json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
        except OSError as exc:
            if failure is None:
                raise
            failure.add_note(f"the trace could not be written: {exc}")
        del failure


trace.__module__ = "penstock.statistics"


@final
class _Recorder(Listener):
    """Turns what happens in this process into trace events.

    Args:
        write: Receives each event.
        folder: Where worker processes write theirs.
        start: When the trace began.
        name: Of the process.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], folder: str, start: int, name: str) -> None:
        self._write, self._folder, self._start, self._name = write, folder, start, name
        self._tracks: dict[Any, int] = {}
        self._nodes: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()  # the keys of their tracks
        # and when the last batch came, or 0
        self._loops: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._event("M", 0, "process_name", args={"name": name})

    def task(self, task: Any, begin: int, end: int) -> None:
        """A task was done in this thread."""
        thread = threading.current_thread()
        name = "inline" if thread is threading.main_thread() else thread.name
        track = self._name if self._name.startswith("worker") else f"worker: {name}"
        self._span(thread.ident, track, _name_of(task), begin, end, _args_of(task))

    def read(self, node: Any, begin: int, end: int) -> None:
        """Workers or a thread read the node once."""
        name = type(node).__name__
        self._span(self._nodes.setdefault(node, object()), f"reads of {name}", name, begin, end)

    def delivered(self, loader: Any, asked: int, moment: int) -> None:
        """A batch came. The time from the previous batch to the request was the training step."""
        self._waited(loader, asked, moment, {"epoch": loader.epoch, "batch": loader.position})[1] = moment

    def ended(self, loader: Any, asked: int, why: str) -> None:
        """No batch came."""
        moment = now()
        loop = self._waited(loader, asked, moment, {})
        loop[1] = 0
        self._event("i", self._tracks[loop[0]], why, s="p", ts=(moment - self._start) / 1e3)

    def in_worker(self, init: Callable[[int], None] | None) -> _InWorker:
        """The first function that a worker process calls."""
        return _InWorker(init, self._folder, self._start)

    def _waited(self, loader: Any, asked: int, moment: int, args: dict[str, Any]) -> list[Any]:
        loop = self._loops.setdefault(loader, [object(), 0, f"loop over loader {len(self._loops)}"])
        if loop[1]:
            self._span(loop[0], loop[2], "training step", loop[1], asked)
        self._span(loop[0], loop[2], "wait", asked, moment, args)
        return loop

    def _span(self, key: Any, track: str, name: str, begin: int, end: int, args: dict[str, Any] | None = None) -> None:
        """An event on the track of ``key``, which is called ``track``."""
        if key not in self._tracks:
            self._tracks[key] = number = len(self._tracks) + 1
            self._event("M", number, "thread_name", args={"name": track})
            self._event("M", number, "thread_sort_index", args={"sort_index": number})
        begin = max(0, begin - self._start)
        self._event(
            "X",
            self._tracks[key],
            name,
            ts=begin / 1e3,
            dur=max(0, end - self._start - begin) / 1e3,
            **({"args": args} if args else {}),
        )

    def _event(self, kind: str, track: int, name: str, **more: Any) -> None:
        self._write({"ph": kind, "name": name, "pid": os.getpid(), "tid": track, **more})


@final
class _InWorker:
    """Makes a worker process write its events to a file while the trace runs, and calls the user's
    ``worker_init_fn``.
    """

    def __init__(self, init: Callable[[int], None] | None, folder: str, start: int) -> None:
        self._init, self._folder, self._start = init, folder, start

    def __call__(self, worker: int) -> None:
        if os.path.isdir(self._folder):
            with contextlib.suppress(OSError):  # a full disk, for example
                # for the life of the process
                file = open(os.path.join(self._folder, f"{os.getpid()}.jsonl"), "w", buffering=1)  # noqa: SIM115
                traced.append(_Recorder(partial(_write, file), self._folder, self._start, f"worker process {worker}"))
        if self._init is not None:
            self._init(worker)


def _write(file: IO[str], event: dict[str, Any]) -> None:
    if os.fstat(file.fileno()).st_nlink:
        with contextlib.suppress(OSError):  # a full disk must not end the training
            file.write(json.dumps(event) + "\n")
    else:  # the trace has ended, and the file was deleted
        traced.clear()


def _name_of(task: Any) -> str:
    return {"Loaded": "collate", "Planning": "plan"}.get(type(task).__name__, "load")


def _args_of(task: Any) -> dict[str, Any]:
    """The address of a task: its epoch, and the positions and indices of its samples."""
    indices = getattr(task, "indices", task)
    if not isinstance(indices, Indices):
        return {}
    if not indices.is_batch:
        return {"epoch": indices.epoch, "positions": [int(indices.positions)], "indices": [_json(indices.values)]}
    return {
        "epoch": indices.epoch,
        "samples": len(indices),
        "positions": indices.positions[:_MOST_INDICES].tolist(),
        "indices": [_json(value) for value in indices.values[:_MOST_INDICES]],
    }


def _json(value: Any) -> Any:
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else brief(value)
