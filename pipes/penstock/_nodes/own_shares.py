"""OwnShares: which rank may load a position in a source that splits itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final

from penstock._errors import Once, StateMismatch
from penstock._nodes.node import epoch_of, place_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._nodes.index_node import IndexNode
    from penstock._nodes.node import State

log = logging.getLogger("penstock")


@final
class OwnShares:
    """Adds to a place whose it is: the world size, and the rank if the source has a state of its own.

    Args:
        source: The source that is read.
        own: Whether it splits itself; otherwise a place is everybody's.
        ranks: Returns rank and world size.
    """

    def __init__(self, source: IndexNode[object], own: bool, ranks: Callable[[], tuple[int, int]]) -> None:
        self._source, self._own, self._ranks = source, own, ranks
        self._once = Once()

    def owned(self, place: State) -> State:
        """``place`` with its owner, if it has one."""
        if not self._own:
            return place
        rank, world_size = self._ranks()
        if world_size == 1 or self._anyones(place):
            return place
        per_rank = self._source.first.state_is_per_rank()
        return {"source": place, "world_size": world_size, **({"rank": rank} if per_rank else {})}

    def checked(self, state: State) -> State:
        """The source's state.

        At the start of an epoch, a state of another rank loses the progress of that rank's source.

        Raises:
            StateMismatch: The state counts items of another rank's share, or of a share at another world size.
        """
        inner = inner_of(state)
        rank, world_size = self._ranks()
        saved = state.get("rank", rank), state.get("world_size", 1)
        owned = "world_size" in state or (self._own and not self._anyones(state))
        if not owned or (self._own and saved == (rank, world_size)):
            return inner
        epoch, after = place_of(inner) or (0, None)
        if after is not None and inner == self._source.start(epoch, after):
            return self._source.start(epoch)
        whose = f"by rank {saved[0]} of {saved[1]}" if "rank" in state else f"at a world size of {saved[1]}"
        raise StateMismatch(
            f"this state was saved {whose} and counts the items of a share that the source made itself, but this is "
            f"rank {rank} of {world_size}. Load {'the state that this rank saved' if 'rank' in state else 'it'} at the "
            f"same world size, or load none and start another epoch with loader.set_epoch."
        )

    def say(self) -> None:
        """Log, once, which states have to be saved."""
        if self._ranks()[1] > 1 and self._source.first.state_is_per_rank() and self._once("own"):
            log.warning(
                "split='own', and the source has its own state_dict: the state of a rank loads only on that rank and "
                "at this world size. Save the states of all ranks."
            )

    def _anyones(self, place: State) -> bool:
        """Whether ``place`` is the start or the end of an epoch, so that any rank may load it."""
        epoch = epoch_of(place)
        return place == self._source.start(epoch) or place == {"epoch": epoch, "source": None}


def inner_of(state: State) -> State:
    """The source's part of a place."""
    inner: State = state["source"] if "world_size" in state else state
    return inner
