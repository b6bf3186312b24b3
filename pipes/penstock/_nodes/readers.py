"""Read an iterable or a torchdata node pass by pass, for `IterableSource`.

A *pass* is one reading from beginning to end.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, final
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import Sampler

from penstock._arguments import checksum
from penstock._errors import GraphError, is_own_error
from penstock._fetch.dataset_facts import is_stateful
from penstock._fetch.encoding import decoded, encoded
from penstock._fetch.epoch_attribute import tell_epoch
from penstock._fetch.error_policy import stopped_early
from penstock._nodes.index_node import index_of
from penstock._nodes.node import BaseNode, EndOfEpoch, Node, seeds_of

if TYPE_CHECKING:
    from penstock._fetch.dataset_facts import DatasetFacts


class Reader(Protocol):
    """Reads a source that can be read only from its beginning.

    Attributes:
        KEY: The key of its state in the saved state.
        IS_NODE: Whether the source is a torchdata node. For a node, a `start` right after a `start` at a state rebuilds
            that pass, with everything that depends on its epoch; and `resume` reads up to the position of the state.
        stateful: Whether the source keeps a state from one pass to the next.
        counts_apart: Whether it holds several samplers. After a resume in the middle of a pass, only those that are
            read again count that pass, so that a state at its end is not where the next pass begins.
        told: Whether the source has a ``set_epoch``.
        exclusive: Whether two readers of the source would move each other's position.
    """

    KEY: str
    IS_NODE: bool
    stateful: bool
    counts_apart: bool
    told: bool

    @property
    def exclusive(self) -> bool: ...

    def seeds(self) -> list[Any]:
        """What decides which items come, besides its state."""

    def pristine(self) -> Any:
        """The state before anything was read."""

    def start(self, epoch: int, state: Any = None) -> None:
        """Begin the next pass, for ``epoch``. If ``state`` is given, which is the start of a pass, begin that pass."""

    def resume(self, epoch: int, state: Any, ended: bool) -> bool:
        """Move to a state in the middle of a pass, or at its end. Return whether that was possible."""

    def next(self) -> Any:
        """The next item; ``StopIteration`` at the end of the pass."""

    def state(self) -> Any:
        """The position in this pass; None if the source has no state."""

    def shutdown(self) -> None:
        """End the threads and processes of the source."""


_END = object()


@final
class IterableReader:
    """Reads an iterable. The state is the iterable's own, or that of its iterator if only the iterator has one."""

    KEY = "iterable"
    IS_NODE = False
    counts_apart = False

    def __init__(self, facts: DatasetFacts) -> None:
        if facts.read == "once":
            raise GraphError(
                f"{facts.name} is an iterator, which can be read only once, but every epoch reads it from the "
                f"beginning. Pass the iterable that it was made from."
            )
        self._iterable = facts.dataset
        self._iterator: Any = iter(())
        self.stateful = facts.has_state
        self.told = facts.is_told

    @property
    def exclusive(self) -> bool:
        return self.stateful or self._iterator is self._iterable

    def seeds(self) -> list[Any]:
        return []

    def pristine(self) -> Any:
        if not self.stateful:
            return None
        try:
            return self._iterable.state_dict()
        except Exception as exc:  # each __iter__ creates its state, so it keeps none between passes
            if not is_own_error(exc):
                raise
            self.stateful = False
            return None

    def start(self, epoch: int, state: Any = None) -> None:
        if state is not None:
            self._iterable.load_state_dict(state)
        self._tell(epoch)
        self._open()

    def resume(self, epoch: int, state: Any, ended: bool) -> bool:
        self._tell(epoch)
        saved = encoded(state, "state")  # a copy, because the iterable may change the state that it loads
        if self.stateful and state is not None:
            self._iterable.load_state_dict(state)
        if ended and (self.told or not self.stateful or state is None):  # the next pass needs only its own start
            self._iterator = iter(())
            return True
        self._open()
        # its __iter__ restarted and lost the state: load it once more
        if state is not None and not self._stands_at(saved):
            (self._iterator if is_stateful(self._iterator) else self._iterable).load_state_dict(decoded(saved))
        if ended:
            # An iterable that begins where a loaded state says must end this pass, or the next pass would be the empty
            # rest of this one.
            if next(self._iterator, _END) is not _END:  # it had already started over: undo that read
                self._iterable.load_state_dict(decoded(saved))
            self._iterator = iter(())
        return self.stateful or is_stateful(self._iterator)

    def _stands_at(self, saved: Any) -> bool:
        if not self.stateful and not is_stateful(self._iterator):
            return True
        try:
            return bool(encoded(self.state(), "state") == saved)
        except Exception:
            return False

    def next(self) -> Any:
        return next(self._iterator)

    def state(self) -> Any:
        return (
            self._iterable.state_dict()
            if self.stateful
            else self._iterator.state_dict()
            if is_stateful(self._iterator)
            else None
        )

    def shutdown(self) -> None:
        self._iterator = iter(())  # so that a generator ends now, with its `finally`

    def _open(self) -> None:
        try:
            self._iterator = iter(self._iterable)
        except StopIteration as exc:
            raise stopped_early(self._iterable) from exc

    def _tell(self, epoch: int) -> None:
        if self.told:
            tell_epoch(self._iterable, epoch)


