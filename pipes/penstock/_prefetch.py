"""Prefetcher: items ready before they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, final

from penstock._node import Node, State, is_mark
from penstock._pump import Pump

if TYPE_CHECKING:
    from penstock._node import BaseNode

T = TypeVar("T", covariant=True)


@final
class Prefetcher(Node[T]):
    """Read ahead of the consumer in one background thread.

    Behind a `ParallelMapper` with workers it does little, since that keeps items in work by itself; behind anything that works in the
    caller's thread it takes that work away from there.

    Args:
        source: After the first ``next`` only the background thread reads it.
        prefetch_factor: Items kept ready; memory is bounded by ``prefetch_factor + 1`` items.
        timeout: Seconds to wait for one item before ``TimeoutError``; None waits for ever.
        run_ahead: Read into the next epoch before it is asked for.
    """

    def __init__(self, source: BaseNode[T], prefetch_factor: int = 2, *, timeout: float | None = None, run_ahead: bool = True) -> None:
        super().__init__(source)
        if isinstance(prefetch_factor, bool) or not isinstance(prefetch_factor, int) or prefetch_factor < 1:
            raise ValueError(f"prefetch_factor={prefetch_factor!r} must be a whole number of at least 1.")
        self._pump = Pump(
            self.source,
            holds=None if run_ahead else is_mark,
            depth=prefetch_factor,
            name="penstock-prefetch",
            timeout=timeout,
        )

    def reset(self, initial_state: State | None = None) -> None:
        super(Node, self).reset(initial_state)
        self._pump.reset(initial_state)

    def next(self) -> T:
        item: T = self._pump.next()
        return item

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Any:
        raise TypeError("a Prefetcher stands behind the data level; put Sharder and Batcher below it.")

    def get_state(self) -> State:
        return self._pump.state

    def start_of(self, epoch: int) -> State | None:
        return self.source.start_of(epoch)

    def remaining(self, state: State | None = None) -> int | None:
        return self.source.remaining(self._pump.state if state is None else state)

    def interrupt(self) -> None:
        self._pump.interrupt()

    def shutdown(self) -> None:
        self._pump.shutdown()
        self.source.shutdown()

    def statistics(self) -> tuple[Any, ...]:
        return (*self.source.statistics(), self._pump.statistics())
