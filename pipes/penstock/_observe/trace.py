"""trace: what loaders do, moment by moment, as a file for ui.perfetto.dev or chrome://tracing.

The file is a JSON object of the Trace Event Format (Google; https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Of it we use:

- an object with the key ``traceEvents``: a list of events, in any order; times ``ts`` and ``dur`` are numbers of microseconds, from any origin
- every event has ``ph``, ``pid`` and ``tid``; events of one ``pid`` and ``tid`` make a track
- ``"ph": "X"``, a complete event: ``name``, ``ts``, ``dur`` of at least 0. On one track two of them are apart, or one is inside the other
- ``"ph": "i"``, an instant: ``name``, ``ts``, and its scope ``s``: ``"g"``, ``"p"`` or ``"t"``
- ``"ph": "M"``, metadata: ``name`` is ``process_name``, ``thread_name`` or ``thread_sort_index``, and ``args`` has ``name`` or ``sort_index``
- ``args``, any JSON object, is shown when an event is chosen

The moments are those that `statistics` is made of: while somebody traces, whoever looks at the clock also says what it saw (``traced``). The clock is
``time.perf_counter_ns``, which all processes of a machine share on Linux and macOS. A worker process writes its events into a file of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, final

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
    """Write what all loaders of this process do inside the ``with`` to a file for ui.perfetto.dev or chrome://tracing.

    There is a track for each loop over a loader, with its waits, its training steps and the ends of epochs; one for each node that workers or a thread read; and
    one for each worker, with the indices of the samples of each batch. Worker processes are shown if they start inside the ``with``.

    A trace grows by a few hundred bytes a batch and node, in memory until the end; so trace some hundred batches, not a training.

    Args:
        path: The file, written at the end, also after an error.

    Raises:
        RuntimeError: Another trace is under way in this process.
        OSError: The file cannot be written; before anything is traced if its folder says so. An error inside the ``with`` takes precedence.
    """
    if _under_way:
        raise RuntimeError(f"a trace to {_under_way[0]} is under way. End it first.")
    open(path, "w").close()  # whoever cannot write there hears of it before the training
    recorder = _Recorder()
    _under_way.append(os.fspath(path))
    failure: BaseException | None = None
    try:
        recorder.begin()
        yield
    except BaseException as exc:
        failure = exc
        raise
    finally:
        _under_way.clear()
        recorder.end()
        try:
            with open(path, "w") as file:
                json.dump({"traceEvents": recorder.events(), "displayTimeUnit": "ms"}, file)
        except OSError as exc:
            if failure is None:
                raise
            failure.add_note(f"The trace could not be written: {exc}")
        del failure


trace.__module__ = "penstock.statistics"


@final
class _Recorder(Listener):
    """The events of this process."""

    def __init__(self) -> None:
        self._start = now()
        self._folder = tempfile.mkdtemp(prefix="penstock-trace-")  # its end tells the worker processes that the trace has ended
        self._events: list[dict[str, Any]] = []
        self._numbers: dict[Any, int] = {}
        self._loops: weakref.WeakKeyDictionary[Any, list[int]] = (
            weakref.WeakKeyDictionary()
        )  # a loader's track, and when its last batch came, or 0
        self._nodes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """Listen."""
        traced.append(self)

    def end(self) -> None:
        """Listen no more, and take in what worker processes have written."""
        traced.clear()
        for name in sorted(os.listdir(self._folder)):
            with open(os.path.join(self._folder, name)) as file:
                for line in file:
                    with contextlib.suppress(ValueError):  # the last line of a worker that was killed
                        self._events.append(json.loads(line))
        shutil.rmtree(self._folder, ignore_errors=True)

    def events(self) -> list[dict[str, Any]]:
        """All events of all processes."""
        return [_metadata("process_name", 0, name="training process"), *self._events]

    # What the clocks say.

    def task(self, task: Any, begin: int, end: int) -> None:
        """A task was done in this thread."""
        thread = threading.current_thread()
        name = "inline" if thread is threading.main_thread() else thread.name
        self._add(self._track(thread.ident, f"worker: {name}"), _name_of(task), begin, end, _args_of(task))

    def read(self, node: Any, begin: int, end: int) -> None:
        """The node was read once, by workers or a thread."""
        if node not in self._nodes:
            self._nodes[node] = self._track(object(), f"reads of {type(node).__name__}")
        self._add(self._nodes[node], type(node).__name__, begin, end)

    def delivered(self, loader: Any, asked: int, moment: int) -> None:
        """A batch came; what passed between the one before and the asking was the training step."""
        loop = self._loop(loader, asked)
        loop[1] = moment
        self._add(loop[0], "wait", asked, moment, {"epoch": loader.epoch, "batch": loader.position})

    def ended(self, loader: Any, asked: int, why: str) -> None:
        """No batch came."""
        loop = self._loop(loader, asked)
        loop[1], moment = 0, now()
        self._add(loop[0], "wait", asked, moment)
        at = (moment - self._start) / 1e3
        self._events.append({"ph": "i", "name": why, "s": "p", "ts": at, "pid": os.getpid(), "tid": loop[0]})

    def in_worker(self, init: Callable[[int], None] | None) -> _InWorker:
        """What a worker process does first."""
        return _InWorker(init, self._folder, self._start)

    def _loop(self, loader: Any, asked: int) -> list[int]:
        if loader not in self._loops:
            number = len(self._loops)
            self._loops[loader] = [self._track(("loop", number), f"loop over loader {number}"), 0]
        loop = self._loops[loader]
        if loop[1]:
            self._add(loop[0], "training step", loop[1], asked)
        return loop

    def _track(self, key: Any, name: str) -> int:
        if key not in self._numbers:
            self._numbers[key] = number = len(self._numbers) + 1
            self._events += [_metadata("thread_name", number, name=name), _metadata("thread_sort_index", number, sort_index=number)]
        return self._numbers[key]

    def _add(self, track: int, name: str, begin: int, end: int, args: dict[str, Any] | None = None) -> None:
        self._events.append(_complete(track, name, max(0, begin - self._start), end - begin, args))


@final
class _InWorker:
    """Has a worker process write its events into a file, for as long as the trace goes on; then runs the user's ``worker_init_fn``."""

    def __init__(self, init: Callable[[int], None] | None, folder: str, start: int) -> None:
        self._init = init
        self._folder = folder
        self._start = start

    def __call__(self, worker: int) -> None:
        if os.path.isdir(self._folder):
            with contextlib.suppress(OSError):  # a full disk, for example
                traced.append(_File(worker, os.path.join(self._folder, f"{os.getpid()}.jsonl"), self._start))
        if self._init is not None:
            self._init(worker)


