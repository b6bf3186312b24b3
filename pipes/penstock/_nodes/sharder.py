"""Sharder: this rank's share of the global sequence."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final, get_args

import numpy as np

from penstock._errors import GraphError, Once
from penstock._fetch.indices import Indices, joined
from penstock._nodes.balance import Costs, DealtTo, dealt, together
from penstock._nodes.index_node import IndexNode, index_of
from penstock._nodes.node import as_node, epoch_of, fields
from penstock._nodes.own_shares import OwnShares, inner_of
from penstock._nodes.ranks import Ranks
from penstock._nodes.tails import Tail, check_tail, part, repeats, share
from penstock._nodes.within import places_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy.typing as npt
    from torch.distributed.device_mesh import DeviceMesh

    from penstock._nodes.node import BaseNode, EndOfEpoch, Node, State


T = TypeVar("T", covariant=True)
Split = Literal["items", "batches", "within"]
log = logging.getLogger("penstock")


@final
class Sharder(IndexNode[T]):
    """Deal the items of ``source`` to the ranks, round by round.

    Its state is the source's state at the end of a round, so it is the same on every rank and loads on any number of
    ranks. There is one exception: with ``tail="exact"``, a rank without an item in the last round reports the end of
    the epoch before the others do. Rank 0 is never early.

    If a source can only be read from its beginning (`IterableSource`, or a torchdata node), its ``split`` is required.
    If it splits itself (``"own"``), all of its items are passed on, and ``tail`` has no effect. Its states then hold
    the world size, and also the rank if the source has its own ``state_dict``. They load only with the same values,
    except at the start of an epoch.

    Args:
        source: The global sequence, the same on every rank: samples, or whole batches of a batch sampler.
        rank: This process's number, from 0. If None, rank and world size are looked up at the first item: in ``mesh``,
            else in ``torch.distributed``, else in the environment variables ``RANK`` and ``WORLD_SIZE``, else rank 0
            of 1.
        world_size: The number of ranks that share the sequence.
        mesh: One dimension of a ``DeviceMesh``, such as ``mesh["dp"]``. Ranks with the same coordinate get the same
            items.
        split: ``"items"`` deals single items, like cards: item k goes to rank k mod world_size. ``"batches"`` deals
            whole batches: of ``world_size * n`` items, where ``n`` is the size of one read (a batch, if a `Batcher` is
            downstream), each rank gets ``n`` in a row. The same batches of all ranks hold the same items, so states do
            not differ. ``"within"`` deals the places of each batch, place j to rank j mod world_size. None:
            ``"items"``, unless `ask` is called.
        tail: How to handle a short last round of an epoch. ``"pad"`` fills it with items from the epoch's start, like
            ``DistributedSampler``; ``"drop"`` drops it; ``"exact"`` deals it as it is, so that ranks may differ by one
            item. None: ``"pad"``, unless `ask` is called.
        balance: The cost of each sample, by index: shape ``(n,)``. The items of one read (a batch, if a `Batcher` is
            downstream), or the samples of a whole round of a `KeyGrouper`, are then dealt so that they cost about the
            same on all ranks. All ranks together get the same as without it, and each rank as many.

    Raises:
        ValueError: On construction or at the first item, on all ranks alike: invalid numbers.
        GraphError: On construction: ``split="within"`` over a source that splits itself; ``balance`` with it, or with
            such a source. At the first item, on all ranks alike: ``tail="pad"`` over a source that cannot be read by
            position or does not know its length; several ranks, and a source with ``split=None``; ``tail="exact"`` over
            a source that carries over epochs.
        StateMismatch: At the first item: the source splits itself, and the state belongs to another rank or world size.
    """

    __module__ = "penstock.nodes"

    has_no_choice = False  # whether the source can only be dealt by items

    def __init__(
        self,
        source: BaseNode[T],
        rank: int | None = None,
        world_size: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        split: Split | None = None,
        tail: Tail | None = None,
        balance: npt.ArrayLike | Costs | None = None,
    ) -> None:
        check_tail(tail or "pad")
        if split not in (None, *get_args(Split)):
            raise ValueError(f"split={split!r} must be one of {get_args(Split)}.")
        self._ranks = Ranks(rank, world_size, mesh)
        self.check_group = self._ranks.check_group  # for each batch, so not by a method that calls it
        node = as_node(source)
        own = index_of(node).facts.sharded_by == "own"
        if split == "within" and own:
            raise GraphError(
                "split='within' would split batches that already belong to one rank, because the source has "
                "split='own'. Leave split='within' out."
            )
        self.split: Split = split or "items"
        self.tail: Tail = tail or "pad"
        self._split: Split | Literal["own"] = "own" if own else self.split
        self._left_open = {name for name, given in (("split", split), ("tail", tail)) if given is None}
        self._costs = balance if balance is None or isinstance(balance, Costs) else Costs(balance)
        if self._costs is not None and self._split != "items":
            raise GraphError(
                f"balance deals single items to the ranks, which split={self._split!r} does not. Leave one of them out."
            )
        self._opened = -1  # the epoch that `_open` has checked
        self._once = Once()
        costs = {} if self._costs is None else {"balance": self._costs.checksum}
        # one dict for all nodes downstream, which `ask` may change
        self._dealt = {"split": self._split, "tail": self.tail}
        # "batches" leads to the same states as "items"
        settings = {"split": "items" if self._split == "batches" else self._split}
        super().__init__(node, settings=settings, rank_settings={"dealt": self._dealt, **costs})
        self._shares = OwnShares(self.upstream, self._split == "own", self._ranks.now)
        if self._split in ("items", "batches"):
            self.first.dealt_to = DealtTo(self._ranks, self._costs)

    def details(self) -> dict[str, Any]:
        rank, world_size = self.ranks()
        balance = {} if self._costs is None else {"balance": True}
        return {"rank": rank, "world_size": world_size, "split": self._split, "tail": self.tail, **balance}

    def counted(self, items: int) -> int:
        return share(items, *self.ranks(), self.tail) if self._split in ("items", "batches") else items

    def start(self, epoch: int, after: State | None = None) -> State:
        place = self.upstream.start(epoch, after)
        return place if after is None else self._shares.owned(place)

    def left(self, place: State) -> int | None:
        return super().left(inner_of(place))

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[T], State]:
        if every != 1:
            raise GraphError("two Sharders in one graph would split the items twice. Remove one of them.")
        source, tail = self.upstream, self.tail
        rank, world_size = self._ranks.pinned or self.ranks()  # also called by a reader thread
        if world_size == 1:
            return source.read(place, n)
        if self._split == "own":
            items, behind = source.read(inner_of(place), n)
            return items, self._shares.owned(behind)
        if self.facts.sharded_by is None:
            raise GraphError(
                self.first.who_deals.format(
                    source=self.facts.settings.get("source", "the source"), world_size=world_size
                )
            )
        if self._split == "within":
            items, behind = source.read(place, n)
            return [places_of(batch, rank, world_size) for batch in items], behind
        if self.facts.in_rounds:
            return source.read(place, n, world_size, rank)
        if epoch_of(place) != self._opened:
            self._open(place)
        left = source.left(place)
        if self._costs is not None and n > 1 and (left is None or left >= world_size):
            return self._balanced(self._costs, place, n, left)
        if left is None:  # every rank reads all items of each round
            items, behind = source.read(place, n * world_size)
            if self._split == "batches":
                return items[slice(*part(len(items), rank, world_size, tail))], behind
            return items[rank::world_size][: share(len(items), rank, world_size, tail)], behind
        # Every rank requests as many rounds as rank 0, whose share is the largest. So the place moves by the same
        # number of items on each rank, and all ranks have the same state.
        rounds = min(n, share(left, 0, world_size, tail))
        if self._split == "batches":
            # The items of all ranks, because 1,600 of an order take no longer than a jump to this rank's.
            items, behind = source.read(place, rounds * world_size)
            begin, end = part(len(items), rank, world_size, tail)
            again, items = np.arange(max(begin, len(items)), end) - len(items), items[begin:end]
        else:  # with ``every`` and ``first``, the source computes this rank's items only
            items, behind = source.read(place, rounds, world_size, rank)
            short = repeats(tail) and len(items) < min(n, share(left, rank, world_size, tail))
            again = np.array([rank - left % world_size] if short else [], np.int64)
        rest = source.left(behind)
        if rest and share(rest, rank, world_size, tail) == 0:
            # This rank gets none of the rest: skip it, so that the state after this block says that the epoch is over.
            # With "drop" this happens on every rank, with "exact" only on those that the short round does not reach.
            behind = source.skip(behind)
        return self._padded(place, items, again) if len(again) else items, behind

    def peek(self, place: State, positions: np.ndarray) -> Sequence[T]:
        return self.upstream.peek(inner_of(place), positions)

    def at(self, epoch: int, positions: np.ndarray, *, wraps: bool = False) -> Sequence[Any]:
        return self.upstream.at(epoch, positions, wraps=self._split in ("items", "batches") and self.tail == "pad")

    def skip(self, place: State) -> State:
        return self._shares.owned(self.upstream.skip(inner_of(place)))

    def over(self, place: State) -> tuple[EndOfEpoch, State]:
        marker, behind = self.upstream.over(inner_of(place))
        return marker, self._shares.owned(behind)

    def check(self, state: Any) -> None:
        if isinstance(state, dict) and "world_size" in state:
            state = fields(state, source=dict, world_size=int, **({"rank": int} if "rank" in state else {}))["source"]
        self.upstream.check(state)

    def seek(self, place: State) -> State:
        _, world_size = self._ranks.pin()
        self._opened = -1
        place = self._shares.owned(self.upstream.seek(self._shares.checked(place)))
        if self._split == "own":
            self._shares.say()
        elif self.split != "within" and self.tail == "exact" and world_size > 1:
            log.info(
                "tail='exact' on several ranks: the state of a rank that has run out of items says that the epoch is "
                "over. Save the state of rank 0."
            )
        return place

    def ranks(self) -> tuple[int, int]:
        """The rank and the world size: those pinned when a reader was moved here, or those that a lookup would find
        now.
        """
        return self._ranks.now()

    @property
    def may_have_members(self) -> bool:
        """Whether `members` may ever return any."""
        return self._split != "own" and not self._ranks.is_given

    def members(self) -> Sequence[int]:
        """The ranks of the process group that read the same sequence as this one; see `Ranks.members`.

        Empty if the source splits itself.
        """
        return () if self._split == "own" else self._ranks.members()

    def ask(self, split: Split, tail: Tail) -> bool:
        """Deal so, where the arguments left it open and nothing was dealt yet.

        Returns:
            Whether it deals by ``split``.
        """
        if self._ranks.pinned is None and self._split != "own" and self._costs is None:
            if "split" in self._left_open and not self.has_no_choice:
                self.split = self._split = self._dealt["split"] = split
            if "tail" in self._left_open:
                self.tail = self._dealt["tail"] = tail
        return self._split == split

    def undivided(self) -> AbstractContextManager[None]:
        """In this context there is one rank, for counting. Nothing may be read."""
        return self._ranks.alone()

    def look_up_again(self) -> None:
        """Look up rank and world size again at the next `reset`, because the process group may have been recreated.

        Changes nothing by itself.
        """
        self._ranks.forget()

    def _open(self, place: State) -> None:
        """Check before each epoch that its items can be dealt, so that all ranks fail here instead of one rank at the
        end of the epoch.
        """
        if self.tail == "exact" and self.facts.carries_over_epochs:
            raise GraphError(
                "tail='exact' lets some ranks end an epoch before the others, but this source begins the next epoch "
                "where it was left, so the ranks would begin at different places. Use tail='drop': the items it leaves "
                "out begin the next epoch."
            )
        self.upstream.read(place, 0)  # makes a sampler plan the epoch, so that it knows its length
        if repeats(self.tail):
            try:
                self.upstream.peek(place, np.arange(0))
            except GraphError as error:
                others = "tail='drop'" if self.facts.carries_over_epochs else "tail='drop' or tail='exact'"
                share = (
                    ""
                    if self.facts.carries_over_epochs
                    else " If it already yields the share of this rank only, pass split='own' instead."
                )
                raise GraphError(f"{error}, which tail={self.tail!r} needs. Use {others}.{share}") from None
            if self.upstream.left(place) is None:
                raise GraphError(
                    f"tail={self.tail!r} needs a source that knows how many items an epoch has. Use tail='drop' or "
                    f"tail='exact'."
                )
        world_size, left = self.ranks()[1], self.upstream.left(place)
        if (
            self.tail == "drop"
            and not self.facts.carries_over_epochs
            and (left is None or left % world_size)
            and self._once("drop")
        ):
            of = f"up to {world_size - 1}" if left is None else f"{left % world_size} of {left:,}"
            level = logging.WARNING if "groups" in self.facts.settings else logging.INFO  # of groups it is the default
            log.log(
                level,
                "tail='drop': %s items at the end of this epoch are left out, because %d ranks get equally many.",
                of,
                world_size,
            )
        self._opened = epoch_of(place)

    def _balanced(self, costs: Costs, place: State, n: int, left: int | None) -> tuple[Sequence[T], State]:
        """Like `read`, but whole rounds are dealt by cost. A short last round is dealt as it is without."""
        (rank, world_size), source = self._ranks.pinned or self.ranks(), self.upstream
        few = together(world_size, n)
        apart = world_size // few  # rank r is in group ``r % apart``, which gets the items that its ranks would get
        if left is None:
            read, behind = source.read(place, n * world_size)
            whole = len(read) // world_size * world_size
            items: Sequence[T] = read[rank % apart : whole : apart]
            own = share(len(read) - whole, rank, world_size, self.tail)
            rest: Sequence[T] = read[whole + rank :: world_size][:own]
        else:
            rounds = min(n, left // world_size)
            items, behind = source.read(place, rounds * few, apart, rank % apart)
            rest, behind = self.read(behind, n - rounds)
        if not len(items):
            return rest, behind
        numbers = dealt(costs.of(items), few, rank // apart)
        chosen = items[numbers] if isinstance(items, Indices) else [items[number] for number in numbers.tolist()]
        return joined(chosen, rest), behind

    def _padded(self, place: State, items: Sequence[T], again: np.ndarray) -> Sequence[T]:
        """``items`` plus those numbered ``again`` from the epoch's start, because the short last round has too few.

        The first place of the round that has no item gets item 0 of the epoch, the next one item 1, and so on. ``peek``
        wraps around at the end of the epoch, which makes these positions ``total``, ``total + 1``, ….
        """
        total = self.upstream.left(self.upstream.start(epoch_of(place)))
        assert total is not None
        return joined(items, self.upstream.peek(place, total + again))


def ranks_of(root: Node[Any]) -> tuple[int, int]:
    """The rank and the world size of a graph; (0, 1) without a `Sharder`."""
    sharder = next((node for node in root.chain() if isinstance(node, Sharder)), None)
    return (0, 1) if sharder is None else sharder.ranks()
