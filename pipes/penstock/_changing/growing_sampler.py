"""GrowingSampler: indices of data that grow. An epoch is over what there was when it began."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np

from penstock._nodes.index_node import Facts, FirstNode
from penstock._nodes.node import State, fields, is_count
from penstock._nodes.sampler import Sampler
from penstock._random.changing import Changing
from penstock._random.growth import WHY, Growth, Parts
from penstock._random.orders import SequentialOrder, ShuffledOrder

if TYPE_CHECKING:
    from penstock._fetch.dataset_facts import DatasetFacts
    from penstock._fetch.indices import Indices


def growing(facts: DatasetFacts, *, shuffle: bool, seed: int) -> GrowingSampler:
    """The source of a dataset that `grows`: of its own parts, or else of its samples."""
    if (own := facts.parts) is not None:
        return GrowingSampler(own(shuffle=shuffle, seed=seed))
    return GrowingSampler(
        Parts(facts.samples(), "samples", partial(ShuffledOrder, seed=seed) if shuffle else SequentialOrder)
    )


@final
class GrowingSampler(FirstNode["Indices"], Changing):
    """A `Sampler` for each number of parts, of which an epoch uses one.

    Args:
        parts: Of the dataset, as they are now.
    """

    has_notes = True
    why_ranks_differ = WHY
    run = 1

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.growth = Growth(parts.now, parts.noun, self._settings)
        self._samplers: dict[int, Sampler] = {}
        now = self._of(parts.now).facts.settings
        # Ranks that have found different data are to be compared, so only what all numbers of parts have in common goes
        # into the settings.
        super().__init__(Facts({name: value for name, value in now.items() if name not in ("length", "counts")}))
        self.changing = self

    def details(self) -> dict[str, Any]:
        return {"order": self._of(self._parts.now).order}

    def start(self, epoch: int, after: State | None = None) -> State:
        return {"epoch": epoch, "position": 0}

    def left(self, place: State) -> int:
        return self._at(place["epoch"]).left(place)

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Indices, State]:
        return self._at(place["epoch"]).read(place, n, every, first)

    def peek(self, place: State, positions: np.ndarray) -> Indices:
        return self._at(place["epoch"]).peek(place, positions)

    def check(self, state: Any) -> None:
        self._at(fields(state, epoch=int, position=int)["epoch"]).check(state)

    def passed(self, place: State) -> int:
        epoch = place["epoch"]
        begun = [era for era in self.growth.eras if era[0] < epoch]
        whole = sum(
            (end - since) * self.growth.settings(parts)["length"]
            for (since, parts), (end, _) in pairwise([*begun, (epoch, 0)])
        )
        return int(whole + place["position"])

    def seek(self, place: State) -> State:
        return self._at(place["epoch"]).seek(place)

    def settings_at(self, epoch: int, place: Any) -> dict[str, Any]:
        return self.growth.settings(self.growth.at(epoch))

    def changes(self) -> dict[str, Any]:
        return self.growth.changes()

    def choices(self) -> dict[str, Any]:
        return self.growth.choices()

    def note(self, place: State, *, again: bool = False) -> tuple[int, ...]:
        return self.growth.marks()

    def presumed(self, settings: dict[str, Any]) -> dict[str, Any]:
        length, ends = settings.get("length"), self._parts.ends
        if not is_count(length):
            return {}
        if ends is None:
            return {"grow": [[0, length]]}
        found = np.flatnonzero(ends == length).tolist()
        return (
            {"grow": [[0, max(found, key=lambda parts: self._settings(parts).get("counts") == settings.get("counts"))]]}
            if found
            else {}
        )

    def adopt(self, changes: dict[str, Any]) -> None:
        self.growth.adopt(changes)

    def resume_at(self, epoch: int, position: int, sample: int) -> None:
        self.growth.goes_on(epoch + (position > 0))

    def _at(self, epoch: int) -> Sampler:
        return self._of(self.growth.at(epoch))

    def _of(self, parts: int) -> Sampler:
        found = self._samplers.get(parts)
        if found is None:
            found = Sampler(self._parts.order(parts))
            # of two epochs, because the next one is read ahead
            self._samplers = {**dict([*self._samplers.items()][-1:]), parts: found}
        return found

    def _settings(self, parts: int) -> dict[str, Any]:
        own = {"dataset_length": parts} if self._parts.settings is None else self._parts.settings(parts)
        return self._of(parts).facts.settings | own
