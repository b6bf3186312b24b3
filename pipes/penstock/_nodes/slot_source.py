"""SlotSource: the slots of epochs whose lengths only the workers find out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from penstock._errors import GraphError
from penstock._fetch.dataset_facts import length
from penstock._fetch.indices import Indices
from penstock._nodes.index_node import Facts, FirstNode
from penstock._nodes.node import State, fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from penstock._fetch.dataset_facts import DatasetFacts
    from penstock._fetch.indices import Nothing


@final
class SlotSource(FirstNode[Indices]):
    """Slots 0, 1, 2, … of each epoch: see `ShareBatches`. The epoch ends when every lane is known to have ended.

    Where a lane ends is a fact that `absent` tells, and no part of the state: a resumed run finds it again. Slots that
    are empty, but not known to be, only cost time.
    """

    has_indices = False
    who_deals = (
        "lanes= reads {source} in its own epochs, which only one rank can do: {world_size} ranks would each find "
        "another end. Pass penstock.Stream({source}(…), lanes=…, epoch_size=…), which any number of ranks share, as "
        "the dataset. Or, to read all of it on every rank, in the training process: split='items', without lanes."
    )

    def __init__(self, facts: DatasetFacts, lanes: int, batch_size: int, drop_last: bool, seed: int) -> None:
        self._name, self._dataset = facts.name, facts.dataset
        self._lanes, self._batch_size, self._drop_last = lanes, batch_size, drop_last
        # of an epoch: the first slot of each ended lane that is known to be empty
        self._ends: tuple[int, dict[int, int]] = (-1, {})
        settings = {
            "source": self._name,
            "lanes": lanes,
            "batch_size": batch_size,
            "drop_last": drop_last,
            "stream_seed": seed,
        }
        super().__init__(Facts(settings, sharded_by=None))

    def details(self) -> dict[str, Any]:
        return {"dataset": self._name, "lanes": self._lanes}

    def absent(self, found: Nothing) -> None:
        if self._ends[0] != found.epoch:
            self._ends = found.epoch, {}
        ends, lane = self._ends[1], found.slot % self._lanes
        ends[lane] = min(found.slot, ends.get(lane, found.slot))

    def start(self, epoch: int, after: State | None = None) -> State:
        return {"epoch": epoch, "slot": 0}

    def left(self, place: State) -> int | None:
        return 0 if self._next(place) is None else None

    def claimed(self, epoch: int) -> int | None:
        """By the ``__len__`` of the dataset, as for a `DataLoader`."""
        items, size = length(self._dataset), self._batch_size
        return None if items is None else items // size if self._drop_last else -(-items // size)

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Indices], State]:
        taken: list[Indices] = []
        while len(taken) < n and (slot := self._next(place)) is not None:
            taken.append(Indices(place["epoch"], slot, slot))
            place = {"epoch": place["epoch"], "slot": slot + 1}
        return taken, place

    def peek(self, place: State, positions: np.ndarray) -> Sequence[Indices]:
        raise GraphError(f"{self._name} cannot be read by position")

    def check(self, state: Any) -> None:
        fields(state, epoch=int, slot=int)

    def _next(self, place: State) -> int | None:
        slot, ends = place["slot"], self._ends[1] if self._ends[0] == place["epoch"] else {}
        if not ends:
            return int(slot)
        return next(
            (later for later in range(slot, slot + self._lanes) if later < ends.get(later % self._lanes, later + 1)),
            None,
        )
