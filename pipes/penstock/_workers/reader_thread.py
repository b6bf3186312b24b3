"""A thread that reads ahead: it keeps a few items of a source ready, each with the source's state after that item.

Who touches what: the reader thread alone reads the source. The consumer thread resets it, but only while the reader is
outside and kept there (`ReaderThread._leave_source`), so the source needs no lock. While the reader is inside,
`ReaderThread` calls nothing but the source's ``interrupt``. Invariant: items ready plus the item being read are at most
``depth + 1``, so memory is bounded.

An item may hold the reader: an error, ``StopIteration``, or the end of an epoch if nothing may run ahead. The reader
then waits until the consumer has taken that item and requests the next, so it reads nothing that might never be needed.

Who holds what: `ReaderThread` holds the `_Shelf`; the thread holds it only while it reads, and has a weak reference
otherwise. An error raised to the consumer refers to every frame on its way, including frames of `ReaderThread`, and the
graph may hold that error. If the thread held the graph, a running thread would keep everything alive, and an abandoned
loader would never be collected.

A signal handler may raise in the consumer thread between any two steps. So the threads wake each other by a `Bell`, and
after each ring the woken thread looks at the shared fields again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from penstock._errors import ANEW, ClosedError
from penstock._workers.bell import Bell
from penstock._workers.lifetime import PATIENCE_S, join, patience_s, start, when_abandoned
from penstock._workers.meter import Histogram, now, traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock._statistics import ReaderStatistics


class _Here(threading.local):
    reads_ahead = False


_here = _Here()


def reads_ahead() -> bool:
    """Whether the calling thread is a reader thread, so that the consumer's code runs at the same time."""
    return _here.reads_ahead


class Readable(Protocol):
    """A source that a `ReaderThread` can read."""

    def __next__(self) -> Any:
        """The next item."""

    def reset(self, initial_state: dict[str, Any] | None) -> None:
        """Move to ``initial_state``."""

    def get_state(self) -> dict[str, Any]:
        """The current position."""
        ...

    def address(self) -> Any:
        """Where the item that ``next`` returned last comes from."""
        ...

    def interrupt(self) -> None:
        """End the wait of a ``next`` in another thread."""


class _Item(NamedTuple):
    value: Any
    error: BaseException | None
    state: dict[str, Any]
    holds: bool
    address: Any


@final
class _Shelf:
    """Everything that leads to the graph: the source, and the items read from it."""

    def __init__(
        self, source: Readable, convert: Callable[[Any], Any] | None, holds: Callable[[Any], bool] | None
    ) -> None:
        self.source = source
        self.convert = convert
        self.holds = holds
        self.items: deque[_Item] = deque()  # read and written under the core's lock
        self.read_ns = 0  # in the source; written by the reader
        self.converted = Histogram()

    def read(self) -> _Item:
        began = now()
        try:
            try:
                value = next(self.source)
            finally:
                read = now()
                self.read_ns += read - began
                for one in traced:
                    one.read(self.source, began, read)
            if self.convert is not None:
                value = self.convert(value)
                self.converted.add(now() - read)
            return _Item(
                value,
                None,
                self.source.get_state(),
                self.holds is not None and self.holds(value),
                self.source.address(),
            )
        except BaseException as exc:
            return _Item(None, exc, self.source.get_state(), True, None)


