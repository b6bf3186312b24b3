"""A reader thread that keeps a few items of a source ready, each with the source's state behind it.

Who touches what: while the pump runs, the reader thread alone calls the source; the consumer's thread calls it only in
`Pump.reset` and `Pump.shutdown`, when the reader is known to be out of it. Invariant: items ready, and the one being read, are at
most ``depth + 1``, so memory is bounded.

An item that ends something (an error, ``StopIteration``, an end of epoch where nothing may run ahead) holds the reader until the
consumer has taken it and asks for more: nothing is read that might never be wanted.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

from penstock._errors import ClosedError
from penstock._statistics import ReaderStatistics
from penstock._workers.lifetime import PATIENCE_S, join, patience_s

if TYPE_CHECKING:
    from collections.abc import Callable


_here = threading.local()


def reads_ahead() -> bool:
    """Whether the thread that asks is a reader thread: the consumer's runs on beside it."""
    return getattr(_here, "reads_ahead", False)


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


class _Core:
    """What the reader thread and the pump share. The thread must not hold the pump, or an abandoned one would never end."""

    def __init__(self, source: Readable, depth: int, convert: Callable[[Any], Any] | None, holds: Callable[[Any], bool] | None) -> None:
        self.source = source
        self.convert = convert
        self.holds = holds
        self.depth = depth
        self.changed = threading.Condition()
        # All below is read and written under `changed` only.
        self.parcels: deque[_Item] = deque()
        self.running = False
        self.held = False
        self.inside = False
        self.interrupted = False
        self.stopped = False
        self.items = 0

    def run(self) -> None:
        _here.reads_ahead = True
        while True:
            with self.changed:
                self.inside = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.stopped or (self.running and not self.held and len(self.parcels) < self.depth))
                if self.stopped:
                    return
                self.inside = True
            parcel = self.read()
            with self.changed:
                if self.running:
                    self.parcels.append(parcel)
                    self.held = parcel.holds
                    self.items += 1
            del parcel  # This frame must not keep a batch alive while it waits.

    def read(self) -> _Item:
        try:
            value = next(self.source)
            if self.convert is not None:
                value = self.convert(value)
            return _Item(value, None, self.source.get_state(), self.holds is not None and self.holds(value))
        except BaseException as exc:
            return _Item(None, exc, self.source.get_state(), True)

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.running = False
            self.parcels.clear()
            self.changed.notify_all()


@final
class ReaderThread:
    """Read ``source`` ahead of the consumer, in one background thread that lives as long as the pump.

    Args:
        source: Read in the background thread.
        depth: Items kept ready, at least 1.
        name: The thread's name.
        convert: Applied to each item there.
        holds: Whether nothing may be read behind this item until the consumer asks for it.
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
        self._raised: dict[str, Any] | None = None
        self._timeout = timeout
        self._wait_s = 0.0
        self._core = _Core(source, depth, convert, holds)
        self._thread = threading.Thread(target=self._core.run, name=name, daemon=True)
        self._finalizer = weakref.finalize(self, _end, self._core, self._thread, PATIENCE_S)

    def reset(self, initial_state: dict[str, Any] | None) -> None:
        """Drop what is ready, stand the source elsewhere, and read on; the first time, start the thread."""
        core = self._core
        if core.stopped:
            raise ClosedError(f"{self._thread.name} has ended; build a new loader.")
        self._leave_source()
        core.source.reset(initial_state)
        self.state = core.source.get_state()
        self._raised = None
        with core.changed:
            core.running = True
            core.held = core.interrupted = False
            core.changed.notify_all()
        if self._thread.ident is None:
            self._thread.start()

    def next(self) -> Any:
        """The next item, or the error that reading it raised.

        Raises:
            TimeoutError: After ``timeout`` seconds; the item is then still to come.
        """
        core = self._core
        with core.changed:
            if self._raised is not None:
                self.state, self._raised = self._raised, None
            if core.held and not core.parcels:
                core.changed.notify_all()  # before the change, so that an interrupt between the two does not leave the reader asleep
                core.held = False
            began = time.perf_counter()
            core.changed.wait_for(lambda: core.stopped or core.interrupted or core.parcels, self._timeout)
            self._wait_s += time.perf_counter() - began
            if core.stopped or core.interrupted:
                raise ClosedError(f"{self._thread.name} was ended, or moved elsewhere, while an item was being waited for.")
            if not core.parcels:
                raise TimeoutError(f"waited {self._timeout} s for {self._thread.name} to read an item.")
            item = core.parcels[0]
            if item.error is None:
                self.state = item.state  # before it is taken: an item that an interrupt loses must have moved the state
            else:
                self._raised = item.state
            core.parcels.popleft()
            core.changed.notify_all()
        if item.error is not None:
            raise item.error
        return item.value

    def interrupt(self) -> None:
        """Make a `next` that waits raise `ClosedError`, until `reset`; from any thread."""
        with self._core.changed:
            self._core.interrupted = True
            self._core.changed.notify_all()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread, if need be out of the middle of a wait in the source; see `Pool.shutdown` and `join`."""
        self._finalizer.detach()
        if not self._core.stopped:
            _end(self._core, self._thread, patience_s(timeout))

    def statistics(self) -> ReaderStatistics:
        """A frozen account of the pump so far."""
        with self._core.changed:
            return ReaderStatistics(self._thread.name, self._core.depth, len(self._core.parcels), self._core.items, self._wait_s)

    def _leave_source(self) -> None:
        """Return once the reader is out of the source and stays out; a wait in there is interrupted, work is waited for."""
        core = self._core
        with core.changed:
            core.running = False
            core.parcels.clear()
            inside = core.inside
        if inside:
            core.source.interrupt()
        with core.changed:
            core.changed.wait_for(lambda: not core.inside)


def _end(core: _Core, thread: threading.Thread, timeout: float) -> None:
    core.stop()
    if core.inside:
        core.source.interrupt()
    join([thread], timeout)
