"""The workloads of benchmark_loaders.py, and how each loader is set up for them.

Other loaders are set up as their own documentation recommends, with about two batches in progress per worker:

- DataLoader, with and without ``persistent_workers``; "kept iterator" repeats the batch sampler forever and keeps one iterator, as the
  multi-epoch loader of timm does. StatefulDataLoader is a drop-in.
- torchdata.nodes: the graph of its migration guide, SamplerWrapper, Batcher, ParallelMapper over whole batches, Prefetcher, Loader.
- Grain: source, seed, shuffle, batch, repeat. `ReadOptions` recommends 0 threads for data in memory, which has its own row ("inline"),
  and inside worker processes, which are parallel already. Its worker processes are always spawned.
- SPDL: a continuous source of batches of indices, whole batches in the pool, the thread queue at the sink; processes are a region of the
  pipeline, as recommended for work that holds Python's lock. Batches are NumPy arrays, or tensors if 1 MB or more crosses to another
  process, because tensors travel in shared memory.
- MosaicML Streaming: local shards without a remote, batch_size passed to both, persistent workers.

If the work is waiting (W5), the threads of nodes, Grain and SPDL read samples, not batches, concurrently, as their documentation shows for
I/O. Grain's processes are 2 with 16 threads each. SPDL then has a cost per sample, so there is also a row for its whole batches.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset, default_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH_SIZE = 64
SEED = 1
LARGE_BATCH = 2**20  # bytes


# ---------------------------------------------------------------------------------------------------------------------- the workloads


@dataclass(frozen=True)
class Calibration:
    """The sizes at which a sample of W2 and of W3 takes about 1 ms here, and the time it took."""

    side: int = 224
    image_ms: float = 1.0
    loops: int = 20_000
    loop_ms: float = 1.0


class Rows(Dataset):
    """W1: 32 float32; the first is the row number."""

    def __init__(self, length: int) -> None:
        self.rows = np.random.default_rng(SEED).random((length, 32), dtype=np.float32)
        self.rows[:, 0] = np.arange(length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.rows[index]


class Images(Dataset):
    """W2: progressive JPEGs in memory, decoded without Python's lock. Smooth patterns with noise, because pure noise does not compress."""

    def __init__(self, length: int, side: int, distinct: int = 64) -> None:
        from PIL import Image

        self.length = length
        self.files = []
        rng = np.random.default_rng(SEED)
        for _ in range(distinct):
            coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
            noisy = np.asarray(coarse, dtype=np.float32) + rng.normal(0, 12, (side, side, 3))
            file = io.BytesIO()
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90, progressive=True)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        from PIL import Image

        return np.array(Image.open(io.BytesIO(self.files[index % len(self.files)])))


class Loops(Dataset):
    """W3: a loop in Python, which holds its lock. The first value is the sample's number."""

    def __init__(self, length: int, loops: int) -> None:
        self.length = length
        self.loops = loops

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        total = 0
        for number in range(self.loops):
            total += number & index
        return np.array([index, total % 1000], dtype=np.float32)


