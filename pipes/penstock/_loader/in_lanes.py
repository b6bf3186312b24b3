"""An ``IterableDataset`` in its own epochs, read in lanes: ``Loader.from_dataset(dataset, lanes=…)``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

from penstock._arguments import whole_number
from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.fetch import Fetch
from penstock._nodes.slot_source import SlotSource
from penstock._streams.share_batches import ShareBatches
from penstock._streams.worker_shares import WorkerShares

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._loader.together import Shares


def in_lanes(
    facts: DatasetFacts,
    lanes: int | None,
    shares: Shares,
    collate_fn: Callable[[Any], Any] | None,
    transform: Callable[[Any], Any] | None,
    *,
    seed: int,
    bookmarks: str | os.PathLike[str] | None,
    seed_global_rngs: bool | Literal["always"],
    worker_init_fn: Callable[[int], None] | None,
    in_order: bool,
    on_error: Any,
) -> tuple[SlotSource, Shares, Fetch]:
    """The source of the slots, how they are dealt, and what loads them.

    Raises:
        ValueError: An argument conflicts with ``lanes``.
        TypeError: The dataset is no ``IterableDataset``.
    """
    if lanes is None:
        raise ValueError(
            f"bookmarks={bookmarks!r} keeps states of an IterableDataset that is read in lanes. Pass lanes= as well, "
            f"or leave bookmarks out."
        )
    if shares.split is not None:
        raise ValueError(
            f"lanes={lanes!r} and split={shares.split!r} exclude each other: lanes split the dataset by worker. Leave "
            f"split out; or leave lanes out, to read the dataset in the training process."
        )
    if not in_order:
        raise ValueError(
            f"lanes={lanes!r} and in_order=False exclude each other: which batches there are depends on where each "
            f"lane ends, which shows in their order. Leave in_order out."
        )
    if on_error != "raise":
        raise ValueError(
            f"lanes={lanes!r} and on_error={on_error!r} exclude each other: a generator that raised cannot go on. "
            f"Handle the error in the dataset; or use penstock.Stream(dataset, lanes={lanes!r}, epoch_size=…, "
            f'on_error="skip"), which goes on with the worker\'s next pass.'
        )
    folder = None if bookmarks is None else os.path.abspath(bookmarks)
    of = WorkerShares(
        facts.dataset,
        lanes,
        endless=False,
        folder=folder,
        seed_global_rngs=seed_global_rngs,
        worker_init_fn=worker_init_fn,
    )
    remedy = "A Ramp needs an order: read the dataset as a Stream, with epoch_size=."
    size = None if shares.batch_size is None else whole_number("batch_size", shares.batch_size, 1, remedy=remedy)
    batches = ShareBatches(of, size, shares.drop_last, collate_fn, transform, seed)
    source = SlotSource(facts, of.lanes, batches.size, shares.drop_last, seed)
    of_batches = DatasetFacts(batches)
    of_batches.name = of.name  # for messages
    return source, shares._replace(batch_size=None, tail=shares.tail or "drop"), Fetch(of_batches, _as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch
