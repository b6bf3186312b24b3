"""The places of a batch that a rank gets, if each batch is split among the ranks."""

from __future__ import annotations

from typing import Any

from penstock._errors import GraphError
from penstock._fetch.indices import Indices


def places_of(batch: Any, rank: int, world_size: int) -> Any:
    """Place j is that of rank j mod ``world_size``.

    Raises:
        GraphError: ``batch`` is a single item.
        ValueError: It does not divide evenly.
    """
    if isinstance(batch, Indices) and not batch.is_batch:
        raise GraphError(
            "split='within' splits each batch, but the source yields single items. Pass a batch_sampler, or in a "
            "hand-built graph put the Batcher first."
        )
    if len(batch) % world_size:
        raise ValueError(
            f"split='within' needs batches that divide evenly, but {len(batch)} samples do not divide among "
            f"{world_size} ranks. Use split='items'."
        )
    return batch[rank::world_size]
