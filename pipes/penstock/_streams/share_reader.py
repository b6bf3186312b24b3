"""ShareReader: the items that one worker of a `DataLoader` would yield in one pass, wherever they are read.

It iterates over a copy of the dataset, which sees itself as that worker in ``torch.utils.data.get_worker_info``. Torch
has one worker info per process, so it is set only while the copy works, and one thread at a time.

Each item is read with the global generators seeded by (seed, pass, worker, number), and restored afterwards. That costs
100 us, so a dataset that draws nothing is only watched after a while. If it draws nevertheless, the share is read
again, seeded: what came before was not drawn. A look takes 1 us in a loop, and 5 us after a sample that slept 1 ms. The
first item is always seeded, because a dataset may make a generator of its own from ``torch.initial_seed()`` there,
which no look notices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, final

from penstock._errors import SampleError, is_own_error, suppress_own
from penstock._fetch.dataset_copies import plain
from penstock._fetch.dataset_facts import is_stateful
from penstock._fetch.held import EndOfWalk
from penstock._fetch.reused import OwnMemory
from penstock._random.global_rng import GlobalRngSnapshot, global_rngs_kept, seed_globals
from penstock._random.sample_rng import epoch_word
from penstock._streams.share_states import checksum_of_item
from penstock._workers.lane_info import LaneInfo, next_as, seen_as

if TYPE_CHECKING:
    from penstock._fetch.dataset_copies import DatasetCopies
    from penstock._random.global_rng import States

T = TypeVar("T")

CALM: Final = 64
"""After so many items that drew nothing, a process stops seeding."""


class Share(NamedTuple):
    """What worker ``worker`` of ``lanes`` yields in pass ``pass_``; ``seed`` is that of the worker, for all passes."""

    pass_: int
    worker: int
    lanes: int
    seed: int

    def info(self, dataset: Any) -> LaneInfo:
        """What ``get_worker_info`` returns there; its seed is another one in each pass, as in each epoch of a
        `DataLoader`.
        """
        return LaneInfo(self.worker, self.lanes, epoch_word(self.seed, self.pass_), dataset)


@final
class ShareReader(Iterator[Any], EndOfWalk):
    """The items of ``share``, from its beginning on. For one thread at a time.

    Args:
        copies: Of the dataset.
        share: What to read.
        seeding: Of this process.
        init: Called with the worker's number for each copy, as a `DataLoader` calls its ``worker_init_fn``.

    Attributes:
        n: The number of the next item.
        data: The copy.
        attributes: Its plain ones, before it was read.
    """

    def __init__(
        self, copies: DatasetCopies, share: Share, seeding: ItemSeeding, init: Callable[[int], Any] | None = None
    ) -> None:
        self.n = 0
        self._ahead: deque[Any] = deque()  # items that `goes_to` has read
        self._copies = copies
        self._share = share
        self._seeding = seeding
        self._init = init
        self._open()

    def _open(self) -> None:
        self.data = self._copies()
        self._info = self._share.info(self.data)
        self._own = OwnMemory()
        self._iterator: Any = None
        self._next: Callable[[], Any] = self._begin_and_next
        self._begins = True  # nothing was read yet
        self.attributes: dict[str, Any] = {}

    def __next__(self) -> Any:
        if self._ahead:
            item = self._ahead.popleft()
        else:
            try:
                item = self._seeding.read(self._next, self._share, self.n, begins=self._begins)
            except LateDraw:
                item = self._read_again()
            self._begins = False
            item = self._own(item) if self._own.watches else item
        self.n += 1
        return item

    def _read_again(self) -> Any:
        self.close()
        self._open()
        for before in range(self.n):
            self._seeding.read(self._next, self._share, before)
        return self._seeding.read(self._next, self._share, self.n)

    @property
    def asked(self) -> bool:
        """Whether the copy has asked which worker it is."""
        return self._info.asked

    @property
    def holder(self) -> Any:
        """What has a state: the copy, or its iterator; None if neither has."""
        return next((one for one in (self.data, self._iterator) if is_stateful(one)), None)

    def state(self) -> Any:
        """The state of the `holder`, before item ``n``; None if there is none, or what came after that item was read
        already.
        """
        with seen_as(self._info):
            return None if self._ahead or self.holder is None else self.holder.state_dict()

    def goes_to(self, n: int, state: Any, sums: list[str], *, late: bool) -> bool:
        """Go to item ``n`` by ``state``, before anything is read.

        Returns whether the items with the checksums ``sums`` come next.

        ``late``: load the state after ``iter``, for a dataset that begins afresh there.
        """
        self.n = n
        try:
            self._seeding.read(partial(self._resume, state, late=late), self._share, 0, begins=True)
            items = [next(self) for _ in sums]
        except Exception as exc:
            if not is_own_error(exc):
                raise
            return False
        self.n = n
        self._ahead.extend(items)
        return [checksum_of_item(item) for item in items] == sums

    def close(self) -> None:
        """Close the iterator of the copy."""
        if callable(close := getattr(self._iterator, "close", None)):
            with suppress_own():
                close()

    def _begin_and_next(self) -> Any:
        with seen_as(self._info):
            self._begin()
        return self._next()

    def _resume(self, state: Any, *, late: bool) -> None:
        with seen_as(self._info):
            late = late or not is_stateful(self.data)
            self._begin(None if late else state)
            if late:
                self.holder.load_state_dict(state)

    def _begin(self, state: Any = None) -> None:
        try:
            if callable(tell := getattr(self.data, "set_epoch", None)):
                tell(self._share.pass_)
            if self._init is not None:  # after the epoch is set, as for a DataLoader's workers
                with global_rngs_kept() if self._seeding.on else nullcontext():
                    self._init(self._share.worker)
            self.attributes = plain(self.data)
            if state is not None:
                self.data.load_state_dict(state)
            self._iterator = iter(self.data)
            self._next = partial(next_as, self._info, self._iterator)
        except StopIteration as exc:  # it would pass for the end of the share
            raise SampleError(
                f"{type(self.data).__name__} raised StopIteration before its first item. Catch it there; a worker "
                f"without items returns an empty iterator."
            ) from exc


class LateDraw(Exception):
    """An item drew from the global generators that was not seeded, because nothing had drawn before.

    They are as they were.
    """


@final
class ItemSeeding:
    """Seeds the global generators for each item, or makes sure that nothing draws from them. Of one process.

    Attributes:
        on: False never touches the generators; "always" seeds each item.
        drew: Whether an item drew.
    """

    def __init__(self, on: bool | Literal["always"]) -> None:
        self.on = on
        self.drew = self._watched = False
        self._calm = 0 if on is True else -math.inf  # items that drew nothing; minus infinity: each is seeded
        self._watch = GlobalRngSnapshot()

    def several(self, read: Callable[[], T]) -> T:
        """``read()``, which reads several items of a share, and nothing else.

        Once nothing seems to draw, they are watched together.

        Raises:
            LateDraw: One of them drew. The share must be read again.
        """
        before = self._watch.look() if self._calm >= CALM else None
        if before is None:
            return read()
        self._watched = True
        try:
            items = read()
        except BaseException as exc:
            self._check(before, raises=is_own_error(exc))
            raise
        finally:
            self._watched = False
        self._check(before)
        return items

    def read(self, read: Callable[[], Any], share: Share, n: int, *, begins: bool = False) -> Any:
        """``read()``, with the generators seeded for item ``n`` of ``share``. ``begins``: in any case.

        Raises:
            LateDraw: They were not seeded, and it drew. From now on they are.
        """
        if not self.on or (self._watched and not begins):
            return read()
        before = self._watch.look() if self._calm >= CALM and not begins else None
        if before is None:
            with global_rngs_kept():
                seed_globals(share.seed, share.pass_, n)
                before = self._watch.look()
                try:
                    return read()
                finally:
                    self._calm += 1
                    if before is None or self._watch.look() != before:
                        self.drew, self._calm = True, -math.inf
        try:
            item = read()
        except BaseException as exc:
            self._check(before, raises=is_own_error(exc))
            raise
        self._check(before)
        return item

    def _check(self, before: States, *, raises: bool = True) -> None:
        if self._watch.look() != before:
            self.drew, self._calm = True, -math.inf
            self._watch.put_back(before)
            if raises:
                raise LateDraw

    def __reduce__(self) -> Any:
        return ItemSeeding, (self.on,)
