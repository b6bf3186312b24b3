"""How each loader is set up for the programs in this folder, as its own documentation says, and what they all share.

The data are the numbers 0, 1, 2, ... in shards of uneven lengths, so that a batch says by itself what is in it. A
loader that has a format of its own gets the same numbers in that format.

A program is a question, and its ``CLAIMS`` have the answers that docs/comparison.md gives. It asks each loader in a
process of its own, because some of them hang, and prints a line for each:

    StatefulDataLoader 0.11.0 | exact | 2 samples read again | holds

It ends with 0 whatever it finds. ``--loaders Grain SPDL`` asks these only, and table.py asks everybody everything.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.metadata
import io
import itertools
import json
import os
import pickle
import signal
import socket
import sys
import tarfile
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SEED = 1
HANGS_AFTER_S = 120
Answer = tuple[str, str]  # the finding in a word or two, and what is behind it
Question = Callable[[str, Path], Answer]  # asks the loader of that name, and may use the folder


# ------------------------------------------------------------------------------------------------------------- the data


@dataclass(frozen=True)
class Job:
    """What a program wants from a loader.

    Attributes:
        scale: Shard ``k`` of the data has ``scale * (60 + 7 * (k % 13))`` numbers; there are 24.
        held: Samples in a shuffle buffer, for loaders that have one.
        kept: Which numbers are kept; the others are filtered out.
        reads: Each read of a sample leaves a byte in this file.
        fatal: The first process that reads this number kills itself, and leaves this file behind.
        persistent: Workers stay between epochs, where that is an option.
        elsewhere: Workers are actors of a Ray cluster, where that is an option.
    """

    batch_size: int = 8
    workers: int = 2
    rank: int = 0
    ranks: int = 1
    scale: int = 1
    shuffle: bool = True
    held: int = 0
    kept: Callable[[int], bool] | None = None
    reads: str | None = None
    fatal: tuple[int, str] | None = None
    persistent: bool = False
    elsewhere: bool = False

    @property
    def lengths(self) -> list[int]:
        """Of the shards."""
        return [self.scale * (60 + 7 * (shard % 13)) for shard in range(24)]

    @property
    def n(self) -> int:
        """Numbers in all."""
        return sum(self.lengths)

    def shard(self, shard: int) -> range:
        """The numbers of a shard."""
        begin = sum(self.lengths[:shard])
        return range(begin, begin + self.lengths[shard])

    def read(self, number: Any) -> int:
        """Called by each loader for each sample, wherever that runs."""
        if self.reads is not None:
            file = os.open(self.reads, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, b".")
            os.close(file)
        if self.fatal is not None and int(number) == self.fatal[0]:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.fatal[1], os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        return int(number)

    def count(self) -> int:
        """Reads so far."""
        assert self.reads is not None
        return os.path.getsize(self.reads) if os.path.exists(self.reads) else 0


@dataclass(frozen=True)
class Opened:
    """A loader that is set up.

    Attributes:
        epoch: An iterator over the batches of an epoch, or of what a loaded state leaves of it.
        state: The state after the last batch; None if there is no such thing.
        load: Takes a state.
        close: Ends what runs.
    """

    epoch: Callable[[], Iterator[Any]]
    state: Callable[[], Any] | None = None
    load: Callable[[Any], object] | None = None
    close: Callable[[], object] = lambda: None


def numbers(batch: Any) -> list[int]:
    """A batch as a list."""
    return [int(number) for number in (batch.tolist() if hasattr(batch, "tolist") else batch)]


def plain(batch: Any) -> Any:
    """A `collate_fn` that leaves samples as they are."""
    return batch


# ---------------------------------------------------------------------------------------------------------- the loaders


class ByIndex:
    """Numbers by index, for who reads like that."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.length = job.n

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return self.job.read(index)

    def batch(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class OneShard:
    """The numbers of a shard, for penstock's `Shards`."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, shard: int) -> Iterator[int]:
        return map(self.job.read, self.job.shard(shard))


def penstock(folder: Path, job: Job) -> Opened:
    import penstock

    common = {"batch_size": job.batch_size, "shuffle": job.shuffle, "seed": SEED, "num_workers": job.workers}
    common |= {"rank": job.rank, "world_size": job.ranks, "collate_fn": plain}
    if job.kept or job.held:
        steps = [
            *([penstock.Filter(job.kept)] if job.kept else []),
            *([penstock.Shuffle(job.held)] if job.held else []),
        ]
        data: Any = penstock.Stream(
            24, OneShard(job), epoch_size=job.n // 2, lanes=8, steps=steps, bookmarks=str(folder / "bookmarks")
        )
    else:
        data = ByIndex(job)
    if job.elsewhere:
        connect()
        common |= {"method": "ray"}
    loader = penstock.Loader.from_dataset(data, **common)
    return Opened(lambda: iter(loader), loader.state_dict, loader.load_state_dict, loader.close)


def stateful_dataloader(folder: Path, job: Job) -> Opened:
    from torch import manual_seed
    from torch.utils.data import IterableDataset, get_worker_info
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    class Shards(IterableDataset):  # splits itself by rank and worker, as everybody writes it
        def __iter__(self) -> Iterator[int]:
            worker = get_worker_info()
            part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
            for shard in range(24)[job.rank * parts + part :: job.ranks * parts]:
                yield from filter(job.kept, map(job.read, job.shard(shard)))

    manual_seed(SEED)
    options: dict[str, Any] = {"batch_size": job.batch_size, "num_workers": job.workers, "collate_fn": plain}
    options["persistent_workers"] = job.persistent and job.workers > 0
    if job.kept:
        loader = StatefulDataLoader(Shards(), **options)
    elif job.ranks > 1:
        data = ByIndex(job)
        sampler = StatefulDistributedSampler(data, job.ranks, job.rank, shuffle=job.shuffle, seed=SEED)
        loader = StatefulDataLoader(data, sampler=sampler, **options)
    else:
        loader = StatefulDataLoader(ByIndex(job), shuffle=job.shuffle, **options)
    return Opened(lambda: iter(loader), loader.state_dict, loader.load_state_dict)


def nodes(folder: Path, job: Job) -> Opened:
    import torchdata.nodes as tn
    from torch import Generator
    from torch.utils.data import RandomSampler, SequentialSampler
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = ByIndex(job)
    if job.kept:  # a node of the user, because there is none that filters: shards are dealt to the ranks
        mine = itertools.chain.from_iterable(map(job.shard, range(job.rank, 24, job.ranks)))
        node = tn.Batcher(tn.IterableWrapper(list(filter(job.kept, mine))), job.batch_size, drop_last=False)
    else:
        sampler: Any = SequentialSampler(data)
        if job.ranks > 1:
            sampler = StatefulDistributedSampler(data, job.ranks, job.rank, shuffle=job.shuffle, seed=SEED)
        elif job.shuffle:
            sampler = RandomSampler(data, generator=Generator().manual_seed(SEED))
        node = tn.Batcher(tn.SamplerWrapper(sampler), job.batch_size, drop_last=False)
    if job.workers:
        node = tn.ParallelMapper(
            node, data.batch, num_workers=job.workers, method="process", multiprocessing_context="fork"
        )
        node = tn.Prefetcher(node, prefetch_factor=2)
    else:
        node = tn.Mapper(node, data.batch)
    loader = tn.Loader(node)
    return Opened(lambda: iter(loader), loader.state_dict, loader.load_state_dict)


def grain(folder: Path, job: Job) -> Opened:
    import grain as gr

    data = gr.MapDataset.source(ByIndex(job))
    data = data.seed(SEED).shuffle() if job.shuffle else data
    if job.kept:
        data = data[job.rank :: job.ranks].filter(job.kept)
    elif job.ranks > 1:
        share = iter(
            gr.experimental.ElasticIterator(
                data, job.batch_size * job.ranks, gr.sharding.ShardOptions(job.rank, job.ranks)
            )
        )
        return Opened(lambda: share, share.get_state, share.set_state)
    read = data.to_iter_dataset().batch(job.batch_size)
    if job.workers:
        read = read.mp_prefetch(gr.MultiprocessingOptions(num_workers=job.workers))
    batches = iter(read)
    return Opened(lambda: batches, batches.get_state, batches.set_state, batches.close)


def grain_repeated(folder: Path, job: Job) -> Opened:
    """Epochs without a pause: one endless iterator, from which each epoch takes its batches."""
    import grain as gr

    data = gr.MapDataset.source(ByIndex(job)).seed(SEED).shuffle().batch(job.batch_size).repeat().to_iter_dataset()
    batches = iter(data.mp_prefetch(gr.MultiprocessingOptions(num_workers=job.workers)))
    return Opened(lambda: itertools.islice(batches, -(-job.n // job.batch_size)), close=batches.close)


def spdl(folder: Path, job: Job) -> Opened:
    from spdl.pipeline import PipelineBuilder
    from spdl.pipeline.defs import MAIN_PROCESS, ProcessPoolExecutorConfig
    from torch import Generator
    from torch.utils.data import BatchSampler, RandomSampler

    data = ByIndex(job)
    order = BatchSampler(RandomSampler(data, generator=Generator().manual_seed(SEED)), job.batch_size, drop_last=False)
    builder = PipelineBuilder().add_source(order, continuous=True)
    if job.workers:
        pool = ProcessPoolExecutorConfig(max_workers=job.workers, mp_context="fork")
        builder = builder.to(pool).pipe(data.batch).to(MAIN_PROCESS)
    else:
        builder = builder.pipe(data.batch)
    pipeline = builder.add_sink(4).build(num_threads=2, use_thread_output_queue=True)
    state, load = getattr(pipeline, "state_dict", None), getattr(pipeline, "load_state_dict", None)
    return Opened(lambda: iter(pipeline), state, load, pipeline.stop)


def write_mds(folder: Path, job: Job) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=2000 * job.scale) as writer:
        for number in range(job.n):
            writer.write({"number": number})


def mds(folder: Path, job: Job) -> Opened:
    """Its ranks are processes with the variables of torchrun."""
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Numbers(StreamingDataset):
        def __getitem__(self, at: int) -> int:
            return job.read(super().__getitem__(at)["number"])

    if job.ranks == 1:
        clean_stale_shared_memory()
    data = Numbers(
        local=str(written(folder, "mds", write_mds, job)),
        batch_size=job.batch_size,
        shuffle=job.shuffle,
        shuffle_seed=SEED,
    )
    persistent = job.persistent and job.workers > 0
    loader = StreamingDataLoader(
        data, batch_size=job.batch_size, num_workers=job.workers, persistent_workers=persistent
    )
    return Opened(lambda: iter(loader), loader.state_dict, loader.load_state_dict)


def of_shard(job: Job, shard: int) -> Iterator[int]:
    yield from job.shard(shard)


def write_litdata(folder: Path, job: Job) -> None:
    from litdata import optimize

    optimize(
        functools.partial(of_shard, job),
        list(range(24)),
        str(folder),
        chunk_size=100 * job.scale,
        num_workers=1,
        verbose=False,
    )


def litdata(folder: Path, job: Job) -> Opened:
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(
        str(written(folder, "litdata", write_litdata, job)),
        shuffle=job.shuffle,
        drop_last=job.ranks > 1,
        seed=SEED,
        transform=job.read,
    )
    persistent = job.persistent and job.workers > 0
    loader = StreamingDataLoader(
        data, batch_size=job.batch_size, num_workers=job.workers, collate_fn=plain, persistent_workers=persistent
    )
    return Opened(lambda: iter(loader), loader.state_dict, loader.load_state_dict)


def records(job: Job, shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in job.shard(shard):
            yield {"number": job.read(number)}


def hugging_face(folder: Path, job: Job) -> Opened:
    """With a StatefulDataLoader, as its documentation says, and without one if there are no workers."""
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    from datasets import IterableDataset

    unrecorded = dataclasses.replace(job, kept=None)
    data = IterableDataset.from_generator(
        functools.partial(records, unrecorded), gen_kwargs={"shards": list(range(24))}
    )
    if job.shuffle:
        data = data.shuffle(seed=SEED, buffer_size=job.held or 1)
    if job.kept:
        data = data.filter(lambda record: job.kept(record["number"]))
    if job.ranks > 1:
        data = split_dataset_by_node(data, job.rank, job.ranks)
    if not job.workers:
        batched = data.batch(job.batch_size)
        return Opened(lambda: (batch["number"] for batch in batched), batched.state_dict, batched.load_state_dict)
    loader = StatefulDataLoader(
        data, batch_size=job.batch_size, num_workers=job.workers, collate_fn=plain, persistent_workers=job.persistent
    )
    return Opened(
        lambda: ([record["number"] for record in batch] for batch in loader), loader.state_dict, loader.load_state_dict
    )


def write_tars(folder: Path, job: Job) -> None:
    folder.mkdir(parents=True)
    for shard in range(24):
        with tarfile.open(folder / f"{shard:06}.tar", "w") as tar:
            for number in job.shard(shard):
                info = tarfile.TarInfo(f"{number:09}.txt")
                data = str(number).encode()
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def webdataset(folder: Path, job: Job) -> Opened:
    import webdataset as wds

    paths = sorted(map(str, written(folder, "tars", write_tars, job).glob("*.tar")))
    split = (lambda urls: itertools.islice(urls, job.rank, None, job.ranks)) if job.ranks > 1 else wds.single_node_only
    data = wds.WebDataset(paths, shardshuffle=24 if job.shuffle else False, seed=SEED, nodesplitter=split)
    data = data.map(lambda sample: job.read(sample["txt"]))
    if job.kept:
        data = data.select(job.kept)
    if job.held:
        data = data.shuffle(job.held)
    data = data.batched(job.batch_size, collation_fn=plain)
    loader = wds.WebLoader(
        data, batch_size=None, num_workers=job.workers, persistent_workers=job.persistent and job.workers > 0
    )
    return Opened(lambda: iter(loader), getattr(loader, "state_dict", None), getattr(loader, "load_state_dict", None))


def write_energon(folder: Path, job: Job) -> None:
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    write_tars(folder, job)
    names = sorted(path.name for path in folder.glob("*.tar"))
    WebdatasetPreparator.prepare_dataset(
        folder, names, split_parts_ratio=[("train", 1.0), ("val", 0.0), ("test", 0.0)], workers=1
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")


def energon(folder: Path, job: Job, *, epoch: int = 0) -> Opened:
    """Its loader of training data has no end; ``epoch`` batches make one."""
    from megatron import energon

    @dataclass
    class Number(energon.Sample):
        number: int

    @energon.stateless
    def cook(sample: Any) -> Number:
        number = job.read(sample["txt"])
        if job.kept and not job.kept(number):
            raise energon.SkipSample
        return Number(**energon.basic_sample_keys(sample), number=number)

    class Encoder(energon.DefaultTaskEncoder):
        decoder = None
        cookers = (energon.Cooker(cook),)

        @energon.stateless
        def batch(self, samples: list[Number]) -> list[int]:
            return [sample.number for sample in samples]

        def encode_batch(self, batch: list[int]) -> list[int]:
            return batch

    data = energon.get_train_dataset(
        written(folder, "energon", write_energon, job),
        worker_config=energon.WorkerConfig(rank=job.rank, world_size=job.ranks, num_workers=job.workers),
        batch_size=job.batch_size,
        shuffle_buffer_size=job.held or None,
        max_samples_per_sequence=50,
        virtual_epoch_length=epoch,
        task_encoder=Encoder(),
    )
    loader = energon.get_savable_loader(data)
    return Opened(lambda: iter(loader), loader.save_state_rank, loader.restore_state_rank)


def connect() -> None:
    """Start Ray on this machine, with room for all workers that are asked for."""
    import ray

    if not ray.is_initialized():
        ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")


class ReadThere:
    """For an actor of Ray Data."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": [self.job.read(number) for number in batch["id"]]}


