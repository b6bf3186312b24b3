"""The shards that one process has open: a bounded number, closed in least recently used order."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, final

from torch.utils.data import IterableDataset, get_worker_info

from penstock._errors import first_time
from penstock._fetch.error_policy import annotate
from penstock._fetch.fetch import samples_in
from penstock._fetch.sample import current
from penstock._streams.forward_reader import ForwardShard, differs
from penstock._streams.retrying import close
from penstock._workers.lifetime import held_in_time, process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from penstock._streams.schedule import Schedule

log = logging.getLogger("penstock")

INDEXED: Final = 64
"""How many shards with random access stay open, unless there are more cuts."""


@final
class OpenShards:
    """Reads records of shards, which it opens and closes as needed.

    Guarantees: Any number of threads may read, and two of them wait for each other only at the same shard. A process
    uses only what it opened itself: after a fork it starts with nothing open, and so does a copy.

    Args:
        shards: What ``open`` is called with.
        open: Returns an object with ``__len__`` and ``__getitem__``, or an iterable of records. If it has a parameter
            ``start``, it returns an iterable that begins with that record.
        counts: int64, shape ``(shards,)``: how many records each shard should have.
        cuts: How many shards are read in turn.
        window: How far the order moves a record within its cut.
        name: What messages call a shard without a path; its number follows.
        owned: Whether each lane belongs to one worker process.
        schedule: Notified before a shard is opened, if copies are kept.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        open: Callable[..., Any],
        counts: np.ndarray,
        cuts: int,
        window: int,
        name: str = "shard",
        owned: bool = False,
        schedule: Schedule | None = None,
    ) -> None:
        self._arguments = (shards, open, counts, cuts, window, name)
        self.owned = owned
        self.schedule = schedule
        self._seeks = has_start(open)
        self._cuts = cuts
        self._allowed = most_files()
        self._most_indexed = min(max(cuts + 4, INDEXED), self._allowed)
        self._start()

    def _start(self) -> None:
        self._pid = process.id
        # guards only the next attribute, and is never held while a shard is opened, read or closed
        self._lock = threading.Lock()
        self._shards: OrderedDict[int, _Shard] = OrderedDict()
        self._threads: set[int] = set()  # that have read

    @property
    def _most_readers(self) -> int:
        """Threads read what is free, so they may be in different shards of a lane."""
        return min(self._cuts + max(4, len(self._threads)), self._allowed)

    def read(self, shard: int, numbers: Sequence[int]) -> list[Any]:
        """The records ``numbers``, in ascending order, of one shard."""
        while True:
            one = self._entry(shard)
            self._threads.add(threading.get_ident())
            try:
                with one.lock:
                    # by another thread's `_tidy`, before this thread acquired the lock: take a new entry
                    if one.closed:
                        continue
                    if one.content is None:
                        one.content = self._opened(shard, numbers[0])
                    return one.content.read(numbers, len(self._threads))
            finally:
                # Without its lock: `_tidy` waits for the readers of what it closes, so two threads could wait for each
                # other. `handles` may therefore be out of date, and a shard may be closed too early or too late;
                # reading reopens it.
                if one.handles != (handles := 0 if one.content is None else one.content.handles):
                    one.handles = handles
                    self._tidy()

    def is_busy(self, shard: int) -> bool:
        """Whether another thread is opening or reading a shard, so that `read` would wait. Out of date at once."""
        known = self._shards.get(shard)
        return known is not None and known.lock.locked()

    def close(self) -> None:
        """Close everything that this process has open. Idempotent; reading opens shards again."""
        with self._lock:
            gone, self._shards = self._shards, OrderedDict()
        for one in gone.values():
            one.close()
        if self.schedule is not None:
            self.schedule.close()

    def __reduce__(self) -> Any:
        return OpenShards, (*self._arguments, self.owned, self.schedule)

    # at interpreter exit the module may already be gone
    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        with suppress(Exception):
            if self._pid == os.getpid():
                # nothing else can be using them, and a finalizer must not wait for a lock
                for one in self._shards.values():
                    one.close(wait=False)

    def _entry(self, shard: int) -> _Shard:
        if self._pid != process.id:
            # another thread may have been reading at the moment of the fork, so neither its lock nor its readers can be
            # used
            self._start()
        with self._lock:
            one = self._shards.setdefault(shard, _Shard())
            self._shards.move_to_end(shard)
        return one

    def _opened(self, shard: int, first: int) -> _IndexedShard | ForwardShard:
        shards, opener, counts, _, window, name = self._arguments
        label = f"{name} {shards[shard]}"
        if self.schedule is not None:
            self.schedule.opening(0 if (loading := current.get()) is None else loading.epoch, shard)
        try:
            opened = opener(shards[shard], **({"start": first} if self._seeks else {}))
            is_indexed = (
                hasattr(opened, "__getitem__")
                and hasattr(opened, "__len__")
                and not isinstance(opened, IterableDataset)
            )
            if is_indexed and not self._seeks:
                return _IndexedShard(label, int(counts[shard]), opened)
            if not self._seeks and not self.owned:
                _say_if_read_by_all(label)
            again = functools.partial(opener, shards[shard])
            return ForwardShard(
                label, int(counts[shard]), again, opened, first if self._seeks else None, window, self._most_readers
            )
        except Exception as exc:
            annotate(exc, f"while opening {label}")
            raise

    def _tidy(self) -> None:
        """Close the shards that were read to their end, and the least recently used ones, down to the limits."""
        with self._lock:
            # the loop is not in here: Ctrl-C at its jump could leave the lock held (python/cpython#130279)
            gone = self._beyond()
        for one in gone:  # without the lock, because another thread may be reading from it
            one.close()

    def _beyond(self) -> list[_Shard]:
        """Remove and return the shards to close, least recently used first: each read moves its shard to the end."""
        gone = []
        # Handles beyond the limit, separately for each kind: a reader loses its position in the shard when it is
        # closed, so it must not make way for files that can be read anywhere. Shards that are being opened (None) stay.
        over = {_IndexedShard: -self._most_indexed, ForwardShard: -self._most_readers, type(None): 0}
        for one in self._shards.values():
            over[type(one.content)] += one.handles
        for shard, one in list(self._shards.items()):
            # Read to its end. A shard that has just been opened has no handles yet either, but its lock is held.
            is_done = one.handles == 0 and not one.lock.locked()
            if one.content is not None and (is_done or over[type(one.content)] > 0):
                over[type(one.content)] -= one.handles
                gone.append(self._shards.pop(shard))
        return gone


