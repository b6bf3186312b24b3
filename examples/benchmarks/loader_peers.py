"""The workloads of loaders.py, and how each loader is set up for them.

Other loaders are set up as their own documentation recommends, with about two batches in progress per worker:

- DataLoader, and its drop-in StatefulDataLoader. At the ends of epochs also with ``persistent_workers``, and as a "kept
  iterator" over a batch sampler that never ends, as in the multi-epoch loader of timm.
- torchdata.nodes: the graph of its migration guide, SamplerWrapper, Batcher, ParallelMapper over whole batches,
  Prefetcher, Loader.
- Grain: source, seed, shuffle, batch, repeat. `ReadOptions` recommends 0 threads for data in memory ("inline"), and
  inside worker processes, which are parallel already. Its worker processes are always spawned.
- SPDL: a continuous source of batches of indices, whole batches in the pool, the thread queue at the sink; processes
  are a region of the pipeline, as recommended for work that holds Python's lock. Batches are NumPy arrays, or tensors
  if 1 MB or more crosses to another process, because tensors travel in shared memory.

If the work is waiting, the threads of nodes, Grain and SPDL read samples, not batches, concurrently, as their
documentation shows for I/O, and Grain has 2 processes of 16 threads each.

Everyone decodes images with Pillow: SPDL's own decoder would be other work.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import multiprocessing
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset, default_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEED = 1
LARGE_BATCH = 2**20  # bytes


# -------------------------------------------------------------------------------------------------------- the workloads


class Rows(Dataset):
    """32 float32 in one array; the first is the row's number."""

    def __init__(self, length: int) -> None:
        self.rows = np.random.default_rng(SEED).random((length, 32), dtype=np.float32)
        self.rows[:, 0] = np.arange(length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[index]


class Made(Dataset):
    """``length`` samples, of which sample i is ``make(i)``."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self.length = length
        self.make = make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Nothing(Dataset):
    """Samples that cost nothing and draw nothing, for what a loader itself costs."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices

    def __getitem__(self, index: int) -> int:
        return index


class Tokens:
    """Ragged int64, 32 to 512 tokens, none of them 0."""

    def __init__(self, distinct: int = 20_000) -> None:
        rng = np.random.default_rng(SEED)
        self.ends = rng.integers(32, 513, distinct).cumsum()
        self.tokens = rng.integers(1, 50_000, self.ends[-1])

    def __call__(self, index: int) -> np.ndarray:
        place = index % len(self.ends)
        return self.tokens[self.ends[place - 1] if place else 0 : self.ends[place]]


class Table:
    """Dicts of 40 Python floats; the first is the row's number."""

    def __init__(self, distinct: int = 2000) -> None:
        values = np.random.default_rng(SEED).random((distinct, 40)).tolist()
        self.rows = [{f"column {place}": value for place, value in enumerate(row)} for row in values]

    def __call__(self, index: int) -> dict[str, float]:
        return self.rows[index % len(self.rows)] | {"column 0": float(index)}


class Photos:
    """JPEGs in memory, decoded without Python's lock.

    Smooth patterns with noise, because pure noise does not compress.
    """

    def __init__(self, side: int, distinct: int = 64) -> None:
        from PIL import Image

        self.files = []
        rng = np.random.default_rng(SEED)
        for _ in range(distinct):
            coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
                (side, side), Image.Resampling.BICUBIC
            )
            noisy = np.asarray(coarse, dtype=np.float32) + rng.normal(0, 12, (side, side, 3))
            file = io.BytesIO()
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __call__(self, index: int) -> np.ndarray:
        """Of uint8, (side, side, 3)."""
        from PIL import Image

        return np.array(Image.open(io.BytesIO(self.files[index % len(self.files)])))


class Augmented(Photos):
    """A random crop, flipped or not, normalised: float32, (3, 224, 224)."""

    mean = np.array([[[0.485]], [[0.456]], [[0.406]]], dtype=np.float32) * 255
    scale = 1 / (np.array([[[0.229]], [[0.224]], [[0.225]]], dtype=np.float32) * 255)

    def __call__(self, index: int) -> np.ndarray:
        image = super().__call__(index)
        top, left = torch.randint(0, len(image) - 223, (2,)).tolist()
        crop = image[top : top + 224, left : left + 224]
        if torch.rand(()) < 0.5:
            crop = crop[:, ::-1]
        pixels = crop.transpose(2, 0, 1).astype(np.float32, order="C")
        pixels -= self.mean
        pixels *= self.scale
        return pixels