def ray_data(folder: Path, job: Job) -> Opened:
    """With the options for a deterministic order of https://docs.ray.io/en/latest/data/shuffling-data.html."""
    import ray.data

    connect()
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    ray.data.DataContext.get_current().enable_progress_bars = False
    data = ray.data.range(job.n, override_num_blocks=24)
    if job.shuffle:
        data = data.random_shuffle(seed=SEED)
    data = data.map_batches(
        ReadThere,
        fn_constructor_args=(job,),
        batch_size=job.batch_size,
        compute=ray.data.ActorPoolStrategy(size=max(job.workers, 1)),
    )
    return Opened(lambda: (batch["id"] for batch in data.iter_batches(batch_size=job.batch_size)))


def write_olmo(folder: Path, job: Job) -> None:
    import numpy as np

    folder.mkdir(parents=True)
    np.arange(job.n, dtype=np.uint32).tofile(folder / "numbers.npy")


def olmo(folder: Path, job: Job) -> Opened:
    """OLMo-core's `NumpyDataLoader`: a number is a token, and a sequence of one token is a sample."""
    import numpy as np
    from olmo_core.data import DataCollator, NumpyDataLoaderBase, NumpyFSLDataset

    class Numbers(NumpyFSLDataset):
        def __getitem__(self, index: int) -> dict[str, Any]:
            item = super().__getitem__(index)
            job.read(item["input_ids"])
            return item

    place = written(folder, "olmo", write_olmo, job)
    data = Numbers(
        place / "numbers.npy", sequence_length=1, pad_token_id=0, eos_token_id=0, vocab_size=job.n, dtype=np.uint32
    )
    data.work_dir = place
    data.prepare()
    loader = NumpyDataLoaderBase.wrap_numpy_dataset(
        data,
        global_batch_size=job.batch_size * job.ranks,
        collator=DataCollator(pad_token_id=0),
        dp_world_size=job.ranks,
        dp_rank=job.rank,
        fs_local_rank=job.rank,
        seed=SEED,
        shuffle=job.shuffle,
        num_workers=job.workers,
    )
    epochs = itertools.count(1)

    def load(state: Any) -> None:
        nonlocal epochs
        loader.load_state_dict(state)
        epochs = itertools.count(state["epoch"])

    def epoch() -> Iterator[Any]:
        loader.reshuffle(next(epochs), in_memory=True)
        for batch in loader:
            yield batch["input_ids"].flatten()
        loader.reset()

    return Opened(epoch, loader.state_dict, load)


