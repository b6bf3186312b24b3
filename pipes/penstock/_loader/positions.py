"""Positions: looks up positions of a graph. Pure: it asks the index level, and starts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from penstock._errors import GraphError
from penstock._fetch.dataset_facts import measured
from penstock._fetch.fetch import Fetch
from penstock._loader.state_dict import epoch_in
from penstock._nodes.cycler import Cycler
from penstock._nodes.index_node import IndexNode, items_in, left_at, source_of
from penstock._nodes.node import place_of, seeds_of
from penstock._nodes.sharder import ranks_of

if TYPE_CHECKING:
    from penstock._nodes.node import Node, State

_WAYS: Final = (
    ("drop_last", True, "leave drop_last=True out"),
    ("full", True, "leave drop_last=True of Buckets out"),
    ("short", "drop", "give Buckets another short="),
    ("tail", "drop", "pass tail='pad' (with groups or a stream: use fewer ranks)"),
)
"""What may leave nothing of an epoch: the name and value of a setting, and what to do."""


@final
class Positions:
    """Looks up positions of the graph that ends with ``root``, and refuses a graph whose answers are inconsistent.

    Attributes:
        facts: Facts of the last node of the index level.
        first: The first node, where items come from.
    """

    def __init__(self, root: Node[Any]) -> None:
        self._root = root
        self._nodes = list(root.chain())
        # an infinite graph has one: the Cycler
        index = next(node for node in self._nodes if isinstance(node, IndexNode))
        self.facts = index.facts
        self.first = index.first
        self._holders: list[Any] = [node for node in self._nodes if hasattr(type(node), "holds_error")]
        self._cyclers = [node for node in self._nodes if isinstance(node, Cycler)]

    def remaining(self, state: State) -> int | None:
        """Items left in the epoch of ``state``; None if unknown."""
        return left_at(self._root, state)

    def start_of(self, epoch: int, after: State | None = None) -> State:
        """The state before the first item of ``epoch``. It may depend on ``after``, the run's current position."""
        place = place_of(after) if after is not None and self.first.looks_back else None
        state = (
            self._root.start_of(epoch) if place is None or place[1] is None else self._root.start_of(epoch, place[1])
        )
        if not isinstance(state, dict) or epoch_in(state) != epoch:
            raise GraphError(
                f"{type(self._root).__name__}.start_of({epoch}) returned {state!r}, but must nest its source's state "
                f"under 'source'."
            )
        return state

    def items(self, epoch: int, after: State) -> int | None:
        """Items in the whole of ``epoch``; None if unknown."""
        return self.remaining(self.start_of(epoch, after))

    def end_of(self, epoch: int) -> State:
        """The state in which only the marker of ``epoch`` is left."""
        return {"epoch": epoch, "source": None}

    def sized(self) -> bool:
        """Whether the source knows how many items an epoch has."""
        return self.first.sized()

    def unsized(self) -> Exception | None:
        """The error of the ``__len__`` of what the first node reads, if that raises one."""
        source = source_of(self.first)
        return None if source is self.first else measured(source)[1]

    def claimed(self, epoch: int) -> int | None:
        """Items in ``epoch`` according to the source; None if it says no more than `items` knows."""
        known = self.first.left(self.first.start(epoch))
        return None if known is not None and self.first.claimed(epoch) == known else items_in(self._root, epoch)

    def skipped(self, before: State, after: State) -> bool:
        """Whether samples between two states are passed over by ``skip``."""
        if (skipping := self.first.skipping) is None:
            return False
        places: list[Any] = [(place_of(state) or (0, None))[1] for state in (before, after)]
        return bool(skipping.skips.touch(*map(self.first.passed, places)))

    def remedy(self, epoch: int) -> str:
        """What to do about ``epoch``, which yields nothing on this rank."""
        facts, alone = self.facts, ranks_of(self._root)[1] == 1
        said = facts.settings | facts.rank_settings | facts.rank_settings.get("dealt", {})
        ways = [way for name, value, way in _WAYS if said.get(name) == value and not (name == "tail" and alone)]
        if not ways or (said.get("short") != "drop" and self.first.left(self.first.start(epoch)) == 0):
            return "Its dataset or its sampler is empty: check the path, and what filters it."
        return f"Use more samples, or {' and '.join(ways)}."

    def settings(self) -> dict[str, Any]:
        """What must be the same when a state is loaded."""
        settings = dict(self.facts.settings)
        for node in self._nodes:
            if isinstance(fetch := getattr(node, "map_fn", None), Fetch):
                settings |= fetch.settings()
        if settings.get("split") == "own":
            # each rank has its own stream, and may have its own seed, but one state may serve all of them
            return settings
        return settings | seeds_of(self._root)

    def settings_at(self, state: Any) -> dict[str, Any]:
        """Settings that depend on the position in ``state``, which is not checked yet."""
        place = place_of(state)
        return {} if place is None else self.first.settings_at(*place)

    def failure(self) -> BaseException | None:
        """The error after which the source must be reset, once the consumer has seen it; None if there is none."""
        for node in self._cyclers:
            if node.failure is not None:
                return None if any(holder.holds_error for holder in self._holders) else node.failure
        return None
