"""Builds the standard graph from `DataLoader`'s arguments, in three steps: dataset -> source -> graph -> loader.

`print(loader.graph)` shows the three: the loader on the first line, then the graph from its last node on, and the
source at its end.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from torch.utils.data import default_collate, default_convert

from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.fetch import Fetch, IdentityDataset
from penstock._fetch.torch_collate import has_registered
from penstock._loader.built_again import unseeded
from penstock._loader.dataloader_words import DataLoaderWords, say_once
from penstock._loader.together import Asked, Shares, check_order, check_together, is_buckets, is_ramp
from penstock._memory.devices import can_pin, resolve_device
from penstock._nodes.balance import Costs
from penstock._nodes.batcher import Batcher
from penstock._nodes.cycler import Cycler
from penstock._nodes.index_node import index_of
from penstock._nodes.node import BaseNode, Node
from penstock._nodes.parallel_mapper import ParallelMapper
from penstock._nodes.sampler import Sampler
from penstock._nodes.sharder import Sharder
from penstock._random.order import ContinuingOrder

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import TypeVar

    from penstock._changing.ramp import Ramp
    from penstock._fetch.error_policy import OnError
    from penstock._loader.loader import Loader
    from penstock._nodes.tails import Tail
    from penstock._random.buckets import Buckets
    from penstock._random.grouping import Packs
    from penstock._random.order import Order
    from penstock._workers.pool import StartMethod

    Batch = TypeVar("Batch", default=Any)
    """What ``collate_fn`` makes. Nothing is claimed of what torch's default makes."""


