"""Refuses conflicting arguments of `Loader.from_dataset`. It works on `DatasetFacts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard

from penstock._nodes.tails import repeats
from penstock._random.orders import SequentialOrder, ShuffledOrder, TorchOrder
from penstock._random.weighted_order import WeightedOrder

if TYPE_CHECKING:
    from penstock._changing.ramp import Ramp
    from penstock._fetch.dataset_facts import DatasetFacts
    from penstock._nodes.balance import Costs
    from penstock._nodes.tails import Tail
    from penstock._random.buckets import Buckets
    from penstock._random.grouping import Packs
    from penstock._random.order import Order


class Asked(NamedTuple):
    """The arguments of `Loader.from_dataset` that decide the order."""

    shuffle: bool
    sampler: Any
    batch_sampler: Any
    order: Order | None
    groups: Packs | Buckets | None
    seed: int
    plan_ahead: bool
    infinite: bool
    skip: Any
    grow: bool

    @property
    def given(self) -> Any:
        """The sampler or the batch sampler; None if there is neither."""
        return self.sampler if self.sampler is not None else self.batch_sampler


class Shares(NamedTuple):
    """Those that decide how the order is cut into batches and dealt to the ranks."""

    batch_size: int | Ramp | None
    drop_last: bool
    rank: int | None
    world_size: int | None
    mesh: Any
    split: Literal["items", "batches", "own", "within"] | None
    tail: Tail | None
    costs: Costs | None = None


def check_together(facts: DatasetFacts, asked: Asked, shares: Shares) -> None:
    """Refuse conflicting arguments, as `DataLoader` does.

    Raises:
        ValueError: Two arguments exclude each other, or the dataset excludes one.
        TypeError: The dataset can be read neither by index nor forward.
    """
    batch_size, drop_last, split, tail = shares.batch_size, shares.drop_last, shares.split, shares.tail
    if split not in (None, "items", "batches", "own", "within"):
        raise ValueError(f"split={split!r} must be 'items', 'batches', 'own' or 'within'.")
    batch_sampler, infinite = asked.batch_sampler is not None, asked.infinite
    orders = {
        "shuffle=True": asked.shuffle,
        "sampler": asked.sampler is not None,
        "batch_sampler": batch_sampler,
        "order": asked.order is not None,
    }
    given = [name for name, is_given in orders.items() if is_given]
    if facts.read == "forward":
        if given:
            raise ValueError(
                f"{given[0]} needs a dataset that is read by index, but {facts.name} can only be iterated. Leave "
                f"{given[0]} out."
            )
    elif split == "own" and asked.given is None:
        raise ValueError(
            f"split='own' is for data that splits itself by rank as it is read, but {facts.name} is read by index. "
            f"Leave split out, or pass a sampler or a batch sampler that yields the indices of this rank."
        )
    elif facts.read == "once":
        raise TypeError(
            f"{facts.name} can be read only once, but a loader reads it once per epoch. Create it in the __iter__ of a "
            f"torch.utils.data.IterableDataset, or pass a list of it: list(...)."
        )
    elif facts.read != "by index":
        raise TypeError(
            f"a dataset has __getitem__ and __len__, or is an IterableDataset, but {facts.name} is neither. "
            + (
                "Wrap it: Loader.from_dataset(IterableSource(data), ...)."
                if facts.read == "as it comes"
                else "Give it a __getitem__ and a __len__."
            )
        )
    if (
        asked.given is not None and facts.own_order(shuffle=False, seed=0) is not None
    ):  # a DistributedSampler over a Mix would silently drop the weights
        raise ValueError(
            f"{facts.name} brings its own order, which a sampler would replace. Leave the sampler out, because the "
            f"loader shards the samples across ranks itself; or pass a different order as order=."
        )
    if asked.skip and (facts.read == "forward" or asked.given is not None or asked.groups is not None):
        what = "groups" if asked.groups is not None else facts.name if asked.given is None else "a sampler"
        raise ValueError(
            f"skip={asked.skip!r:.80} counts samples since the start of training, but {what} does not. Use it with a "
            f"dataset with an order, without groups."
        )
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: each decides the order. Keep one of them.")
    if batch_sampler and (batch_size != 1 or drop_last):
        raise ValueError(
            f"batch_sampler and batch_size={batch_size}, drop_last={drop_last} exclude each other: a batch sampler "
            f"already makes the batches. Drop one of them."
        )
    if batch_size is None and drop_last:
        raise ValueError("drop_last=True needs batches, but batch_size=None makes none. Leave one of them out.")
    if drop_last and tail == "exact":
        raise ValueError(
            "drop_last=True leaves samples out, but tail='exact' promises all of them. Leave one of them out."
        )
    if infinite and tail == "exact":
        raise ValueError(
            "tail='exact' lets some ranks run out of samples, but an infinite loader never ends. Use tail='pad' or "
            "tail='drop'."
        )
    if split == "within" and not batch_sampler:
        raise ValueError(
            "split='within' splits each batch of a batch_sampler across ranks, but there is no batch_sampler. Pass "
            "one, or leave split out."
        )
    if asked.grow or facts.grows:
        _check_grow(facts, asked)
    if asked.groups is not None:
        _check_groups(asked.groups, facts, asked, shares)
    if shares.costs is not None:
        _check_balance(shares.costs, facts, asked, shares)


def _check_grow(facts: DatasetFacts, asked: Asked) -> None:
    """Refuse ``grow`` where the length of an epoch, or what an index means, depends on more than the dataset; and tell
    ``facts`` of it.
    """
    others = {"a sampler": asked.given, "order": asked.order, "groups": asked.groups, "skip": asked.skip or None}
    if (other := next((name for name, value in others.items() if value is not None), None)) is not None:
        raise ValueError(
            f"grow=True lets epochs grow with {facts.name}, but {other} was made for its present length. Leave one of "
            f"the two out."
        )
    if not facts.grows and (
        facts.read != "by index" or facts.names or facts.own_order(shuffle=False, seed=0) is not None
    ):
        raise ValueError(
            f"grow=True compares the length of a map-style dataset, but {facts.name} has files or shards, a subset's "
            f"indices, an order of its own, or no length. Pass grow=True to its Shards or Stream, if it is one; if it "
            f"is a Mix, add a source; otherwise begin the run with a Mix of it, to which a source can be added."
        )
    facts.grows = True


def _check_groups(groups: Any, facts: DatasetFacts, asked: Asked, shares: Shares) -> None:
    """Refuse arguments that conflict with ``groups``."""
    from penstock._random.buckets import Buckets
    from penstock._random.grouping import Packs

    if not isinstance(groups, Packs | Buckets):
        raise TypeError(f"groups={groups!r:.80} must be penstock.Packs(…) or penstock.Buckets(…).")
    if facts.read != "by index":
        raise ValueError(
            f"groups needs a dataset that is read by index, but {facts.name} can only be iterated. Leave groups out."
        )
    if asked.given is not None:
        raise ValueError(
            "a sampler and groups exclude each other, because groups are made from an order. Use shuffle or order= "
            "instead of the sampler."
        )
    if groups.sources is not None:
        _check_sources(
            "key" if isinstance(groups, Buckets) and groups.keys is not None else "length", groups.sources, facts
        )
    keys = groups.keys if isinstance(groups, Buckets) else None
    of_each, what = (groups.lengths, "length") if keys is None else (keys, "key")
    if len(of_each) != facts.samples():
        raise ValueError(
            f"there are {len(of_each)} {what}s, but {facts.name} has {facts.length} samples. Pass one {what} for each "
            f"index of the dataset."
        )
    if isinstance(groups, Buckets) and (shares.batch_size != 1 or shares.drop_last):
        raise ValueError(
            f"Buckets and batch_size={shares.batch_size}, drop_last={shares.drop_last} exclude each other: each bucket "
            f"is a batch. Leave them out here; Buckets has "
            f"{'batch_size and short' if keys is not None else 'max_samples and drop_last'} instead."
        )
    if keys is not None and shares.tail is not None:
        raise ValueError(
            f"tail={shares.tail!r} is for short rounds, and Buckets with keys have none: their short={keys.short!r} "
            f"decides. Leave tail out."
        )
    if repeats(shares.tail):
        raise ValueError(
            f"tail={shares.tail!r} repeats items of an epoch, but groups cannot be read by position. Use tail='drop' "
            f"or tail='exact'."
        )


def _check_balance(costs: Costs, facts: DatasetFacts, asked: Asked, shares: Shares) -> None:
    """Refuse arguments with which ``balance`` makes no sense."""
    keys = asked.groups.keys if is_buckets(asked.groups) else None
    if is_buckets(asked.groups) and keys is None:
        raise ValueError(
            "balance would move samples between Buckets by length, beyond their limits. Give Buckets a same_size_run "
            "of as many batches as there are ranks, or leave balance out."
        )
    if (
        decides := "a batch sampler"
        if asked.batch_sampler is not None
        else f"split={shares.split!r}"
        if shares.split in ("own", "batches")
        else None
    ) is not None:
        raise ValueError(
            f"balance deals samples to ranks, but {decides} already does. Use shuffle or sampler with batch_size "
            f"instead, or leave balance out."
        )
    if facts.read != "by index":
        raise ValueError(
            f"balance needs the cost of each index of a dataset, but {facts.name} can only be iterated. Leave balance "
            f"out."
        )
    if keys is None and shares.batch_size in (None, 1):
        raise ValueError(
            f"with batch_size={shares.batch_size} each rank gets one sample, whatever it costs, so balance changes "
            f"nothing. Raise batch_size, or leave balance out."
        )
    if asked.skip or is_ramp(shares.batch_size):
        word = f"skip={asked.skip!r:.80}" if asked.skip else f"batch_size={shares.batch_size!r:.80}"
        raise ValueError(
            f"balance deals rounds of one size, one after the other, but {word} changes them. Leave one of the two out."
        )
    if len(costs) != facts.samples() and not costs.of_lengths:
        raise ValueError(
            f"balance has {len(costs)} costs, but {facts.name} has {facts.length} samples. Pass one cost for each "
            f"index of the dataset."
        )


def _check_sources(what: str, given: dict[str, int], facts: DatasetFacts) -> None:
    """Refuse lengths or keys by source that are not those of the mix."""
    sources = facts.source_lengths or {}
    if given != sources:
        counts = {name: given[name] for name in given.keys() & sources.keys() if given[name] != sources[name]}
        raise ValueError(
            f"{what}s is a dict by source, but {facts.name} has "
            f"{sources or 'no sources (only a Mix without streams has some)'}: missing are "
            f"{sorted(sources.keys() - given.keys())}, unknown are {sorted(map(str, given.keys() - sources.keys()))}, "
            f"and of another number are {counts}. Pass one {what} for each sample of each source."
        )


def check_order(order: Order, facts: DatasetFacts) -> None:
    """Refuse an order that is longer than the dataset, or silently leaves samples out."""
    items = facts.length
    if items is None:
        return
    if isinstance(order, WeightedOrder) and order.weights != items:
        raise ValueError(
            f"WeightedOrder has {order.weights} weights, but {facts.name} has {items} samples. Pass one weight for "
            f"each sample; 0 means never drawn."
        )
    if isinstance(order, SequentialOrder | ShuffledOrder | TorchOrder) and len(order) > items:
        raise ValueError(
            f"{type(order).__name__} has {len(order)} positions, but {facts.name} has {items} samples. Build it with "
            f"len(dataset)."
        )


def is_ramp(batch_size: int | Ramp | None) -> bool:
    """Whether batches differ in size, by their sample."""
    return hasattr(batch_size, "batched")


def is_buckets(groups: Packs | Buckets | None) -> TypeGuard[Buckets]:
    """Whether each group is a batch."""
    if groups is None:
        return False
    from penstock._random.buckets import Buckets

    return isinstance(groups, Buckets)
