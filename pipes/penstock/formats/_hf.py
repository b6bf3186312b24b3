"""Hugging Face datasets: map-style datasets unchanged, and streams whose shards have known lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Unpack, final

from torch.utils.data import _utils

from penstock._files.paths import extra
from penstock._streams.stream import over

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock._streams.sharded import FormatOptions

_WHO: Final = "penstock.formats.hf"
_KEEP_COUNTS: Final = {
    "ArrowExamplesIterable",
    "ExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
}
_BY_SAMPLE: Final = {*_KEEP_COUNTS, "FilteredExamplesIterable", "VerticallyConcatenatedMultiSourcesExamplesIterable"}
"""The shards of these, read one after the other, are the whole stream, unless their function receives indices or
batches.
"""
_END: Final = object()


def hf(dataset: Any, counts: Sequence[int] | None = None, **options: Unpack[FormatOptions]) -> Any:
    """Prepare a Hugging Face dataset for `Loader.from_dataset` and `Mix`.

    A ``Dataset`` can already be read by index, with its format and its transform, so it is returned unchanged. An
    ``IterableDataset`` becomes `penstock.Shards`, or a `penstock.Stream`: shard i is
    ``dataset.shard(dataset.num_shards, i)``, read front to back. One after the other, the shards are exactly what
    iterating over the stream yields; a stream of several shards with a step for which this does not hold, such as
    ``take``, is refused. Leave shuffling and splitting over ranks to the loader.

    Args:
        dataset: A ``datasets.Dataset`` or ``datasets.IterableDataset``.
        counts: Samples in each shard of an ``IterableDataset``. Default: inferred if it was made by
            ``Dataset.to_iterable_dataset`` or states the lengths of its shards, and every later step keeps the number
            of samples.
        **options: ``lanes``, ``window``, ``transform``: see `penstock.Shards`. ``epoch_size``, and with it ``steps``,
            ``bookmarks``, ``retries``, ``on_error``: see `penstock.Stream`; the shard lengths then need not be known,
            so the stream may contain any steps.

    Raises:
        ValueError: The lengths are unknown; the number of counts differs from the number of shards; the stream was
            shuffled or split over ranks; or it has several shards and a step that looks beyond one sample.
        TypeError: ``dataset`` is neither kind of dataset.
        ImportError: datasets is not installed.
    """
    datasets = extra("datasets", _WHO)
    if isinstance(dataset, datasets.Dataset):
        if counts is not None or options:
            raise ValueError(
                f"{', '.join(['counts', *options])} apply to an IterableDataset, but this Dataset is read by index. "
                f"Drop them, or pass dataset.to_iterable_dataset()."
            )
        return dataset
    if isinstance(dataset, dict):
        raise TypeError(
            f"this is a {type(dataset).__name__} with the splits {', '.join(map(repr, dataset))}. Choose one: "
            f"hf(dataset[{next(iter(dataset), 'train')!r}])."
        )
    if not isinstance(dataset, datasets.IterableDataset):
        raise TypeError(f"hf takes a datasets.Dataset or a datasets.IterableDataset, not a {type(dataset).__name__}.")
    steps = _checked(dataset)
    if counts is None and options.get("epoch_size") is None:
        counts = _known_counts(dataset, steps)
    if counts is not None and len(counts) != dataset.num_shards:
        raise ValueError(
            f"got {len(counts)} counts for {dataset.num_shards} shards (dataset.num_shards). Pass one count per shard."
        )
    return over(dataset.num_shards, _Shards(dataset), counts, options)


@final
class _Shards:
    """Opens a shard of a stream by its number."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, shard: int, start: int = 0) -> Iterator[Any]:
        """The samples of a shard, starting with sample ``start``."""
        stream = self._dataset.shard(self._dataset.num_shards, shard)
        samples = iter(stream.skip(start) if start else stream)
        first = _first(samples)
        if first is not _END:
            yield first
            yield from samples


def _first(samples: Iterator[Any]) -> Any:
    """The first of ``samples``, read as if outside a worker.

    In a torch worker a stream yields only some of its shards, and it decides that here.
    """
    worker = _utils.worker
    info, worker._worker_info = worker._worker_info, None
    try:
        return next(samples, _END)
    finally:
        worker._worker_info = info


def _checked(dataset: Any) -> list[Any]:
    """The steps of the stream, from the last one back to its sources. Refuses steps that cannot resume."""
    steps = list(_steps(dataset._ex_iterable))
    if dataset._distributed is not None:
        raise ValueError(
            "this stream was split over ranks by split_dataset_by_node, but the loader splits it itself. Pass the "
            "stream without that."
        )
    if any("Shuffled" in type(step).__name__ for step in steps):
        raise ValueError(
            "this stream was shuffled with a buffer, which cannot resume. Pass the stream without .shuffle(), and pass "
            "shuffle=True to the loader: it shuffles the shards, and with window=1000 also the samples within about "
            "1000 of each other."
        )
    for step in steps:
        if step.num_shards > 1 and not _is_by_sample(step):
            raise ValueError(
                f"the step {type(step).__name__} looks beyond one sample (it counts or repeats samples, gets their "
                f"indices or batches of them, or chooses between sources), so it would yield other samples in each of "
                f"its {step.num_shards} shards alone than in the whole stream. Leave it to the loader: batch_size=, a "
                f"function of one sample as transform= or in steps=, Mix for several sources, epoch_size= for a part "
                f"of any samples, a Dataset loaded without streaming (split='train[:1000]') for a certain part. Or "
                f"pass the stream itself to Loader.from_dataset, which iterates over it."
            )
    return steps


def _is_by_sample(step: Any) -> bool:
    if type(step).__name__ not in _BY_SAMPLE or getattr(step, "batched", False) or getattr(step, "with_indices", False):
        return False
    return sum(before.num_shards for before in _before(step)) in (
        0,
        step.num_shards,
    )  # before datasets 5, joined streams were sharded side by side


def _steps(step: Any) -> Iterator[Any]:
    """The steps of the stream, from the last one back to its sources."""
    yield step
    for before in _before(step):
        yield from _steps(before)


def _before(step: Any) -> Sequence[Any]:
    return [step.ex_iterable] if hasattr(step, "ex_iterable") else getattr(step, "ex_iterables", ())


def _known_counts(dataset: Any, steps: list[Any]) -> Sequence[int]:
    source = steps[-1]
    unclear = next((step for step in steps if not _keeps_count(step)), None)
    if unclear is None:
        pieces = source.kwargs.get("shards")
        # to_iterable_dataset
        if pieces and all(isinstance(piece, extra("datasets", _WHO).Dataset) for piece in pieces):
            return list(map(len, pieces))
        split = (dataset.info.splits or {}).get(str(dataset.split))
        lengths: list[int] | None = getattr(split, "original_shard_lengths", None)
        if lengths is not None and len(lengths) == dataset.num_shards:
            return lengths
    why = "" if unclear is None else f" after the step {type(unclear).__name__}"
    raise ValueError(
        f"the number of samples in each of the {dataset.num_shards} shards is unknown{why}. Pass counts=; or pass "
        f"epoch_size= to read it without counting; or load the dataset without streaming, which reads it by index. For "
        f"parquet files, also with hf:// paths, penstock.formats.parquet reads the counts from the file footers."
    )


def _keeps_count(step: Any) -> bool:
    """Whether a step yields exactly one sample per input. A map over batches may yield any number."""
    return type(step).__name__ in _KEEP_COUNTS and not getattr(step, "batched", False)
