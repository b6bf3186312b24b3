"""Ledger: the samples of a loader, settled in any order.

It uses four things of a `Loader`, which knows nothing of it: ``last`` names what was delivered, ``here`` is the
position after it, ``load`` makes it again, and ``load_ahead`` lets the workers begin. At any instant, in any thread,
each position is exactly one of: after the *frontier* (``here``), *open* (in this ledger), or *settled* (before the
frontier, and not open). A saved state is such an instant.

**Interrupts.** A signal handler may save a state, or raise, between any two lines of ``next``. So the frontier is one
tuple, assigned at once, and what ``next`` has taken but not returned (`_handing`) is served first by the next call.
There is no ``threading.Condition``: an interrupt in it ends in "cannot release un-acquired lock".
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import threading
import time
import zlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Self, TypeVar, final

import numpy as np

from penstock._arguments import Shown, seconds, whole_number
from penstock._errors import ClosedError, GraphError, StateError
from penstock._loader.address import Address, as_runs, of_runs
from penstock._loader.epoch_iterator import EpochIterator
from penstock._nodes.node import is_count
from penstock._nodes.sharder import ranks_of
from penstock._workers.bell import Bell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock._loader.loader import Loader

T = TypeVar("T")

KEY: Final = "penstock.ledger"
_FORMAT: Final = 1
_AHEAD: Final = 64
"""How many of those that are to be served again are looked up together."""
_LOOK_S: Final = 0.1
"""Seconds between two looks, because an interrupt may swallow a ring."""
_BITS: Final = 2**24
"""The most bits of a bitmap in a state."""
_REMEMBERED: Final = 4096
"""Settlements that are remembered, for error messages only."""


@final
class Ledger(Shown, Generic[T]):
    """Take samples from ``loader``, and settle them later, in any order, from any thread or event loop.

    Iterate over the ledger: each item is a pair of an `Address` and the sample there. It is *open* until `done` or
    `drop` settles it. A state holds what is open, so that after a load it is served first, in order, with the same
    random numbers; then come the samples that nobody has taken. Save it together with the weights: what was settled
    after that never happened.

    While a ledger is attached, the loader's own ``state_dict`` raises, because a trainer that saves it would skip what
    is open. So does what would move the loader beside it.

    Args:
        loader: Infinite, on one rank (which hands the samples out), over data that is read by position. With
            ``batch_size=None`` the items are samples, otherwise batches.
        max_open: The most that may be open. At that number ``next`` waits until one is settled.
        timeout: How long it waits, in seconds; None: forever.

    Raises:
        ValueError: The loader is not infinite.
        GraphError: Its data cannot be read by position, or it has a ledger already.
    """

    __module__ = "penstock"

    def __init__(self, loader: Loader[T], max_open: int = 4096, *, timeout: float | None = 600.0) -> None:
        if not loader.infinite:
            raise ValueError(
                "a Ledger needs a loader with infinite=True: at the end of an epoch some of its samples are still "
                "open, so a loop over it has no end."
            )
        if loader.saved_by is not None:
            raise GraphError("this loader has a Ledger already. Close that one first, or build another loader.")
        loader.locate(Address(0, ()))  # raises if it cannot
        self._loader = loader
        self._max_open = whole_number("max_open", max_open, 1)
        settings = loader._reader.positions.facts.settings
        # nobody can look up the samples of an epoch whose weights were replaced
        self._may_forget = settings.get("order") == "weighted" and "groups" not in settings
        self._timeout = inf if (given := seconds("timeout", timeout)) is None else given
        self._pid = os.getpid()
        # re-entrant, because a signal handler may save the state. Never held while data is loaded.
        self._lock = threading.RLock()
        self._bell = Bell()
        # the thread that uses the loader, if any; an entry is made and removed in one step
        self._users: dict[None, int] = {}
        self._thread: ThreadPoolExecutor | None = None  # of `__anext__`
        # All below is guarded by the lock, and set anew by `_begin`.
        self._closed = False
        self._open: dict[Address, tuple[float, Any]]  # since when, and its indices, if they are known
        self._queue: OrderedDict[Address, None]  # of those, the ones to be served again
        self._retired: set[int]
        self._settled: OrderedDict[Address, str]  # the last ones
        self._taking: Address | None  # see `_take`
        self._handing: dict[int, Address | None]  # by thread: open, and not returned yet
        self._iterator: Iterator[T] | None
        self._pending: Future[tuple[Address, T] | None] | None  # of an `__anext__`; it survives a cancellation
        self._frontier: tuple[Address | None, Any]  # what was taken last, and the position after it
        self._begin([], [])
        loader.saved_by = "ledger"
        if loader._runs.number:
            loader._runs.end()  # iterators from before read no more

    def _begin(self, opened: Iterable[Address], retired: Iterable[int]) -> None:
        since = {at: (time.monotonic(), at.indices) for at in opened}
        vars(self).update(  # at once, because a signal handler may save the state
            _open=since,
            _queue=OrderedDict.fromkeys(since),
            _retired={*retired},
            _settled=OrderedDict(),
            _taking=None,
            _handing={},
            _iterator=None,
            _pending=None,
            _frontier=(self._loader.last, self._loader.here),
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a Ledger cannot be copied or pickled: it alone hands out the samples of its loader. Give its state_dict() "
            "to a Ledger over another loader, and leave it out of what workers or lanes copy."
        )

    def details(self) -> dict[str, Any]:
        return {
            "open": len(self._open),
            "max_open": self._max_open,
            "retired": len(self._retired),
            "loader": self._loader,
        }

    # Serving.

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Address, T]:
        """The next sample, with its address.

        Raises:
            TimeoutError: ``max_open`` are open, and none was settled in time.
            ClosedError: The ledger was closed.
            Exception: Loading it failed. A sample that is to be served again stays where it is; `drop` ends that.
        """
        end = time.monotonic() + self._timeout
        try:
            while (pair := self._attempt(end)) is None:
                pass
            # the last step: an interrupt before it has the sample served by the next call
            self._handing[threading.get_ident()] = None
            return pair
        except BaseException:
            self._give_back()  # to any thread; if that is interrupted, then to this one
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[Address, T]:
        end = time.monotonic() + self._timeout
        while True:
            with self._lock:
                self._check_life()
                if self._pending is None:
                    self._thread = self._thread or ThreadPoolExecutor(1, "penstock-ledger")
                    self._pending = self._thread.submit(self._attempt_in_thread, end)
                pending = self._pending
            here = asyncio.wrap_future(pending)
            # asyncio logs an error that nobody has asked for
            here.add_done_callback(lambda done: done.cancelled() or done.exception())
            with contextlib.suppress(Exception):  # raised below, in the call that has it
                # A cancellation leaves it to the next call, perhaps in another event loop.
                await asyncio.shield(here)
            with self._lock:
                if self._pending is not pending:  # another task that waited for it has it
                    continue
                self._pending = None
            if (pair := pending.result()) is not None:
                return pair

    def _attempt(self, end: float) -> tuple[Address, T] | None:
        """One look: the next sample, or None if it is not this thread's turn, or ``max_open`` are open.

        Each look is short, so that the end of the program waits for no thread.
        """
        if not self._enter(end):
            self._bell.wait(_LOOK_S)
            return None
        try:
            return self._served()
        finally:
            self._users.clear()
            self._bell.ring()

    def _attempt_in_thread(self, end: float) -> tuple[Address, T] | None:
        pair = self._attempt(end)
        self._handing[threading.get_ident()] = None
        return pair

    def _enter(self, end: float) -> bool:
        """Whether this thread may use the loader, and there is something to serve."""
        me = threading.get_ident()
        with self._lock:
            self._check_life()
            may = self._queue or self._handing.get(me) is not None or len(self._open) < self._max_open
            if may and self._users.setdefault(None, me) == me:  # it may be this thread's own, left by an interrupt
                self._recover()
                return True
            if not may:
                self._loader._reader.check_open()  # nobody would end this wait
            if not may and time.monotonic() >= end:
                at, (since, _) = next(iter(self._open.items()))
                raise TimeoutError(
                    f"max_open={self._max_open} are open, and none was settled for {self._timeout:g} s. The oldest is "
                    f"{at}, open for {time.monotonic() - since:.0f} s. Call done, drop or again for it."
                )
        return False

    def _recover(self) -> None:
        """What an interrupted ``next`` had taken was not returned, so it is served first."""
        last = self._loader.last
        if self._iterator is not None and last is not None and last != self._frontier[0]:
            self._take(last, self._loader.here)
        self._give_back()

    def _give_back(self) -> None:
        """What this thread has taken, and not returned, is the next to be served."""
        with self._lock:
            me = threading.get_ident()
            if (at := self._handing.get(me)) is not None and at in self._open:
                self._queue[at] = None
                self._queue.move_to_end(at, last=False)
            self._handing[me] = None

    def _served(self) -> tuple[Address, T]:
        if self._iterator is None:
            if ranks_of(self._loader.root)[1] != 1:
                raise GraphError(
                    "a Ledger is for one rank, which hands the samples out to the others. Build its loader with "
                    "rank=0, world_size=1."
                )
            self._iterator = EpochIterator(self._loader)
        while (at := next(iter(self._queue), None)) is not None:
            with self._lock:
                ahead = list(islice(self._queue, _AHEAD))
            self._loader.load_ahead(ahead)
            try:
                item = self._loader.load(at)
            except Exception as exc:
                exc.add_note(f"while serving {at} again. It stays open: drop it, or call next once more.")
                raise
            at = self._loader.locate(at)
            with self._lock:
                if at in self._queue and at in self._open:  # otherwise it was settled meanwhile
                    self._open[at] = self._open[at][0], at.indices
                    self._handing[threading.get_ident()] = at
                    del self._queue[at]
                    return at, item
        return self._new(self._iterator)

    def _new(self, samples: Iterator[T]) -> tuple[Address, T]:
        first: int | None = None
        while True:
            item = next(samples)
            at = self._loader.last
            if at is None:
                raise GraphError("a node of this graph overrides next, so nobody knows which samples it has delivered.")
            with self._lock:
                if self._take(at, self._loader.here):
                    return at, item
            first = at.epoch if first is None else first
            if at.epoch > first + 1:
                raise ValueError(f"every sample of epoch {first + 1} is retired, so there is nothing left to serve.")

    def _take(self, at: Address, here: Any) -> bool:
        """``at`` is delivered: unless it is retired it is open, and the frontier is past it.

        Returns whether it is open.
        """
        if self._retired and not isinstance(at.indices, int):  # `retire` could not see it before the first item
            raise ValueError(
                "retire() is about single samples, but this loader makes batches. Build it with batch_size=None."
            )
        served = not self._retired or at.indices not in self._retired
        self._taking = at if served else None  # while it is open, but not behind the frontier yet
        if served:
            self._open[at] = time.monotonic(), at.indices
            self._handing[threading.get_ident()] = at
        self._frontier = at, here
        return served

    # Settling.

    def done(self, at: Address) -> None:
        """It was trained on.

        Raises:
            TypeError: It is not an `Address`.
            ValueError: It is not open; the message says how it was settled, if that was not long ago.
        """
        self._settle(at, "done")

    def drop(self, at: Address) -> None:
        """It will not be trained on in this epoch. Raises what `done` does."""
        self._settle(at, "dropped")

    def again(self, *addresses: Address) -> None:
        """Serve them once more, before anything new; they stay open.

        No effect on one that waits for that already. Raises what `done` does.
        """
        with self._lock:
            for at in addresses:
                self._check_open(at)
            self._queue.update(dict.fromkeys(map(self._with_indices, addresses)))
            self._bell.ring()

    def retire(self, index: int) -> None:
        """Never serve the dataset index ``index`` again, except where it is open already.

        Raises:
            ValueError: It is negative, or the items are batches.
        """
        index = whole_number("index", index, 0)
        with self._lock:
            last = self._frontier[0]
            if last is not None and not isinstance(last.indices, int):
                raise ValueError(
                    f"retire({index}) is about single samples, but this loader makes batches. Build it with "
                    f"batch_size=None."
                )
            self._retired.add(index)

    @property
    def open(self) -> tuple[Address, ...]:
        """What is open, the oldest first. After a load, `Loader.locate` finds the indices of one not served since."""
        with self._lock:
            return tuple(map(self._with_indices, self._open))

    def _with_indices(self, at: Address) -> Address:
        return at if at.indices is not None else replace(at, indices=self._open[at][1])

    def _settle(self, at: Address, how: str) -> None:
        with self._lock:
            self._check_open(at)
            del self._open[at]
            self._queue.pop(at, None)
            self._settled[at] = how
            if len(self._settled) > _REMEMBERED:
                self._settled.popitem(last=False)
            self._bell.ring()

    def _check_open(self, at: Address) -> None:
        self._check_life()
        if not isinstance(at, Address):
            raise TypeError(f"{at!r:.80} is not an Address. Pass the first of the two that the ledger gave you.")
        if at in self._open:
            known = self._open[at][1]
            if None not in (known, at.indices) and known != at.indices:
                raise ValueError(f"{at} is of another loader: the one open here has the indices {known!r:.80}.")
            return
        if at in self._settled:
            raise ValueError(f"{at} was already settled: {self._settled[at]}.")
        last = self._frontier[0]
        if last is not None and _in_order(at) <= _in_order(last):
            raise ValueError(
                f"{at} is not open: it was settled or retired long ago, or before this state was loaded, or it is of "
                f"another loader."
            )
        raise ValueError(
            f"{at} was not served by this ledger yet: it is of another loader, or of a run that was rolled back."
        )

    def _check_life(self) -> None:
        if self._closed or self._pid != os.getpid():
            raise ClosedError(
                "this ledger was closed."
                if self._closed
                else f"this ledger belongs to process {self._pid}, and this is a fork of it."
            )

    # Saving and loading.

    def state_dict(self) -> dict[str, str]:
        """What is open, what is retired, and the loader's position, as one key with one JSON string.

        In any thread or signal handler; waits for nothing.

        No sample is in it: 4,096 open samples take under 50 KB, wherever they are; 100,000 retired ones of a million
        under 100 KB.
        """
        with self._lock:
            opened, retired, taking, (last, here) = [*self.open], sorted(self._retired), self._taking, self._frontier
        if taking is not None and taking is not last and taking in opened:
            opened.remove(taking)  # a signal handler saves in the middle of `_take`
        opened.sort(key=_in_order)
        samples: dict[int, list[int]] = {}
        for at in opened:
            if isinstance(at.position, int):
                samples.setdefault(at.epoch, []).append(at.position)
        found = {
            "format": _FORMAT,
            "loader": self._loader.state_dict(here),
            "samples": [[epoch, as_runs(positions)] for epoch, positions in samples.items()],
            "batches": [at.json() for at in opened if isinstance(at.position, tuple)],
            "retired": _packed(retired),
            **({"indices": [at.indices for at in opened]} if self._may_forget else {}),
        }
        return {KEY: json.dumps(found, separators=(",", ":"))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Serve first what was open, in the order of the positions, and then go on at the frontier.

        A state of the loader alone has nothing open.

        Raises:
            StateError: It is damaged, or not a state.
            StateMismatch: It is of other data or settings.
        """
        state, opened, retired = parts(state_dict)
        wait(filter(None, [self._pending]))  # what it takes is of the position before
        with self._lock:
            self._check_life()
            if self._users.setdefault(None, threading.get_ident()) != threading.get_ident():
                raise RuntimeError("another thread is in next(ledger). Load a state between two samples.")
        try:
            self._loader._resume(state)
            with self._lock:
                self._begin(opened, retired)
        finally:
            self._users.clear()
            self._bell.ring()

    # Life.

    def close(self) -> None:
        """End every ``next`` that waits, with `ClosedError`, and give the loader its ``state_dict`` back.

        The loader itself stays open. Idempotent.
        """
        with self._lock:
            if not self._closed:
                self._loader.saved_by = None
            self._closed = True
            self._bell.ring()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _in_order(at: Address) -> tuple[int, int]:
    return at.epoch, at.position if isinstance(at.position, int) else min(at.position, default=0)


