"""The code inside Ray actors: a worker, and a record of the workers' progress. The other side is `ray_pool`."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections import ChainMap
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

import numpy as np

from penstock._errors import SampleError
from penstock._memory.modes import in_neutral_modes
from penstock._memory.parcel import PICKLED, Parcel, Reducers
from penstock._memory.recycler import Recycler
from penstock._workers.meter import Meter, measuring, now
from penstock._workers.pool import IDLE
from penstock._workers.processes.protocol import ERROR, REFUSED, VALUE
from penstock._workers.processes.remote_error import RemoteError
from penstock._workers.processes.worker_main import parcel_of, prepare

if TYPE_CHECKING:
    from penstock._workers.processes.protocol import Setup

COUNTED_EVERY_NS: Final = 250_000_000
"""How often an actor reports the counts of its meter, which take 8 KB."""
NOTED_WITHIN_S: Final = 5.0
NO_TASK: Final = -1

Answer = tuple[int, int, bytes, list[np.ndarray]]
"""Status, and the pieces of a `Parcel`."""


@final
class RayWorker:
    """The class of an actor: runs the tasks of one call after another."""

    def __init__(self, worker: int, life: int) -> None:
        import ray

        self._life = life
        self._where = f"Ray worker {worker} (pid {os.getpid()} on node {ray.util.get_node_ip_address()})"
        self._worker = worker
        self._meter = Meter()
        self._counted_ns = 0
        self._allocate = Recycler(2).allocate

    def where(self) -> str:
        """A description of this worker. The first answer shows that Ray has found a place."""
        return self._where

    @in_neutral_modes
    def prepare(self, setup: bytes) -> Answer | None:
        """Unpack the setup. Returns the error if that fails."""
        try:
            loaded: Setup = pickle.loads(setup)
            self._work = loaded.work
            prepare(loaded, self._worker)
        except BaseException as error:  # from user code, and the consumer must see whatever that raises
            return self._failure(REFUSED, error)
        measuring.set(self._meter)
        return None

    @in_neutral_modes
    def run(self, tasks: list[bytes], notes: Any = None) -> tuple[list[Answer], int, np.ndarray | None]:
        """The answers to ``tasks``; how many nanoseconds they took; and now and then what was counted.

        Args:
            tasks: Pickled.
            notes: An actor that records each row before it is loaded, with the number of the task, so that it is known
                which row kills this process.
        """
        measuring.set(self._meter)  # Ray may call from another context than before
        began = self._meter.begin()
        answers = [self._do(task, notes) for task in tasks]
        ended = self._meter.end()
        counted = None
        if ended - self._counted_ns > COUNTED_EVERY_NS:
            self._counted_ns, counted = ended, np.array(self._meter.counted(), np.int64)
        return answers, ended - began, counted

    def _do(self, body: bytes, notes: Any) -> Answer:
        current_row: Any = [IDLE] if notes is None else _Noted(self._life, *notes)
        try:
            value = self._work(pickle.loads(body), current_row, self._allocate)
            if notes is not None:
                current_row.done()
        except BaseException as error:  # from user code, SystemExit and the like are errors too
            with contextlib.suppress(Exception):  # a frozen exception takes no note
                error.add_note(f"in {self._where}")
            return self._failure(ERROR, error)
        began = now()
        try:
            pieces = parcel_of(value, self._where).pieces()
        except SampleError as refused:
            try:
                pieces = _pickled_by_value(value)
            except BaseException:  # a user's __reduce__ may raise anything
                refused.add_note(f"while loading {self._work.name(pickle.loads(body), IDLE)}")
                return self._failure(ERROR, refused)
        self._meter.pack.add(now() - began)
        return VALUE, *pieces

    def _failure(self, status: int, error: BaseException) -> Answer:
        # a class of the program's ``__main__`` by its contents
        return status, *Parcel(tuple(RemoteError.of(error, dumps=by_value))).pieces()


def by_value(value: Any, buffer_callback: Any = None) -> bytes:
    """``value`` pickled by Ray's cloudpickle, with tensors of every dtype."""
    from ray import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
        dispatch_table: ClassVar[Any] = ChainMap(Reducers(), cloudpickle.Pickler.dispatch_table)

    Pickler(file := io.BytesIO(), 5, buffer_callback).dump(value)
    return file.getvalue()


def _pickled_by_value(value: Any) -> tuple[int, bytes, list[np.ndarray]]:
    """The pieces of a value with classes of the program's ``__main__``, which this process cannot import."""
    buffers: list[pickle.PickleBuffer] = []
    body = by_value(value, buffers.append)
    return (
        PICKLED,
        body,
        [
            np.frombuffer(raw, np.uint8) if raw.nbytes else np.empty(0, np.uint8)
            for raw in (one.raw() for one in buffers)
        ],
    )


class _Noted(list[int]):
    """A ``current_row`` that is also recorded in another actor, so that it outlives this process."""

    def __init__(self, life: int, notes: Any, number: int) -> None:
        super().__init__([IDLE])
        self._life, self._notes, self._number = life, notes, number
        self._note(number, IDLE)

    def __setitem__(self, place: Any, row: Any) -> None:
        super().__setitem__(place, row)
        self._note(self._number, row)

    def done(self) -> None:
        """The task was done, so it is not to blame for a later death."""
        self._note(NO_TASK, IDLE)

    def _note(self, number: int, row: int) -> None:
        import ray

        # Waits for the other actor. A note on its way would die with this process, and the row that kills it could not
        # be named.
        with contextlib.suppress(ray.exceptions.RayError):
            # it has died with its node, or does not answer: then the row stays unknown
            ray.get(self._notes.note.remote(self._life, number, row), timeout=NOTED_WITHIN_S)


@final
class RayNotes:
    """An actor that records, by life number, the task and row that each watched actor is working on."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[int, int]] = {}

    def note(self, life: int, number: int, row: int) -> None:
        self._at[life] = number, row

    def at(self, life: int) -> tuple[int, int]:
        return self._at.get(life, (NO_TASK, IDLE))
