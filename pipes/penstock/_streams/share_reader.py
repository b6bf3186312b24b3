"""ShareReader: the items that one worker of a `DataLoader` would yield in one pass, wherever they are read.

It iterates over a copy of the dataset, which sees itself as worker k of ``lanes`` in ``torch.utils.data.get_worker_info``. Torch has one worker info per process, so
it is set only while the copy works, and one thread at a time.

Each item is read with the global generators seeded by (seed, pass, worker, number), and restored afterwards. That costs 100 us, so a dataset that draws
nothing is only watched after a while. If it draws nevertheless, the share is read again, seeded: what it gave before was not drawn.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from torch.utils.data._utils import worker as torch_worker

from penstock._errors import is_own_error
from penstock._fetch.dataset_facts import is_stateful
from penstock._fetch.encoding import decoded
from penstock._random.global_rng import GlobalRngSnapshot, global_rngs_kept, seed_globals
from penstock._streams.share_states import StateTaker, checksum

if TYPE_CHECKING:
    from penstock._random.global_rng import States
    from penstock._streams.share_states import Mark
    from penstock._streams.worker_shares import WorkerShares

CALM: Final = 64
"""After so many items that drew nothing, a process stops seeding."""


class Share(NamedTuple):
    """What ``worker`` yields in pass ``pass_``; ``seed`` is that of the worker."""

    pass_: int
    worker: int
    seed: int


class LaneInfo(torch_worker.WorkerInfo):
    """What ``get_worker_info`` returns to a copy. Notes whether it was asked for what tells workers apart."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "seed"):
            object.__setattr__(self, "asked", True)
        return super().__getattribute__(name)


_one_at_a_time = threading.RLock()


def _forked() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.RLock()  # another thread of the parent may have held it
    if type(torch_worker._worker_info) is LaneInfo:
        torch_worker._worker_info = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def seen_as(info: LaneInfo) -> Iterator[None]:
    """In this context ``get_worker_info`` returns ``info``."""
    with _one_at_a_time:
        before, torch_worker._worker_info = torch_worker._worker_info, info
        try:
            yield
        finally:
            torch_worker._worker_info = before


