"""Mix: several datasets as one, sampled by weight."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

from torch.utils.data import ConcatDataset

from penstock._arguments import Shown, whole_number
from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.error_policy import annotate
from penstock._fetch.packed_rows import PackedRow
from penstock._fetch.sample import current
from penstock._random.lane_mix_order import InterleavedMixOrder
from penstock._random.mix_order import MixOrder, source_seed
from penstock._streams.sharded import Sharded
from penstock._streams.stream import Stream

if TYPE_CHECKING:
    from penstock._random.mix_stages import Weights


class Share(NamedTuple):
    """How much a mix takes from one source; see `Mix.report`."""

    items: float
    passes: float


@final
class Mix(Shown, ConcatDataset[Any]):
    """Several datasets, mixed by weight. Pass it to `Loader.from_dataset` like any dataset.

    As a dataset it is the concatenation of its sources, sorted by name. It has its own order, a `MixOrder`: an endless
    sequence with exact shares, cut into epochs. Each epoch continues every source where the previous epoch left it.
    With ``shuffle=True`` each pass over a source is reshuffled with a seed derived from the loader's seed and the
    source's name; a source with its own order keeps it. Where a sample is loaded and in the loader's ``transform``,
    ``penstock.sample().source`` is the name of its source.

    A source may be a `Stream`. Then each lane of the mix mixes independently (see `InterleavedMixOrder`),
    ``epoch_size`` is required, and an epoch continues where the previous one stopped. The number of lanes of each
    stream must divide the largest number of lanes among the streams.

    You can stop a run and continue with other weights and more sources: loading a state compares only the stages that
    started before it was saved, and the sources that they use. `Loader.reweight` changes the weights while the run goes
    on.

    Args:
        datasets: The sources, by name: map-style datasets, or a `Stream` each.
        weights: The weight of each source, with any sum; or stages, as pairs of a start and weights, where the start is
            an item counted from the start of training, over all ranks. A stage may omit sources. A source may have the
            weight 0 until `Loader.reweight` gives it another one.
        epoch_size: Items in an epoch, over all ranks. Default: the sum of the lengths of the sources in the first
            stage.
        stop: Where epoch 0 ends, and so the length of every epoch. ``"first"``: before any source would repeat an item.
            ``"all"``: before the last source would, so that every item of every source has been shown. That holds for
            epoch 0 only: later epochs continue the sources where they are, and may repeat an item or leave one out.
            Excludes ``epoch_size``.
        run: How many consecutive items come from the same source; ``run=batch_size * world_size`` fills each batch from
            one source.
        tag: Add the name of the source to each sample under this key. Samples must be dicts.

    Raises:
        ValueError: A weight is negative, not finite, or names no source; all weights are 0; or a source is empty or is
            named by no weight.
        TypeError: A source can neither be read by index nor is a `Stream`.
    """

    __module__ = "penstock"

    def __init__(
        self,
        datasets: Mapping[str, Any],
        weights: Weights | Sequence[tuple[int, Weights]],
        *,
        epoch_size: int | None = None,
        stop: Literal["first", "all"] | None = None,
        run: int = 1,
        tag: str | None = None,
    ) -> None:
        _check_sources(datasets)
        self.names = sorted(datasets)
        super().__init__([datasets[name] for name in self.names])
        if stop not in (None, "first", "all"):
            raise ValueError(f"stop={stop!r} must be 'first' or 'all'.")
        if stop is not None and epoch_size is not None:
            raise ValueError(
                f"stop={stop!r} and epoch_size={epoch_size} exclude each other, because both define where an epoch "
                f"ends. Drop one of them."
            )
        self.tag = tag
        self._weights = {**weights} if isinstance(weights, Mapping) else copy.deepcopy(weights)
        self._epoch_size = epoch_size if stop is None else stop
        self._run = run
        self._streams = {name: dataset for name, dataset in datasets.items() if _is_stream(dataset)}
        order = self.order(shuffle=False, seed=0)
        if isinstance(order, InterleavedMixOrder):
            self.forward_lanes = order.lanes  # tells the loader to give each lane to one worker

    def details(self) -> dict[str, Any]:
        return {"sources": self.names, "samples": None if self._streams else super().__len__()}

    def __len__(self) -> int:
        return int(self._epoch_size) if self._streams and self._epoch_size is not None else super().__len__()

    def __getitem__(self, index: int) -> Any:
        number, at = self._place_in_stream(index) if self._streams else self._place(index)
        name = self.names[number]
        loading = current.get()
        outer = loading.enter_source(name) if loading is not None else None
        try:
            sample = self.datasets[number][at]
        except Exception as exc:
            annotate(exc, f"in the source {name!r} of a mix, at its index {at}")
            raise
        finally:
            if loading is not None:
                loading.leave_source(outer)
        return sample if self.tag is None else self._tagged(sample, name)

    def where(self, index: int) -> str:
        """See `DatasetLike`."""
        number, at = self._place_in_stream(index) if self._streams else self._place(index)
        return f"{self.names[number]}, {DatasetFacts.of(self.datasets[number]).where(at) or f'index {at}'}"

    @property
    def sets_worker_info(self) -> bool:
        """See `DatasetLike`."""
        return any(stream.sets_worker_info for stream in self._streams.values())

    def seed_items(self, seed_global_rngs: bool | Literal["always"], worker_init_fn: Any = None) -> None:
        """See `DatasetLike`."""
        for stream in self._streams.values():
            if stream.sets_worker_info:
                stream.seed_items(seed_global_rngs, worker_init_fn)

    def close(self) -> None:
        """Close what its shards and streams have open in this process. Idempotent; reading opens it again."""
        for dataset in self.datasets:
            if isinstance(dataset, Sharded | Mix):
                dataset.close()

    @property
    def source_lengths(self) -> dict[str, int] | None:
        """See `DatasetLike`; None with streams."""
        if self._streams:
            return None
        datasets: list[Any] = self.datasets  # all have a length
        return dict(zip(self.names, map(len, datasets), strict=True))

    @property
    def only_concatenates(self) -> bool:
        """Whether samples are exactly what the sources return, so that array sources can be gathered."""
        return self.tag is None and not self._streams

    def order(self, *, shuffle: bool, seed: int) -> MixOrder | InterleavedMixOrder:
        """The order of the mix; see `DatasetLike`.

        ``shuffle`` applies to the sources: without it, each is read from its first item to its last.
        """
        pairs: list[tuple[str, Any]] = list(zip(self.names, self.datasets, strict=True))
        orders = {
            name: DatasetFacts.of(dataset).order(shuffle=shuffle, seed=source_seed(seed, name))
            for name, dataset in pairs
        }
        if not self._streams:
            sizes = {name: len(dataset) for name, dataset in pairs}
            return MixOrder(orders, self._weights, self._epoch_size, seed, self._run, sizes, self._data())
        if self._epoch_size is None or isinstance(self._epoch_size, str) or self._run != 1:
            what = (
                f"run={self._run}"
                if self._run != 1
                else "stop"
                if isinstance(self._epoch_size, str)
                else "epoch_size=None"
            )
            raise ValueError(
                f"{what}: the source {min(self._streams)!r} is a stream of unknown length. Set the number of items in "
                f"an epoch with epoch_size=, and drop stop and run."
            )
        return InterleavedMixOrder(orders, self._weights, self._epoch_size, seed, self._data())

    def _data(self) -> dict[str, dict[str, str]]:
        return {name: DatasetFacts.of(dataset).names for name, dataset in zip(self.names, self.datasets, strict=True)}

    def report(self, items: int | None = None) -> dict[str, Share]:
        """What the first ``items`` items of training (default: one epoch) take from each source, by name.

        Returns:
            For each source a named tuple: ``items``, the expected number, from which the actual one differs by a few,
            and ``passes``, how often the source is repeated, which is ``items`` divided by its length (NaN in a mix
            with streams).
        """
        order = self.order(shuffle=False, seed=0)
        expected = order.expected(0, len(order) if items is None else whole_number("items", items, 0))
        lengths: Any = [float("nan")] * len(expected) if isinstance(order, InterleavedMixOrder) else order.lengths
        return {
            name: Share(float(n), float(n / length))
            for (name, n), length in zip(expected.items(), lengths, strict=True)
        }

    def _place(self, index: int) -> tuple[int, int]:
        """The number of a sample's source, and its index in that source."""
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"index {index} is out of bounds for {len(self)} samples")
        number = bisect_right(self.cumulative_sizes, at)
        return number, at - (self.cumulative_sizes[number - 1] if number else 0)

    def _place_in_stream(self, index: int) -> tuple[int, int]:
        """The same, under the rule of `InterleavedMixOrder`."""
        rest, lane = divmod(index, self.forward_lanes)
        at, number = divmod(rest, len(self.names))
        return number, at * self.forward_lanes + lane if self.names[number] in self._streams else at

    def _tagged(self, sample: Any, name: str) -> Any:
        if isinstance(sample, Mapping) and self.tag not in sample:
            return sample | {self.tag: name} if isinstance(sample, PackedRow) else {**sample, self.tag: name}
        what = "already has it" if isinstance(sample, Mapping) else f"is of type {type(sample).__name__}"
        raise TypeError(
            f"tag={self.tag!r} needs samples that are dicts without that key, but one of the source {name!r} {what}. "
            f"Instead, read penstock.sample().source in its __getitem__, or in the loader's transform=."
        )


def _check_sources(datasets: Any) -> None:
    if not isinstance(datasets, Mapping) or not datasets or not all(isinstance(name, str) for name in datasets):
        raise TypeError(
            f"a mix takes a dict of datasets by name, such as {{'web': …, 'code': …}}, not {datasets!r:.80}."
        )
    for name, dataset in datasets.items():
        facts = DatasetFacts.of(dataset)
        if facts.grows:
            raise ValueError(
                f"the source {name!r} has grow=True, but a mix counts on the passes over each source. Leave it out, "
                f"and add what has come as one more source, with reweight; or read {name!r} alone."
            )
        if facts.length is None:
            raise TypeError(
                f"the source {name!r} is a {facts.name}, which cannot be read by index. A mix needs __getitem__ and "
                f"__len__ to resume anywhere."
            ) from facts.unsized


def _is_stream(dataset: Any) -> bool:
    if isinstance(dataset, Mix) and dataset._streams:
        raise ValueError(
            "a mix with streams cannot be a source of another mix. Put all sources into one mix, with the products of "
            "their weights."
        )
    return isinstance(dataset, Stream)