def write_cuts(folder: Path, job: Job) -> None:
    folder.mkdir(parents=True)
    with (folder / "cuts.jsonl").open("w") as file:
        for number in range(job.n):
            cut = {"id": str(number), "start": 0, "duration": 1 + number % 7, "channel": 0, "type": "MonoCut"}
            file.write(json.dumps(cut) + "\n")


def lhotse(folder: Path, job: Job) -> Opened:
    """Saved and restored as in https://github.com/lhotse-speech/lhotse/pull/417.

    A number is a recording of 1 to 7 s.
    """
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __getitem__(self, cuts: Any) -> list[int]:
            return [job.read(cut.id) for cut in cuts]

    sampler = DynamicBucketingSampler(
        CutSet.from_jsonl_lazy(written(folder, "cuts", write_cuts, job) / "cuts.jsonl"),
        max_cuts=job.batch_size,
        num_buckets=5,
        shuffle=job.shuffle,
        seed=SEED,
        rank=job.rank,
        world_size=job.ranks,
        **({"buffer_size": job.held} if job.held else {}),
    )
    if job.kept:
        sampler = sampler.filter(lambda cut: job.kept(int(cut.id)))
    loader: Any = DataLoader(
        Numbers(),
        sampler=sampler,
        batch_size=None,
        num_workers=job.workers,
        persistent_workers=job.persistent and job.workers > 0,
    )
    begun = False

    def epoch() -> Iterator[Any]:
        nonlocal begun
        sampler.set_epoch(sampler.epoch + begun)
        begun = True
        return iter(loader)

    return Opened(
        epoch, lambda: copy.deepcopy(sampler.state_dict()), lambda state: sampler.load_state_dict(copy.deepcopy(state))
    )