class DecodedTogether(Dataset):
    """The JPEGs of `Photos`, 375 x 300, decoded and resized to (batch, 224, 224, 3) by SPDL's native decoder, a batch
    at a time. It needs FFmpeg.
    """

    def __init__(self, length: int) -> None:
        import spdl.io

        self.length = length
        self.files = Photos(375).files
        self.decode = functools.partial(spdl.io.load_image_batch, width=224, height=224)
        self.array = spdl.io.to_numpy

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.from_numpy(self.array(self.decode([self.files[index % len(self.files)] for index in indices])))

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]


def looped(index: int) -> np.ndarray:
    """A loop in Python, which holds its lock; about 1 ms. The first value is the sample's number."""
    total = 0
    for number in range(20_000):
        total += number & index
    return np.array([index, total % 1000], dtype=np.float32)


class Planes:
    """Images of 3 x 224 x 224 bytes in memory, returned as float32."""

    def __init__(self, distinct: int = 512) -> None:
        self.store = np.random.default_rng(SEED).integers(0, 256, (distinct, 3, 224, 224), dtype=np.uint8)

    def __call__(self, index: int) -> np.ndarray:
        return self.store[index % len(self.store)].astype(np.float32)


def fields(index: int) -> dict[str, Any]:
    """A dict of three: a small image, its label, two boxes."""
    return {"image": torch.full((3, 8, 8), float(index)), "label": index, "boxes": torch.full((2, 4), float(index))}


def tokenized(index: int) -> dict[str, torch.Tensor]:
    """Three rows of 512 tokens."""
    return {name: torch.full((512,), index) for name in ("input_ids", "attention_mask", "labels")}


def of_detection(samples: list[dict[str, Any]]) -> tuple[list[torch.Tensor], list[int]]:
    """What a detector's collate_fn does: lists, because images differ in size."""
    return [sample["image"] for sample in samples], [sample["label"] for sample in samples]


def waited(index: int) -> np.ndarray:
    """5 ms of waiting, as for a network. The first value is the sample's number."""
    time.sleep(0.005)
    return np.full(8, index, dtype=np.float32)


