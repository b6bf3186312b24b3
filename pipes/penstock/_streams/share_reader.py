"""ShareReader: the items that one worker of a `DataLoader` would yield in one pass, wherever they are read.

It iterates over a copy of the dataset, which sees itself as that worker in ``torch.utils.data.get_worker_info``. Torch
has one worker info per process, so it is set only while the copy works, and one thread at a time.

Each item is read with the global generators seeded by (seed, pass, worker), and restored afterwards; behind the first
item that draws, by the number of the item as well. So a dataset that only looks at them, or draws once, in ``iter``,
finds the same in each item of the share, as in a worker of a `DataLoader`. The seed of worker k is that of worker 0
plus k, as there: some datasets subtract k, to shuffle alike in all workers. It is also what ``torch.initial_seed()``
returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, final

from penstock._errors import is_own_error, suppress_own
from penstock._fetch.dataset_copies import plain
from penstock._fetch.dataset_facts import is_stateful
from penstock._fetch.error_policy import stopped_early
from penstock._fetch.held import EndOfWalk
from penstock._fetch.reused import OwnMemory
from penstock._fetch.told_parts import told_in
from penstock._random.global_rng import (
    GlobalRngSnapshot,
    RngImage,
    forget_interrupted,
    global_rngs_kept,
    note_watched,
    seed_share,
)
from penstock._streams.share_states import checksum_of_item
from penstock._workers.lane_info import LaneInfo, next_as, seen_as

if TYPE_CHECKING:
    from penstock._fetch.dataset_copies import DatasetCopies

T = TypeVar("T")


class Share(NamedTuple):
    """What worker ``worker`` of ``lanes`` yields in pass ``pass_``; ``seed`` is that of its worker info."""

    pass_: int
    worker: int
    lanes: int
    seed: int

    def info(self, dataset: Any) -> LaneInfo:
        """What ``get_worker_info`` returns there."""
        return LaneInfo(self.worker, self.lanes, self.seed, dataset)


@final
class ShareReader(Iterator[Any], EndOfWalk):
    """The items of ``share``, from its beginning on. For one thread at a time.

    Args:
        copies: Of the dataset.
        share: What to read.
        seeding: Of this process.
        init: Called with the worker's number for each copy, as a `DataLoader` calls its ``worker_init_fn``.

    Attributes:
        share: What is read.
        n: The number of the next item.
        drew: Whether an item before it drew from the global generators.
        base: The generators as they are seeded until then, once known.
        data: The copy.
        attributes: Its plain ones, before it was read.
    """

    def __init__(
        self, copies: DatasetCopies, share: Share, seeding: ItemSeeding, init: Callable[[int], Any] | None = None
    ) -> None:
        self.n = 0
        self.share = share
        self.drew = False
        self.base: RngImage | None = None
        self._ahead: deque[Any] = deque()  # items that `goes_to` has read
        self._seeding = seeding
        self._init = init
        self.data, self._left = copies(), copies.left
        self._info = share.info(self.data)
        self._own = OwnMemory()
        self._iterator: Any = None
        self._next: Callable[[], Any] = self._begin_and_next
        self.attributes: dict[str, Any] = {}

    def __next__(self) -> Any:
        if self._ahead:
            item = self._ahead.popleft()
        else:
            item = self._seeding.read(self._next, self)
            item = self._own(item) if self._own.watches else item
        self.n += 1
        return item

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

    def goes_to(self, n: int, drew: bool, state: Any, sums: list[str], *, late: bool) -> bool:
        """Go to item ``n`` by ``state``, before anything is read.

        Returns whether the items with the checksums ``sums`` come next. ``drew``: whether an item before it did.

        ``late``: load the state after ``iter``, for a dataset that begins afresh there.
        """
        self.n = n
        try:
            self._seeding.read(partial(self._resume, state, late=late), self)
            self.drew = drew
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
            for path, one in told_in(self.data).items():
                if path not in self._left:
                    one.set_epoch(self.share.pass_)
            if self._init is not None:  # after the epoch is set, as for a DataLoader's workers
                with global_rngs_kept() if self._seeding.on else nullcontext():
                    self._init(self.share.worker)
            self.attributes = plain(self.data)
            if state is not None:
                self.data.load_state_dict(state)
            self._iterator = iter(self.data)
            self._next = partial(next_as, self._info, self._iterator)
        except StopIteration as exc:
            raise stopped_early(self.data) from exc


@final
class ItemSeeding:
    """Seeds the global generators for the items of shares, and restores them. Of one process.

    Args:
        on: False never touches the generators; "always" seeds each item by its number, from the first one on.

    Attributes:
        on: As above.
        drew: Whether an item drew.
    """

    def __init__(self, on: bool | Literal["always"]) -> None:
        self.on = on
        self.drew = False
        self._watch = GlobalRngSnapshot()
        self._outside: RngImage | None = None  # the generators as they were when `several` began
        self._began: Any = None  # the marks when the last item in it began, or itself, if NumPy keeps no deviate then
        self._several = False  # whether it runs

    def several(self, read: Callable[[], T]) -> T:
        """``read()``, which reads items of shares and nothing else, so that the generators are restored only once."""
        if not self.on or self._several:
            return read()
        if self._outside is None or self._outside.states != self._watch.look():
            self._outside = RngImage(self._watch)
        outside = self._outside
        noted, self._several = note_watched(outside.states), True
        self._began = outside.marks if outside.is_plain else None
        try:
            return read()
        finally:
            outside.put(drawn=self._watch.marks != self._began)
            self._several = False
            if noted:
                forget_interrupted()

    def read(self, read: Callable[[], Any], reader: ShareReader) -> Any:
        """``read()``, with the generators seeded for the next item of ``reader``."""
        if not self.on:
            return read()
        if not self._several:
            return self.several(partial(self.read, read, reader))
        watch, number = self._watch, reader.n if reader.drew or self.on == "always" else None
        if number is not None or reader.base is None:
            seed_share(reader.share.seed, number)
            if number is None:
                reader.base = RngImage(watch)
        elif (now := watch.marks) != reader.base.marks:
            reader.base.put(drawn=now != self._began)
        self._began = watch.marks if reader.base is None or number is not None else reader.base.marks
        try:
            return read()
        finally:
            now = watch.marks
            if not reader.drew and (now is None or now != self._began):
                reader.drew = self.drew = True

    def __reduce__(self) -> Any:
        return ItemSeeding, (self.on,)