class _Shard:
    """One shard, from the first request to read it. ``lock`` is held while it is opened, read or closed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.content: _IndexedShard | ForwardShard | None = None
        self.handles = 0
        self.closed = False

    def close(self, *, wait: bool = True) -> None:
        with held_in_time(self.lock) if wait else contextlib.nullcontext(True) as may:
            self.closed = True
            if self.content is not None and may:  # otherwise it is collected when its reader has finished
                self.content.close()


class _IndexedShard:
    """A shard that can be read by position."""

    handles = 1

    def __init__(self, label: str, count: int, opened: Any) -> None:
        self._label = label
        self._opened = opened
        self._check = getattr(opened, "check_version", None)
        self._epoch: int | None = None
        if len(opened) != count:
            self.close()
            raise ValueError(differs(label, count, f"has {len(opened)}"))

    def read(self, numbers: Sequence[int], threads: int) -> list[Any]:
        """The records ``numbers``."""
        if self._check is not None:
            loading = current.get()
            epoch = None if loading is None else loading.epoch
            if epoch is None or epoch != self._epoch:  # once per epoch, because a file stays open across epochs
                self._check()
                self._epoch = epoch
        if callable(gather := getattr(self._opened, "__getitems__", None)):
            try:
                records = samples_in(self._opened, gather(list(numbers)), len(numbers), "or drop __getitems__")
            except Exception as exc:
                annotate(
                    exc,
                    f"in one of the records {', '.join(map(str, numbers[:8]))}{', …' if len(numbers) > 8 else ''} of "
                    f"{self._label}",
                )
                raise
            return list(records)
        records = []
        for number in numbers:
            try:
                records.append(self._opened[number])
            except Exception as exc:
                annotate(exc, f"in record {number} of {self._label}")
                raise
        return records

    def close(self) -> None:
        """Close the opened object, if it can be closed."""
        close(self._opened, Exception)


def _say_if_read_by_all(label: str) -> None:
    """Log once, in the first of several worker processes, that each of them reads every shard, because each batch has
    records of all lanes.
    """
    info = get_worker_info()
    if info is not None and info.num_workers > 1 and info.id == 0 and first_time("read by all"):
        log.warning(
            "%s can only be read forward, so each of the %d worker processes reads all shards from front to back. "
            'Write an index (python -m penstock index, for uncompressed files), or use method="thread", in which '
            "workers share what was read, or use one worker. If reading costs more than transform=, pass epoch_size= "
            "instead of counts=, which divides the shards among the workers.",
            label,
            info.num_workers,
        )


def most_files() -> int:
    """Half of the number of files that this process may open."""
    try:
        import resource  # not available on Windows
    except ImportError:
        return 256
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, files // 2) if files != resource.RLIM_INFINITY else 2**30


def has_start(open: Callable[..., Any]) -> bool:
    """Whether ``open`` has a parameter ``start``; ``**kwargs`` does not count."""
    try:
        parameter = inspect.signature(open).parameters.get("start")
    except (TypeError, ValueError):  # a builtin
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def reads_forward(open: Callable[..., Any]) -> bool:
    """Whether what ``open`` returns is read forward, as far as that is known before it is called."""
    known: bool = getattr(open, "reads_forward", has_start(open) or inspect.isgeneratorfunction(open))
    return known