def pad(rows: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """What a tokeniser's collator does."""
    ids = pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def together(rows: Any) -> torch.Tensor:
    """A collate_fn for rows that are a batch already."""
    return rows if isinstance(rows, torch.Tensor) else torch.stack(rows)


def first(rows: list[int]) -> int:
    """A collate_fn that costs nothing."""
    return rows[0]


@dataclass(frozen=True)
class Workload:
    """One kind of work.

    Args:
        title: The name to print.
        make: Builds a dataset of so many samples.
        length: Samples per epoch.
        batch_size: Samples per batch.
        collate: ``collate_fn``.
        workers: Threads or processes.
        waits: ``workers`` is how many samples may wait at the same time.
        turn: Seconds of a turn, as a multiple of ``--seconds``: more if few batches are done in that time.
        copies: Whether the consumer copies each batch into memory of its own.
        ends: Whether the ends of epochs are part of what is measured; otherwise the first batches of an epoch are left
            out.
    """

    title: str
    make: Callable[[int], Any]
    length: int = 64_000
    batch_size: int = 64
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 2
    waits: bool = False
    turn: float = 1
    copies: bool = False
    ends: bool = False

    @property
    def lead(self) -> int:
        """Batches at the start of an epoch that may have been loaded earlier."""
        return 0 if self.ends else max(8, 2 * self.workers)


NOTHING = "nothing"
NATIVE = "native"
WORKLOADS = {
    "rows": Workload("tiny rows, 32 float32", Rows, 96_000),
    "epochs": Workload("the same, in epochs of 50 batches", Rows, 3200, turn=1.5, ends=True),
    "tensors": Workload(
        "the same, in a TensorDataset", lambda length: TensorDataset(torch.from_numpy(Rows(length).rows)), 96_000
    ),
    "table": Workload("dicts of 40 Python numbers, batches of 256", lambda length: Made(length, Table()), 256_000, 256),
    "text": Workload(
        "32 to 512 tokens, padded by collate_fn, batches of 32", lambda length: Made(length, Tokens()), 64_000, 32, pad
    ),
    "decode": Workload("JPEG, decoded to 3 x 224 x 224 uint8", lambda length: Made(length, Photos(224)), turn=1.5),
    "augment": Workload(
        "JPEG, decoded, cropped, flipped, as float32", lambda length: Made(length, Augmented(256)), turn=1.5
    ),
    NATIVE: Workload(
        "JPEG, decoded and resized by a native decoder of batches", DecodedTogether, collate=together, turn=1.5
    ),
    "python": Workload("1 ms of pure Python, batches of 16", lambda length: Made(length, looped), 64_000, 16, turn=1.5),
    "large": Workload(
        "batches of 38 MB, copied once by the consumer",
        lambda length: Made(length, Planes()),
        12_800,
        turn=1.5,
        copies=True,
    ),
    "waiting": Workload(
        "5 ms of waiting, 32 at the same time", lambda length: Made(length, waited), workers=32, waits=True, turn=5
    ),
    **{
        f"fields {n}": Workload(
            f"dicts of three small fields, batches of {n}", lambda length: Made(length, fields), 2000 * n, n
        )
        for n in (1, 4, 16, 64)
    },
    **{
        f"tokens {n}": Workload(
            f"dicts of three rows of 512 tokens, batches of {n}", lambda length: Made(length, tokenized), 2000 * n, n
        )
        for n in (4, 16)
    },
    "list": Workload("numbers, batches of 8, collate_fn=list", lambda length: Made(length, int), 16_000, 8, list),
    "detection": Workload(
        "dicts of three small fields, lists of 4 by a collate_fn",
        lambda length: Made(length, fields),
        8000,
        4,
        of_detection,
    ),
    NOTHING: Workload("nothing is loaded", lambda _: Nothing(), collate=first),
}


# ---------------------------------------------------------------------------------------------------------- the loaders


@dataclass(frozen=True)
class Task:
    """What a loader is to load: a workload's dataset, and the bytes of a batch."""

    workload: Workload
    dataset: Any
    batch_bytes: int

    @property
    def batch_size(self) -> int:
        return self.workload.batch_size

    @property
    def workers(self) -> int:
        return self.workload.workers

    @property
    def waiting(self) -> bool:
        """Whether samples rather than batches should be read concurrently."""
        return self.workload.waits

    @property
    def own_collate(self) -> Callable[[list[Any]], Any] | None:
        """The user's function, if there is one."""
        return None if self.workload.collate is default_collate else self.workload.collate

    @property
    def batches(self) -> int:
        """Batches per epoch."""
        return math.ceil(len(self.dataset) / self.batch_size)


@dataclass(frozen=True)
class Opened:
    """A common interface: ``epoch()`` iterates over the next epoch, ``close()`` shuts the loader down.

    Work without a loader has no batches. It has ``finished``, an array with a row per worker: how many samples, and
    when.
    """

    epoch: Callable[[], Iterator[Any]]
    close: Callable[[], object] = lambda: None
    finished: np.ndarray | None = None


def seeded() -> torch.Generator:
    """Randomness that is the same in every run."""
    return torch.Generator().manual_seed(SEED)


def index_batches(task: Task) -> BatchSampler:
    """Shuffled batches of indices, in a new order for each iteration."""
    return BatchSampler(RandomSampler(task.dataset, generator=seeded()), task.batch_size, drop_last=False)


class Collated:
    """Turn indices into a batch."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __call__(self, indices: list[int]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        return self.collate(many(indices) if many is not None else [self.dataset[index] for index in indices])


class Repeated:
    """A batch sampler that never ends."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.batches


def torch_loader(task: Task, method: str, *, stateful: bool = False, **options: Any) -> Opened:
    """DataLoader, or its stateful twin."""
    kind: type[DataLoader] = DataLoader
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    workers = task.workers if method == "processes" else 0
    if "batch_sampler" not in options:
        options |= {"batch_size": task.batch_size, "shuffle": True, "generator": seeded()}
    context = "fork" if workers else None
    loader = kind(
        task.dataset, num_workers=workers, collate_fn=task.own_collate, multiprocessing_context=context, **options
    )
    return Opened(lambda: iter(loader))


def kept_iterator(task: Task, method: str) -> Opened:
    """DataLoader over an endless batch sampler, with one iterator for all epochs."""
    endless = torch_loader(task, method, batch_sampler=Repeated(index_batches(task))).epoch()
    return Opened(lambda: itertools.islice(endless, task.batches))


def nodes(task: Task, method: str) -> Opened:
    """torchdata.nodes."""
    import torchdata.nodes as tn

    method = {"threads": "thread", "processes": "process"}[method]
    parallel = {
        "num_workers": task.workers,
        "method": method,
        "multiprocessing_context": "fork" if method == "process" else None,
    }
    node = tn.SamplerWrapper(RandomSampler(task.dataset, generator=seeded()))
    if task.waiting and method == "thread":
        node = tn.Batcher(
            tn.ParallelMapper(node, task.dataset.__getitem__, **parallel), task.batch_size, drop_last=False
        )
        node = tn.Prefetcher(tn.Mapper(node, task.workload.collate), prefetch_factor=4)
    else:
        node = tn.Batcher(node, task.batch_size, drop_last=False)
        node = tn.ParallelMapper(node, Collated(task.dataset, task.workload.collate), **parallel)
        node = tn.Prefetcher(node, prefetch_factor=2 * task.workers)
    loader = tn.Loader(node)
    return Opened(lambda: iter(loader))


def as_arrays(collate: Callable[[list[Any]], Any], rows: list[Any]) -> Any:
    """What ``collate`` returns, with arrays for tensors."""
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf, collate(rows)
    )