@final
class _Core:
    """All that the thread holds while it waits: nothing here leads to the graph."""

    def __init__(self, shelf: _Shelf, depth: int) -> None:
        self.shelf = weakref.ref(shelf)
        self.depth = depth
        # re-entrant: a signal handler may close the loader while its own thread holds the lock
        self.lock = threading.RLock()
        self.room = Bell()  # wakes the reader
        self.ready = Bell()  # wakes the consumer in `next`
        self.left = Bell()  # wakes the thread that waits in `_leave_source`
        # Guarded by `lock`, except that `stopped` and `inside` may be read without it.
        self.running = False
        self.held = False  # by an item: read nothing until the consumer requests more
        self.still = False  # read nothing until the consumer has used the source itself
        self.inside = False  # the reader is in the source
        self.interrupted = False
        self.stopped = False
        self.ended = False  # the thread and the source were told to end
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
                # Read under the lock: if a reset came while the item was read, it has set `running` to False, and
                # the item belongs to the old position.
                running = self.running
                if running:
                    shelf.items.append(item)
                    self.held = item.holds
                    self.items += 1
            del item, shelf  # While the thread waits, its frame must keep neither a batch nor the graph alive.
            if running:
                self.ready.ring()
            else:
                self.left.ring()

    def _entered(self) -> _Shelf | None:
        """Enter the source and return the shelf; None if the reader must wait."""
        with self.lock:
            shelf = self.shelf()
            if (
                shelf is None
                or self.stopped
                or not self.running
                or self.held
                or self.still
                or len(shelf.items) >= self.depth
            ):
                return None
            self.inside = True
            return shelf

    def stop(self) -> _Shelf | None:
        """Tell the thread to end. Return the shelf if the thread is still inside the source."""
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
    """Read ``source`` ahead of the consumer in one background thread.

    It starts at the first `reset` and lives as long as this object.

    Args:
        source: Read in the background thread.
        depth: Items kept ready, at least 1.
        name: The thread's name.
        convert: Applied to each item, in the background thread.
        holds: Whether the reader must stop after this item until the consumer asks for the next. Called with None
            before the first item.
        timeout: Seconds that `next` waits; None waits forever.
        places: Of the thread that waits for the reader; see `DrawWatch.place`.

    Attributes:
        address: Of the item that `next` returned last.
        state: The source's state after that item. If `next` raised, the state moves past that item at the next call.
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
        places: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self._places = places
        self.address: Any = None
        self.state: dict[str, Any] = {}
        self._name = name
        self._raised: dict[str, Any] | None = None
        self._timeout = timeout
        self._wait_s = 0.0
        self._asked = self._ready = 0  # how often the consumer asked, and how many items were ready then, in all
        self._shelf = _Shelf(source, convert, holds)
        self._core = _Core(self._shelf, depth)
        self._thread: threading.Thread | None = None
        self._started = False

    def reset(self, initial_state: dict[str, Any] | None) -> None:
        """Drop the items that are ready, move the source to ``initial_state``, and continue reading.

        The first call starts the thread.
        """
        core, shelf = self._core, self._shelf
        if core.stopped:
            raise ClosedError(f"{self._name} has ended. {ANEW}")
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
            when_abandoned(self, partial(_end, core, thread, PATIENCE_S))
            self._thread = thread
        if not self._started:  # the first time, or again if an exception interrupted the start
            start([self._thread], core.lock)
            self._started = True

    def next(self) -> Any:
        """The next item, or the error that reading it raised.

        Raises:
            TimeoutError: After ``timeout`` seconds. A later call may still return the item.
        """
        if self._raised is not None:
            self.state, self._raised = self._raised, None
        self._asked += 1
        self._ready += len(self._shelf.items)
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
            del error  # its traceback refers to this frame: break the cycle

    @contextmanager
    def still(self) -> Iterator[None]:
        """In this context the source is not read. Waits for the item that is being read now."""
        core = self._core
        try:
            with core.lock:  # or the reader, which has just looked at the flag, might enter after our look
                core.still = True
            while core.inside:
                core.ready.wait(_LOOK_S)
            yield
        finally:
            core.still = False
            core.room.ring()

    @property
    def holds_error(self) -> bool:
        """Whether the source has raised an error that `next` has not raised yet.

        True while the reader is in the source, because it may raise.
        """
        core, items = self._core, self._shelf.items
        with core.lock:
            return core.inside or bool(items and items[-1].error is not None)

    def interrupt(self) -> None:
        """Make `next`, including one that waits now, raise `ClosedError` until the next `reset`. Thread-safe."""
        with self._core.lock:
            self._core.interrupted = True
        self._core.ready.ring()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread. If it waits in the source, the wait is interrupted. See `Pool.shutdown` and `join`."""
        _end(self._core, self._thread, patience_s(timeout))

    def statistics(self) -> ReaderStatistics:
        """The counters so far, as a frozen object."""
        from penstock._statistics import ReaderStatistics

        shelf = self._shelf
        with self._core.lock:
            return ReaderStatistics(
                self._name,
                self._core.depth,
                len(shelf.items),
                self._core.items,
                self._wait_s,
                shelf.read_ns / 1e9,
                shelf.converted.durations(),
                self._ready / self._asked if self._asked else 0.0,
            )

    def _take(self) -> _Item | None:
        """Take the next item if it is ready; otherwise release a reader that an item holds."""
        core, items = self._core, self._shelf.items
        with core.lock:
            if core.stopped or core.interrupted:
                raise ClosedError(
                    f"{self._name} was closed, or moved to another position, while it waited for an item."
                )
            if items:
                item = items[0]
                if item.error is None:
                    self.address = item.address
                    self.state = item.state  # before popleft: if an interrupt loses the item, the state must be past it
                else:
                    self._raised = item.state
                if items:  # a signal handler may just have closed the loader, which clears them
                    items.popleft()
            else:
                item = None
                core.held = False
        core.room.ring()  # each time, because an interrupt may have come before an earlier ring
        return item

    def _wait(self) -> _Item:
        wait = self._waited
        for place in self._places:
            wait = partial(place, wait)
        return wait()

    def _waited(self) -> _Item:
        began = time.perf_counter()
        try:
            while True:
                left = None if self._timeout is None else began + self._timeout - time.perf_counter()
                # The item counts, not the ring: check once more even after the time-out, because an interrupt may have
                # swallowed a ring.
                in_time = self._core.ready.wait(left)
                item = self._take()
                if item is not None:
                    return item
                if not in_time:
                    raise TimeoutError(f"waited {self._timeout} s for {self._name} to read an item.")
        finally:
            self._wait_s += time.perf_counter() - began

    def _leave_source(self) -> None:
        """Return once the reader has left the source until the next `reset`.

        Interrupts a wait in the source, and waits for work there to finish.
        """
        core = self._core
        with core.lock:
            core.running = False
            self._shelf.items.clear()
            inside = core.inside
        if inside:
            self._shelf.source.interrupt()
        while core.inside:
            core.left.wait()


_LOOK_S = 0.1
"""Seconds between two looks, for one who waits for a bell that also rings for others."""


def _end(core: _Core, thread: threading.Thread | None, timeout: float) -> None:
    if core.ended:
        return
    shelf = core.stop()
    if shelf is not None:
        shelf.source.interrupt()
        del shelf
    core.ended = True  # not before: after an interrupt, the next call tells the rest
    join([] if thread is None else [thread], timeout)
