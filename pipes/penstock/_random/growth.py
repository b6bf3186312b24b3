"""Data that grow: what there was, from when on. What a run has begun to read of some of it, it ends with those."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from penstock._arguments import checksum
from penstock._errors import StateError
from penstock._random.lane_order import PASSES, Deal, InterleavedOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock._random.order import Order
    from penstock._random.permutation import Int64s
    from penstock._random.shard_order import Opens

_DEALS: Final = 2**48
"""More deals than a lane ever has from one list of shards."""


class Parts(NamedTuple):
    """What an epoch over the first few of a dataset's parts needs.

    Attributes:
        now: How many parts there are.
        noun: What they are, such as shards.
        order: The order over the first so many.
        settings: Those that identify the first so many. None: their number does.
        ends: How many samples the first 0, 1, 2, … parts have, int64. None: each has one.
    """

    now: int
    noun: str
    order: Callable[[int], Order]
    settings: Callable[[int], dict[str, Any]] | None = None
    ends: Int64s | None = None


DAMAGED: Final = "what the data have grown by is damaged in this state. Load an older one."


@final
class Growth:
    """How many parts there were, from when on.

    Args:
        now: How many there are. A run that begins uses all of them.
        noun: What they are.
        settings: Those that identify the first so many.

    Attributes:
        eras: Pairs of when and how many, both ascending. What "when" counts is its owner's: epochs, or items since the
            start of training.
    """

    def __init__(self, now: int, noun: str, settings: Callable[[int], dict[str, Any]]) -> None:
        self.now = now
        self._identify, self._told = settings, dict[int, dict[str, Any]]()
        self.eras: list[tuple[int, int]] = [(0, now)]
        self._noun = noun

    def settings(self, many: int) -> dict[str, Any]:
        """Settings that identify the first so many.

        Kept, because they go into each state and take long for many shards.
        """
        return self._told.get(many) or self._told.setdefault(many, self._identify(many))

    def at(self, when: int) -> int:
        """How many there were."""
        return self.eras[bisect_right(self.eras, when, key=itemgetter(0)) - 1][1]

    def goes_on(self, since: int) -> None:
        """From ``since`` on there are all that there are now."""
        if self.eras[-1][1] < self.now:
            self.eras = [*(era for era in self.eras if era[0] < since), (since, self.now)]

    def changes(self) -> dict[str, Any]:
        """See `Changing.changes`."""
        return {"grow": [list(era) for era in self.eras]}

    def adopt(self, changes: dict[str, Any]) -> None:
        """See `Changing.adopt`."""
        if changes.keys() - {"grow"}:
            raise ValueError(f"data that grow have no {', '.join(sorted(changes.keys() - {'grow'}))} to change.")
        eras = [(since, parts) for since, parts in changes.get("grow", [(0, self.now)])]
        if not eras or eras[0][0] or any(one[0] >= other[0] or one[1] >= other[1] for one, other in pairwise(eras)):
            raise StateError(DAMAGED)
        if eras[-1][1] > self.now:
            raise ValueError(
                f"there were {eras[-1][1]:,} {self._noun}, and now there are {self.now:,}. Data that grow keep what "
                f"they had, in its order, and have more behind it."
            )
        self.eras = eras

    def choices(self) -> dict[str, Any]:
        """See `Changing.choices`."""
        return {**self.changes(), "grown": self.settings(self.now)}

    def marks(self, *, again: bool = False) -> tuple[int, ...]:
        """See `PlainOrder.marks`."""
        return (int(checksum(repr(self.choices()).encode()), 16),)


WHY: Final = (
    "The ranks have found different data, because more arrived while they looked. Make one list for all of them, or "
    "let none arrive until the job has started."
)
"""Why ranks differ."""


@final
class GrowingDeal:
    """The deal of shards of which there are more and more.

    A lane that has read its share of a pass goes on with the shards of the next era once that has begun: at the pass's
    last shard, its first item comes at or behind that. The passes of an era are counted from 0, so every lane reads its
    whole share of every pass that it begins, and each shard comes once in each pass of an era, however far apart the
    lanes are.

    Args:
        eras: Pairs of an item, a multiple of ``lanes``, and the number of shards from there on.
        lanes: See `Deal`.
        shuffle: See `Deal`.
        seed: See `Deal`.
    """

    def __init__(self, eras: Sequence[tuple[int, int]], lanes: int, *, shuffle: bool, seed: int) -> None:
        self.shards = eras[-1][1]
        self.lanes, self.shuffle, self.seed = lanes, shuffle, seed
        self._begins = [since // lanes for since, _ in eras]
        self._deals = [Deal(shards, lanes, shuffle=shuffle, seed=seed) for _, shards in eras]

    def __getitem__(self, deal: int) -> tuple[int, int]:
        era, number = divmod(deal, _DEALS)
        pass_, shard = self._deals[era][number]
        return era * PASSES + pass_, shard

    def after(self, deal: int, first: int) -> int:
        """See `Deal.after`."""
        era, number = divmod(deal, _DEALS)
        shards = self._deals[era].shards
        if (number + self.lanes) // shards > number // shards and (
            latest := bisect_right(self._begins, first) - 1
        ) > era:
            return latest * _DEALS + number % self.lanes
        return deal + self.lanes

    def shards_with(self, deal: int) -> int:
        """See `Deal.shards_with`."""
        return self._deals[deal // _DEALS].shards

    def opens(self, pass_: int) -> Opens:
        """See `Deal.opens`."""
        era, number = divmod(pass_, PASSES)
        opens = self._deals[min(era, len(self._deals) - 1)].opens(number)
        return opens._replace(times=opens.times + era * PASSES)


@final
class GrowingLanes(InterleavedOrder):
    """An `InterleavedOrder` of shards of which there are more and more.

    Args:
        lanes: See `Stream`.
        epoch_size: See `Stream`.
        settings: See `InterleavedOrder`, without what says how many shards there are.
        take: See `InterleavedOrder`.
        growth: In items since the start of training, multiples of ``lanes``.
        dealt: Called when a run goes on after it has changed.
    """

    why_ranks_differ = WHY

    def __init__(
        self,
        lanes: int,
        epoch_size: int,
        settings: dict[str, Any],
        take: Callable[[], None],
        growth: Growth,
        dealt: Callable[[], None],
    ) -> None:
        super().__init__(lanes, epoch_size, settings, take, growth.marks)
        self._growth, self._dealt_for = growth, growth.eras
        self._dealt = dealt

    def settings_at(self, epoch: int, position: int) -> dict[str, Any]:
        """See `ScheduledOrder.settings_at`."""
        return self.settings_of(epoch) | self._growth.settings(self._growth.at(position))

    def changes(self) -> dict[str, Any]:
        """See `Changing.changes`."""
        return self._growth.changes() | super().changes()

    def choices(self) -> dict[str, Any]:
        """See `Changing.choices`."""
        return self._growth.choices() | super().choices()

    def presumed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """See `Changing.presumed`."""
        grow = {"grow": [[0, settings["shards"]]]} if "shards" in settings else {}
        return grow | super().presumed(settings)

    def adopt(self, changes: dict[str, Any]) -> None:
        """See `Changing.adopt`."""
        before = self._growth.eras
        super().adopt({name: value for name, value in changes.items() if name == "epochs"})
        self._growth.adopt({name: value for name, value in changes.items() if name != "epochs"})
        eras = self._growth.eras
        if eras[0][1] < self.lanes or any(since % self.lanes for since, _ in eras):
            self._growth.eras = before
            raise StateError(DAMAGED)

    def resume_at(self, epoch: int, position: int, sample: int) -> None:
        """See `Changing.resume_at`."""
        super().resume_at(epoch, position, sample)
        self._growth.goes_on(-(-sample // self.lanes) * self.lanes)
        if self._dealt_for != self._growth.eras:
            self._dealt_for = self._growth.eras
            self._dealt()