def grain(task: Task, method: str) -> Opened:
    """Grain: one endless iterator, in which an epoch is a number of batches."""
    from grain import MapDataset, MultiprocessingOptions, ReadOptions
    from grain.experimental import ThreadPrefetchIterDataset

    shuffled = MapDataset.source(task.dataset).seed(SEED).shuffle()
    batch_fn = functools.partial(as_arrays, task.own_collate) if task.own_collate else None
    processes = (2 if task.waiting else task.workers) if method == "processes" else 0
    if task.waiting:
        threads = task.workers // max(processes, 1)
        # Grain scans the whole buffer for every sample
        read = ReadOptions(num_threads=threads, prefetch_buffer_size=2 * task.batch_size)
        data = shuffled.repeat().to_iter_dataset(read).batch(task.batch_size, batch_fn=batch_fn)
        if not processes:
            # otherwise the consumer's thread would make the batches
            data = ThreadPrefetchIterDataset(data, prefetch_buffer_size=2)
    else:
        read = ReadOptions(
            num_threads=task.workers if method == "threads" else 0, prefetch_buffer_size=2 * task.workers
        )
        data = shuffled.batch(task.batch_size, batch_fn=batch_fn).repeat().to_iter_dataset(read)
    if processes:
        data = data.mp_prefetch(MultiprocessingOptions(num_workers=processes, per_worker_buffer_size=2))
    endless = iter(data)
    return Opened(lambda: itertools.islice(endless, task.batches), endless.close)


def spdl(task: Task, method: str) -> Opened:
    """SPDL: one pipeline that keeps running across epochs."""
    from spdl.pipeline import PipelineBuilder
    from spdl.pipeline.defs import MAIN_PROCESS, ProcessPoolExecutorConfig

    collate = np.stack if isinstance(task.dataset[0], np.ndarray) and not task.own_collate else task.workload.collate
    if method == "processes":
        collate = default_collate if task.batch_bytes >= LARGE_BATCH and collate is np.stack else collate
        if task.batch_bytes < LARGE_BATCH:
            collate = functools.partial(as_arrays, collate)
    builder = PipelineBuilder()
    if method == "processes":
        pool = ProcessPoolExecutorConfig(max_workers=task.workers, mp_context="fork")
        builder.add_source(index_batches(task), continuous=True).to(pool).pipe(Collated(task.dataset, collate)).to(
            MAIN_PROCESS
        )
    elif task.waiting:
        builder.add_source(RandomSampler(task.dataset, generator=seeded()), continuous=True)
        builder.pipe(task.dataset.__getitem__, concurrency=task.workers).aggregate(task.batch_size).pipe(collate)
    else:
        builder.add_source(index_batches(task), continuous=True)
        builder.pipe(Collated(task.dataset, collate), concurrency=task.workers)
    threads = task.workers + 1 if task.waiting else task.workers  # one to collate
    ready = 4 if task.waiting else 2 * task.workers
    pipeline = builder.add_sink(ready).build(num_threads=threads, use_thread_output_queue=True)
    return Opened(lambda: iter(pipeline), pipeline.stop)


def ours(task: Task, method: str) -> Opened:
    """penstock, through its public API."""
    import penstock

    options = {
        "num_workers": 0 if method == "inline" else task.workers,
        "method": "process" if method == "processes" else "thread",
    }
    if method == "processes":
        options["multiprocessing_context"] = "fork"
    if isinstance(task.dataset, Nothing):
        options["seed_global_rngs"] = False
    loader = penstock.Loader.from_dataset(
        task.dataset, batch_size=task.batch_size, shuffle=True, seed=SEED, collate_fn=task.own_collate, **options
    )
    return Opened(lambda: iter(loader), loader.close)


