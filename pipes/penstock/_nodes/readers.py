"""What an `IterableSource` reads, pass by pass: an iterable, or a torchdata node; and what their saved states say of passes.

A *pass* is one reading from the beginning to the end. Some count their passes and give another one each time, so `moved` and `tells_its_epoch`
look into the state for a count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, final

from torch.utils.data import IterableDataset

from penstock._errors import GraphError
from penstock._nodes.encoding import TAG, decoded, encoded
from penstock._nodes.node import BaseNode, EndOfEpoch, Node
from penstock._nodes.self_splitting import wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable


class Reader(Protocol):
    """Something that is read from its beginning.

    Attributes:
        KEY: Under which its state is saved.
        IS_NODE: Whether it is a torchdata node: `start`, where nothing was read since `start` at a state, makes that pass anew, with all that
            follows from its epoch; and `resume` reads as far as the state.
        stateful: Whether it has a state of its own between two passes.
        plain: Whether its ``epoch`` in a state, if it has one, is one more each time.
        told: Whether it is told the epoch.
        exclusive: Whether two that read it at the same time would move each other.
    """

    KEY: str
    IS_NODE: bool
    stateful: bool
    plain: bool
    told: bool

    @property
    def exclusive(self) -> bool: ...

    def pristine(self) -> Any:
        """Its state before anything was read."""

    def start(self, epoch: int, state: Any = None) -> None:
        """Begin the next pass, which is ``epoch``; or that of ``state``, which stands at the start of one."""

    def resume(self, epoch: int, state: Any, ended: bool) -> bool:
        """Stand in the middle of a pass, or at its end; whether it could."""
        ...

    def next(self) -> Any:
        """The next item; ``StopIteration`` at the end of the pass."""

    def state(self) -> Any:
        """Where it stands in this pass; None where it has no state."""

    def shutdown(self) -> None:
        """End its threads and processes."""


def _is_stateful(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


@final
class IterableReader:
    """Reads an iterable. The state is the iterable's; or, where only what its ``__iter__`` gives has one, that of the pass."""

    KEY = "iterable"
    IS_NODE = False
    plain = True

    def __init__(self, iterable: Iterable[Any]) -> None:
        if isinstance(iterable, Iterator) and not isinstance(iterable, IterableDataset):  # whose __iter__ begins anew, and returns self
            raise GraphError(
                f"{type(iterable).__name__} is an iterator, which can be read only once; an epoch needs an iterable that can be read again."
            )
        self._iterable: Any = iterable
        self._iterator: Any = iter(())
        self.stateful = _is_stateful(iterable)
        self.told = hasattr(iterable, "set_epoch")

    @property
    def exclusive(self) -> bool:
        return self.stateful or self._iterator is self._iterable

    def pristine(self) -> Any:
        if not self.stateful:
            return None
        try:
            return self._iterable.state_dict()
        except Exception:  # what it looks at is made by its __iter__, and then by each anew
            self.stateful = False
            return None

    def start(self, epoch: int, state: Any = None) -> None:
        if state is not None:
            self._iterable.load_state_dict(state)
        self._tell(epoch)
        self._iterator = iter(self._iterable)

    def resume(self, epoch: int, state: Any, ended: bool) -> bool:
        self._tell(epoch)
        saved = encoded(state, "state")  # what is loaded may be changed
        if self.stateful and state is not None:
            self._iterable.load_state_dict(state)
        if ended:
            self._iterator = iter(())
            return True
        self._iterator = iter(self._iterable)
        if state is not None and not self._stands_at(saved):  # it has begun anew
            (self._iterator if _is_stateful(self._iterator) else self._iterable).load_state_dict(decoded(saved))
        return self.stateful or _is_stateful(self._iterator)

    def _stands_at(self, saved: Any) -> bool:
        if not self.stateful and not _is_stateful(self._iterator):
            return True
        try:
            return bool(encoded(self.state(), "state") == saved)
        except Exception:
            return False

    def next(self) -> Any:
        return next(self._iterator)

    def state(self) -> Any:
        return self._iterable.state_dict() if self.stateful else self._iterator.state_dict() if _is_stateful(self._iterator) else None

    def shutdown(self) -> None:
        pass

    def _tell(self, epoch: int) -> None:
        if self.told:
            self._iterable.set_epoch(epoch)