@final
class ShareReader(Iterator[Any]):
    """The items of ``share``, from its beginning on. For one thread at a time.

    Attributes:
        share: What it reads.
        n: Items read.
        info: What its copy sees as the worker info.

    Args:
        of: Opens it, and is told what is observed.
        share: What to read.
        trial: Tell nobody, and keep no states.
    """

    def __init__(self, of: WorkerShares, share: Share, *, trial: bool = False) -> None:
        self.share = share
        self.n = 0
        self._of = of
        self._trial = trial
        self._ready: deque[Any] = deque()  # read to check a state
        self._taker = None if trial or of.states is None or not of.states.used else StateTaker(self, of.states)
        self._sums: list[str] | None = None if trial else []  # checksums of its first items, until they are enough
        self._open()

    def _open(self) -> None:
        share, self._data = self.share, self._of.copies()
        self.info = LaneInfo(id=share.worker, num_workers=self._of.lanes, seed=share.seed >> 1, dataset=self._data)
        object.__setattr__(self.info, "asked", False)
        self._iterator: Any = None

    @property
    def asked(self) -> bool:
        """Whether the copy has asked which worker it is."""
        return bool(object.__getattribute__(self.info, "asked"))

    def __next__(self) -> Any:
        try:
            item = self._ready.popleft() if self._ready else self._read(self.n)
        except StopIteration:
            if not self._trial:
                self._of.ended(self, self._data, self._sums)
            raise
        self.n += 1
        if self._sums is not None:
            self._sums.append(checksum(item))
            if self._of.begun(self, self._sums):
                self._sums = None
        if self._taker is not None and not self._ready:
            self._taker.after(item)
        return item

    @property
    def has_state(self) -> bool:
        """Whether the copy, or its iterator, has a state."""
        return self._holder() is not None

    def state(self) -> Any:
        """The state of the copy, or of its iterator; None if neither has one."""
        holder = self._holder()
        if holder is None:
            return None
        with seen_as(self.info):
            return holder.state_dict()

    def again(self, mark: Mark) -> ShareReader | None:
        """Another reader of the share, which stands at ``mark``; None if that does not lead to the same items."""
        for late in (False, True):  # some datasets begin afresh in __iter__, and take a state only then
            reader = ShareReader(self._of, self.share)
            if reader._restored(mark, late):
                return reader
            reader.close()
        return None

    def say(self, what: str, why: str) -> None:
        """Warn that the states of the dataset are not used."""
        self._of.warn_once(
            what,
            f"{self._of.name} (worker {self.share.worker}, item {self.n}): {why}, so it is not used, and a resumed run reads the data again, exactly. To save that time, "
            f"keep everything in the state that decides the next item, such as a shuffle buffer.",
        )

    def close(self) -> None:
        """Close the iterator of the copy."""
        iterator, self._iterator, self._data = self._iterator, iter(()), None
        close = getattr(iterator, "close", None)
        if callable(close):
            with contextlib.suppress(Exception):
                close()

    def _read(self, n: int) -> Any:
        seeding = self._of.seeding
        try:
            return seeding.read(self._next, self.share, n)
        except LateDraw:
            self.close()
            self._open()
            for before in range(n):
                seeding.read(self._next, self.share, before)
            return seeding.read(self._next, self.share, n)

    def _next(self) -> Any:
        with _one_at_a_time:  # `seen_as`, inlined
            before, torch_worker._worker_info = torch_worker._worker_info, self.info
            try:
                if self._iterator is None:
                    self._begin()
                return next(self._iterator)
            finally:
                torch_worker._worker_info = before

    def _begin(self) -> None:
        if self._of.told:
            self._data.set_epoch(self.share.pass_)
        self._iterator = iter(self._data)

    def _restored(self, mark: Mark, late: bool) -> bool:
        self._sums = self._taker = None
        try:
            state = decoded(json.loads(mark.state))
            with seen_as(self.info):
                if not late and is_stateful(self._data):
                    if self._of.told:
                        self._data.set_epoch(self.share.pass_)
                    self._data.load_state_dict(state)
                    self._iterator = iter(self._data)
                else:
                    self._begin()
                    self._holder().load_state_dict(state)
            for n in range(mark.n, mark.n + len(mark.sums)):
                self._ready.append(self._read(n))
        except Exception as exc:
            if not is_own_error(exc):
                raise
            return False
        self.n = mark.n
        self._taker = None if self._of.states is None else StateTaker(self, self._of.states)
        return [checksum(item) for item in self._ready] == mark.sums

    def _holder(self) -> Any:
        return next((one for one in (self._data, self._iterator) if is_stateful(one)), None)


class LateDraw(Exception):
    """An item drew from the global generators that was not seeded, because nothing had drawn before. They are as they were."""


@final
class ItemSeeding:
    """Seeds the global generators for each item, or makes sure that nothing draws from them. Of one process.

    Attributes:
        on: False never touches the generators.
        drew: Whether an item drew.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self.drew = False
        self._calm = 0  # items that drew nothing
        self._watch = GlobalRngSnapshot()

    def read(self, read: Callable[[], Any], share: Share, n: int) -> Any:
        """``read()``, with the generators seeded for item ``n`` of ``share``.

        Raises:
            LateDraw: They were not seeded, and it drew. From now on they are.
        """
        if not self.on:
            return read()
        before = None if self.drew or self._calm < CALM else self._watch.look()
        if before is None:
            with global_rngs_kept():
                seed_globals(share.seed, share.pass_, n)
                before = self._watch.look()
                try:
                    return read()
                finally:
                    self.drew = self.drew or before is None or self._watch.look() != before
                    self._calm += 1
        try:
            item = read()
        except BaseException as exc:
            self._check(before, raises=is_own_error(exc))
            raise
        self._check(before)
        return item

    def _check(self, before: States, *, raises: bool = True) -> None:
        if self._watch.look() != before:
            self.drew = True
            self._watch.put_back(before)
            if raises:
                raise LateDraw