def no_loader(task: Task, method: str) -> Opened:
    """The work alone: as many threads or processes as workers, which load, collate and forget."""
    work = Collated(task.dataset, task.workload.collate)
    copy = copier(task) if task.workload.copies else None
    finished = torch.zeros(task.workers, 2, dtype=torch.float64).share_memory_().numpy()

    def repeat(worker: int) -> None:
        order = np.random.default_rng(worker).permutation(len(task.dataset)).tolist()
        for end in itertools.cycle(range(task.batch_size, len(order) + 1, task.batch_size)):
            batch = work(order[end - task.batch_size : end])
            if copy is not None:
                copy(batch)
            finished[worker] = finished[worker, 0] + task.batch_size, time.perf_counter()

    kind = threading.Thread if method == "threads" else multiprocessing.get_context("fork").Process
    for worker in range(task.workers):
        kind(target=repeat, args=(worker,), daemon=True).start()
    return Opened(lambda: iter(()), finished=finished)


def load_only(task: Task, method: str) -> Opened:
    """The samples of a batch, for what loading them costs."""

    def load() -> Iterator[None]:
        for indices in Repeated(index_batches(task)):
            task.dataset.__getitems__(indices) if hasattr(task.dataset, "__getitems__") else [
                task.dataset[index] for index in indices
            ]
            yield None

    return Opened(load)


def index_level(task: Task, method: str) -> Opened:
    """Batches of indices, for what it costs to know which samples are next."""
    from penstock.nodes import Batcher, Cycler, Sampler, Sharder
    from penstock.orders import ShuffledOrder

    node = Batcher(Sharder(Cycler(Sampler(ShuffledOrder(len(task.dataset), seed=SEED)))), batch_size=task.batch_size)
    node.reset()
    return Opened(lambda: iter(node))


def copier(task: Task) -> Callable[[Any], object]:
    """Copies a batch, a tensor or an array, into memory that exists already."""
    target = torch.empty(task.batch_size, *task.dataset[0].shape)
    return lambda batch: target[: len(batch)].copy_(torch.as_tensor(batch))


@dataclass(frozen=True)
class Loader:
    """How a loader is built, by which methods it loads, and on which workloads: by default on all."""

    build: Callable[[Task, str], Opened]
    methods: tuple[str, ...] = ("inline", "threads", "processes")
    workloads: tuple[str, ...] = tuple(name for name in WORKLOADS if name != NOTHING)


NO_LOADER, OURS, REFERENCE = "no loader", "penstock", "DataLoader"
LOAD_ONLY, INDEX_LEVEL = "load only", "index level"
LOADERS = {
    NO_LOADER: Loader(
        no_loader, ("threads", "processes"), tuple(name for name in WORKLOADS if name not in ("epochs", NOTHING))
    ),
    REFERENCE: Loader(torch_loader, ("inline", "processes"), tuple(WORKLOADS)),
    "DataLoader persistent": Loader(
        functools.partial(torch_loader, persistent_workers=True), ("processes",), ("epochs",)
    ),
    "DataLoader kept": Loader(kept_iterator, ("inline", "processes"), ("epochs",)),
    "StatefulDataLoader": Loader(functools.partial(torch_loader, stateful=True), ("inline", "processes")),
    "torchdata.nodes": Loader(nodes, ("threads", "processes")),
    "Grain": Loader(grain),
    "SPDL": Loader(spdl, ("threads", "processes")),
    OURS: Loader(ours, workloads=tuple(WORKLOADS)),
    LOAD_ONLY: Loader(
        load_only, ("inline",), tuple(name for name in WORKLOADS if name not in ("epochs", "waiting", NOTHING))
    ),
    INDEX_LEVEL: Loader(index_level, ("inline",), (NOTHING,)),
}


def names_of(workload: str) -> list[str]:
    """The loaders of a workload, as "loader, method". Nobody waits for one sample after the other."""
    return [
        f"{name}, {method}"
        for name, loader in LOADERS.items()
        if workload in loader.workloads
        for method in loader.methods
        if (workload, method) != ("waiting", "inline")
    ]


def build(name: str, task: Task) -> Opened:
    """Build the loader "loader, method"."""
    loader, method = name.split(", ")
    return LOADERS[loader].build(task, method)
