"""A reader thread that keeps a few items of a source ready, each with the source's state behind it.

Who touches what: while the pump runs, the reader thread alone calls the source; the consumer's thread calls it only in
`ReaderThread.reset` and `ReaderThread.shutdown`, when the reader is known to be out of it. Invariant: items ready, and the one being read, are at
most ``depth + 1``, so memory is bounded.

An item that ends something (an error, ``StopIteration``, an end of epoch where nothing may run ahead) holds the reader until the
consumer has taken it and asks for more: nothing is read that might never be wanted.

Who holds what: the pump holds the `_Shelf`, the thread only while it reads. An error that was raised to the consumer knows every frame on its
way, the pump's among them, and the graph may hold that error; a thread that held the graph would keep all of them forever.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

from penstock._errors import ClosedError
from penstock._statistics import ReaderStatistics
from penstock._workers.bell import Bell
from penstock._workers.lifetime import PATIENCE_S, join, patience_s, start

if TYPE_CHECKING:
    from collections.abc import Callable


class _Here(threading.local):
    reads_ahead = False


_here = _Here()


def reads_ahead() -> bool:
    """Whether the thread that asks is a reader thread: the consumer's runs on beside it."""
    return _here.reads_ahead


class Readable(Protocol):
    """What a pump asks of its source."""

    def __next__(self) -> Any:
        """The next item."""

    def reset(self, initial_state: dict[str, Any] | None) -> None:
        """Stand elsewhere."""

    def get_state(self) -> dict[str, Any]:
        """Where it stands."""
        ...

    def interrupt(self) -> None:
        """Get a ``next`` that waits in another thread out of there."""


@dataclass(frozen=True, slots=True)
class _Item:
    value: Any
    error: BaseException | None
    state: dict[str, Any]
    holds: bool


@final
class _Shelf:
    """The way to the graph: its last node, and what was read of it."""

    def __init__(self, source: Readable, convert: Callable[[Any], Any] | None, holds: Callable[[Any], bool] | None) -> None:
        self.source = source
        self.convert = convert
        self.holds = holds
        self.items: deque[_Item] = deque()  # read and written under the core's lock

    def read(self) -> _Item:
        try:
            value = next(self.source)
            if self.convert is not None:
                value = self.convert(value)
            return _Item(value, None, self.source.get_state(), self.holds is not None and self.holds(value))
        except BaseException as exc:
            return _Item(None, exc, self.source.get_state(), True)


@final
class _Core:
    """What the thread holds while it waits."""

    def __init__(self, shelf: _Shelf, depth: int) -> None:
        self.shelf = weakref.ref(shelf)
        self.depth = depth
        self.lock = threading.RLock()  # re-entrant: a signal's handler may close the loader while its thread holds it
        self.room = Bell()  # to the reader
        self.ready = Bell()  # to the consumer in `next`
        self.left = Bell()  # to whoever wants the reader out of the source
        # All below is read and written under `lock` only, except `stopped` and `inside`, which may be read without.
        self.running = False
        self.held = False
        self.inside = False
        self.interrupted = False
        self.stopped = False
        self.items = 0

    def run(self) -> None:
        _here.reads_ahead = True
        while not self.stopped:
            shelf = self._entered()
            if shelf is None:
                self.room.wait()
                continue
            item = shelf.read()
            with self.lock:
                self.inside = False
                running = self.running
                if running:
                    shelf.items.append(item)
                    self.held = item.holds
                    self.items += 1
            del item, shelf  # This frame must not keep a batch alive while it waits, nor the graph.
            (self.ready if running else self.left).ring()

    def _entered(self) -> _Shelf | None:
        """The shelf, if there is something to read now."""
        with self.lock:
            shelf = self.shelf()
            if shelf is None or self.stopped or not self.running or self.held or len(shelf.items) >= self.depth:
                return None
            self.inside = True
            return shelf

    def stop(self) -> _Shelf | None:
        """Have the thread end; the shelf, if the thread is in the middle of the source."""
        with self.lock:
            self.stopped = True
            self.running = False
            shelf = self.shelf()
            if shelf is not None:
                shelf.items.clear()
            inside = self.inside
        self.room.ring()
        self.ready.ring()
        return shelf if inside else None