def _packed(numbers: list[int]) -> Any:
    """``numbers``, in order, as `as_runs`, or as text of a compressed bitmap if that is shorter."""
    runs = as_runs(numbers)
    if len(runs) < 64 or numbers[-1] >= _BITS:
        return runs
    bits = np.zeros(numbers[-1] + 1, bool)
    bits[numbers] = True
    text = base64.b85encode(zlib.compress(np.packbits(bits).tobytes(), 9)).decode()
    return text if len(text) < len(json.dumps(runs, separators=(",", ":"))) else runs


def _unpacked(found: Any) -> list[int]:
    if not isinstance(found, str):
        return of_runs(found)
    unpacked = zlib.decompressobj()
    packed = unpacked.decompress(base64.b85decode(found), _BITS // 8)
    if not unpacked.eof:
        raise ValueError("the retired indices are cut off, or too many")
    numbers: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8))).tolist()
    return numbers


def _checked(at: Address, indices: Any) -> Any:
    values = indices if isinstance(at.position, tuple) else [indices]
    if indices is not None and not (len(values) == len(at.positions) and all(map(is_count, values))):
        raise ValueError(f"{indices!r:.80} are not the indices of {at}")
    return indices


def parts(state_dict: Any) -> tuple[Any, list[Address], list[int]]:
    """The loader's state, what is open, and what is retired.

    Raises:
        StateError: It is damaged.
    """
    if not isinstance(state_dict, dict) or KEY not in state_dict:
        return state_dict, [], []  # the loader says what is wrong, if anything
    try:
        found = json.loads(state_dict[KEY])
        if found.keys() - {"indices"} != {"format", "loader", "samples", "batches", "retired"} or (
            found["format"] != _FORMAT
        ):
            raise ValueError("it has other keys, or another format")
        opened = [Address(epoch, position) for epoch, runs in found["samples"] for position in of_runs(runs)]
        opened += map(Address.from_json, found["batches"])
        if len({*opened}) < len(opened):
            raise ValueError("a position is open twice")
        opened.sort(key=_in_order)
        if "indices" in found:
            opened = [
                replace(at, indices=_checked(at, indices)) for at, indices in zip(opened, found["indices"], strict=True)
            ]
        return found["loader"], opened, _unpacked(found["retired"])
    except (ValueError, TypeError, AttributeError, RecursionError, zlib.error) as exc:
        raise StateError(f"this state of a Ledger is damaged: {exc}") from None
