"""The order of a weighted mix: exact shares, no resonance with ranks, and random access."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from fractions import Fraction
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np

from penstock._arguments import checksum, joined, whole_number
from penstock._random.endless_order import EndlessOrder
from penstock._random.mix_layout import Blocks, laid_out
from penstock._random.mix_stages import stage_at, stages_of
from penstock._random.orders import LONGEST, check_positions, checked_seed
from penstock._random.permutation import MIXED, Int64s, by_group, philox_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock._random.mix_stages import Stage, Weights
    from penstock._random.order import Order

_AT_ONCE = 2**16
"""Number of items laid out at once: few enough for the processor's cache."""


@final
class MixOrder(EndlessOrder):
    """Mix several orders by weight: an endless sequence, cut into epochs of ``epoch_size`` items.

    Each source is endless too: one pass over its order after another. A new epoch continues every source where the
    previous epoch left it.

    *Shares.* Items come in blocks of 1024 (more if a weight is below 1/1024, up to 2**20). Each block holds as many
    items of each source as keep the total within 1 of the exact share; see `Stage`. *Within a block* the items of a
    source are spread evenly, with jitter: item i of q gets the time ``(i + u) / q + phi`` modulo 1, with u and phi
    uniform, and the block is sorted by time. Then each 64 neighbours are permuted, because otherwise two equal sources
    would nearly alternate, and one of two ranks would get mostly the first. So a source's count is never off by more
    than about a dozen items, and a rank's share is as random as with independent draws.

    Args:
        orders: The order of each source, by name.
        weights: The weight of each source, with any sum: ``{"web": 7, "code": 3}``. Or stages, each with the item at
            which it starts, counted from the start of training: ``[(0, {…}), (80_000_000, {…})]``. A weight of 0, or
            none, excludes the source from that stage.
        epoch_size: Items in an epoch. ``"first"`` ends the first epoch before any source would repeat an item,
            ``"all"`` before the last one would. Default: the sum of the lengths of the orders in the first stage.
        seed: From 0 to 2**63 - 1.
        run: How many consecutive items come from the same source. It must divide ``epoch_size`` and the starts of the
            stages.
        sizes: The length of each source's dataset, if it differs from the length of its order. The index of sample i of
            a source is i plus the lengths of the datasets before it, sorted by name.
        data: More that identifies each source's data: checksums by name, as `DatasetFacts.names` has them.

    Attributes:
        added: The stages that `restage` has added, each with its start.

    Raises:
        ValueError: Weights are invalid or match no source; a source is empty; or ``run`` does not divide
            ``epoch_size``.
    """

    __module__ = "penstock._random.mix_order"

    def __init__(
        self,
        orders: Mapping[str, Order],
        weights: Weights | Sequence[tuple[int, Weights]],
        epoch_size: int | Literal["first", "all"] | None = None,
        seed: int = 0,
        run: int = 1,
        sizes: Mapping[str, int] | None = None,
        data: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.names = sorted(orders)
        self._seed = checked_seed(seed)
        self.run = self.grain = whole_number("run", run, 1, LONGEST)
        if not self.names:
            raise ValueError("a mix needs at least one source, but got none.")
        self._planned = stages_of(weights, self.names, self.run)
        self._orders = [orders[name] for name in self.names]
        self.lengths = [len(order) for order in self._orders]
        if 0 in self.lengths:
            raise ValueError(f"the source {self.names[self.lengths.index(0)]!r} has a weight but no items. Remove it.")
        self._sized = sized = self.lengths if sizes is None else [sizes[name] for name in self.names]
        self._data = data or {}
        self._offsets = np.cumsum([0, *sized[:-1]])
        self.read_ahead = min(
            _AT_ONCE, max(4096, 1024 * len(self.names))
        )  # one call to each source's order costs 50 us, so it should serve many items
        self._kept: tuple[int, int, Blocks] | None = None
        self.stages: list[Stage] = []
        self.added: list[tuple[int, Weights]] = []
        self._added: list[Stage] = []
        self._keys: list[Any] = []
        self._counts: list[list[int]] = []  # runs of each source before each stage
        self._used: list[list[bool]] = []  # whether each source has a share in a stage or an earlier one
        self._said_at: dict[int, dict[str, Any]] = {}
        self.restage([])
        self._n = self._epoch_size(epoch_size)
        self._sources = [
            [name, size, order.settings()] for name, size, order in zip(self.names, sized, self._orders, strict=True)
        ]
        self._said = {"order": "mix", "length": self._n, "seed": self._seed, "run": self.run}

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """See `Order.indices`."""
        check_positions(positions, self.length_of(epoch))
        out = np.empty(len(positions), np.int64)
        runs = positions if self.run == 1 else positions // self.run
        first = self.begin_of(epoch) // self.run  # the epoch's first run: a Python int, because it may exceed 64 bits
        if not len(runs):
            return out
        begun = [bisect_right(self.stages, first + int(run), key=_start_of) for run in (runs.min(), runs.max())]
        for number in range(begun[0] - 1, begun[1]):
            stage, chosen = self.stages[number], slice(None)  # type: Stage, Any
            if begun[0] < begun[1]:
                end = self.stages[number + 1].start - first if number + 1 < len(self.stages) else LONGEST
                chosen = np.flatnonzero((runs >= max(0, stage.start - first)) & (runs < max(0, min(end, LONGEST))))
            if (those := runs[chosen]).size:
                within = 0 if self.run == 1 else positions[chosen] % self.run
                out[chosen] = self._indices(number, first + int(those.min()) - stage.start, those - those.min(), within)
        return out

    def details(self) -> dict[str, Any]:
        return {
            "sources": self.names,
            "stages": len(self.stages),
            "epoch_size": self._n,
            "run": self.run,
            "seed": self._seed,
        }

    def settings(self) -> dict[str, Any]:
        """See `Order.settings`."""
        return {**self._said, **self._begun(len(self.stages))}

    def settings_at(self, epoch: int, position: int) -> dict[str, Any]:
        """See `ScheduledOrder.settings_at`."""
        run = -(-(self.begin_of(epoch) + position) // self.run)
        return self.settings_of(epoch) | self._begun(bisect_left(self.stages, run, key=_start_of))

    def choices(self) -> dict[str, Any]:
        """See `Changing.choices`."""
        return {"stages from": [stage.start * self.run for stage in self.stages], **super().choices()}

    def changes(self) -> dict[str, Any]:
        """See `Changing.changes`."""
        return {**({"stages": self.added} if self.added else {}), **super().changes()}

    def adopt(self, changes: dict[str, Any]) -> None:
        """See `Changing.adopt`."""
        added = [(start, weights) for start, weights in changes.get("stages", ())]
        was = self._eras
        super().adopt({name: value for name, value in changes.items() if name != "stages"})
        try:
            self.restage(added)
        except BaseException:
            self._eras = was
            raise

    def restage(self, added: list[tuple[int, Weights]]) -> None:
        """Replace the stages that were added to those of the plan. One that starts where another does replaces it."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(added, self.added, strict=False)))
        stages = self._added[:same] + [
            stage_at(start, weights, self.names, self.run) for start, weights in added[same:]
        ]
        merged = sorted({stage.start: stage for stage in (*self._planned, *stages)}.values(), key=_start_of)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(merged, self.stages, strict=False)))
        was = vars(self).copy()
        try:
            self.stages, self.added, self._added, self._kept = merged, added, stages, None
            self._keys, self._counts, self._used = self._keys[:kept], self._counts[:kept], self._used[:kept]
            self._said_at = {begun: entries for begun, entries in self._said_at.items() if begun <= kept}
            for number in range(kept, len(merged)):
                before = self._used[-1] if number else [False] * len(self.names)
                self._used.append([share > 0 or before[source] for source, share in enumerate(merged[number].shares)])
                self._keys.append(philox_words(self._seed, number, MIXED, 6))
                self._counts.append(
                    self._runs_before(number - 1, merged[number].start) if number else [0] * len(self.names)
                )
        except BaseException:  # Ctrl-C
            vars(self).update(was)
            raise

    def expected(self, begin: int, end: int) -> dict[str, Fraction]:
        """The exact shares of the sources in the items from ``begin`` to ``end - 1``."""
        starts = [*(stage.start * self.run for stage in self.stages), end]
        items = [max(0, min(end, until) - max(begin, start)) for start, until in pairwise(starts)]
        taken = [*zip(items, self.stages, strict=True)]
        return {
            name: sum((n * stage.shares[source] for n, stage in taken), Fraction(0))
            for source, name in enumerate(self.names)
        }

    def _indices(self, number: int, start: int, runs: Int64s, within: Int64s | int) -> Int64s:
        """Dataset indices of ``runs``, counted from run ``start`` of a stage; ``within``: places in their runs."""
        stage = self.stages[number]
        block, place = divmod(start, stage.block)
        at = runs + place
        sources, numbers = np.empty(len(at), np.uint16), np.empty(len(at), np.int64)
        row_of = at // stage.block
        rows = np.sort(row_of)
        rows = rows[np.diff(rows, prepend=-1) > 0]  # like np.unique, which imports numpy.ma: 10 ms
        counts = stage.before(block)
        most = max(1, _AT_ONCE // stage.block)
        for some in (rows[begin : begin + most] for begin in range(0, len(rows), most)):
            # All of them in one call, even if they are far apart, like those of one rank of many: each call costs as
            # much as two blocks.
            those = [block + row for row in some.tolist()]
            blocks = self._laid_out(number, those)
            chosen: Any = (
                slice(None) if len(some) == len(rows) else np.flatnonzero((row_of >= some[0]) & (row_of <= some[-1]))
            )
            row, place_in = np.searchsorted(some, row_of[chosen]), at[chosen] % stage.block
            source = sources[chosen] = blocks.sources[row, place_in]
            since = np.array(
                [[then - now for then, now in zip(stage.before(one), counts, strict=True)] for one in those]
            )
            numbers[chosen] = blocks.numbers[row, place_in] + since[row, source]
        numbers *= self.run
        numbers += within
        out = np.empty(len(at), np.int64)
        for source, chosen in by_group(sources):
            base = self.run * (self._counts[number][source] + counts[source])
            first, place = divmod(base, self.lengths[source])
            out[chosen] = self._offsets[source] + over_passes(
                self._orders[source], self.lengths[source], first, numbers[chosen] + place
            )
        return out

    def _laid_out(self, number: int, those: Sequence[int]) -> Blocks:
        """Some blocks of a stage. The last one is kept, because the next call usually starts in the middle of it."""
        kept = self._kept
        if len(those) == 1 and kept is not None and kept[:2] == (number, those[0]):
            return kept[2]
        blocks = laid_out(self.stages[number], those, self._keys[number], self._used[number])
        self._kept = number, those[-1], Blocks(blocks.sources[-1:], blocks.numbers[-1:])
        return blocks

    def _runs_before(self, number: int, run: int) -> list[int]:
        """How many runs of each source come before ``run``, which lies in a stage or at its end."""
        stage = self.stages[number]
        block, place = divmod(run - stage.start, stage.block)
        counts = [whole + count for whole, count in zip(self._counts[number], stage.before(block), strict=True)]
        if place:
            blocks = self._laid_out(number, [block])
            partial = np.bincount(blocks.sources[0, :place], minlength=len(counts)).tolist()
            counts = [count + more for count, more in zip(counts, partial, strict=True)]
        return counts

    def _epoch_size(self, asked: int | Literal["first", "all"] | None) -> int:
        if asked is None:
            return max(1, sum(self.lengths[source] for source in self.used(1)) // self.run) * self.run
        if asked in ("first", "all"):
            up = asked == "all"
            places = [self._place_of(source, length // self.run) for source, length in enumerate(self.lengths)]
            if up and None in places:
                raise ValueError(
                    f"stop='all': the source {self.names[places.index(None)]!r} has no weight in the last stage and "
                    f"does not finish before it. Use epoch_size."
                )
            # The first run with a repeated item is excluded; for "all" it is kept if some of its items are new.
            found = [
                place + (up and self.lengths[source] % self.run > 0)
                for source, place in enumerate(places)
                if place is not None
            ]
            n = (max(found) if up else min(found)) * self.run
            if not n:
                raise ValueError(f"stop='first': run={self.run} is longer than a source. Use epoch_size.")
            return n
        n = whole_number("epoch_size", asked, 1, LONGEST + 1, "Or pass stop='first' or stop='all' to Mix.")
        if n % self.run:
            raise ValueError(
                f"epoch_size={n} is not a multiple of run={self.run}. Make it {n // self.run * self.run or self.run}."
            )
        return n

    def _place_of(self, source: int, count: int) -> int | None:
        """The run that is number ``count`` of ``source``; None if there is none."""
        number = bisect_right(self._counts, count, key=lambda counts: counts[source]) - 1
        stage, rest = self.stages[number], count - self._counts[number][source]
        if not (share := stage.shares[source]):
            return None
        block = int(rest / (share * stage.block))
        block += stage.before(block + 1)[source] <= rest  # at a block's end a source is off by less than 1
        places = np.flatnonzero(self._laid_out(number, [block]).sources[0] == source)
        return stage.start + block * stage.block + int(places[rest - stage.before(block)[source]])

    def used(self, begun: int) -> list[int]:
        """The numbers of the sources that the first ``begun`` stages use. Those of the first stage always count."""
        return [source for source, used in enumerate(self._used[max(begun, 1) - 1]) if used]

    def _begun(self, begun: int) -> dict[str, Any]:
        """The settings that the first ``begun`` stages depend on: their shares, and the sources that they use."""
        if begun not in self._said_at:
            used = self.used(begun)
            self._said_at[begun] = {
                "stages": checksum_of(
                    [[stage.start, [str(stage.shares[source]) for source in used]] for stage in self.stages[:begun]]
                ),
                "sources": checksum_of([self._sources[source] for source in used]),
                "dataset_length": sum(self._sized[source] for source in used),
                **data_of(self._data, [self.names[source] for source in used]),
            }
        return self._said_at[begun]


def over_passes(order: Order, length: int, first: int, at: Int64s) -> Int64s:
    """The items ``at`` of an endless sequence, one pass over ``order`` after another, counted from the beginning of its
    pass ``first``.
    """
    passes = at // length
    several = passes.min() < passes.max()
    out = np.empty(len(at), np.int64)
    for one in sorted(set(passes.tolist())) if several else [int(passes[0])]:
        chosen: Any = np.flatnonzero(passes == one) if several else slice(None)
        out[chosen] = order.indices((first + one) % 2**63, at[chosen] - one * length)
    return out


def _start_of(stage: Stage) -> int:
    return stage.start


def data_of(data: Mapping[str, Mapping[str, str]], used: Sequence[str]) -> dict[str, str | None]:
    """What identifies the data of the sources ``used``, by name. None where nothing does."""
    names = sorted({name for of_source in data.values() for name in of_source})
    return {name: joined([data[source][name] for source in used if name in data[source]]) for name in names}


def checksum_of(said: Any) -> str:
    return checksum(json.dumps(said, sort_keys=True).encode())


def source_seed(seed: int, name: str) -> int:
    """The seed of one source of a mix.

    With one seed for all, sources of equal length would be shuffled in the same way.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()) >> 1
