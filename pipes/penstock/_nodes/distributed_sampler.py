"""Samplers that shard by themselves: a DistributedSampler is replaced by its order.

Any other is refused, unless it shards for one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

from torch.utils.data import BatchSampler, DistributedSampler

from penstock._errors import GraphError
from penstock._fetch.held import held
from penstock._nodes.ranks import process_group
from penstock._nodes.sampler_traits import wrapped
from penstock._random.orders import SequentialOrder, TorchOrder


@final
@dataclass(frozen=True, slots=True)
class DistributedSamplerSettings:
    """The settings of a ``DistributedSampler``, as arguments of this library.

    Attributes:
        order: Its order over the whole dataset.
        tail: How the last round is handled; see `Sharder`.
        batch_size: Of the ``BatchSampler`` around it; None if there is none.
        drop_last: Of the ``BatchSampler``.
        sampler: The sampler, to follow its ``set_epoch``.
        share: The rank and the number of ranks it was built for. None if the `Sharder` looks them up, because the
            sampler has them from the process group, which may be recreated, or was built for one rank and so yields the
            indices of all.
    """

    order: TorchOrder | SequentialOrder
    tail: Literal["pad", "drop"]
    batch_size: int | None
    drop_last: bool
    sampler: DistributedSampler[Any]
    share: tuple[int, int] | None


def taken_over(sampler: Any, batch_sampler: Any = None) -> DistributedSamplerSettings | None:
    """The same order unsharded, if ``sampler`` or ``batch_sampler`` is a ``DistributedSampler`` or a ``BatchSampler``
    around one.

    Otherwise None. Left as it is, it would give each rank a share of its share.

    Raises:
        GraphError: It is a ``DistributedSampler`` with a custom ``__iter__``, so its order is unknown; or its
            ``BatchSampler`` was passed as ``sampler``, so that each batch would count as one index.
    """
    given = sampler if sampler is not None else batch_sampler
    batches = given if _walks_as(given, BatchSampler) else None
    inner = given if batches is None else batches.sampler
    if not isinstance(inner, DistributedSampler):
        return None
    if not _walks_as(inner, DistributedSampler):
        refuse_sharded(inner)
        return None
    if getattr(inner, "next_yielded", None) is not None:
        raise GraphError(
            f"{type(inner).__name__} has loaded its own state, which the loader does not use. Load the loader's state "
            f"instead: loader.load_state_dict(...), saved by loader.state_dict(). Or pass a new sampler."
        )
    if batches is not None and sampler is not None:
        raise GraphError(
            "a DistributedSampler shards the indices across ranks, and the loader would shard the batches of "
            "sampler=BatchSampler(...) again, each as one index. For batches of samples, pass the BatchSampler as "
            "batch_sampler=, and the loader shards once. For dataset[[0, 1]], build the BatchSampler on the sampler "
            "that the DistributedSampler shards."
        )
    share = inner.rank, inner.num_replicas
    n = len(inner.dataset)  # type: ignore[arg-type]
    return DistributedSamplerSettings(
        order=TorchOrder(n, inner.seed) if inner.shuffle else SequentialOrder(n),
        tail="drop" if inner.drop_last else "pad",
        batch_size=None if batches is None else batches.batch_size,
        drop_last=batches is not None and batches.drop_last,
        sampler=inner,
        share=None if share in ((0, 1), process_group()) else share,
    )


def _walks_as(sampler: Any, kind: type) -> bool:
    """Whether it yields what torch's own ``kind`` would. torchdata's subclasses do, because they only count what they
    have yielded.
    """
    used: Any = type(sampler)
    stateful = used.__module__ == "torchdata.stateful_dataloader.sampler"
    return isinstance(sampler, kind) and (stateful or used.__iter__ is kind.__iter__)  # type: ignore[attr-defined]


def refuse_sharded(sampler: Any) -> None:
    """Refuse a sampler that is known to give each rank its own share, even if another one holds it.

    For others, ranks compare what they yield.

    Raises:
        GraphError: It has a ``rank``, ``num_replicas`` or ``process_index``, or holds a ``DistributedSampler``, and was
            not built for a single rank.
    """
    found = held({"sampler": sampler}, _LOOKED_AT)
    inside = [one.value for one in found if isinstance(one.value, DistributedSampler)]
    for one in (*wrapped(sampler), *inside):
        ranks = next((name for name in ("num_replicas", "num_processes", "world_size") if hasattr(one, name)), None)
        if ranks is not None and getattr(one, ranks) == 1:
            continue
        if any(hasattr(one, name) for name in ("rank", "num_replicas", "process_index")):
            own = "pass split='own', which takes the share of this rank as it is"
            if isinstance(one, DistributedSampler) and one is not sampler:
                outer = type(sampler).__name__
                remedy = (
                    f"Build it with num_replicas=1, rank=0, so that {outer} yields what all ranks get, and pass "
                    f"{outer} as before. Or {own}"
                )
            elif _walks_as(one, DistributedSampler):
                remedy = f"Pass it to from_dataset, which shards once, or use Sampler(TorchOrder(n, seed)). Or {own}"
            else:
                whole = f" (with {ranks}=1, if it takes that)" * (ranks is not None)
                remedy = (
                    f"Build it so that it yields the indices of all ranks{whole}, or {own}. Or pass the same order as "
                    f"order=, which is read by position. If it does not shuffle (evaluation), leave the sampler out "
                    f"and pass tail='exact', which delivers every sample once"
                )
            raise GraphError(
                f"{type(one).__name__} shards the indices across ranks, and the loader would shard each share again. "
                f"{remedy}."
            )


_LOOKED_AT = 500
"""Objects in a sampler among which a ``DistributedSampler`` is looked for."""