class Planes(Dataset):
    """W4: images of 3 x 224 x 224 bytes in memory, returned as float32: 38 MB per batch."""

    def __init__(self, length: int, distinct: int = 512) -> None:
        self.length = length
        self.store = np.random.default_rng(SEED).integers(0, 256, (distinct, 3, 224, 224), dtype=np.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        return self.store[index % len(self.store)].astype(np.float32)


class Waits(Dataset):
    """W5: 5 ms of waiting, as for a network. The first value is the sample's number."""

    seconds = 0.005

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(self.seconds)
        return np.full(8, index, dtype=np.float32)


@dataclass(frozen=True)
class Workload:
    """One kind of work.

    Args:
        title: The name to print.
        make: Builds the dataset from (calibration, length).
        length: Samples per epoch when speed is measured.
        short: Batches per epoch when epochs should end often.
        workers: Threads or processes, or how many samples may wait at the same time.
        tagged: Whether the first value of a sample is its own number.
    """

    title: str
    make: Callable[[Calibration, int], Any]
    length: int
    short: int
    workers: int = 2
    tagged: bool = True


WORKLOADS = {
    "W1": Workload("tiny rows, 32 float32", lambda _, length: Rows(length), 100_000, 50),
    "W1T": Workload("the same rows in a TensorDataset", lambda _, length: TensorDataset(torch.from_numpy(Rows(length).rows)), 100_000, 50),
    "W2": Workload("1 ms of JPEG decoding, without Python's lock", lambda at, length: Images(length, at.side), 64_000, 12, tagged=False),
    "W3": Workload("1 ms of pure Python", lambda at, length: Loops(length, at.loops), 64_000, 12),
    "W4": Workload("batches of 38 MB, copied once by the consumer", lambda _, length: Planes(length), 12_800, 16, tagged=False),
    "W5": Workload("5 ms of waiting, 32 at the same time", lambda _, length: Waits(length), 64_000, 64, workers=32),
}


def calibrate() -> Calibration:
    """The sizes at which one sample of W2 and one of W3 take about 1 ms in this process."""
    side, loops = 224, 20_000
    for _ in range(2):
        side = round(side * math.sqrt(0.001 / sample_s(Images(1, side, distinct=1))) / 8) * 8
        loops = round(loops * 0.001 / sample_s(Loops(1, loops)))
    return Calibration(side, 1000 * sample_s(Images(1, side, distinct=1)), loops, 1000 * sample_s(Loops(1, loops)))


def sample_s(dataset: Any, samples: int = 5, trials: int = 50) -> float:
    """Seconds per sample, in the best of several trials."""
    best = math.inf
    for _ in range(trials):
        start = time.perf_counter()
        for _ in range(samples):
            dataset[0]
        best = min(best, (time.perf_counter() - start) / samples)
    return best


# ------------------------------------------------------------------------------------------------------------------------ the loaders


@dataclass(frozen=True)
class Task:
    """What a loader is to load.

    Args:
        dataset: Map-style.
        workers: Threads or processes.
        waiting: Whether the work is waiting, so that samples rather than batches should be read concurrently.
        batch_bytes: Bytes per batch.
        shards: The folder with the same samples as MDS shards, for the loader that reads shards.
    """

    dataset: Any
    workers: int
    waiting: bool
    batch_bytes: int
    shards: str | None = None


@dataclass(frozen=True)
class Opened:
    """A common interface: ``epoch()`` iterates over the next epoch, ``close()`` shuts the loader down."""

    epoch: Callable[[], Iterator[Any]]
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Loader:
    """How to build a loader, what to import first, and which workloads it runs."""

    build: Callable[[Task], Opened]
    modules: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ("W1", "W2", "W3", "W4", "W5")


def seeded() -> torch.Generator:
    """Randomness that is the same in every run."""
    return torch.Generator().manual_seed(SEED)


def index_batches(task: Task) -> BatchSampler:
    """Shuffled batches of indices, in a new order for each iteration."""
    return BatchSampler(RandomSampler(task.dataset, generator=seeded()), BATCH_SIZE, drop_last=False)


def batches_of(task: Task) -> int:
    """Batches per epoch."""
    return math.ceil(len(task.dataset) / BATCH_SIZE)


class Collated:
    """Turn indices into a batch."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __call__(self, indices: list[int]) -> Any:
        return self.collate([self.dataset[index] for index in indices])


class Repeated:
    """A batch sampler that never ends."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.batches


def torch_loader(task: Task, *, stateful: bool = False, workers: int | None = None, **options: Any) -> Opened:
    """DataLoader, or its stateful twin."""
    kind: type[DataLoader] = DataLoader
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    workers = task.workers if workers is None else workers
    if "batch_sampler" not in options:
        options |= {"batch_size": BATCH_SIZE, "shuffle": True, "generator": seeded()}
    loader = kind(task.dataset, num_workers=workers, multiprocessing_context="fork" if workers else None, **options)
    return Opened(lambda: iter(loader))


def kept_iterator(task: Task) -> Opened:
    """DataLoader over an endless batch sampler, with one iterator for all epochs."""
    endless = torch_loader(task, batch_sampler=Repeated(index_batches(task))).epoch()
    return Opened(lambda: itertools.islice(endless, batches_of(task)))


def nodes(task: Task, method: str) -> Opened:
    """torchdata.nodes."""
    import torchdata.nodes as tn

    parallel = {"num_workers": task.workers, "method": method, "multiprocessing_context": "fork" if method == "process" else None}
    node = tn.SamplerWrapper(RandomSampler(task.dataset, generator=seeded()))
    if task.waiting and method == "thread":
        node = tn.Batcher(tn.ParallelMapper(node, task.dataset.__getitem__, **parallel), BATCH_SIZE, drop_last=False)
        node = tn.Prefetcher(tn.Mapper(node, default_collate), prefetch_factor=4)
    else:
        node = tn.ParallelMapper(tn.Batcher(node, BATCH_SIZE, drop_last=False), Collated(task.dataset), **parallel)
        node = tn.Prefetcher(node, prefetch_factor=2 * task.workers)
    loader = tn.Loader(node)
    return Opened(lambda: iter(loader))


def grain(task: Task, method: str) -> Opened:
    """Grain: one endless iterator, in which an epoch is a number of batches."""
    from grain import MapDataset, MultiprocessingOptions, ReadOptions
    from grain.experimental import ThreadPrefetchIterDataset

    shuffled = MapDataset.source(task.dataset).seed(SEED).shuffle()
    processes = 2 if method == "process" else 0
    if task.waiting:
        threads = task.workers // max(processes, 1)
        read = ReadOptions(num_threads=threads, prefetch_buffer_size=2 * BATCH_SIZE)  # Grain scans the whole buffer for every sample
        data = shuffled.repeat().to_iter_dataset(read).batch(BATCH_SIZE)
        if not processes:
            data = ThreadPrefetchIterDataset(data, prefetch_buffer_size=2)  # otherwise the consumer's thread would make the batches
    else:
        read = ReadOptions(num_threads=task.workers if method == "thread" else 0, prefetch_buffer_size=2 * task.workers)
        data = shuffled.batch(BATCH_SIZE).repeat().to_iter_dataset(read)
    if processes:
        data = data.mp_prefetch(MultiprocessingOptions(num_workers=processes, per_worker_buffer_size=2))
    endless = iter(data)
    return Opened(lambda: itertools.islice(endless, batches_of(task)), endless.close)


def spdl(task: Task, method: str, *, samples: bool = True) -> Opened:
    """SPDL: one pipeline that keeps running across epochs."""
    from spdl.pipeline import PipelineBuilder
    from spdl.pipeline.defs import MAIN_PROCESS, ProcessPoolExecutorConfig

    builder = PipelineBuilder()
    if method == "process":
        pool = ProcessPoolExecutorConfig(max_workers=task.workers, mp_context="fork")
        collate = default_collate if task.batch_bytes >= LARGE_BATCH else np.stack
        builder.add_source(index_batches(task), continuous=True).to(pool).pipe(Collated(task.dataset, collate)).to(MAIN_PROCESS)
    elif task.waiting and samples:
        builder.add_source(RandomSampler(task.dataset, generator=seeded()), continuous=True)
        builder.pipe(task.dataset.__getitem__, concurrency=task.workers).aggregate(BATCH_SIZE).pipe(np.stack)
    else:
        builder.add_source(index_batches(task), continuous=True)
        builder.pipe(Collated(task.dataset, np.stack), concurrency=task.workers)
    threads = task.workers + 1 if task.waiting else task.workers  # one for np.stack
    ready = 4 if task.waiting else 2 * task.workers
    pipeline = builder.add_sink(ready).build(num_threads=threads, use_thread_output_queue=True)
    return Opened(lambda: iter(pipeline), pipeline.stop)


def mosaic(task: Task) -> Opened:
    """MosaicML Streaming, from shards that `write_shards` wrote."""
    from streaming import StreamingDataLoader, StreamingDataset

    class Shards(StreamingDataset):
        def __getitem__(self, at: int) -> np.ndarray:
            return super().__getitem__(at)["sample"].astype(np.float32)

    dataset = Shards(local=task.shards, batch_size=BATCH_SIZE, shuffle=True, shuffle_seed=SEED, epoch_size=len(task.dataset))
    options = {"persistent_workers": True, "multiprocessing_context": "fork"}
    loader = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=task.workers, **options)
    return Opened(lambda: iter(loader))


