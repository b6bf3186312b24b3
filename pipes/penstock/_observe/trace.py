"""trace: what loaders do, moment by moment, as a file for ui.perfetto.dev or chrome://tracing.

The file is a JSON object of the Trace Event Format (Google; https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Of it we use:

- an object with the key ``traceEvents``: a list of events, in any order; times ``ts`` and ``dur`` are numbers of microseconds, from any origin
- every event has ``ph``, ``pid`` and ``tid``; events of one ``pid`` and ``tid`` make a track
- ``"ph": "X"``, a complete event: ``name``, ``ts``, ``dur`` of at least 0. On one track two of them are apart, or one is inside the other
- ``"ph": "i"``, an instant: ``name``, ``ts``, and its scope ``s``: ``"g"``, ``"p"`` or ``"t"``
- ``"ph": "M"``, metadata: ``name`` is ``process_name``, ``thread_name`` or ``thread_sort_index``, and ``args`` has ``name`` or ``sort_index``
- ``args``, any JSON object, is shown when an event is chosen

Nothing of this costs anything while nobody traces: for the duration of a trace, three methods are replaced by ones that look at the clock. The clock is
``time.perf_counter_ns``, which all processes of a machine share on Linux and macOS. A worker process writes its events into a file of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from penstock._arguments import brief
from penstock._fetch.indices import Indices
from penstock._fetch.task import Loaded, _Task
from penstock._loader.loader import Loader, _Epoch
from penstock._nodes.parallel_mapper import ParallelMapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock._nodes.node import Node

_now = time.perf_counter_ns
_CALL: Final = _Task.__call__
_NEXT: Final = _Epoch.__next__
_MOST_INDICES: Final = 256
_under_way: list[str] = []


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write what all loaders of this process do inside the ``with`` to a file for ui.perfetto.dev or chrome://tracing.

    There is a track for each loop over a loader, with its waits, its training steps and the ends of epochs; one for each node of the graph; and one for
    each worker, with the indices of the samples of each batch. Worker processes are shown if they start inside the ``with``.

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


trace.__module__ = "penstock"


@final
class _Recorder:
    """The events of this process, and what it takes to notice them."""

    def __init__(self) -> None:
        self._start = _now()
        self._folder = tempfile.mkdtemp(prefix="penstock-trace-")  # its end tells the worker processes that the trace has ended
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[Any, int] = {}
        self._loaders: weakref.WeakKeyDictionary[Loader[Any], _Watched] = weakref.WeakKeyDictionary()
        self._count = 0

    def begin(self) -> None:
        """Replace the methods."""
        recorder = self

        def call(self: Any, task: Any, cell: Any, *args: Any, **words: Any) -> Any:
            begin = _now()
            try:
                return _CALL(self, task, cell, *args, **words)
            finally:
                thread = threading.current_thread()
                name = "inline" if thread is threading.main_thread() else thread.name
                track = recorder.track(("worker", thread.ident), f"worker: {name}")
                recorder.add(track, _name_of(task), begin, _now(), _args_of(task))

        def step(self: _Epoch[Any]) -> Any:
            watched = recorder.watched(self._loader)
            begin = _now()
            try:
                item = _NEXT(self)
            except BaseException as exc:
                watched.ended(begin, exc, self._loader.epoch)
                raise
            watched.delivered(begin, self._loader)
            return item

        _Task.__call__ = call  # type: ignore[method-assign]
        _Epoch.__next__ = step  # type: ignore[method-assign]

    def end(self) -> None:
        """Put everything back."""
        _Task.__call__ = _CALL  # type: ignore[method-assign]
        _Epoch.__next__ = _NEXT  # type: ignore[method-assign]
        for watched in list(self._loaders.values()):
            watched.leave()
        for name in sorted(os.listdir(self._folder)):
            with open(os.path.join(self._folder, name)) as file:
                for line in file:
                    with contextlib.suppress(ValueError):  # the last line of a worker that was killed
                        self._events.append(json.loads(line))
        shutil.rmtree(self._folder, ignore_errors=True)

    def events(self) -> list[dict[str, Any]]:
        """All events of all processes."""
        return [_metadata("process_name", 0, name="training process"), *self._events]

    def watched(self, loader: Loader[Any]) -> _Watched:
        """How ``loader`` is watched, from now on."""
        if loader not in self._loaders:
            self._loaders[loader] = _Watched(self, loader, self._count)
            self._count += 1
        return self._loaders[loader]

    def track(self, key: Any, name: str) -> int:
        """The number of a track; made when it is first asked for."""
        if key not in self._tracks:
            self._tracks[key] = number = len(self._tracks) + 1
            self._events += [_metadata("thread_name", number, name=name), _metadata("thread_sort_index", number, sort_index=number)]
        return self._tracks[key]

    def add(self, track: int, name: str, begin: int, end: int, args: dict[str, Any] | None = None) -> None:
        """A complete event."""
        self._events.append(_complete(track, name, begin - self._start, end - begin, args))

    def mark(self, track: int, name: str) -> None:
        """An instant."""
        self._events.append({"ph": "i", "name": name, "s": "p", "ts": (_now() - self._start) / 1e3, "pid": os.getpid(), "tid": track})

    def in_worker(self, init: Callable[[int], None] | None) -> _InWorker:
        """What a worker process does first."""
        return _InWorker(init, self._folder, self._start)


@final
class _Watched:
    """A loader whose loop and nodes are timed. Nothing of it keeps the loader or a node alive."""

    def __init__(self, recorder: _Recorder, loader: Loader[Any], number: int) -> None:
        self._recorder = recorder
        self._loop = recorder.track(("loop", number), f"loop over loader {number}")
        self._came: int | None = None
        self._nodes: list[tuple[weakref.ref[Node[Any]], str]] = []
        self._clock = weakref.ref(loader._clock)
        self._mappers: list[tuple[weakref.ref[ParallelMapper[Any]], Any]] = []
        for node in reversed(list(loader.root.chain())):
            track = recorder.track(("node", number, id(node)), f"node: {type(node).__name__}")
            for method in ("next", "take"):
                self._watch(node, method, track)
            if node is loader.root and getattr(loader._clock.read, "__self__", None) is node:
                loader._clock.read = vars(node)["next"]
            if isinstance(node, ParallelMapper) and node._pool is None:
                init = node._of_processes["worker_init_fn"]
                node._of_processes["worker_init_fn"] = recorder.in_worker(init)
                self._mappers.append((weakref.ref(node), init))

    def _watch(self, node: Node[Any], method: str, track: int) -> None:
        recorder, name, ref = self._recorder, f"{type(node).__name__}.{method}", weakref.ref(node)
        original = getattr(type(node), method)

        def timed(*args: Any, **words: Any) -> Any:
            begin = _now()
            try:
                return original(ref(), *args, **words)
            finally:
                if _under_way:  # a reader thread may be inside when the trace ends
                    recorder.add(track, name, begin, _now())

        vars(node)[method] = timed
        self._nodes.append((ref, method))

    def leave(self) -> None:
        """Put the loader's nodes back."""
        for ref, method in self._nodes:
            if (node := ref()) is not None:
                timed = vars(node).pop(method, None)
                clock = self._clock()
                if clock is not None and clock.read is timed:
                    clock.read = getattr(node, method)
        for mapper_ref, init in self._mappers:
            if (mapper := mapper_ref()) is not None:
                mapper._of_processes["worker_init_fn"] = init

    def delivered(self, begin: int, loader: Loader[Any]) -> None:
        """A batch came; what passed between the one before and ``begin`` was the training step."""
        self._step(begin)
        self._came = _now()
        self._recorder.add(self._loop, "wait", begin, self._came, {"epoch": loader.epoch, "batch": loader.position})

    def ended(self, begin: int, exc: BaseException, epoch: int) -> None:
        """No batch came."""
        self._step(begin)
        self._came = None
        is_end = isinstance(exc, StopIteration)
        self._recorder.add(self._loop, "wait", begin, _now())
        self._recorder.mark(self._loop, f"end of an epoch; next: {epoch}" if is_end else type(exc).__name__)

    def _step(self, begin: int) -> None:
        if self._came is not None:
            self._recorder.add(self._loop, "training step", self._came, begin)


