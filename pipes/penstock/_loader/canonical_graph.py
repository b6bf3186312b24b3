"""Builds the standard graph from `DataLoader`'s arguments."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

from torch.utils.data import default_collate, default_convert

from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.fetch import Fetch, IdentityDataset, has_getitems
from penstock._fetch.torch_collate import has_registered
from penstock._loader.dataloader_words import DataLoaderWords, say_once
from penstock._loader.in_step import unseeded_length
from penstock._loader.together import check_groups, check_order, check_together, is_buckets
from penstock._memory.devices import can_pin, resolve_device
from penstock._nodes.batcher import Batcher
from penstock._nodes.cycler import Cycler
from penstock._nodes.index_node import index_of
from penstock._nodes.node import BaseNode, Node
from penstock._nodes.parallel_mapper import ParallelMapper
from penstock._nodes.sampler import Sampler
from penstock._nodes.sharder import Sharder
from penstock._random.order import ContinuingOrder, dataset_order
from penstock._random.orders import order_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from penstock._fetch.error_policy import OnError
    from penstock._nodes.tails import Tail
    from penstock._random.grouping import Buckets, Packs
    from penstock._random.order import Order
    from penstock._workers.pool import StartMethod


class Options(TypedDict, total=False):
    """The keyword-only arguments of `FromDataset.from_dataset`, for type checkers and editors; documented there."""

    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool
    order: Order | None
    groups: Packs | Buckets | None
    transform: Callable[[Any], Any] | None
    seed: int | None
    method: Literal["thread", "process", "ray"]
    device: torch.device | str | None
    rank: int | None
    world_size: int | None
    mesh: DeviceMesh | None
    split: Literal["items", "own", "within"] | None
    tail: Tail | None
    plan_ahead: bool
    seed_global_rngs: bool | Literal["always"]
    prefetch_next_epoch: bool
    max_restarts: int | None
    on_error: OnError
    max_errors: float | None
    ray_options: Mapping[str, Any] | None
    infinite: bool
    restart_on_stop_iteration: bool | None


class FromDataset(DataLoaderWords):
    """Gives `Loader` its `from_dataset`. A separate class, so that the signature stands next to the code that uses it."""

    _unseeded: int | None
    _built_for: int | None

    if TYPE_CHECKING:

        def __init__(self, root: BaseNode[Any], *, infinite: bool, restart_on_stop_iteration: bool | None) -> None: ...

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Any] | None = None,
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
        groups: Packs | Buckets | None = None,
        transform: Callable[[Any], Any] | None = None,
        seed: int | None = None,
        method: Literal["thread", "process", "ray"] = "process",
        device: torch.device | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        split: Literal["items", "own", "within"] | None = None,
        tail: Tail | None = None,
        plan_ahead: bool = True,
        seed_global_rngs: bool | Literal["always"] = True,
        prefetch_next_epoch: bool = True,
        max_restarts: int | None = None,
        on_error: OnError = "raise",
        max_errors: float | None = None,
        ray_options: Mapping[str, Any] | None = None,
        infinite: bool = False,
        restart_on_stop_iteration: bool | None = None,
    ) -> Self:
        """Build a `Loader` over ``dataset``.

        The arguments up to ``in_order`` are those of ``torch.utils.data.DataLoader``, in the same order and with the same meanings, so
        ``DataLoader = Loader.from_dataset`` is the only change that a script needs. The loader exposes ``dataset``, ``batch_size``,
        ``num_workers``, ``collate_fn``, ``pin_memory`` and ``drop_last`` as read-only attributes.

        DataLoader arguments:
            dataset: A map-style dataset, an ``IterableDataset``, or a finite torchdata node. The last two are read in this process, and
                need ``split`` on several ranks.
            batch_size: Samples per batch on this rank; None disables batching.
            shuffle: Reshuffle every epoch. The order is a pure function of (``seed``, epoch).
            sampler: Yields indices. From a ``DistributedSampler`` the loader takes seed, shuffle and drop_last, and shards by itself.
            batch_sampler: Yields lists of indices; ranks get whole batches. Excludes ``batch_size`` and ``drop_last``.
            num_workers: Worker threads or processes. 0 loads in the calling thread; ``"auto"`` adjusts the number as training runs.
            collate_fn: Merges samples into a batch; default: ``default_collate``. Runs in the workers, but in this process for a stream
                with two or more worker processes.
            pin_memory: Copy batches to pinned memory if there is an accelerator.
            drop_last: Drop the last batch of an epoch if it is not full.
            timeout: Seconds to wait for a batch; 0 waits forever.
            worker_init_fn: Called with the worker's number as each worker process starts.
            multiprocessing_context: A start method or context; default: that of ``multiprocessing``.
            generator: Its initial seed becomes ``seed``; nothing is drawn from it.
            prefetch_factor: Batches in progress per worker. Default: 2; 4 for batches up to 1 MiB; 8 (Ray: 32) up to 64 KiB.
            persistent_workers: Ignored: workers live as long as the loader. False logs a note once.
            pin_memory_device: Ignored: memory is pinned for the present accelerator. Logs a note once.
            in_order: False delivers batches as they finish; each rank must then save its own state. See `ParallelMapper`.

        Order:
            order: An `Order`, instead of ``shuffle`` or ``sampler``. Default: the dataset's ``order(*, shuffle, seed)`` if it has one, as
                `Mix` does.
            groups: `Packs` packs samples to a fixed length; `Buckets` makes batches of similar lengths. Excludes ``sampler`` and
                ``batch_sampler``; `Buckets` also excludes ``batch_size`` and ``drop_last``.
            seed: Seeds everything random. Default: 0 on every rank and in every run, regardless of ``torch.manual_seed``.
            plan_ahead: Read a copy of the sampler for the next epoch during this one; see `SamplerWrapper`.
            infinite: ``for batch in loader`` continues across epochs, and ``len(loader)`` is undefined.
            restart_on_stop_iteration: Resume the state of a finished epoch at the next epoch (True) or at its own empty remainder (False).
                Default: at the next epoch if the loop saw the end; see `Loader`.

        Ranks:
            rank: This process's rank, from 0. Default: from ``mesh`` or ``torch.distributed``, at the first batch; see `Sharder`.
            world_size: Number of ranks; pass it together with ``rank``.
            mesh: One dimension of a ``DeviceMesh``, such as ``mesh["dp"]``. Ranks with the same coordinate get the same items.
            split: How ranks share the data. By index: ``"items"`` (default) or, with ``batch_sampler``, ``"within"``; see `Sharder`. With a sampler or
                batch sampler that yields the indices of this rank: ``"own"``.
                Streams need a choice: ``"items"`` (every rank reads everything and keeps its share) or ``"own"`` (the stream splits
                itself); see `IterableSource`.
            tail: If shares are unequal, ``"pad"`` repeats samples, ``"drop"`` leaves some out, and ``"exact"`` lets ranks differ; see
                `Sharder`. Default: ``"pad"``, or ``"drop"`` with ``groups`` or a `Stream`. No effect with ``split="own"``.

        Workers:
            method: ``"process"``, ``"thread"``, or ``"ray"`` (actors of a Ray cluster, on other machines).
            transform: Applied to each sample in a worker, before collating or packing. Draw random numbers from ``penstock.sample().rng``.
            device: Copy batches to this device ahead of time, on a separate stream; see `ToDevice`.
            seed_global_rngs: Seed ``random``, NumPy, torch, and generators that the dataset holds for each sample, so that augmentation is reproducible; with threads, warn
                about code that draws from them. See `ParallelMapper`.
            prefetch_next_epoch: Load the next epoch's first batches before the loop asks for them.
            ray_options: Needs of each Ray worker, as for an actor's ``.options()``: ``num_cpus``, ``resources``, ``runtime_env``, …

        Errors:
            on_error: For a sample that fails: ``"raise"``, ``"skip"``, or a function ``(exception, index, epoch, position)`` that returns a
                substitute or `SKIP`; see `ParallelMapper`.
            max_errors: Failures allowed under ``on_error``: an ``int`` in total, or a ``float`` as a share of any 1000 samples.
            max_restarts: Worker processes that may die and be replaced before `WorkerDied`; default: 8, or twice the number of workers if
                that is more.

        Raises:
            ValueError: Arguments exclude each other or are invalid.
            TypeError: The dataset has no length where one is needed.
            GraphError: ``sampler`` shards by itself, and ``split`` is not ``"own"``.
        """
        shuffle = bool(shuffle)
        given = sampler if sampler is not None else batch_sampler
        if not persistent_workers:
            say_once("persistent_workers=False has no effect: workers live as long as the loader. Call loader.close() to end them.")
        if pin_memory_device:
            say_once(f"pin_memory_device={pin_memory_device!r} has no effect: memory is pinned for the present accelerator.")
        default = default_collate if batch_size is not None else default_convert
        if collate_fn is default and not has_getitems(dataset):  # which may return what only torch's function takes for samples
            collate_fn = None  # samples are then written in place
        words = {
            "dataset": dataset,
            "batch_size": None if batch_sampler is not None or is_buckets(groups) else batch_size,
            "num_workers": num_workers,
            "collate_fn": default if collate_fn is None else collate_fn,
            "pin_memory": pin_memory,
            "drop_last": drop_last,
        }
        unseeded = seed is None and generator is None and order is None
        seed = generator.initial_seed() % 2**63 if generator is not None else seed or 0
        on_device = device is not None and resolve_device(device).type != "cpu"
        facts = DatasetFacts(type(dataset).__name__, "forward", None, False) if isinstance(dataset, BaseNode) else DatasetFacts.of(dataset)
        if facts.in_memory and num_workers:
            raise ValueError(
                f"num_workers={num_workers!r}: a {facts.name} dataset is in memory and needs no workers. Leave num_workers out."
            )
        check_together(
            facts,
            batch_size=batch_size,
            orders={
                "shuffle=True": shuffle,
                "sampler": sampler is not None,
                "batch_sampler": batch_sampler is not None,
                "order": order is not None,
            },
            drop_last=drop_last,
            tail=tail,
            split=split,
            infinite=infinite,
            brings_order=given is not None and dataset_order(dataset, shuffle=False, seed=0) is not None,
        )
        map_fn: Callable[[Any], Any] = Fetch(dataset, collate_fn, transform)
        if groups is not None:
            check_groups(groups, facts, batch_size, sampler=given is not None, drop_last=drop_last, tail=tail)
            from penstock._fetch.packing import PackView
            from penstock._random.grouping import Packs

            if isinstance(groups, Packs):
                map_fn = Fetch(PackView(dataset, groups.capacity, groups.pad, transform), collate_fn)
        made_for = None  # the length of the dataset
        if facts.read == "forward":
            source, map_fn = _read(dataset, split, seed, bool(seed_global_rngs)), _collate_only(collate_fn, batch_size, transform)
            if seed_global_rngs is True and collate_fn is None and transform is None and not has_registered():
                seed_global_rngs = False  # no user code runs while batching, and restoring the generators would cost 80 us
        elif given is not None:
            from penstock._nodes.distributed_sampler import taken_over

            if split != "own" and (sharded := taken_over(sampler, batch_sampler)) is not None:
                source, tail = Sampler(sharded.order), tail or sharded.tail
                source.told = [sharded.sampler]
                if rank is None and mesh is None and sharded.share is not None:
                    rank, world_size = sharded.share
                if sharded.batch_size is not None:
                    batch_size, drop_last = sharded.batch_size, sharded.drop_last
            else:
                from penstock._nodes.sampler_wrapper import SamplerWrapper

                own: Literal["own", "items"] = "own" if split == "own" else "items"
                source = SamplerWrapper(given, seed, plan_ahead=plan_ahead, batches=sampler is None, split=own, infinite=infinite)
                if sampler is None:
                    batch_size = None
        else:
            if order is None:
                made_for, order = facts.samples(), order_of(dataset, shuffle=shuffle, seed=seed)
            else:
                check_order(order, facts)
            if groups is not None and isinstance(order, ContinuingOrder):
                raise ValueError(
                    f"groups needs the length of each sample, but {type(dataset).__name__} is an endless stream. Leave groups out, and pack with the penstock.Pack step."
                )
            if groups is None:
                source = Sampler(order)
            else:
                from penstock._nodes.grouper import Grouper

                source = Grouper(order, groups)
                if (read_by_all := getattr(dataset, "read_by_all", None)) is not None:
                    read_by_all()
            if is_buckets(groups):
                batch_size = None

        tail = tail or ("pad" if groups is None and not index_of(source).facts.carries_over_epochs else "drop")
        node: Node[Any] = Sharder(Cycler(source), rank, world_size, mesh=mesh, split="within" if split == "within" else "items", tail=tail)
        if batch_size is not None:
            node = Batcher(node, batch_size, drop_last)
        node = ParallelMapper(
            node,
            map_fn,
            num_workers,
            in_order,
            method,
            multiprocessing_context,
            prefetch_factor=prefetch_factor,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            seed=seed,
            seed_global_rngs=seed_global_rngs,
            pin_memory=pin_memory or on_device,
            prefetch_next_epoch=prefetch_next_epoch,
            max_restarts=max_restarts,
            on_error=on_error,
            max_errors=max_errors,
            ray_options=ray_options,
        )
        node.executor.generators.leave(generator=generator)
        words["num_workers"] = partial(getattr, node, "num_workers")  # a function, because "auto" changes the number
        if device is not None:
            from penstock._nodes.to_device import ToDevice

            node = ToDevice(node, device, prefetch_next_epoch=prefetch_next_epoch)
        elif pin_memory and can_pin():
            from penstock._nodes.pin_memory import PinMemory

            node = PinMemory(node, prefetch_next_epoch=prefetch_next_epoch)
        loader = cls(node, infinite=infinite, restart_on_stop_iteration=restart_on_stop_iteration)
        if isinstance(source, Sampler):
            source.take()
        loader._words = words
        loader._built_for = made_for
        if unseeded:
            loader._unseeded = unseeded_length(facts.length if shuffle else None, given)
        return loader


FromDataset.from_dataset.__func__.__qualname__ = "Loader.from_dataset"  # type: ignore[attr-defined]  # Python uses this name in the error for an unknown argument


def _read(dataset: Any, split: Any, seed: int, seed_global_rngs: bool) -> Node[Any]:
    if not isinstance(dataset, Node):
        from penstock._nodes.iterable_source import IterableSource

        return IterableSource(dataset, split=split, seed=seed, seed_global_rngs=seed_global_rngs)
    said = index_of(dataset).facts.sharded_by
    if split not in (None, said):
        raise ValueError(f"split={split!r} conflicts with split={said!r} of the {type(dataset).__name__}. Set split on that node only.")
    return dataset


def _collate_only(
    collate_fn: Callable[[Any], Any] | None, batch_size: int | None, transform: Callable[[Any], Any] | None
) -> Callable[[Any], Any]:
    if transform is not None:
        return Fetch(IdentityDataset(), collate_fn, transform)
    fetch = Fetch(None, collate_fn)
    return fetch.convert if batch_size is None else fetch.collate
