"""Prefetcher: items ready before the consumer requests them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, final

from penstock._nodes.reader_node import ReaderNode

if TYPE_CHECKING:
    from penstock._nodes.node import BaseNode


T = TypeVar("T", covariant=True)


@final
class Prefetcher(ReaderNode[T]):
    """Read ahead of the consumer in one background thread.

    It adds little downstream of a `ParallelMapper` with workers, which reads ahead itself. Downstream of nodes that
    work in the caller's thread, it moves their work to the background, unless they seed the global generators: see
    ``seed_global_rngs`` of `ParallelMapper`.

    Args:
        source: After the first ``next`` only the background thread reads it.
        prefetch_factor: Items kept ready; memory is bounded by ``prefetch_factor + 1`` items.
        timeout: Seconds to wait for one item before ``TimeoutError``; None waits forever.
        prefetch_next_epoch: Read into the next epoch before the consumer requests it.
    """

    __module__ = "penstock.nodes"

    def __init__(
        self,
        source: BaseNode[T],
        prefetch_factor: int = 2,
        *,
        timeout: float | None = None,
        prefetch_next_epoch: bool = True,
    ) -> None:
        super().__init__(
            source, prefetch_factor, "penstock-prefetch", prefetch_next_epoch=prefetch_next_epoch, timeout=timeout
        )