@final
class NodeReader:
    """Reads a torchdata node, which is never asked again behind its end: not all of them then say the same."""

    KEY = "node"
    IS_NODE = True
    exclusive = True

    def __init__(self, node: BaseNode[Any]) -> None:
        upstream: Any = node
        while upstream is not None and not isinstance(upstream, Node):
            upstream = getattr(upstream, "source", None)
        if upstream is not None:
            _check_downstream(node, upstream)
        self._node: Any = node
        self._at_start = False  # it was reset, and nothing else: one that reads ahead would count a second reset as a pass
        self.stateful = True
        self.told = False
        updaters = [one.epoch_updater for one in wrapped(node) if hasattr(one, "epoch_updater")]
        self.plain = all(getattr(updater, "__name__", "") == "_default_epoch_updater" for updater in updaters)

    def pristine(self) -> Any:
        self._node.reset(None)
        self._at_start = True
        return self._node.state_dict()

    def start(self, epoch: int, state: Any = None) -> None:
        if state is not None or not self._at_start:
            self._node.reset(state)
        self._at_start = False

    def resume(self, epoch: int, state: Any, ended: bool) -> bool:
        self._at_start = False
        self._node.reset(state)
        if ended:
            try:
                next(self._node)  # One that counts its passes must see the end of this one again.
            except StopIteration:
                return True
            self._node.reset(state)  # What it reads stood at the beginning again already.
        return True

    def next(self) -> Any:
        item = next(self._node)
        if isinstance(item, EndOfEpoch):
            raise GraphError(
                f"{type(self._node).__name__} handed on {item}: it stands downstream of a Cycler. Put it upstream, or write a penstock.Node."
            )
        return item

    def state(self) -> Any:
        return self._node.state_dict()

    def shutdown(self) -> None:
        shutdown = getattr(self._node, "shutdown", None)
        if callable(shutdown):
            shutdown()


def _check_downstream(node: BaseNode[Any], ours: Node[Any]) -> None:
    """Refuse a torchdata node that reads a node of ours and would not know what comes."""
    name = f"{type(node).__module__}.{type(node).__name__}"
    if ours.endless:
        raise GraphError(
            f"{name} stands downstream of a Cycler and would be handed EndOfEpoch marks, which it does not know. "
            f"Put it upstream of the Cycler, or write a penstock.Node."
        )
    if not any(hasattr(one, "map_fn") for one in ours.chain()):
        raise GraphError(
            f"{name} stands downstream of a {type(ours).__name__} and would be handed Indices, which it does not know. Put it upstream, use the node of "
            f"penstock that does the same, or write a penstock.Node."
        )


_COUNTS = {"epoch", "current_epoch"}
_SETTINGS = {"seed", "rank", "world_size", "num_replicas", "num_workers", "batch_size", "version"}


def moved(state: Any, epochs: int) -> Any:
    """``state``, as `encoded` made it, with every count of epochs in it ``epochs`` further."""
    if isinstance(state, list):
        return [moved(item, epochs) for item in state]
    if not isinstance(state, dict) or TAG in state:
        return state
    return {key: item + epochs if _counts(key, item) else moved(item, epochs) for key, item in state.items()}


def tells_its_epoch(start: Any, now: Any, expected: Any) -> bool:
    """Whether ``now`` is known to be the start of an epoch, from the state at the ``start`` of epoch 0.

    Its counts must be those of ``expected``. Anything else must be what nothing has happened to yet (zeros, words, settings), or be made anew, as
    numbers drawn by (seed, epoch) are: what stands as at the start of epoch 0 and is neither may be what the epochs before have left behind.
    """
    first, found, asked = (dict(_leaves(state)) for state in (start, now, expected))
    return all(
        value == asked.get(path) if _counts(path[-1], value) else _blank(path, value) or value != first.get(path)
        for path, value in found.items()
    )


def counts(state: Any) -> int:
    """How many counts of epochs are in ``state``. Several may run at different speeds."""
    return sum(_counts(path[-1], value) for path, value in _leaves(state))


def _counts(key: Any, value: Any) -> bool:
    return isinstance(key, str) and key.strip("_") in _COUNTS and isinstance(value, int) and not isinstance(value, bool)


def _leaves(state: Any, path: tuple[Any, ...] = ("",)) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(state, list) or (isinstance(state, dict) and TAG not in state):
        for key, item in enumerate(state) if isinstance(state, list) else state.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, state


def _blank(path: tuple[Any, ...], value: Any) -> bool:
    if any(isinstance(key, str) and key.strip("_") in _SETTINGS for key in path):
        return True
    if isinstance(value, dict):
        return not value["items"] if "items" in value else set(value.get("data", "x")) <= set("A=")  # bytes that are all zero
    return not value or isinstance(value, bool | str)
