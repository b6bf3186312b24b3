"""The base class of nodes that read their source in a background thread."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from penstock._arguments import seconds, whole_number
from penstock._errors import ANEW, ClosedError
from penstock._nodes.node import Node, State, is_marker
from penstock._nodes.parallel_mapper import ParallelMapper
from penstock._workers.reader_thread import ReaderThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._fetch.indices import Indices
    from penstock._nodes.executor import Executor
    from penstock._nodes.node import BaseNode
    from penstock._statistics import NodeStatistics


T = TypeVar("T", covariant=True)


class ReaderNode(Node[T]):
    """Deliver items that a `ReaderThread` reads from ``source``.

    The state is the source's after the last delivered item.

    Args:
        source: After the first ``next`` only the reader thread reads it.
        prefetch_factor: Items kept ready.
        name: The thread's name.
        prefetch_next_epoch: Read into the next epoch before the consumer requests it.
        timeout: Seconds to wait for one item; None waits forever.
        threaded: If False, there is no thread, and `next` reads the source.
    """

    def __init__(
        self,
        source: BaseNode[Any],
        prefetch_factor: int,
        name: str,
        *,
        prefetch_next_epoch: bool = True,
        timeout: float | None = None,
        threaded: bool = True,
    ) -> None:
        super().__init__(source)
        self._depth, self._timeout = whole_number("prefetch_factor", prefetch_factor, 1), seconds("timeout", timeout)
        self._name = name
        self._prefetch_next_epoch = prefetch_next_epoch
        self._threaded = threaded
        self._pump: ReaderThread | None = None  # made at the first reset
        self._closed = False

    def details(self) -> dict[str, Any]:
        return {"prefetch_factor": self._depth}

    def reset(self, initial_state: State | None = None) -> None:
        super(Node, self).reset(initial_state)
        if self._threaded and self._pump is None:
            if self._closed:
                raise ClosedError(f"{self._name} has ended. {ANEW}")
            self._pump = ReaderThread(
                self.source,
                self._depth,
                self._name,
                convert=self._converter(),
                holds=self._holds(),
                timeout=self._timeout,
                places=[one.draws.place() for one in self._executors() if one.draws is not None],
            )
        (self.source if self._pump is None else self._pump).reset(initial_state)

    def next(self) -> T:
        item: T = next(self.source) if self._pump is None else self._pump.next()
        return item

    def get_state(self) -> State:
        return self.source.get_state() if self._pump is None else self._pump.state

    def address(self) -> Indices | None:
        return self.source.address() if self._pump is None else self._pump.address

    def again(self, item: Any) -> Any:
        return item

    def still(self) -> AbstractContextManager[None]:
        """In this context the source is not read by another thread. What is ready stays so."""
        return nullcontext() if self._pump is None else self._pump.still()

    def check(self, state: Any) -> None:
        super().check(state)  # its states are those of its source

    def start_of(self, epoch: int, after: State | None = None) -> State:
        return super().start_of(epoch, after)

    @property
    def holds_error(self) -> bool:
        """Whether the source has raised an error that the consumer has not seen yet."""
        return self._pump is not None and self._pump.holds_error

    def interrupt(self) -> None:
        (self.source if self._pump is None else self._pump).interrupt()

    def shutdown(self) -> None:
        self._closed = True
        if self._pump is not None:
            self._pump.shutdown()
        self.source.shutdown()

    def statistics(self, elapsed_s: float = 0.0, items: int = 0) -> tuple[NodeStatistics, ...]:
        if self._pump is not None:
            self.source._was_read(int(1e9 * self._pump.statistics().read_s))
        return super().statistics(elapsed_s, items)

    def _was_read(self, ns: int) -> None:
        if self._threaded:
            self._read_ns = ns
        else:
            super()._was_read(ns)

    def _items_read(self, items: int) -> int:
        return items + (0 if self._pump is None else self._pump.statistics().ready)

    def _stages(self) -> dict[str, Any]:
        return {} if self._pump is None else {"to_device": self._pump.statistics().convert}

    def _counted(self, elapsed_s: float, items: int) -> NodeStatistics:
        own = super()._counted(elapsed_s, items)
        if self._pump is None:
            return dataclasses.replace(own, depth=self._depth if self._threaded else 0)
        pump = self._pump.statistics()
        return dataclasses.replace(
            own,
            source_wait_s=pump.read_s,
            consumer_wait_s=max(0.0, elapsed_s - pump.read_s - pump.convert.total_s),
            work_s=pump.convert.total_s,
            ready=pump.ready,
            ready_mean=pump.ready_mean,
            depth=pump.depth,
        )

    @property
    def ahead(self) -> int | None:
        return self._depth + 1 if self._threaded else 0

    def _converter(self) -> Callable[[Any], Any] | None:
        """The function that the thread applies to each item and marker.

        Called in the consumer's thread, at the first `reset`.
        """
        return None

    def _executors(self) -> list[Executor]:
        return [node.executor for node in self.source.chain() if isinstance(node, ParallelMapper)]

    def _holds(self) -> Callable[[Any], bool]:
        """A function that says after which items the reader waits for the consumer.

        It must not refer to this node, or the thread would keep it alive.
        """
        executors = self._executors()
        source, ahead = self.source, self._prefetch_next_epoch
        return lambda item: (
            (is_marker(item) and not (ahead and source.runs_ahead)) or any(one.in_step for one in executors)
        )
