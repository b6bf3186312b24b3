"""Times the nodes that run in one thread, one inside the other, at no cost to most reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, final

from penstock._workers.meter import now

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._nodes.node import Node, State

_SLOW_NS = 200_000
"""After a read that took longer, the next one is watched too."""
_EVERY, _MOST = 17, 271
"""One in so many reads is watched, at first and at most. No powers of two: an order computes its indices in blocks of such lengths."""


_READS = ("next", "take")


class Traced:
    """A trace also gives nodes a ``next`` and a ``take`` of its own.

    Attributes:
        changes: How often one has begun or ended for a loader, after which what a `Watch` knows of its nodes is out of date.
    """

    changes: ClassVar[int] = 0


@final
class Watch:
    """Reads ``node``, and learns how long each node works that runs inside its ``next``.

    It watches the first read of each epoch, and then one read in 17, in 34, … in 271, which stands for those that follow; if reads are slow, all of them. In a read that it watches, each
    node has a ``next`` and a ``take`` that look at the clock.

    Args:
        node: The node to read.

    Attributes:
        plain: Reads that it leaves unwatched; whoever counts it down may read the node itself.
    """

    def __init__(self, node: Node[Any]) -> None:
        self._node = node
        self._inner = [inner for inner in node._same_thread() if inner is not node]
        self._timed: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._timed_at = -1
        self.plain = 0  # reads to leave unwatched
        self._every = _EVERY
        self._ns = 0  # of all reads, as far as is known
        self._watched_ns = 0  # of those that were watched

    def __next__(self) -> Any:
        if self.plain:
            self.plain -= 1
            return next(self._node)
        began = now()
        item = self._watched() if self._inner else next(self._node)
        ns = now() - began
        self._watched_ns += ns
        if ns < _SLOW_NS:
            self.plain = self._every - 1
            ns *= self._every
            self._every = min(_MOST, 2 * self._every)
        else:
            self._every = _EVERY
        self._ns += ns
        return item

    def reset(self, initial_state: State | None = None) -> None:
        """Reset the node."""
        self.soon()
        self._node.reset(initial_state)

    def get_state(self) -> State:
        """The node's state."""
        return self._node.get_state()

    def interrupt(self) -> None:
        """Interrupt the node."""
        self._node.interrupt()

    @property
    def is_alone(self) -> bool:
        """Whether the node is the only one to be timed."""
        return not self._inner

    def soon(self) -> None:
        """Watch the next read: an epoch begins with it."""
        self.plain, self._every = 0, _EVERY

    def share_out(self) -> None:
        """Tell the nodes how long they were read, in all."""
        self._node._read_ns = self._ns  # unless a better clock says more
        for inner in self._inner:
            inner._read_ns = inner._watched_ns * self._ns // self._watched_ns if self._watched_ns else 0

    def _watched(self) -> Any:
        if self._timed_at != Traced.changes:
            self._timed_at = Traced.changes
            self._timed = [
                (
                    vars(inner),
                    {name: _timed(inner, getattr(inner, name)) for name in _READS},
                    {k: vars(inner)[k] for k in _READS if k in vars(inner)},
                )
                for inner in self._inner
            ]
        all_timed = self._timed
        try:
            for attributes, timed, _ in all_timed:
                attributes.update(timed)
            return next(self._node)
        finally:
            for attributes, timed, before in all_timed:
                for name in timed:
                    attributes.pop(name, None)
                if before:
                    attributes.update(before)


def _timed(node: Node[Any], read: Callable[..., Any]) -> Callable[..., Any]:
    inside = False

    def timed(*arguments: Any, **options: Any) -> Any:
        nonlocal inside
        if inside:  # a `next` that calls its own `take`
            return read(*arguments, **options)
        inside, began = True, now()
        try:
            return read(*arguments, **options)
        finally:
            inside = False
            node._watched_ns += now() - began

    return timed
