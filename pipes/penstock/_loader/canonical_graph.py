"""The canonical graph, from `DataLoader`'s words."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

from torch.utils.data import default_collate, default_convert

from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.fetch import Fetch, IdentityDataset
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
    """For type checkers and editors: the keyword-only arguments of `FromDataset.from_dataset`, which explains them."""

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
    """The classmethod that builds the canonical graph, for the `Loader` to inherit: one signature, next to what it builds."""

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
        """A `Loader` over the canonical graph of ``dataset``: order, epochs, ranks, batches, workers, pinned memory.

        The words up to ``in_order`` are those of ``torch.utils.data.DataLoader``, in its order and with its meanings, so that
        ``DataLoader = Loader.from_dataset`` is all that a script has to change; the others are ours. The loader shows ``dataset``,
        ``batch_size``, ``num_workers``, ``collate_fn``, ``pin_memory`` and ``drop_last``, for reading.

        Args:
            dataset: Map-style; or an ``IterableDataset``, or a finite torchdata node, which is read in this process; on several ranks see ``split``.
            batch_size: Samples in a batch, on this rank; None: no batches.
            shuffle: A new order every epoch, a pure function of (``seed``, epoch).
            sampler: Any sampler of indices. A ``DistributedSampler`` is taken over: its seed, shuffle and drop_last are used here.
            batch_sampler: Any sampler of lists of indices; whole batches are dealt to the ranks. Excludes ``batch_size`` and ``drop_last``.
            num_workers: Worker threads or processes; 0 loads in this thread; ``"auto"`` finds while it runs how many are worth it.
            collate_fn: Makes a batch of a list of samples; default torch's ``default_collate``. It runs in the workers;
                over a stream with two or more worker processes it runs in this process. A type checker learns from it what a batch is.
            pin_memory: Copy batches to pinned memory, where there is an accelerator.
            drop_last: Leave out the batch at an epoch's end that is not full.
            timeout: Seconds to wait for a batch; 0 waits forever.
            worker_init_fn: Called with the worker's number in each worker process.
            multiprocessing_context: A start method or context; default: multiprocessing's.
            generator: Its initial seed becomes ``seed``. Nothing is drawn from it.
            prefetch_factor: Batches in work for each worker; default 2; 4 if batches have at most 1 MiB, 8 (Ray: 32) if 64 KiB.
            persistent_workers: Means nothing, and False is told so once: workers always live as long as the loader.
            pin_memory_device: Means nothing, and is told so once: memory is pinned for the accelerator that there is.
            in_order: Deliver batches in their order; False delivers them as they are done, and its states belong to one rank, see `ParallelMapper`.
            order: An `Order`; excludes ``shuffle`` and ``sampler``. Default: what the dataset's method ``order(*, shuffle, seed)`` returns, if it has one, as
                `Mix` does; otherwise as ``shuffle`` says.
            groups: `Packs` or `Buckets`: put samples into packs of one length, or into batches of similar lengths. Excludes ``sampler`` and
                ``batch_sampler``; with `Buckets` also ``batch_size`` and ``drop_last``, because a bucket is a batch.
            transform: Applied to each sample in the workers, before it is collated (or packed): decoding, augmentation. Its random numbers are the sample's
                (``penstock.sample().rng``). A stream's items are dealt to the ranks first, then transformed.
            seed: Of everything random; default 0, on every rank and in every run, whatever ``torch.manual_seed`` says. Two loaders that shuffle by the
                default seed and have the same length are in step, which a warning tells.
            method: What the workers are: ``"process"``, ``"thread"``, or ``"ray"``: actors of a Ray cluster, on other machines.
            device: Copy batches there ahead of time, on a stream of its own (`ToDevice`); default: they stay on the CPU.
            rank: This process's share of the data, from 0; default: asked of ``mesh`` or ``torch.distributed`` at the first batch, see `Sharder`.
            world_size: How many ranks share the data; goes with ``rank``, and is looked up where that is.
            mesh: One dimension of a ``DeviceMesh``, such as ``mesh["dp"]``: ranks with the same place in it get the same items.
            split: How several ranks share the data. By index: ``"items"`` (None means the same) or, with a ``batch_sampler``, ``"within"``; see
                `Sharder`. What is read from its beginning needs a word there: ``"items"``: every rank reads all of it and is dealt its share; ``"own"``:
                it splits itself by rank, and nothing is dealt; see `IterableSource`.
            tail: What to do if the ranks' shares come out unequal: ``"pad"`` repeats samples, ``"drop"`` leaves some out, ``"exact"`` lets ranks differ, see
                `Sharder`. Default ``"pad"``, or ``"drop"`` for what cannot be padded: ``groups``, and `Shards` that are not counted. Means nothing under
                ``split="own"``.
            plan_ahead: Draw the next epoch from ``sampler`` or ``batch_sampler`` during this one, in a helper process or thread; see `SamplerWrapper`.
            seed_global_rngs: Seed the global generators (``random``, NumPy, torch) for each sample, so that augmentation repeats itself; with ``method="thread"``, warn of what draws from them.
                See `ParallelMapper`.
            prefetch_next_epoch: Load the first batches of the next epoch before it is asked for.
            max_restarts: Worker processes that may die and be replaced before `WorkerDied`; default 8, or twice the number of workers if that is more.
            on_error: For a sample that fails: ``"raise"``, ``"skip"``, or a function ``(exception, index, epoch, position)`` that returns a substitute or
                `SKIP`; see `ParallelMapper`.
            max_errors: Samples that may fail under ``on_error``: an ``int`` in all, a ``float`` as a share of any 1000; default: no bound.
            ray_options: With ``method="ray"``: what each worker needs, as for ``.options()`` of a Ray actor (``num_cpus``, ``resources``, ``runtime_env``, …).
            infinite: ``for batch in loader`` goes on over all epochs, and ``len(loader)`` is unknown.
            restart_on_stop_iteration: A state of a finished epoch resumes at the next one (True), or at its empty remainder (False); default: at the next
                if the loop saw the end, see `Loader`.

        Raises:
            ValueError: Arguments that exclude each other, or make no sense.
            TypeError: A dataset without a length where one is needed.
            GraphError: A sampler that shards by itself.
        """
        shuffle = bool(shuffle)
        given = sampler if sampler is not None else batch_sampler
        if not persistent_workers:
            say_once("persistent_workers=False means nothing here: workers live as long as the loader. loader.close() ends them.")
        if pin_memory_device:
            say_once(f"pin_memory_device={pin_memory_device!r} means nothing here: memory is pinned for the accelerator that there is.")
        words = {
            "dataset": dataset,
            "batch_size": None if batch_sampler is not None or is_buckets(groups) else batch_size,
            "num_workers": num_workers,
            "collate_fn": collate_fn or (default_collate if batch_size is not None else default_convert),
            "pin_memory": pin_memory,
            "drop_last": drop_last,
        }
        unseeded = seed is None and generator is None and order is None
        seed = generator.initial_seed() % 2**63 if generator is not None else seed or 0
        on_device = device is not None and resolve_device(device).type != "cpu"
        facts = DatasetFacts(type(dataset).__name__, "forward", None, False) if isinstance(dataset, BaseNode) else DatasetFacts.of(dataset)
        if facts.in_memory and num_workers:
            raise ValueError(f"num_workers={num_workers!r}: a {facts.name} dataset lies in memory and needs no workers. Leave it out.")
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
            if seed_global_rngs is True and collate_fn is None and transform is None:
                seed_global_rngs = False  # in the batches nothing of the user's runs; restoring the generators would take 80 us
        elif given is not None:
            from penstock._nodes.distributed_sampler import taken_over

            if (sharded := taken_over(sampler, batch_sampler)) is not None:
                source, tail = Sampler(sharded.order), tail or sharded.tail
                if rank is None and mesh is None and sharded.share is not None:
                    rank, world_size = sharded.share
                if sharded.batch_size is not None:
                    batch_size, drop_last = sharded.batch_size, sharded.drop_last
            else:
                from penstock._nodes.sampler_wrapper import SamplerWrapper

                source = SamplerWrapper(given, seed, plan_ahead=plan_ahead, batches=sampler is None)
                if sampler is None:
                    batch_size = None
        else:
            if order is None:
                made_for, order = facts.samples(), order_of(dataset, shuffle=shuffle, seed=seed)
            else:
                check_order(order, facts)
            if groups is not None and isinstance(order, ContinuingOrder):
                raise ValueError(
                    f"groups needs the length of each sample, and {type(dataset).__name__} is a stream without end. Leave groups out; pack with the step penstock.Pack."
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
        words["num_workers"] = partial(getattr, node, "num_workers")  # which changes, if it is "auto"
        if device is not None:
            from penstock._nodes.to_device import ToDevice

            node = ToDevice(node, device, prefetch_next_epoch=prefetch_next_epoch)
        elif pin_memory and can_pin():
            from penstock._nodes.pin_memory import PinMemory

            node = PinMemory(node, prefetch_next_epoch=prefetch_next_epoch)
        loader = cls(node, infinite=infinite, restart_on_stop_iteration=restart_on_stop_iteration)
        loader._words = words
        loader._built_for = made_for
        if unseeded:
            loader._unseeded = unseeded_length(facts.length if shuffle else None, given)
        return loader


FromDataset.from_dataset.__func__.__qualname__ = "Loader.from_dataset"  # type: ignore[attr-defined]  # an unknown argument is refused under that name


def _read(dataset: Any, split: Any, seed: int, seed_global_rngs: bool) -> Node[Any]:
    if not isinstance(dataset, Node):
        from penstock._nodes.iterable_source import IterableSource

        return IterableSource(dataset, split=split, seed=seed, seed_global_rngs=seed_global_rngs)
    said = index_of(dataset).facts.sharded_by
    if split not in (None, said):
        raise ValueError(f"split={split!r} is for the source to say, and {type(dataset).__name__} says {said!r}. Say it there.")
    return dataset


def _collate_only(
    collate_fn: Callable[[Any], Any] | None, batch_size: int | None, transform: Callable[[Any], Any] | None
) -> Callable[[Any], Any]:
    if transform is not None:
        return Fetch(IdentityDataset(), collate_fn, transform)
    fetch = Fetch(None, collate_fn)
    return fetch.convert if batch_size is None else fetch.collate