@final
class NodeReader:
    """Reads a torchdata node. It never calls a node again after its end, because nodes behave differently there.

    A sampler inside that has its own generator draws from it in each pass, and a node that reads ahead begins a pass at
    each reset. So every pass gets a generator for its epoch (`_Generators`). Otherwise the order after a resume would
    depend on how many passes were begun before.
    """

    KEY = "node"
    IS_NODE = True
    exclusive = True

    def __init__(self, node: BaseNode[Any]) -> None:
        inside = _inside(node)
        firsts = ((held, [*held.chain()][-1]) for held in inside if isinstance(held, Node))
        # A penstock node that reads one of these nodes is downstream of it, although it is held here.
        self._ours = [
            held for held, first in firsts if not any(getattr(first, "iterable", None) is other for other in inside)
        ]
        for ours in self._ours:
            _check_downstream(node, ours)
        self._node: Any = node
        self._at_start = False  # just reset: a node that reads ahead would count a second reset as another pass
        self._begun = True  # the pass that was last reset has yielded an item, so its sampler has its generator
        self.stateful = True
        self.told = False
        self.counts_apart = sum(isinstance(part, Sampler) for part in inside) > 1
        self._generators = _Generators(inside)

    def seeds(self) -> list[Any]:
        """The settings of our nodes in it, and its samplers' generators."""
        return [index_of(ours).facts.settings | seeds_of(ours) for ours in self._ours] + self._generators.seeds()

    def pristine(self) -> Any:
        self._reset(0, None)
        self._at_start = True
        return self._node.state_dict()

    def start(self, epoch: int, state: Any = None) -> None:
        if state is not None or not self._at_start:
            self._reset(epoch, state)
        self._at_start = False

    def resume(self, epoch: int, state: Any, ended: bool) -> bool:
        self._at_start = False
        self._reset(epoch, state)
        if ended:
            try:
                next(self._node)  # a node that counts its passes must see the end of this one again
            except StopIteration:
                return True
            self._reset(epoch, state)  # its own source had already started over, so there was an item: undo that read
        return True

    def _reset(self, epoch: int, state: Any) -> None:
        if self._generators.samplers:
            if not self._begun:
                with suppress(StopIteration):
                    # a thread of the last pass may not have begun it yet, and would draw from the generator of this one
                    next(self._node)
            self._generators.replace(epoch)
            self._begun = False
        self._node.reset(state)

    def next(self) -> Any:
        item = next(self._node)
        self._begun = True
        if isinstance(item, EndOfEpoch):
            raise GraphError(
                f"{type(self._node).__name__} passed on {item}, because it is downstream of a Cycler. Put it upstream, "
                f"or write a penstock.nodes.Node."
            )
        return item

    def state(self) -> Any:
        return self._node.state_dict()

    def shutdown(self) -> None:
        shutdown = getattr(self._node, "shutdown", None)
        if callable(shutdown):
            shutdown()


@final
class _Generators:
    """The own generators of samplers: that of epoch 0 is in the state that the user gave it, those of later epochs are
    seeded by it and the epoch.

    Attributes:
        samplers: Those that have one.
    """

    def __init__(self, inside: list[Any]) -> None:
        self.samplers = [part for part in inside if isinstance(getattr(part, "generator", None), torch.Generator)]

    def seeds(self) -> list[str]:
        """Checksums of their states before their first pass."""
        return [checksum(_as_passed.get(sampler, sampler.generator.get_state()).numpy()) for sampler in self.samplers]

    def replace(self, epoch: int) -> None:
        """Give each sampler a new generator for ``epoch``. A pass that was begun keeps its own."""
        for sampler in self.samplers:
            first, generator = (
                _as_passed.setdefault(sampler, sampler.generator.get_state()),
                torch.Generator(device="cpu"),
            )
            if epoch == 0:
                generator.set_state(first)
            else:
                seed = blake2b(first.numpy().tobytes() + epoch.to_bytes(8, "little"), digest_size=8).digest()
                generator.manual_seed(int.from_bytes(seed, "little") >> 1)
            sampler.generator = generator


def _inside(node: BaseNode[Any]) -> list[Any]:
    """``node``, and the nodes and samplers that it holds, directly or not; of one of ours, only itself."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [node]
    while waiting:
        part = waiting.pop()
        if id(part) in found:
            continue
        found[id(part)] = part
        # Attributes of any name, because a user's node has its own names.
        held = (
            [] if isinstance(part, Node) else [getattr(part, "source", None), *getattr(part, "__dict__", {}).values()]
        )
        for value in held:
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            waiting += [each for each in islice(values, _MOST_VALUES) if isinstance(each, (BaseNode, Sampler))]
    return list(found.values())


_MOST_VALUES = 1000
"""How many values of a list or dict are looked at: it may hold data, and be long."""


_as_passed: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
"""The state of a sampler's generator before its first pass. It outlives the loader: another one that reads the sampler
begins with the same state.
"""


def _check_downstream(node: BaseNode[Any], ours: Node[Any]) -> None:
    """Refuse a torchdata node that reads one of our nodes and cannot handle its items."""
    name = f"{type(node).__module__}.{type(node).__name__}"
    if index_of(ours).facts.infinite:
        raise GraphError(
            f"{name} is downstream of a Cycler and would get EndOfEpoch markers, which it cannot handle. "
            f"Put it upstream of the Cycler, or write a penstock.nodes.Node."
        )
    if not any(hasattr(upstream, "map_fn") for upstream in ours.chain()):
        raise GraphError(
            f"{name} is downstream of a {type(ours).__name__} and would get Indices, which it cannot handle. Put it "
            f"upstream, use the penstock node that does the same, or write a penstock.nodes.Node."
        )