@dataclass(frozen=True)
class Peer:
    """A loader.

    Attributes:
        open: Sets it up.
        module: What that imports.
        package: What installs that.
    """

    open: Callable[[Path, Job], Opened]
    module: str
    package: str


PEERS = {
    "penstock": Peer(penstock, "penstock", "torch-penstock"),
    "StatefulDataLoader": Peer(stateful_dataloader, "torchdata", "torchdata"),
    "torchdata.nodes": Peer(nodes, "torchdata", "torchdata"),
    "Grain": Peer(grain, "grain", "grain"),
    "SPDL": Peer(spdl, "spdl", "spdl"),
    "MosaicML Streaming": Peer(mds, "streaming", "mosaicml-streaming"),
    "LitData": Peer(litdata, "litdata", "litdata"),
    "Hugging Face streaming": Peer(hugging_face, "datasets", "datasets"),
    "webdataset": Peer(webdataset, "webdataset", "webdataset"),
    "OLMo-core": Peer(olmo, "olmo_core", "ai2-olmo-core"),
    "Lhotse": Peer(lhotse, "lhotse", "lhotse"),
    "Energon": Peer(energon, "megatron.energon", "megatron-energon"),
    "Ray Data": Peer(ray_data, "ray", "ray"),
}


def written(folder: Path, name: str, write: Callable[[Path, Job], None], job: Job) -> Path:
    """The folder with a loader's own format; written once."""
    place = folder / f"{name}-{job.scale}"
    if not place.exists():
        write(place, job)
    return place