class FromDataset(DataLoaderWords):
    """Gives `Loader` its `from_dataset`.

    A separate class, so that the signature stands next to the code that uses it.
    """

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        batch_size: int | Ramp | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Batch] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: StartMethod | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = True,
        pin_memory_device: str = "",
        in_order: bool = True,
        order: Order | None = None,
        skip: Iterable[Sequence[int]] = (),
        groups: Packs | Buckets | None = None,
        grow: bool = False,
        transform: Callable[[Any], Any] | None = None,
        seed: int | None = None,
        method: Literal["thread", "process", "ray"] = "process",
        device: torch.device | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        split: Literal["items", "batches", "own", "within"] | None = None,
        lanes: int | None = None,
        bookmarks: str | os.PathLike[str] | None = None,
        tail: Tail | None = None,
        balance: npt.ArrayLike | Callable[[np.ndarray], npt.ArrayLike] | None = None,
        plan_ahead: bool = False,
        seed_global_rngs: bool | Literal["always"] = True,
        prefetch_next_epoch: bool = True,
        max_restarts: int | None = None,
        on_error: OnError = "raise",
        max_errors: float | None = None,
        ray_options: Mapping[str, Any] | None = None,
        infinite: bool = False,
    ) -> Loader[Batch]:
        """Build a `Loader` over ``dataset``.

        The arguments up to ``in_order`` are those of ``torch.utils.data.DataLoader``, in the same order and with the
        same meanings, so ``DataLoader = Loader.from_dataset`` is the only change that a script needs. The loader
        exposes ``dataset``, ``batch_size``, ``num_workers``, ``collate_fn``, ``pin_memory`` and ``drop_last`` as
        read-only attributes.

        DataLoader arguments:
            dataset: A map-style dataset, an ``IterableDataset``, or a finite torchdata node. Without ``lanes``, the
                last two are read in this process, and need ``split`` on several ranks.
            batch_size: Samples per batch on this rank; None disables batching. A `Ramp` changes it during training.
            shuffle: Reshuffle every epoch. The order is a pure function of (``seed``, epoch).
            sampler: Yields indices. From a ``DistributedSampler`` the loader takes seed, shuffle and drop_last, and
                shards by itself.
            batch_sampler: Yields lists of indices; ranks get whole batches. Excludes ``batch_size`` and ``drop_last``.
            num_workers: Worker threads or processes. 0 loads in the calling thread; ``"auto"`` adjusts the number as
                training runs. An ``IterableDataset`` without ``lanes`` has workers only for your ``transform`` and
                ``collate_fn``.
            collate_fn: Merges samples into a batch; default: ``default_collate``. Runs in the workers, but in this
                process for a stream with two or more worker processes.
            pin_memory: Copy batches to pinned memory if there is an accelerator.
            drop_last: Drop the last batch of an epoch if it is not full.
            timeout: Seconds to wait for a batch; 0 waits forever. Does not end a read in this process.
            worker_init_fn: Called with the worker's number as each worker process starts; with ``lanes``, and for a
                `Stream` of an ``IterableDataset``, with the lane's, for each copy of the dataset.
            multiprocessing_context: A start method or context; default: that of ``multiprocessing``.
            generator: Its initial seed becomes ``seed``; nothing is drawn from it.
            prefetch_factor: Batches in progress per worker. Default: 2; 4 for batches up to 1 MiB; 8 (Ray: 32) up to 64
                KiB.
            persistent_workers: Ignored: workers live as long as the loader. False logs a note once.
            pin_memory_device: Ignored: memory is pinned for the present accelerator. Logs a note once.
            in_order: False delivers batches as they finish; each rank must then save its own state. See
                `ParallelMapper`.

        Order:
            order: An `Order`, instead of ``shuffle`` or ``sampler``. Default: the dataset's ``order(*, shuffle, seed)``
                if it has one, as `Mix` does.
            skip: Ranges of samples that are never loaded, and count as passed: pairs of the first one and the one after
                the last, counted from the start of training over all ranks. For data with an order.
            groups: `Packs` packs samples to a fixed length; `Buckets` makes batches of similar lengths. Excludes
                ``sampler`` and ``batch_sampler``; `Buckets` also excludes ``batch_size`` and ``drop_last``.
            grow: A state that was saved when the dataset was shorter loads. The epoch that had begun ends with the
                samples of then, and the next one has all: so what is added must come behind what there is. For a
                map-style dataset; `Shards`, `Stream` and formats have the argument themselves.
            seed: Seeds everything random. Default: 0 on every rank and in every run, regardless of
                ``torch.manual_seed``.
            plan_ahead: You declare that the order of your sampler depends on nothing but its ``set_epoch``: the next
                epoch is then read from a copy during this one; see `SamplerWrapper`.
            infinite: ``for batch in loader`` continues across epochs, and ``len(loader)`` is undefined.

        Ranks:
            rank: This process's rank, from 0. Default: from ``mesh`` or ``torch.distributed``, at the first batch; see
                `Sharder`.
            world_size: Number of ranks; pass it together with ``rank``.
            mesh: One dimension of a ``DeviceMesh``, such as ``mesh["dp"]``. Ranks with the same coordinate get the same
                items.
            split: How ranks share the data. By index: ``"items"`` (default), ``"batches"``, which gives each rank whole
                batches of the order, as Accelerate does, or, with ``batch_sampler``, ``"within"``; see `Sharder`. With
                a sampler or batch sampler that yields the indices of this rank: ``"own"``. Streams need a choice:
                ``"items"`` or ``"batches"`` (every rank reads everything and keeps its share), or ``"own"`` (the stream
                splits itself); see `IterableSource`.
            lanes: For an ``IterableDataset`` that splits itself by ``torch.utils.data.get_worker_info``: the batches
                that so many workers of a ``DataLoader`` would make, read by ``num_workers`` processes, and resumed with
                any number of them. On one rank; for several, and for a stream without epochs, see `Stream`.
            bookmarks: With ``lanes``, a folder that keeps states of the dataset from run to run, so that a resume need
                not read the epoch again up to its position. A state that does not lead to the items that came is not
                used.
            tail: If shares are unequal, ``"pad"`` repeats samples, ``"drop"`` leaves some out, and ``"exact"`` lets
                ranks differ; see `Sharder`. Default: ``"pad"``, or ``"drop"`` with ``groups`` or a `Stream`. No effect
                with ``split="own"``.
            balance: The cost of each sample, by index: an array of shape ``(n,)``. Or, with `Packs`, a function of an
                array of lengths, such as ``lambda lengths: lengths**2``, that is summed over the sequences of a pack.
                Every global batch (one batch of each rank) then keeps its samples, but the ranks get those that cost
                about as much: each as many as without. At most 64 ranks exchange samples; costs must be equal on all
                ranks (`check_ranks` compares them), and may change between save and load.

        Workers:
            method: ``"process"``, ``"thread"``, or ``"ray"`` (actors of a Ray cluster, on other machines).
            transform: Applied to each sample in a worker, before collating or packing. Draw random numbers from
                ``penstock.sample().rng``.
            device: Copy batches to this device ahead of time, on a separate stream; see `ToDevice`.
            seed_global_rngs: Seed ``random``, NumPy, torch, and generators that the dataset holds for each sample, so
                that augmentation is reproducible; with threads, warn about code that draws from them. See
                `ParallelMapper`.
            prefetch_next_epoch: Load the next epoch's first batches before the loop asks for them.
            ray_options: Needs of each Ray worker, as for an actor's ``.options()``: ``num_cpus``, ``resources``,
                ``runtime_env``, …

        Errors:
            on_error: For a sample that fails: ``"raise"``, ``"skip"``, or a function
                ``(exception, index, epoch, position)`` that returns a substitute or `SKIP`; see `ParallelMapper`.
            max_errors: Failures allowed under ``on_error``: an ``int`` in total, or a ``float`` as a share of any 1000
                samples.
            max_restarts: Worker processes that may die and be replaced before `WorkerDied`; default: 8, or twice the
                number of workers if that is more.

        Raises:
            ValueError: Arguments exclude each other or are invalid.
            TypeError: The dataset has no length where one is needed.
            GraphError: ``sampler`` shards by itself, and ``split`` is not ``"own"``.
        """
        if not persistent_workers:
            say_once(
                "persistent_workers=False has no effect: workers live as long as the loader. Call loader.close() to "
                "end them."
            )
        if pin_memory_device:
            say_once(
                f"pin_memory_device={pin_memory_device!r} has no effect: memory is pinned for the present accelerator."
            )
        facts = DatasetFacts(dataset, "forward") if isinstance(dataset, BaseNode) else DatasetFacts(dataset)
        if facts.in_memory and num_workers:
            raise ValueError(
                f"num_workers={num_workers!r}: a {facts.name} dataset is in memory and needs no workers. Leave "
                f"num_workers out."
            )
        costs = (
            None if balance is None else Costs(balance, None if is_buckets(groups) else cast("Packs | None", groups))
        )
        its_seed = generator.initial_seed() % 2**63 if generator is not None else seed or 0
        asked = Asked(bool(shuffle), sampler, batch_sampler, order, groups, its_seed, plan_ahead, infinite, skip, grow)
        shares = Shares(batch_size, drop_last, rank, world_size, mesh, split, tail, costs)
        check_together(facts, asked, shares)

        default: Callable[[Any], Any] = default_collate if batch_size is not None else default_convert
        # A __getitems__ may return what only torch's function takes for samples; packs are always samples.
        packs = groups is not None and not is_buckets(groups)
        in_place = collate_fn is None or (collate_fn is default and (packs or not facts.has_getitems))
        own_collate = None if in_place else collate_fn
        runs_user_code = facts.read != "forward" or not in_place or transform is not None or has_registered()

        source: Node[Any]
        map_fn: Callable[[Any], Any]
        if lanes is None and bookmarks is None:
            source, shares = _source_of(facts, asked, shares, bool(seed_global_rngs))
            if facts.read == "forward" and transform is None and (on_error == "skip" or callable(on_error)):
                raise ValueError(
                    f"on_error={on_error!r} handles samples that are loaded one by one, but {facts.name} is read "
                    f"forward, and a generator that raised cannot go on. Catch the error in the dataset; or do what "
                    f"fails in transform=; or use penstock.Stream(dataset, lanes=…, epoch_size=…, on_error='skip'), "
                    f"which goes on with the next pass of a worker."
                )
            map_fn = _map_fn(facts, groups, batch_size, own_collate, transform)
            facts.seed_items(seed_global_rngs, worker_init_fn)
            if facts.sets_worker_info:
                worker_init_fn = None  # it is called for each lane
        else:
            from penstock._loader.in_lanes import in_lanes

            source, shares, map_fn = in_lanes(
                facts,
                lanes,
                shares,
                own_collate,
                transform,
                seed=its_seed,
                bookmarks=bookmarks,
                seed_global_rngs=seed_global_rngs,
                worker_init_fn=worker_init_fn,
                in_order=in_order,
                on_error=on_error,
            )
            seed_global_rngs = (
                bool(seed_global_rngs) and runs_user_code and "always"
            )  # a batch cannot be read twice, and its items are seeded as they are read
            worker_init_fn = None  # it is called for each lane

        # Workers would only copy what is read here, which takes longer than to collate it. And without them nothing is
        # read before the loop asks for it, so a live source may wait until the loop has used the last batch.
        only_read = facts.read == "forward" and lanes is None and not runs_user_code
        if only_read and num_workers and worker_init_fn is not None:
            several = num_workers if isinstance(num_workers, int) else 4
            raise ValueError(
                f"worker_init_fn prepares worker processes, but without lanes= {facts.name} is read in this process, "
                f"and there are none. Leave worker_init_fn out; or, for an IterableDataset that it splits or seeds, "
                f"pass lanes={several}, the workers that a DataLoader would have."
            )
        root, mapper = _graph_of(
            _dealt(source, shares, facts),
            map_fn,
            device,
            pin_memory,
            num_workers=0 if only_read else num_workers,
            in_order=in_order,
            method=method,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            seed=asked.seed,
            # To restore the generators around each batch of a stream would cost 80 us.
            seed_global_rngs=False if seed_global_rngs is True and not runs_user_code else seed_global_rngs,
            prefetch_next_epoch=prefetch_next_epoch,
            max_restarts=max_restarts,
            on_error=on_error,
            max_errors=max_errors,
            ray_options=ray_options,
        )
        mapper.executor.generators.leave(generator=generator)
        index_of(source).first.has_workers |= bool(num_workers)

        loader: Any = cast("Any", cls)(root, infinite=infinite)
        loader._words = {
            "dataset": dataset,
            "batch_size": None if batch_sampler is not None or is_buckets(groups) else batch_size,
            "num_workers": partial(getattr, mapper, "num_workers"),  # a function, because "auto" changes the number
            "collate_fn": default if in_place else collate_fn,
            "pin_memory": pin_memory,
            "drop_last": drop_last,
        }
        default_order = facts.read == "by index" and asked.given is None and order is None
        loader._built_for = facts.length if default_order else None
        if seed is None and generator is None and order is None:
            loader._unseeded = unseeded(asked.given, shuffled=bool(shuffle) and facts.length is not None)
        if isinstance(source, Sampler):
            source.take()
        return cast("Loader[Batch]", loader)


