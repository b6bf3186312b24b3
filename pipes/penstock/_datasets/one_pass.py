"""Reads a whole dataset once, on this rank alone, and shows progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.told_parts import told_in
from penstock._loader.loader import Loader
from penstock._streams.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Generator


def check_read_once(dataset: Any, reader: str, remedy: str) -> None:
    """Refuse a dataset that cannot be read by index, or that changes with the epoch; the latter error ends with
    ``remedy``.
    """
    facts = DatasetFacts.of(dataset)
    if facts.length is None:
        raise TypeError(
            f"{reader} needs a dataset that can be read by index and has a length, and {facts.name} does not qualify. "
            f"Pass a map-style dataset."
        ) from facts.unsized
    for part in told_in(facts.dataset).values():
        raise ValueError(
            f"{type(part).__name__} has set_epoch, so its samples change with the epoch, but {reader} reads them "
            f"only once. {remedy}"
        )


def one_pass(dataset: Any, batch_size: int, what: str, **words: Any) -> Generator[Any]:
    """The batches of ``dataset``. Work that the caller does between batches counts as loading.

    Args:
        dataset: Map-style.
        batch_size: Samples in a batch.
        what: The current activity, for the progress bar.
        **words: See `Loader.from_dataset`.
    """
    loader: Loader[Any] = Loader.from_dataset(
        dataset, batch_size, rank=0, world_size=1, prefetch_next_epoch=False, **words
    )
    with loader, Progress(what, len(dataset), "samples") as progress:
        for number, batch in enumerate(loader, 1):
            yield batch
            progress.at(min(number * batch_size, len(dataset)))