@final
class _InWorker:
    """Has a worker process write its events into a file, for as long as the trace goes on; then runs the user's ``worker_init_fn``."""

    def __init__(self, init: Callable[[int], None] | None, folder: str, start: int) -> None:
        self._init = init
        self._folder = folder
        self._start = start

    def __call__(self, worker: int) -> None:
        _Task.__call__ = _CALL  # type: ignore[method-assign]  # a fork has the parent's
        if os.path.isdir(self._folder):
            with contextlib.suppress(OSError):  # a full disk, for example
                self._trace(worker)
        if self._init is not None:
            self._init(worker)

    def _trace(self, worker: int) -> None:
        file = open(os.path.join(self._folder, f"{os.getpid()}.jsonl"), "w", buffering=1)  # noqa: SIM115  # open for the life of the process
        start = self._start

        def say(event: dict[str, Any]) -> None:
            with contextlib.suppress(OSError):  # a full disk must not end the training
                file.write(json.dumps(event) + "\n")

        def call(self: Any, task: Any, cell: Any, *args: Any, **words: Any) -> Any:
            begin = _now()
            try:
                return _CALL(self, task, cell, *args, **words)
            finally:
                if os.fstat(file.fileno()).st_nlink:
                    say(_complete(worker, _name_of(task), begin - start, _now() - begin, _args_of(task)))
                else:  # the trace has ended, and the file was deleted
                    _Task.__call__ = _CALL  # type: ignore[method-assign]

        say(_metadata("process_name", worker, name=f"worker process {worker}"))
        say(_metadata("thread_name", worker, name=f"worker {worker}"))
        _Task.__call__ = call  # type: ignore[method-assign]


def _complete(track: int, name: str, begin_ns: int, took_ns: int, args: dict[str, Any] | None) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "ts": begin_ns / 1e3, "dur": took_ns / 1e3, "pid": os.getpid(), "tid": track}
    return event if args is None else {**event, "args": args}


def _metadata(kind: str, track: int, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": os.getpid(), "tid": track, "args": args}


def _name_of(task: Any) -> str:
    return "collate" if isinstance(task, Loaded) else "load"


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