# Python uses this name in the error for an unknown argument
FromDataset.from_dataset.__func__.__qualname__ = "Loader.from_dataset"  # type: ignore[attr-defined]


# From the dataset to the source.


def _source_of(facts: DatasetFacts, asked: Asked, shares: Shares, seed_global_rngs: bool) -> tuple[Node[Any], Shares]:
    """Where indices come from, or the items of a stream; and how they are dealt, because samplers and groups have a say
    in it.
    """
    if facts.read == "forward":
        return _stream(facts, asked.seed, shares.split, seed_global_rngs), shares
    if asked.given is not None:
        return _sampled(asked, shares)
    if facts.grows and facts.lanes is None:
        from penstock._changing.growing_sampler import growing

        source = growing(facts, shuffle=asked.shuffle, seed=asked.seed)
        if shares.costs is not None:
            facts.read_by_all()
        return source, shares
    if asked.order is None:
        facts.samples()
        order = facts.order(shuffle=asked.shuffle, seed=asked.seed)
    else:
        order = asked.order
        check_order(order, facts)
    if asked.groups is None and shares.costs is None:
        return _skipping(order, asked.skip), shares
    if isinstance(order, ContinuingOrder):
        what, remedy = ("groups", ", and pack with the penstock.Pack step") if shares.costs is None else ("balance", "")
        raise ValueError(
            f"{what} needs the {'cost' if shares.costs else 'length'} of each sample, but {facts.name} is an endless "
            f"stream. Leave {what} out{remedy}."
        )
    facts.read_by_all()
    if asked.groups is None:
        return _skipping(order, asked.skip), shares
    if is_buckets(asked.groups) and asked.groups.keys is not None:
        from penstock._nodes.key_grouper import KeyGrouper

        return KeyGrouper(order, asked.groups), shares._replace(batch_size=None)
    from penstock._nodes.grouper import Grouper

    batch_size = None if is_buckets(asked.groups) else shares.batch_size
    return Grouper(order, asked.groups), shares._replace(batch_size=batch_size, tail=shares.tail or "drop")