@final
class _File(Listener):
    """The events of a worker process."""

    def __init__(self, worker: int, path: str, start: int) -> None:
        self._worker = worker
        self._start = start
        self._file = open(path, "w", buffering=1)  # noqa: SIM115  # open for the life of the process
        self._say(_metadata("process_name", worker, name=f"worker process {worker}"))
        self._say(_metadata("thread_name", worker, name=f"worker {worker}"))

    def task(self, task: Any, begin: int, end: int) -> None:
        """A task was done."""
        if os.fstat(self._file.fileno()).st_nlink:
            self._say(_complete(self._worker, _name_of(task), begin - self._start, end - begin, _args_of(task)))
        else:  # the trace has ended, and the file was deleted
            traced.clear()

    def _say(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the training
            self._file.write(json.dumps(event) + "\n")


def _complete(track: int, name: str, begin_ns: int, took_ns: int, args: dict[str, Any] | None) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "ts": begin_ns / 1e3, "dur": took_ns / 1e3, "pid": os.getpid(), "tid": track}
    return event if args is None else {**event, "args": args}


def _metadata(kind: str, track: int, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": os.getpid(), "tid": track, "args": args}


def _name_of(task: Any) -> str:
    return {"Loaded": "collate", "PlanRequest": "plan"}.get(type(task).__name__, "load")


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
