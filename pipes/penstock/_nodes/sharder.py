"""Sharder: this rank's share of the global sequence."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, final

import numpy as np
import torch.distributed

from penstock._arguments import whole_number
from penstock._errors import GraphError, StateMismatch
from penstock._fetch.indices import Indices
from penstock._nodes.node import Node, State, epoch_of, fields, place_of
from penstock._nodes.tails import Tail, check_tail, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from penstock._nodes.node import BaseNode


T = TypeVar("T", covariant=True)
log = logging.getLogger("penstock")

_WHO_DEALS = (
    "{source} can only be read from its beginning, so {world_size} ranks need to know who splits it. split='items': every rank reads all of it and "
    "gets its share. split='own': it gives each rank its own share, and nothing else is split. Pass split to from_dataset, or to the "
    "source: IterableSource(..., split=...)."
)


@final
class Sharder(Node[T]):
    """Deal the items of ``source`` to the ranks, round by round.

    Its state is the source's state at the end of a round, so it is the same on every rank and loads on any number of ranks. There is one
    exception: with ``tail="exact"``, a rank without an item in the last round reports the end of the epoch before the others do. Rank 0 is never
    early.

    If a source can only be read from its beginning (`IterableSource`, or a torchdata node), its ``split`` must say who deals. If it splits itself
    (``"own"``), all of its items are passed on, and ``tail`` has no effect. Its states then hold the world size, and also the rank if the source
    has its own ``state_dict``. They load only there, except at the start of an epoch.

    Args:
        source: The global sequence, the same on every rank: samples, or whole batches of a batch sampler.
        rank: This process's number, from 0. If None, rank and world size are looked up at the first item: in ``mesh``, else in
            ``torch.distributed``, else in the environment variables ``RANK`` and ``WORLD_SIZE``, else rank 0 of 1.
        world_size: The number of ranks that share the sequence.
        mesh: One dimension of a ``DeviceMesh``, such as ``mesh["dp"]``: ranks with the same place in it get the same items.
        split: ``"items"`` deals whole items; ``"within"`` deals the places of each batch, place j to rank j mod world_size.
        tail: How to handle a short last round of an epoch. ``"pad"`` fills it with items from the epoch's start, like
            ``DistributedSampler``; ``"drop"`` drops it; ``"exact"`` deals it as it is, so that ranks may differ by one item.

    Raises:
        ValueError: On construction or at the first item, on all ranks alike: numbers that make no sense.
        GraphError: On construction: ``split="within"`` over a source that splits itself. At the first item, on all ranks alike:
            ``tail="pad"`` over a source that cannot be read by position or does not know its length; several ranks, and a source
            that does not say who deals; ``tail="exact"`` over a source that `continues`.
        StateMismatch: At the first item: the source splits itself, and the state belongs to another rank or world size.
    """

    __module__ = "penstock"

    def __init__(
        self,
        source: BaseNode[T],
        rank: int | None = None,
        world_size: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        split: Literal["items", "within"] = "items",
        tail: Tail = "pad",
    ) -> None:
        super().__init__(source)
        check_tail(tail)
        if split not in ("items", "within"):
            raise ValueError(f"split={split!r} is neither 'items' nor 'within'.")
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank={rank!r} and world_size={world_size!r} go together: pass both, or neither to have them looked up.")
        if mesh is not None and (rank is not None or mesh.ndim != 1):
            raise ValueError(
                f"mesh must be one dimension, such as mesh['dp'], and cannot be combined with rank: it has {mesh.ndim} dimensions, rank={rank!r}."
            )
        if rank is not None and world_size is not None:
            rank, world_size = _checked_rank(rank, world_size, "the arguments")
        self._dealer = self.source.split_word()
        self._own = self._dealer == "own"
        if split == "within" and self._own:
            raise GraphError(
                "split='within' would split batches that already belong to one rank, because the source has split='own'. Leave it out."
            )
        self.split = split
        self.tail = tail
        self._given = None if rank is None or world_size is None else (rank, world_size)
        self._mesh = mesh
        self._group_of_mesh = None if mesh is None else process_group()
        self._pinned: tuple[int, int] | None = None
        self._anew = False  # the next reset looks the rank up again
        self._opened = False  # whether `_open` has checked this epoch
        self._said = False

    def details(self) -> dict[str, Any]:
        rank, world_size = self.ranks()
        return {"rank": rank, "world_size": world_size, "split": self._word, "tail": self.tail}

    def reset(self, initial_state: State | None = None) -> None:
        self._pinned, self._anew = self.ranks(), False
        if initial_state is not None:
            initial_state = self._checked_owner(initial_state)
        super().reset(initial_state)
        self._opened = False
        if self._own:
            self._say_own(self._pinned[1])
            return
        if self.split == "items" and self.tail == "exact" and self._pinned[1] > 1:
            log.info(
                "tail='exact' on several ranks: the state of a rank that has no more items says that the epoch is over. Save the state of rank 0."
            )

    def next(self) -> T:
        block = self.take(1)
        if len(block):
            return block[0]
        mark: T = next(self.source)
        self._opened = False
        return mark

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Sequence[T]:
        if every != 1:
            raise GraphError("two Sharders in one graph would split the items twice. Remove one of them.")
        rank, world_size = self._pinned_ranks
        if world_size == 1 or self._own:
            return self.source.take(n)
        if self._dealer is None:
            raise GraphError(_WHO_DEALS.format(source=self.source.settings().get("source", "the source"), world_size=world_size))
        if self.split == "within":
            return [self._places(batch) for batch in self.source.take(n)]
        if not self._opened:
            self._open()
        left = self.source.remaining()
        if left is None:
            return self._dealt_by_reading(n)
        # Every rank asks for as many rounds as rank 0, whose share is the largest. So the source moves by the same number of items on each rank,
        # and all ranks have the same state. With ``every`` and ``first`` the source computes this rank's items only.
        block = self.source.take(min(n, share(left, 0, world_size, self.tail)), every=world_size, first=rank)
        rest = self.source.remaining()
        if rest and share(rest, rank, world_size, self.tail) == 0:
            # This rank gets none of the rest: skip it, so that the state after this block says that the epoch is over. With "drop" that is so on
            # every rank; with "exact" only on those that the short round does not reach.
            if self.continues:
                self.source.finish()
            else:
                self.source.take(1, every=rest, first=rest)
        if self.tail == "pad" and len(block) < min(n, share(left, rank, world_size, "pad")):
            block = self._padded(block, left)
        return block

    def remaining(self, state: State | None = None) -> int | None:
        return self._share(self.source.remaining(None if state is None else _inner(state)))

    def items_per_epoch(self) -> int | None:
        return self._share(self.source.items_per_epoch())

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "split": self._word}

    def get_state(self) -> State:
        return self._owned(self.source.get_state())

    def start_of(self, epoch: int, after: State | None = None) -> State | None:
        state = super().start_of(epoch, after)
        return state if state is None or after is None else self._owned(state)

    def _owned(self, state: State) -> State:
        """``state``, with whose it is, where that matters."""
        if not self._own:
            return state
        rank, world_size = self.ranks()
        if world_size == 1 or self._anyones(state):
            return state
        return {"source": state, "world_size": world_size, **({"rank": rank} if self.source.rank_bound() else {})}

    def check(self, state: Any) -> None:
        if isinstance(state, dict) and "world_size" in state:
            state = fields(state, source=dict, world_size=int, **({"rank": int} if "rank" in state else {}))["source"]
        self.source.check(state)

    def choices(self) -> dict[str, Any]:
        return {**super().choices(), "split": self._word, "tail": self.tail}

    def ranks(self) -> tuple[int, int]:
        """The rank and the world size: those pinned at the reset, or those that a reset would find now."""
        if self._pinned is not None and not self._anew:
            return self._pinned
        if self._given is not None:
            return self._given
        group = process_group()
        if self._mesh is not None:
            if self._mesh.get_coordinate() is None:
                raise ValueError(
                    f"mesh has the ranks {self._mesh.mesh.tolist()!s:.80}, and this is rank {group and group[0]}, which has no place in it and so no share. Iterate on "
                    f"the ranks of the mesh only, or make the mesh of all ranks that read data."
                )
            return self._mesh.get_local_rank(), self._mesh.size()
        if group is not None:
            return group
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return 0, 1
        try:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except ValueError:
            came = f"RANK={os.environ['RANK']!r} and WORLD_SIZE={os.environ['WORLD_SIZE']!r}"
            raise ValueError(
                f"{came} in the environment must be whole numbers. Set both, or neither, or pass rank and world_size."
            ) from None
        return _checked_rank(rank, world_size, "the environment")

    def look_up_again(self) -> None:
        """Find rank and world size anew at the next `reset`, because the process group may have been made again. Changes nothing by itself."""
        self._anew = True

    def check_group(self) -> None:
        """Refuse to hand out what was dealt by other numbers than those of the process group. Asked before each delivery, by the thread that delivers.

        It is not asked when items are taken: what is in flight was taken before the group was made again, and a reader thread could find none in between.
        Costs 2 us.

        Raises:
            GraphError: The process group came up, or was made again, with other numbers than this loader, or its ``mesh``, began with.
        """
        if self._given is not None:
            return
        began, group = self._pinned if self._mesh is None else self._group_of_mesh, process_group()
        if group is None or began is None or group == began:
            return
        remedy = (
            "pass the same state to loader.load_state_dict on every rank, which takes the new rank"
            if self._mesh is None
            else "build another loader, with a mesh of the new group, and load the same state on every rank"
        )
        raise GraphError(
            f"this loader began as rank {began[0]} of {began[1]}, and torch.distributed now says rank {group[0]} of {group[1]}. Call init_process_group before "
            f"the first batch, or pass rank and world_size. If the process group was made again: {remedy}."
        )

    @property
    def _word(self) -> str:
        return "own" if self._own else self.split

    def _anyones(self, state: State) -> bool:
        """Whether ``state`` is the start or the end of an epoch, so that any rank may load it."""
        return state in (self.source.start_of(epoch_of(state)), self.source.end_of(epoch_of(state)))

    def _checked_owner(self, state: State) -> State:
        """The source's state. Where an epoch begins, one of another rank loses what that rank's source had come to.

        Raises:
            StateMismatch: It counts what another rank has read of its own share, or what was read at another world size.
        """
        inner = _inner(state)
        rank, world_size = self.ranks()
        saved = state.get("rank", rank), state.get("world_size", 1)
        owned = "world_size" in state or (self._own and not self._anyones(state))
        if not owned or (self._own and saved == (rank, world_size)):
            return inner
        epoch, after = place_of(inner) or (0, None)
        if after is not None and inner == self.source.start_of(epoch, after):
            return cast("State", self.source.start_of(epoch))
        whose = f"by rank {saved[0]} of {saved[1]}" if "rank" in state else f"at a world size of {saved[1]}"
        raise StateMismatch(
            f"this state was saved {whose}, and counts the items of a share that the source made itself; this is rank {rank} of {world_size}. "
            f"Load {'the state that this rank saved' if 'rank' in state else 'it'} at the same world size, or load none, and start another epoch with loader.set_epoch."
        )

    def _say_own(self, world_size: int) -> None:
        if world_size > 1 and self.source.rank_bound() and not self._said:
            self._said = True
            log.warning(
                "split='own', and the source has its own state_dict: each rank's state is its own, and loads only on that rank and at this world size. Save "
                "the states of all ranks."
            )

    @property
    def _pinned_ranks(self) -> tuple[int, int]:
        """What items are dealt by, until the next reset. A reader thread asks, too."""
        assert self._pinned is not None
        return self._pinned

    def _share(self, items: int | None) -> int | None:
        if items is None or self._word != "items":
            return items
        return share(items, *self.ranks(), self.tail)

    def _open(self) -> None:
        """Check before each epoch that its items can be dealt, so that all ranks fail here, and not a single rank at the end of the epoch."""
        if self.tail == "exact" and self.continues:
            raise GraphError(
                "tail='exact' lets some ranks end an epoch before the others, and this source begins the next one where it was left: the ranks would begin at "
                "different places. Use tail='drop': what it leaves out begins the next epoch."
            )
        self.source.take(0)  # makes a sampler plan the epoch, so that it knows its length
        if self.tail == "pad":
            self.source.at(np.arange(0))  # raises if the source cannot be read by position
            if self.source.items_per_epoch() is None:
                raise GraphError("tail='pad' needs a source that knows how many items an epoch has. Use tail='drop' or tail='exact'.")
        self._opened = True

    def _padded(self, block: Sequence[T], left: int) -> Sequence[T]:
        """``block`` plus one item from the epoch's start, because the short last round has none for this rank.

        The last round has ``left % world_size`` items, so the first rank without one gets item 0 of the epoch, the next rank item 1, and so on.
        ``at`` wraps around at the end of the epoch, which makes these positions ``total``, ``total + 1``, ….
        """
        rank, world_size = self._pinned_ranks
        total = self.source.items_per_epoch()
        assert total is not None
        missing = total + rank - left % world_size
        more = self.source.at(np.array([missing]))
        if isinstance(block, Indices) and isinstance(more, Indices):
            values = [*block.plain(), *more.plain()]
            return Indices(
                block.epoch,
                np.append(block.positions, more.positions),
                np.array(values) if isinstance(block.values, np.ndarray) else values,
            )
        return [*block, *more]

    def _dealt_by_reading(self, n: int) -> Sequence[T]:
        """This rank's part of the next ``n`` rounds, for a source that does not know its length: every rank reads all items of each round."""
        rank, world_size = self._pinned_ranks
        block = self.source.take(n * world_size)
        return block[rank::world_size][: share(len(block), rank, world_size, self.tail)]

    def _places(self, batch: Any) -> Any:
        rank, world_size = self._pinned_ranks
        if isinstance(batch, Indices) and not batch.is_batch:
            raise GraphError(
                "split='within' splits each batch, but the source yields single items. Pass a batch_sampler, or put the Batcher upstream of the Sharder."
            )
        if len(batch) % world_size:
            raise ValueError(
                f"split='within' needs batches that divide evenly: {len(batch)} places do not divide among {world_size} ranks. Use split='items'."
            )
        return batch[rank::world_size]


def _inner(state: State) -> State:
    """The source's part of a state."""
    inner: State = state["source"] if "world_size" in state else state
    return inner


def process_group() -> tuple[int, int] | None:
    """The rank and the world size that ``torch.distributed`` says; None if there is no process group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None


def _checked_rank(rank: int, world_size: int, where: str) -> tuple[int, int]:
    rank, world_size = whole_number("rank", rank, 0), whole_number("world_size", world_size, 1)
    if rank >= world_size:
        raise ValueError(f"rank={rank} and world_size={world_size} from {where} do not fit: the rank must be below the world size.")
    return rank, world_size