def _skipping(order: Order, ranges: Any) -> Sampler:
    sampler = Sampler(order)
    if ranges:
        from penstock._changing.skipping import skip

        skip(sampler, ranges)
    return sampler


def _stream(facts: DatasetFacts, seed: int, split: Any, seed_global_rngs: bool) -> Node[Any]:
    split = "items" if split == "batches" else split  # who reads what is the same
    if not isinstance(facts.dataset, Node):
        from penstock._nodes.iterable_source import IterableSource

        return IterableSource(facts, split=split, seed=seed, seed_global_rngs=seed_global_rngs)
    said = index_of(facts.dataset).facts.sharded_by
    if split not in (None, said):
        raise ValueError(
            f"split={split!r} conflicts with split={said!r} of the {facts.name}. Set split on that node only."
        )
    return facts.dataset


def _sampled(asked: Asked, shares: Shares) -> tuple[Node[Any], Shares]:
    from penstock._nodes.distributed_sampler import taken_over

    if shares.split != "own" and (sharded := taken_over(asked.sampler, asked.batch_sampler)) is not None:
        source = Sampler(sharded.order)
        source.told = [sharded.sampler]
        shares = shares._replace(tail=shares.tail or sharded.tail)
        if shares.rank is None and shares.mesh is None and sharded.share is not None:
            shares = shares._replace(rank=sharded.share[0], world_size=sharded.share[1])
        if sharded.batch_size is not None:
            shares = shares._replace(batch_size=sharded.batch_size, drop_last=sharded.drop_last)
        return source, shares
    from penstock._nodes.sampler_wrapper import SamplerWrapper

    batches = asked.sampler is None
    own: Literal["own", "items"] = "own" if shares.split == "own" else "items"
    wrapper = SamplerWrapper(
        asked.given, asked.seed, plan_ahead=asked.plan_ahead, batches=batches, split=own, infinite=asked.infinite
    )
    return wrapper, shares._replace(batch_size=None) if batches else shares