def write_shards(dataset: Any, folder: str) -> None:
    """Write the rows of W1, or the bytes of W4, as MDS shards."""
    from streaming import MDSWriter

    samples = dataset.store if isinstance(dataset, Planes) else dataset.rows
    shape = ",".join(map(str, samples.shape[1:]))
    with MDSWriter(out=folder, columns={"sample": f"ndarray:{samples.dtype}:{shape}"}) as writer:
        for sample in samples:
            writer.write({"sample": sample})


def ours(task: Task, method: str, *, workers: int | None = None, **options: Any) -> Opened:
    """penstock, through its public API."""
    import penstock

    options |= {"num_workers": task.workers if workers is None else workers, "method": method}
    if method == "process":
        options["multiprocessing_context"] = "fork"
    loader = penstock.Loader.from_dataset(task.dataset, batch_size=BATCH_SIZE, shuffle=True, seed=SEED, **options)
    return Opened(lambda: iter(loader), loader.close)


REFERENCE = "DataLoader"
LOADERS = {
    REFERENCE: Loader(torch_loader),
    "DataLoader, persistent workers": Loader(functools.partial(torch_loader, persistent_workers=True)),
    "DataLoader, kept iterator": Loader(kept_iterator),
    "StatefulDataLoader": Loader(functools.partial(torch_loader, stateful=True), ("torchdata.stateful_dataloader",)),
    "torchdata.nodes, threads": Loader(functools.partial(nodes, method="thread"), ("torchdata.nodes",)),
    "torchdata.nodes, processes": Loader(functools.partial(nodes, method="process"), ("torchdata.nodes",)),
    "Grain, inline": Loader(functools.partial(grain, method="none"), ("grain",), ("W1", "W4")),
    "Grain, threads": Loader(functools.partial(grain, method="thread"), ("grain",)),
    "Grain, processes": Loader(functools.partial(grain, method="process"), ("grain",)),
    "SPDL, threads": Loader(functools.partial(spdl, method="thread"), ("spdl.pipeline",)),
    "SPDL, processes": Loader(functools.partial(spdl, method="process"), ("spdl.pipeline",), ("W1", "W2", "W3", "W4")),
    "SPDL, threads, whole batches": Loader(functools.partial(spdl, method="thread", samples=False), ("spdl.pipeline",), ("W5",)),
    "MosaicML Streaming": Loader(mosaic, ("streaming",), ("W1", "W4")),
    "DataLoader, 0 workers": Loader(functools.partial(torch_loader, workers=0), (), ("W1", "W1T")),
    "DataLoader, 1 worker": Loader(functools.partial(torch_loader, workers=1), (), ("W1T",)),
    "DataLoader, 2 workers": Loader(functools.partial(torch_loader, workers=2), (), ("W1T",)),
    "penstock, 0 workers": Loader(functools.partial(ours, method="thread", workers=0), ("penstock",), ("W1", "W1T")),
    "penstock, threads": Loader(functools.partial(ours, method="thread"), ("penstock",), ("W1", "W1T", "W2", "W3", "W4", "W5")),
    "penstock, processes": Loader(functools.partial(ours, method="process"), ("penstock",)),
    "penstock, processes, seed_samples=False": Loader(
        functools.partial(ours, method="process", seed_samples=False), ("penstock",), ("W1",)
    ),
}