@final
class ReaderThread:
    """Read ``source`` ahead of the consumer, in one background thread that lives as long as the pump. It starts at the first `reset`.

    Args:
        source: Read in the background thread.
        depth: Items kept ready, at least 1.
        name: The thread's name.
        convert: Applied to each item there.
        holds: Whether nothing may be read behind this item until the consumer asks for it; None for what stands before the first one.
        timeout: Seconds that `next` waits; None waits for ever.

    Attributes:
        state: The source's state behind the item that `next` returned last. One that raised counts from the next call on.
    """

    def __init__(
        self,
        source: Readable,
        depth: int,
        name: str,
        *,
        convert: Callable[[Any], Any] | None = None,
        holds: Callable[[Any], bool] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.state: dict[str, Any] = {}
        self._name = name
        self._raised: dict[str, Any] | None = None
        self._timeout = timeout
        self._wait_s = 0.0
        self._shelf = _Shelf(source, convert, holds)
        self._core = _Core(self._shelf, depth)
        self._thread: threading.Thread | None = None
        self._started = False

    def reset(self, initial_state: dict[str, Any] | None) -> None:
        """Drop what is ready, stand the source elsewhere, and read on; the first time, start the thread."""
        core, shelf = self._core, self._shelf
        if core.stopped:
            raise ClosedError(f"{self._name} has ended; build a new loader.")
        self._leave_source()
        shelf.source.reset(initial_state)
        self.state = shelf.source.get_state()
        self._raised = None
        with core.lock:
            core.running = True
            core.held = shelf.holds is not None and shelf.holds(None)
            core.interrupted = False
        core.room.ring()
        if self._thread is None:
            thread = threading.Thread(target=core.run, name=self._name, daemon=True)
            weakref.finalize(self, _abandoned, core, thread, os.getpid())
            self._thread = thread
        if not self._started:  # nor if an interrupt has come before
            start([self._thread], core.lock)
            self._started = True

    def next(self) -> Any:
        """The next item, or the error that reading it raised.

        Raises:
            TimeoutError: After ``timeout`` seconds; the item is then still to come.
        """
        if self._raised is not None:
            self.state, self._raised = self._raised, None
        item = self._take()
        if item is None:
            item = self._wait()
        if item.error is None:
            return item.value
        error = item.error
        del item
        try:
            raise error
        finally:
            del error  # which knows this frame: neither should keep the other

    def interrupt(self) -> None:
        """Make a `next` that waits raise `ClosedError`, until `reset`; from any thread."""
        with self._core.lock:
            self._core.interrupted = True
        self._core.ready.ring()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread, if need be out of the middle of a wait in the source; see `Pool.shutdown` and `join`."""
        if not self._core.stopped:
            _end(self._core, self._thread, patience_s(timeout))

    def statistics(self) -> ReaderStatistics:
        """A frozen account of the pump so far."""
        with self._core.lock:
            return ReaderStatistics(self._name, self._core.depth, len(self._shelf.items), self._core.items, self._wait_s)

    def _take(self) -> _Item | None:
        """The next item, if it is ready; if not, the reader is told to go on."""
        core, items = self._core, self._shelf.items
        with core.lock:
            if core.stopped or core.interrupted:
                raise ClosedError(f"{self._name} was ended, or moved elsewhere, while an item was being waited for.")
            if items:
                item = items[0]
                if item.error is None:
                    self.state = item.state  # before it is taken: an item that an interrupt loses must have moved the state
                else:
                    self._raised = item.state
                if items:  # a signal's handler may just have closed the loader
                    items.popleft()
            else:
                item = None
                core.held = False
        core.room.ring()  # also for a ring that an interrupt has kept from the reader before
        return item

    def _wait(self) -> _Item:
        began = time.perf_counter()
        try:
            while True:
                left = None if self._timeout is None else began + self._timeout - time.perf_counter()
                in_time = self._core.ready.wait(left)
                item = self._take()
                if item is not None:
                    return item
                if not in_time:
                    raise TimeoutError(f"waited {self._timeout} s for {self._name} to read an item.")
        finally:
            self._wait_s += time.perf_counter() - began

    def _leave_source(self) -> None:
        """Return once the reader is out of the source and stays out; a wait in there is interrupted, work is waited for."""
        core = self._core
        with core.lock:
            core.running = False
            self._shelf.items.clear()
            inside = core.inside
        if inside:
            self._shelf.source.interrupt()
        while core.inside:
            core.left.wait()


def _end(core: _Core, thread: threading.Thread | None, timeout: float) -> None:
    shelf = core.stop()
    if shelf is not None:
        shelf.source.interrupt()
        del shelf
    join([] if thread is None else [thread], timeout)


def _abandoned(core: _Core, thread: threading.Thread, pid: int) -> None:
    if os.getpid() == pid and not core.stopped:  # in a fork there is no thread, and it may have held the lock
        _end(core, thread, PATIENCE_S)