# From the source to the graph.


def _dealt(source: Node[Any], shares: Shares, facts: DatasetFacts) -> Node[Any]:
    split = None if shares.split == "own" else shares.split
    if facts.is_read_in_lanes and split == "batches":
        raise ValueError(
            f"split='batches' would make every rank read all shards of {facts.name}. Use split='items', with which "
            f"each rank reads its own lanes."
        )
    if shares.batch_size is None and split == "batches":
        split = "items"  # each item is a batch, or a sample that is one
    tail = shares.tail or ("drop" if index_of(source).facts.carries_over_epochs else None)
    node = Sharder(
        Cycler(source), shares.rank, shares.world_size, mesh=shares.mesh, split=split, tail=tail, balance=shares.costs
    )
    node.has_no_choice = facts.is_read_in_lanes
    size: Any = shares.batch_size
    if size is None:
        return node
    return size.batched(node, shares.drop_last) if is_ramp(size) else Batcher(node, size, shares.drop_last)


def _map_fn(facts: DatasetFacts, groups: Any, batch_size: Any, collate_fn: Any, transform: Any) -> Callable[[Any], Any]:
    """What makes a batch: of indices, of packs, or of the items that a stream has yielded."""
    if facts.read == "forward":
        if transform is not None:
            return Fetch(IdentityDataset(), collate_fn, transform)
        return Fetch(None, collate_fn).convert if batch_size is None else Fetch(None, collate_fn).collate
    if groups is None or is_buckets(groups):
        return Fetch(facts, collate_fn, transform)
    from penstock._fetch.packed_rows import Ragged
    from penstock._fetch.packing import PackView

    ragged = Ragged.of(groups.along, groups.cu_seqlens)
    return Fetch(PackView(facts, groups.capacity, groups.pad, transform, ragged, [*groups.also]), collate_fn)


def _graph_of(
    node: Node[Any], map_fn: Callable[[Any], Any], device: Any, pin_memory: bool, **workers: Any
) -> tuple[Node[Any], ParallelMapper[Any]]:
    """The last node, and the one with the workers."""
    pinned = pin_memory or (device is not None and resolve_device(device).type != "cpu")
    mapper = ParallelMapper(node, map_fn, pin_memory=pinned, **workers)
    if device is not None:
        from penstock._nodes.to_device import ToDevice

        return ToDevice(mapper, device, prefetch_next_epoch=workers["prefetch_next_epoch"]), mapper
    if pin_memory and can_pin():
        from penstock._nodes.pin_memory import PinMemory

        return PinMemory(mapper, prefetch_next_epoch=workers["prefetch_next_epoch"]), mapper
    return mapper, mapper
