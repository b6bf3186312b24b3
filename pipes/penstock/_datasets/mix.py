"""Mix: several datasets as one, each drawn from by its weight."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

from torch.utils.data import ConcatDataset, IterableDataset

from penstock._arguments import whole_number
from penstock._fetch.sample import current
from penstock._fetch.task import annotate
from penstock._random.mix_order import MixOrder, source_seed
from penstock._random.orders import order_of

if TYPE_CHECKING:
    from penstock._random.mix_stages import Weights


class Share(NamedTuple):
    """What a mix takes from one source.

    Attributes:
        items: The expected number of items; the actual one is within a few of it.
        passes: How often the source is repeated: items divided by its length.
    """

    items: float
    passes: float


@final
class Mix(ConcatDataset[Any]):
    """Several map-style datasets, mixed by weight. Pass it to `Loader.from_dataset` like any dataset.

    As a dataset it is the concatenation of its sources, sorted by name. It brings its own order, a `MixOrder`: an endless sequence with exact shares, cut
    into epochs. Each epoch continues every source where the last one left it. With ``shuffle=True`` each pass over a source is shuffled anew, by a seed
    made from the loader's seed and the source's name; a source that brings its own order keeps it. While a sample loads,
    ``penstock.sample().source`` is the name of its source.

    You can stop a run and continue with other weights: loading a state compares only the stages that started before it was taken.

    Args:
        datasets: The sources, by name. Each needs ``__len__`` and ``__getitem__``.
        weights: The weight of each source, with any sum. Or stages: pairs of a start and weights, where the start is an item counted from the start of
            training, over all ranks. A stage may leave sources out.
        epoch_size: Items in an epoch, over all ranks. Default: the sum of the lengths.
        stop: ``"first"``: the first epoch ends before any source would repeat an item; ``"all"``: before the last one would, so all of every source has
            been shown. Later epochs have the same length. Excludes ``epoch_size``.
        run: How many items in a row come from the same source; ``run=batch_size * world_size`` fills each batch from one source.
        tag: Add the name of the source to each sample, which must be a dict, under this key.
        max_passes: Refuse weights that repeat a source more often than this within an epoch.

    Raises:
        ValueError: A weight is negative, not finite or of no source; all are 0; a source is empty or never drawn from; ``max_passes`` is exceeded.
        TypeError: A source cannot be read by index.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        weights: Weights | Sequence[tuple[int, Weights]],
        *,
        epoch_size: int | None = None,
        stop: Literal["first", "all"] | None = None,
        run: int = 1,
        tag: str | None = None,
        max_passes: float | None = None,
    ) -> None:
        _check_sources(datasets)
        self.names = sorted(datasets)
        super().__init__([datasets[name] for name in self.names])
        if stop not in (None, "first", "all"):
            raise ValueError(f"stop={stop!r} is neither 'first' nor 'all'.")
        if stop is not None and epoch_size is not None:
            raise ValueError(
                f"stop={stop!r} and epoch_size={epoch_size} exclude each other, because both say where an epoch ends. Drop one of them."
            )
        self.tag = tag
        self._weights = copy.deepcopy(weights)
        self._epoch_size = epoch_size if stop is None else stop
        self._run = run
        order = self.order(shuffle=False, seed=0)
        if max_passes is not None:
            _check_passes(order, max_passes)

    def __getitem__(self, index: int) -> Any:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"index {index} is out of bounds for {len(self)} samples")
        number = bisect_right(self.cumulative_sizes, at)
        name, at = self.names[number], at - (self.cumulative_sizes[number - 1] if number else 0)
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

    @property
    def only_concatenates(self) -> bool:
        """Whether samples are just what the sources return, so that sources that are arrays can be gathered."""
        return self.tag is None

    def order(self, *, shuffle: bool, seed: int) -> MixOrder:
        """The order of the mix; see `OrderedDataset`. ``shuffle`` is about the sources: without it, each is read from its first item to its last."""
        pairs: list[tuple[str, Any]] = list(zip(self.names, self.datasets, strict=True))
        orders = {name: order_of(dataset, shuffle=shuffle, seed=source_seed(seed, name)) for name, dataset in pairs}
        sizes = {name: len(dataset) for name, dataset in pairs}
        return MixOrder(orders, self._weights, self._epoch_size, seed, self._run, sizes)

    def report(self, items: int | None = None) -> dict[str, Share]:
        """What the first ``items`` items of training (default: one epoch) take from each source, by name."""
        order = self.order(shuffle=False, seed=0)
        return _shares(order, 0, len(order) if items is None else whole_number("items", items, 0))

    def _tagged(self, sample: Any, name: str) -> Any:
        if isinstance(sample, dict) and self.tag not in sample:
            return {**sample, self.tag: name}
        what = "has it already" if isinstance(sample, dict) else f"is of type {type(sample).__name__}"
        raise TypeError(
            f"tag={self.tag!r} needs samples that are dicts without that key, but one of the source {name!r} {what}. Read penstock.sample().source in its "
            f"__getitem__ instead."
        )


def _check_sources(datasets: Any) -> None:
    if not isinstance(datasets, Mapping) or not datasets or not all(isinstance(name, str) for name in datasets):
        raise TypeError(f"a mix takes a dict of datasets by name, such as {{'web': …, 'code': …}}, but {datasets!r:.80} came.")
    for name, dataset in datasets.items():
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"the source {name!r} is a {type(dataset).__name__}, which cannot be read by index. A mix needs __getitem__ and __len__ to resume anywhere."
            )


def _shares(order: MixOrder, begin: int, end: int) -> dict[str, Share]:
    expected = order.expected(begin, end)
    return {name: Share(float(items), float(items / length)) for (name, items), length in zip(expected.items(), order.lengths, strict=True)}


def _check_passes(order: MixOrder, most: float) -> None:
    """Look at the epochs in which a stage starts, and the ones after them: every other epoch takes what the one before took."""
    n = len(order)
    epochs = sorted({0} | {start * order.run // n + more for start in (stage.start for stage in order.stages) for more in (0, 1)})
    for epoch in epochs:
        for name, share in _shares(order, epoch * n, (epoch + 1) * n).items():
            if share.passes > most:
                raise ValueError(
                    f"max_passes={most}: epoch {epoch} would repeat the source {name!r} {share.passes:.3g} times. Lower its weight or epoch_size, or allow more."
                )