# --------------------------------------------------------------------------------------------------------- the programs


def taken(batches: Iterator[Any], count: int) -> list[list[int]]:
    """The next batches."""
    return [numbers(batch) for batch in itertools.islice(batches, count)]


def on_ranks(job: Job, function: Callable[[Job], Any]) -> list[Any]:
    """What ``function`` returns on each rank: a forked process with the variables of torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    readers = []
    for rank in range(job.ranks):
        read, write = os.pipe()
        if not os.fork():
            os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "GLOBAL_RANK"), str(rank))
            os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.ranks))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with os.fdopen(write, "wb") as pipe:
                try:
                    pickle.dump((function(dataclasses.replace(job, rank=rank)), None), pipe)
                except Exception as error:
                    pickle.dump((None, said(error)), pipe)
            os._exit(0)
        os.close(write)
        readers.append(os.fdopen(read, "rb"))
    found = [pickle.load(pipe) for pipe in readers]
    for pipe in readers:
        pipe.close()
        os.wait()
    if errors := [error for _, error in found if error]:
        raise RuntimeError(errors[0])
    return [result for result, _ in found]


def said(error: Exception) -> str:
    """An error in a line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words if len(words) < 200 else f'{words[:60]} ... {words[-120:]}'}"


def version(name: str) -> str | None:
    """None if the loader is not installed."""
    try:
        return importlib.metadata.version(PEERS[name].package)
    except importlib.metadata.PackageNotFoundError:
        with contextlib.suppress(ModuleNotFoundError):  # it may be on the path without being installed
            return str(importlib.import_module(PEERS[name].module).__version__)
    return None


