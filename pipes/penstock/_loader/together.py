"""What makes no sense together in `Loader.from_dataset`. Pure: it is told what the dataset is, and asks it nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from penstock._random.orders import SequentialOrder, ShuffledOrder, TorchOrder, WeightedOrder

if TYPE_CHECKING:
    from penstock._fetch.dataset_facts import DatasetFacts
    from penstock._random.grouping import Buckets, Packs
    from penstock._random.order import Order


def check_together(
    facts: DatasetFacts,
    *,
    batch_size: Any,
    orders: dict[str, bool],
    drop_last: bool,
    tail: str | None,
    split: str | None,
    infinite: bool,
    brings_order: bool,
) -> None:
    """Refuse what makes no sense together, as `DataLoader` does.

    Args:
        facts: Of the dataset.
        batch_size: The argument.
        orders: The arguments that decide the order, ``batch_sampler`` among them, and whether each was given.
        drop_last: The argument.
        tail: The argument.
        split: The argument.
        infinite: The argument.
        brings_order: A sampler was given, and the dataset has an order that it would replace.

    Raises:
        ValueError: Two arguments exclude each other, or the dataset excludes one.
        TypeError: The dataset can be read neither by index nor forward.
    """
    if split not in (None, "items", "own", "within"):
        raise ValueError(f"split={split!r} is neither 'items' nor 'own' nor 'within'.")
    given, batch_sampler = [name for name, is_given in orders.items() if is_given], orders["batch_sampler"]
    if facts.read == "forward":
        if given:
            raise ValueError(
                f"{given[0]} needs a dataset that is read by index, and {facts.name} is read from its beginning. Leave {given[0]} out."
            )
    elif split == "own":
        raise ValueError(
            f"split='own' is for data that splits itself by rank as it is read, and {facts.name} is read by index. Leave split out."
        )
    elif facts.read == "once":
        raise TypeError(
            f"{facts.name} can be read only once, and a loader reads it once an epoch. Put what makes it into the __iter__ of a "
            f"torch.utils.data.IterableDataset, or give a list of it: list(...)."
        )
    elif facts.read != "by index":
        raise TypeError(
            f"a dataset has __getitem__ (and __len__), or is an IterableDataset, and {facts.name} is neither. "
            + (
                "Wrap it: Loader.from_dataset(IterableSource(data), ...)."
                if facts.read == "as it comes"
                else "Give it a __getitem__ and a __len__."
            )
        )
    if brings_order:  # a DistributedSampler over a Mix would silently drop the weights
        raise ValueError(
            f"{facts.name} brings its own order, and a sampler would replace it. Leave the sampler out, because the loader deals the samples to the "
            f"ranks itself; or pass another order as order=."
        )
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: each decides the order. Keep one of them.")
    if batch_sampler and (batch_size != 1 or drop_last):
        raise ValueError(
            f"batch_sampler and batch_size={batch_size}, drop_last={drop_last} exclude each other: a batch sampler already makes the batches. Drop one of them."
        )
    if batch_size is None and drop_last:
        raise ValueError("drop_last=True needs batches, and batch_size=None makes none. Drop one of them.")
    if drop_last and tail == "exact":
        raise ValueError("drop_last=True leaves samples out, and tail='exact' promises all of them. Drop one of them.")
    if infinite and tail == "exact":
        raise ValueError("tail='exact' lets ranks run out, and infinite=True never does. Use tail='pad' or tail='drop'.")
    if split == "within" and not batch_sampler:
        raise ValueError(
            "split='within' deals the places of a batch sampler's batches, and there is no batch_sampler. Give one, or leave split out."
        )


def check_groups(groups: Any, facts: DatasetFacts, batch_size: Any, *, sampler: bool, drop_last: bool, tail: str | None) -> None:
    """Refuse what makes no sense with ``groups``."""
    from penstock._random.grouping import Buckets, Packs

    if not isinstance(groups, Packs | Buckets):
        raise TypeError(f"groups={groups!r:.80} must be penstock.Packs(…) or penstock.Buckets(…).")
    if facts.read != "by index":
        raise ValueError(f"groups needs a dataset that is read by index, and {facts.name} is read from its beginning. Leave groups out.")
    if sampler:
        raise ValueError(
            "a sampler and groups exclude each other, because groups are made of an order. Use shuffle or order= instead of the sampler."
        )
    if len(groups.lengths) != facts.samples():
        raise ValueError(
            f"there are {len(groups.lengths)} lengths, and {facts.name} has {facts.length} samples. Give one length for each index of the dataset."
        )
    if isinstance(groups, Buckets) and (batch_size != 1 or drop_last):
        raise ValueError(
            f"Buckets and batch_size={batch_size}, drop_last={drop_last} exclude each other: each bucket is a batch. Drop one of them."
        )
    if tail == "pad":
        raise ValueError(
            "tail='pad' repeats the start of an epoch, and groups cannot be read by position. Use tail='drop' or tail='exact'."
        )


def check_order(order: Order, facts: DatasetFacts) -> None:
    """Refuse an order that visits places that the dataset does not have, or leaves some out in silence."""
    items = facts.length
    if items is None:
        return
    if isinstance(order, WeightedOrder) and order.weights != items:
        raise ValueError(
            f"WeightedOrder has {order.weights} weights, and {facts.name} has {items} samples: there must be one weight for each sample, 0 "
            f"for one that is never drawn."
        )
    if isinstance(order, SequentialOrder | ShuffledOrder | TorchOrder) and len(order) > items:
        raise ValueError(
            f"{type(order).__name__} visits {len(order)} places, and {facts.name} has {items} samples. Make it of len(dataset)."
        )


def is_buckets(groups: Packs | Buckets | None) -> TypeGuard[Buckets]:
    """Whether each group is a batch."""
    if groups is None:
        return False
    from penstock._random.grouping import Buckets

    return isinstance(groups, Buckets)
