"""Reads all of a dataset once, on this rank alone, and shows how far that is: a terminal sees a bar, else the log has a line each ten seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock._loader.loader import Loader
from penstock._streams.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Generator


def one_pass(dataset: Any, batch_size: int, what: str, **words: Any) -> Generator[Any]:
    """The batches of ``dataset``. What is done with one counts as loading.

    Args:
        dataset: Map-style.
        batch_size: Samples in a batch.
        what: What is being done, for the bar.
        **words: See `Loader.from_dataset`.
    """
    loader: Loader[Any] = Loader.from_dataset(dataset, batch_size, rank=0, world_size=1, prefetch_next_epoch=False, **words)
    with loader, Progress(what, len(dataset), "samples") as progress:
        for number, batch in enumerate(loader, 1):
            yield batch
            progress.at(min(number * batch_size, len(dataset)))