@dataclass(frozen=True)
class Row:
    """What came out for one loader."""

    loader: str
    version: str = ""
    found: str = ""
    why: str = ""
    claimed: str = ""

    def __str__(self) -> str:
        if not self.version:
            return f"{self.loader} | skipped: {PEERS[self.loader].package} is not installed"
        holds = "holds" if self.found == self.claimed else f"does not hold any more: the page says {self.claimed!r}"
        return f"{self.loader} {self.version} | {self.found} | {self.why} | {holds}"


def rows(claims: dict[str, str], question: Question, loaders: Iterable[str] = PEERS) -> Iterator[Row]:
    """Ask all loaders that have a claim, each in a process of its own."""
    import torch  # noqa: F401, once, and not in each of the processes

    for name in claims:
        if name in loaders:
            installed = version(name)
            yield Row(name, installed, *asked(question, name), claims[name]) if installed else Row(name)


def main(claims: dict[str, str], question: Question) -> None:
    """Print whether the claims hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loaders", nargs="+", choices=list(PEERS), default=list(PEERS))
    for row in rows(claims, question, parser.parse_args().loaders):
        print(row, flush=True)


def asked(question: Question, name: str) -> Answer:
    """The answer of one loader, from a forked process: nothing of what it starts survives."""
    start = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as answer,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryDirectory() as folder,
    ):
        sys.stdout.flush()
        if not (child := os.fork()):
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            warnings.simplefilter("ignore")
            global _answer
            _answer = answer.fileno()
            threading.Thread(target=hangs, args=(lambda: start + HANGS_AFTER_S, "no end"), daemon=True).start()
            try:
                found = question(name, Path(folder))
            except Exception as error:
                found = "error", said(error)
            give(found)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        answer.seek(0)
        output.seek(0)
        if not (text := answer.read()):
            return "error", f"it ended with {status}: {' '.join(output.read().split())[-200:]}"
        found, why = json.loads(text)
    return found, why.replace("|", "/")


_answer = 0  # the file of the process that was forked to answer


def give(answer: Answer) -> NoReturn:
    """Write it and end, whatever still runs: some loaders would not end."""
    os.write(_answer, json.dumps(answer).encode())
    os._exit(0)


def hangs(deadline: Callable[[], float], what: str) -> NoReturn:
    """The answer of a process that is still there then."""
    start = time.monotonic()
    while (left := deadline() - time.monotonic()) > 0:
        time.sleep(left)
    give(("hangs", f"{what} within {time.monotonic() - start:.0f} s"))


def watched(batches: Iterator[Any], wait_s: float) -> Iterator[Any]:
    """The answer is "hangs" if no batch comes for that long."""
    heard = time.monotonic()
    threading.Thread(target=hangs, args=(lambda: heard + wait_s, "no batch and no exception"), daemon=True).start()
    for batch in batches:
        heard = time.monotonic()
        yield batch
    heard += HANGS_AFTER_S


def third(number: int) -> bool:
    """What filtering leaves: two thirds, unevenly over short stretches."""
    return number % 3 > 0


def patiently(condition: Callable[[], bool], within_s: float) -> bool:
    """Whether it comes true within that time."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
