"""The loaders that benchmark_streams.py compares: how each writes and mixes token files, stops and resumes.

Everybody is set up as its own documentation says, and delivers int64. A loader is a function of the folder with the data; it returns batches without end
(X3), an order of sources (X8), or batches of durations for each rank (X9). What is not installed is left out, and said.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, WeightedRandomSampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

SEED = 1
LENGTH = 4096  # tokens in a sequence
BATCH_SIZE = 8
WORKERS = 2
VOCABULARY = 20_000  # source k has tokens from k * VOCABULARY on, so that a batch tells where it is from
WEIGHTS = {"code": 0.2, "math": 0.1, "web": 0.7}


@dataclass(frozen=True)
class Peer:
    """One loader.

    Attributes:
        open: Sets it up; its arguments are the workload's.
        modules: What it needs.
        write: Writes its files into the folder, from the token files that are there.
    """

    open: Callable[..., Any]
    modules: tuple[str, ...] = ()
    write: Callable[[Path], None] | None = None


# ------------------------------------------------------------------------------------------------- X3: sequences from token files


def write_tokens(folder: Path, sequences: int, length: int = LENGTH, files: int = 4) -> None:
    """Files of uint16 for each source; each has its share of ``sequences``."""
    generator = np.random.default_rng(SEED)
    for source, (name, weight) in enumerate(WEIGHTS.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in range(files):
            tokens = generator.integers(0, VOCABULARY, (max(8, int(sequences * weight) // files), length), dtype=np.uint16)
            (tokens + np.uint16(source * VOCABULARY)).tofile(folder / name / f"{file:03}.bin")


def sequences_of(folder: Path, name: str, length: int = LENGTH) -> Iterator[np.ndarray]:
    for file in sorted((folder / name).glob("*.bin")):
        yield from np.fromfile(file, np.uint16).reshape(-1, length)


class Memmap(Dataset):
    """Sequences of one file, as everybody writes it."""

    def __init__(self, path: Path, length: int = LENGTH, *, as_array: bool = False) -> None:
        self.tokens = np.memmap(path, np.uint16, "r").reshape(-1, length)
        self.as_array = as_array

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        row = self.tokens[index].astype(np.int64)
        return row if self.as_array else torch.from_numpy(row)


def files_of(folder: Path, name: str, **options: Any) -> list[Memmap]:
    return [Memmap(path, **options) for path in sorted((folder / name).glob("*.bin"))]


def reading_alone(folder: Path) -> Iterator[torch.Tensor]:
    """No loader: random rows are copied from the page cache into a new batch."""
    files = [file for name in WEIGHTS for file in files_of(folder, name)]
    generator = random.Random(SEED)
    rows = [(file.tokens, row) for file in files for row in range(len(file))]
    while True:
        batch = torch.empty(BATCH_SIZE, LENGTH, dtype=torch.int64)
        for place, (tokens, row) in zip(batch.numpy(), generator.choices(rows, k=BATCH_SIZE), strict=True):
            place[:] = tokens[row]
        yield batch


def torch_loader(folder: Path, workers: int = WORKERS) -> Iterator[torch.Tensor]:
    """torch: files joined, and each sequence weighted by its source."""
    parts = {name: ConcatDataset(files_of(folder, name)) for name in WEIGHTS}
    weights = torch.cat([torch.full((len(part),), WEIGHTS[name] / len(part)) for name, part in parts.items()])
    sampler = WeightedRandomSampler(weights, len(weights), generator=torch.Generator().manual_seed(SEED))
    dataset = ConcatDataset(parts.values())
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)
    return again(loader)


def again(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


class Joined:
    """Files of one source, as a random access source of Grain."""

    def __init__(self, folder: Path, name: str, **options: Any) -> None:
        self.files = files_of(folder, name, as_array=True, **options)
        self.ends = list(itertools.accumulate(map(len, self.files)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        file = next(k for k, end in enumerate(self.ends) if index < end)
        return self.files[file][index - (self.ends[file - 1] if file else 0)]


def grain(folder: Path, method: str) -> Iterator[np.ndarray]:
    """Grain: sources shuffled and repeated, then mixed, in batches."""
    import grain.python as pygrain

    parts = [pygrain.MapDataset.source(Joined(folder, name)).seed(SEED).shuffle().repeat() for name in WEIGHTS]
    mixed = pygrain.MapDataset.mix(parts, list(WEIGHTS.values()))
    if method == "inline":
        read = mixed.batch(BATCH_SIZE).to_iter_dataset(pygrain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    elif method == "threads":
        read = mixed.batch(BATCH_SIZE).to_iter_dataset()
    else:
        read = mixed.to_iter_dataset().batch(BATCH_SIZE).mp_prefetch(pygrain.MultiprocessingOptions(num_workers=WORKERS))
    return iter(read)


def write_mds(folder: Path, length: int = LENGTH) -> None:
    from streaming import MDSWriter

    for name in WEIGHTS:
        with MDSWriter(out=str(folder / "mds" / name), columns={"tokens": f"ndarray:uint16:{length}"}) as writer:
            for row in sequences_of(folder, name, length):
                writer.write({"tokens": row})


def mds(folder: Path) -> Iterator[torch.Tensor]:
    """MosaicML Streaming: streams with proportions."""
    from streaming import Stream, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Tokens(StreamingDataset):
        def __getitem__(self, at: int) -> torch.Tensor:
            return torch.from_numpy(super().__getitem__(at)["tokens"].astype(np.int64))

    clean_stale_shared_memory()
    streams = [Stream(local=str(folder / "mds" / name), proportion=weight) for name, weight in WEIGHTS.items()]
    dataset = Tokens(streams=streams, batch_size=BATCH_SIZE, shuffle=True, shuffle_seed=SEED)
    return again(StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=WORKERS, persistent_workers=True))


def whole_file(path: str, length: int) -> Iterator[torch.Tensor]:
    for row in np.fromfile(path, np.uint16).reshape(-1, length):
        yield torch.from_numpy(row)


def write_litdata(folder: Path, length: int = LENGTH) -> None:
    from litdata import TokensLoader, optimize

    for name in WEIGHTS:
        optimize(
            functools.partial(whole_file, length=length),
            [str(path) for path in sorted((folder / name).glob("*.bin"))],
            str(folder / "litdata" / name),
            chunk_size=length * 2048,
            item_loader=TokensLoader(block_size=length),
            num_workers=1,
            verbose=False,
        )


def to_int64(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.to(torch.int64)


def litdata(folder: Path) -> Iterator[torch.Tensor]:
    """LitData: tokens in its own chunks, a combined dataset with weights."""
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader

    parts = [
        StreamingDataset(
            str(folder / "litdata" / name), item_loader=TokensLoader(LENGTH), shuffle=True, drop_last=True, seed=SEED, transform=to_int64
        )
        for name in WEIGHTS
    ]
    mixed = CombinedStreamingDataset(parts, seed=SEED, weights=list(WEIGHTS.values()), iterate_over_all=False)
    return again(StreamingDataLoader(mixed, batch_size=BATCH_SIZE, num_workers=WORKERS))


def write_hugging_face(folder: Path, length: int = LENGTH) -> None:
    from datasets import Dataset as Table
    from datasets import Features, List, Value

    for name in WEIGHTS:
        rows = functools.partial(rows_of, folder, name, length)
        table = Table.from_generator(
            rows, features=Features({"tokens": List(Value("uint16"), length=length)}), cache_dir=str(folder / "cache")
        )
        table.save_to_disk(str(folder / "hugging_face" / name))


def rows_of(folder: Path, name: str, length: int) -> Iterator[dict[str, np.ndarray]]:
    for row in sequences_of(folder, name, length):
        yield {"tokens": row}


def hugging_face(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Hugging Face datasets: tables on disk, interleaved by probability."""
    from datasets import interleave_datasets, load_from_disk

    parts = [load_from_disk(str(folder / "hugging_face" / name)).shuffle(seed=SEED).with_format("torch") for name in WEIGHTS]
    mixed = interleave_datasets(parts, probabilities=list(WEIGHTS.values()), seed=SEED, stopping_strategy="all_exhausted")
    return again(DataLoader(mixed, BATCH_SIZE, shuffle=True, num_workers=WORKERS, persistent_workers=True))


def ours(folder: Path, **options: Any) -> Iterator[dict[str, torch.Tensor]]:
    """penstock: a mix of token files."""
    import penstock
    from penstock.formats import tokens

    mix = penstock.Mix({name: tokens(folder / name / "*.bin", LENGTH) for name in WEIGHTS}, WEIGHTS)
    return again(penstock.Loader.from_dataset(mix, batch_size=BATCH_SIZE, shuffle=True, seed=SEED, **options))


X3 = {
    "no loader": Peer(reading_alone),
    "DataLoader": Peer(torch_loader),
    "DataLoader, 0 workers": Peer(functools.partial(torch_loader, workers=0)),
    "Grain, 0 workers": Peer(functools.partial(grain, method="inline"), ("grain",)),
    "Grain, threads": Peer(functools.partial(grain, method="threads"), ("grain",)),
    "Grain, processes": Peer(functools.partial(grain, method="processes"), ("grain",)),
    "MosaicML Streaming": Peer(mds, ("streaming",), write_mds),
    "LitData": Peer(litdata, ("litdata",), write_litdata),
    "HF datasets": Peer(hugging_face, ("datasets",), write_hugging_face),
    "penstock, 0 workers": Peer(ours, ("penstock",)),
    "penstock, threads": Peer(functools.partial(ours, num_workers=WORKERS, method="thread"), ("penstock",)),
    "penstock, processes": Peer(functools.partial(ours, num_workers=WORKERS, method="process"), ("penstock",)),
}


# ------------------------------------------------------------------------------------------------- X5: resuming
#
# Each is a function of the folder and the number of sequences.

SHORT = 64  # tokens in a sequence of X5, where their number matters


@dataclass(frozen=True)
class Resumable:
    """How to stop and resume.

    Attributes:
        states: The states after some numbers of batches.
        resume: The first batch from a state, with everything built anew; and a function that ends it.
    """

    states: Callable[[list[int]], list[Any]]
    resume: Callable[[Any], tuple[Any, Callable[[], Any] | None]]


def walked(begin: Callable[[], tuple[Iterator[Any], Callable[[], Any]]], places: list[int]) -> list[Any]:
    """States taken on the way through an epoch."""
    batches, state = begin()
    found, done = [], 0
    for place in places:
        for _ in range(place - done):
            next(batches)
        done = place
        found.append(state())
    return found


def resume_ours(folder: Path, sequences: int, **options: Any) -> Resumable:
    import json

    import penstock
    from penstock.formats import tokens

    file = folder / f"sparse-{sequences}.bin"
    with open(file, "wb") as sparse:
        sparse.truncate(2 * SHORT * sequences)

    def build() -> Any:
        return penstock.Loader.from_dataset(tokens(file, SHORT), batch_size=BATCH_SIZE, shuffle=True, seed=SEED, **options)

    def states(places: list[int]) -> list[Any]:
        with build() as loader:
            next(iter(loader))
            state = json.loads(loader.state_dict()["penstock"])
        found = []
        for place in places:  # as a run up to there would have saved it
            state["state"] = {"epoch": 0, "source": {"epoch": 0, "position": place * BATCH_SIZE}}
            found.append({"penstock": json.dumps(state)})
        return found

    def resume(state: Any) -> Any:
        loader = build()
        loader.load_state_dict(state)
        return next(iter(loader)), loader.close

    return Resumable(states, resume)


def resume_grain(folder: Path, sequences: int) -> Resumable:
    import grain.python as pygrain

    def build() -> Any:
        source = pygrain.MapDataset.source(Joined(folder, "web", length=SHORT))
        return iter(source.seed(SEED).shuffle().batch(BATCH_SIZE).to_iter_dataset())

    def begin() -> tuple[Iterator[Any], Callable[[], Any]]:
        batches = build()
        return batches, batches.get_state

    def resume(state: Any) -> Any:
        batches = build()
        batches.set_state(state)
        return next(batches), None

    return Resumable(functools.partial(walked, begin), resume)


def resume_mds(folder: Path, sequences: int) -> Resumable:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    def build() -> Any:
        clean_stale_shared_memory()
        dataset = StreamingDataset(local=str(folder / "mds" / "web"), batch_size=BATCH_SIZE, shuffle=True, shuffle_seed=SEED)
        return StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=0)

    def states(places: list[int]) -> list[Any]:
        loader = build()
        next(iter(loader))
        return [loader.dataset.state_dict(place * BATCH_SIZE, from_beginning=True) for place in places]

    def resume(state: Any) -> Any:
        loader = build()
        loader.load_state_dict(state)
        return next(iter(loader)), None

    return Resumable(states, resume)


def resume_litdata(folder: Path, sequences: int) -> Resumable:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    def build() -> Any:
        dataset = StreamingDataset(
            str(folder / "litdata" / "web"), item_loader=TokensLoader(SHORT), shuffle=True, drop_last=True, seed=SEED, transform=to_int64
        )
        return StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=0)

    def begin() -> tuple[Iterator[Any], Callable[[], Any]]:
        loader = build()
        return iter(loader), loader.state_dict

    def resume(state: Any) -> Any:
        loader = build()
        loader.load_state_dict(state)
        return next(iter(loader)), None

    return Resumable(functools.partial(walked, begin), resume)


def resume_hugging_face(folder: Path, sequences: int) -> Resumable:
    from datasets import load_from_disk

    def build() -> Any:
        table = load_from_disk(str(folder / "hugging_face" / "web")).to_iterable_dataset(num_shards=16)
        return table.shuffle(seed=SEED, buffer_size=1000).with_format("torch").batch(BATCH_SIZE)

    def begin() -> tuple[Iterator[Any], Callable[[], Any]]:
        dataset = build()
        return iter(dataset), dataset.state_dict

    def resume(state: Any) -> Any:
        dataset = build()
        dataset.load_state_dict(state)
        return next(iter(dataset)), None

    return Resumable(functools.partial(walked, begin), resume)


def write_tars(folder: Path, length: int) -> None:
    import webdataset

    (folder / "tars").mkdir(exist_ok=True)
    with contextlib.redirect_stdout(None), webdataset.ShardWriter(str(folder / "tars" / "%06d.tar"), maxcount=10_000, verbose=0) as writer:
        for number, row in enumerate(sequences_of(folder, "web", length)):
            writer.write({"__key__": f"{number:09}", "bin": row.tobytes()})


def resume_webdataset(folder: Path, sequences: int) -> Resumable:
    """It has no state: a resumed run reads what it has read before, and throws it away."""
    import webdataset

    def resume(place: int) -> Any:
        shards = sorted(map(str, (folder / "tars").glob("*.tar")))
        dataset = webdataset.WebDataset(shards, shardshuffle=100, seed=SEED).shuffle(1000).batched(BATCH_SIZE)
        return next(itertools.islice(iter(dataset), place, None)), None

    return Resumable(lambda places: places, resume)


X5 = {
    "Grain": Peer(resume_grain, ("grain",)),
    "MosaicML Streaming": Peer(resume_mds, ("streaming",), functools.partial(write_mds, length=SHORT)),
    "LitData": Peer(resume_litdata, ("litdata",), functools.partial(write_litdata, length=SHORT)),
    "HF datasets": Peer(resume_hugging_face, ("datasets",), functools.partial(write_hugging_face, length=SHORT)),
    "webdataset": Peer(resume_webdataset, ("webdataset",), functools.partial(write_tars, length=SHORT)),
    "penstock, 0 workers": Peer(resume_ours, ("penstock",)),
    "penstock, threads": Peer(functools.partial(resume_ours, num_workers=WORKERS, method="thread"), ("penstock",)),
    "penstock, processes": Peer(functools.partial(resume_ours, num_workers=WORKERS, method="process"), ("penstock",)),
}


# ------------------------------------------------------------------------------------------------- X7: states of many shards


def nothing(shards: Any) -> Iterator[dict[str, int]]:
    for shard in shards:
        for record in range(1000):
            yield {"number": 1000 * shard + record}


def state_ours(shards: int) -> tuple[Any, Callable[[], Any]]:
    import penstock

    data = penstock.Shards(shards, Thousand, counts=np.full(shards, 1000))
    loader = penstock.Loader.from_dataset(data, batch_size=64, shuffle=True, num_workers=8, method="thread")
    return iter(loader), loader.state_dict


class Thousand:
    """The records of a shard."""

    def __init__(self, shard: int) -> None:
        self.shard = shard

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, record: int) -> int:
        return 1000 * self.shard + record


def state_hugging_face(shards: int) -> tuple[Any, Callable[[], Any]]:
    from datasets import IterableDataset

    dataset = IterableDataset.from_generator(nothing, gen_kwargs={"shards": list(range(shards))}).shuffle(seed=SEED, buffer_size=1000)
    return iter(dataset.batch(64)), dataset.state_dict


X7 = {
    "HF datasets": Peer(state_hugging_face, ("datasets",)),
    "penstock, 8 threads": Peer(state_ours, ("penstock",)),
}


# ------------------------------------------------------------------------------------------------- X8: which source is next
#
# Each is a function of (weights, items, ranks) that returns a function; that one returns the source of each item, rank by rank: shape (ranks, items).
# The items are dealt to the ranks as its documentation says.

Drawing = Callable[[], np.ndarray]


def mix_ours(weights: np.ndarray, items: int, ranks: int, shuffled: bool = True) -> Drawing:
    """The order that a `Mix` brings; each rank reads its positions."""
    import penstock

    n = 10**9
    kind = penstock.ShuffledOrder if shuffled else penstock.SequentialOrder
    names = [f"{k:03}" for k in range(len(weights))]
    order = penstock.MixOrder({name: kind(n) for name in names}, dict(zip(names, weights, strict=True)), epoch_size=n)

    def read(rank: int) -> np.ndarray:
        node = penstock.Sampler(order)
        node.reset()
        if rank:
            node.take(rank)
        return np.concatenate([node.take(256, every=ranks).values for _ in range(-(-items // 256))])[:items] // n

    return lambda: np.array([read(rank) for rank in range(ranks)])


class Constant:
    """A source of n items that say where they are from."""

    def __init__(self, source: int, n: int = 10**6) -> None:
        self.source = source
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return self.source


def mix_grain(weights: np.ndarray, items: int, ranks: int) -> Drawing:
    import grain.python as pygrain

    parts = [pygrain.MapDataset.source(Constant(k)).seed(SEED).shuffle().repeat() for k in range(len(weights))]
    mixed = pygrain.MapDataset.mix(parts, weights.tolist())
    shares = [mixed[rank::ranks] for rank in range(ranks)]
    return lambda: np.array([[share[k] for k in range(items)] for share in shares])


def mix_torchdata(weights: np.ndarray, items: int, ranks: int) -> Drawing:
    from torchdata.nodes import IterableWrapper, MultiNodeWeightedSampler

    nodes = []
    for rank in range(ranks):
        sources = {str(k): IterableWrapper(itertools.repeat(k, 10**6)) for k in range(len(weights))}
        shares = {str(k): float(weight) for k, weight in enumerate(weights)}
        nodes.append(MultiNodeWeightedSampler(sources, shares, rank=rank, world_size=ranks, seed=SEED))
        nodes[-1].reset()
    return lambda: np.array([[next(node) for _ in range(items)] for node in nodes])


def mix_hugging_face(weights: np.ndarray, items: int, ranks: int) -> Drawing:
    from datasets.distributed import split_dataset_by_node

    from datasets import Dataset as Table
    from datasets import interleave_datasets

    parts = [Table.from_dict({"source": np.full(items * ranks, k, np.int16)}) for k in range(len(weights))]
    probabilities = (weights / weights.sum()).tolist()
    mixed = interleave_datasets(
        [part.to_iterable_dataset() for part in parts], probabilities=probabilities, seed=SEED, stopping_strategy="all_exhausted"
    )
    shares = [split_dataset_by_node(mixed, rank, ranks) if ranks > 1 else mixed for rank in range(ranks)]
    return lambda: np.array([[row["source"] for row in itertools.islice(share, items)] for share in shares])


def mix_litdata(weights: np.ndarray, items: int, ranks: int) -> Drawing:
    """Its combined dataset, one process for each rank: the seed is the same, so all draw the same sources."""
    from litdata import CombinedStreamingDataset, StreamingDataset

    class Part(StreamingDataset):
        def __init__(self, source: int) -> None:
            self.source, self.batch_size, self.num_workers = source, 1, 0

        def __iter__(self) -> Iterator[int]:
            return itertools.repeat(self.source)

        def __len__(self) -> int:
            return 10**6

        def set_epoch(self, epoch: int) -> None: ...

        def reset(self) -> None: ...

    mixed = CombinedStreamingDataset(
        [Part(k) for k in range(len(weights))], seed=SEED, weights=(weights / weights.sum()).tolist(), iterate_over_all=False
    )
    return lambda: np.array([list(itertools.islice(iter(mixed), items))] * ranks)


def mix_mds(weights: np.ndarray, items: int, ranks: int) -> Drawing:
    """The samples that it plans for an epoch: shape (nodes, ranks, workers, batches, samples)."""
    import tempfile

    from streaming import MDSWriter, Stream, StreamingDataset
    from streaming.base.batching import generate_work
    from streaming.base.util import clean_stale_shared_memory
    from streaming.base.world import World

    clean_stale_shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        streams = []
        for k, weight in enumerate(weights):
            with MDSWriter(out=f"{folder}/{k}", columns={"source": "int"}) as writer:
                for _ in range(1000):
                    writer.write({"source": k})
            streams.append(Stream(local=f"{folder}/{k}", proportion=float(weight)))
        defaults = {"num_canonical_nodes": 1, "shuffle_block_size": 4_000_000}  # which it sets itself when it is read
        dataset = StreamingDataset(streams=streams, batch_size=1, shuffle=True, shuffle_seed=SEED, epoch_size=items * ranks, **defaults)
    return lambda: generate_work("random", dataset, World(1, ranks, 1, 0), 0, 0).reshape(ranks, -1)[:, :items] // 1000


X8 = {
    "Grain": Peer(mix_grain, ("grain",)),
    "torchdata.nodes": Peer(mix_torchdata, ("torchdata.nodes",)),
    "HF datasets": Peer(mix_hugging_face, ("datasets",)),
    "LitData": Peer(mix_litdata, ("litdata",)),
    "MosaicML Streaming": Peer(mix_mds, ("streaming",)),
    "penstock": Peer(mix_ours, ("penstock",)),
    "penstock, sources in order": Peer(functools.partial(mix_ours, shuffled=False), ("penstock",)),
}


# ------------------------------------------------------------------------------------------------- X9: batches of similar length
#
# Each is a function of (seconds, ranks, budget, most) that yields the durations of the ranks' batches, round by round.


def dealt(batches: Iterable[np.ndarray], ranks: int) -> Iterator[list[np.ndarray]]:
    iterator = iter(batches)
    while len(hands := list(itertools.islice(iterator, ranks))) == ranks:
        yield hands


def cut(durations: np.ndarray, budget: float, most: int) -> Iterator[np.ndarray]:
    """Batches of neighbours, as long as the padded size stays within the budget."""
    batch: list[float] = []
    for duration in durations.tolist():
        if batch and (len(batch) == most or max(*batch, duration) * (len(batch) + 1) > budget):
            yield np.array(batch)
            batch = []
        batch.append(duration)
    yield np.array(batch)


def no_buckets(seconds: np.ndarray, ranks: int, budget: float, most: int) -> Iterator[list[np.ndarray]]:
    return dealt(cut(np.random.default_rng(SEED).permutation(seconds), budget, most), ranks)


def plain_sorting(seconds: np.ndarray, ranks: int, budget: float, most: int) -> Iterator[list[np.ndarray]]:
    batches = list(cut(np.sort(seconds), budget, most))
    random.Random(SEED).shuffle(batches)
    return dealt(batches, ranks)


def lhotse(seconds: np.ndarray, ranks: int, budget: float, most: int, sync: bool = True) -> Iterator[list[np.ndarray]]:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    cuts = CutSet.from_cuts(MonoCut(id=f"{k}", start=0.0, duration=float(duration), channel=0) for k, duration in enumerate(seconds))
    samplers = [
        DynamicBucketingSampler(
            cuts,
            max_duration=budget,
            max_cuts=most,
            num_buckets=30,
            shuffle=True,
            seed=SEED,
            world_size=ranks,
            rank=rank,
            sync_buckets=sync,
        )
        for rank in range(ranks)
    ]
    for batches in zip(*samplers, strict=False):
        yield [np.array([cut.duration for cut in batch]) for batch in batches]


def buckets(seconds: np.ndarray, ranks: int, budget: float, most: int) -> Iterator[list[np.ndarray]]:
    import penstock

    loaders = [
        penstock.Loader.from_dataset(
            seconds,
            groups=penstock.Buckets(seconds, budget, most=most, alike=ranks),
            shuffle=True,
            seed=SEED,
            collate_fn=np.array,
            rank=rank,
            world_size=ranks,
        )
        for rank in range(ranks)
    ]
    yield from map(list, zip(*loaders, strict=True))


X9 = {
    "no buckets": Peer(no_buckets),
    "plain sorting": Peer(plain_sorting),
    "lhotse": Peer(lhotse, ("lhotse",)),
    "lhotse, not synchronised": Peer(functools.partial(lhotse, sync=False), ("lhotse",)),
    "penstock": Peer(buckets, ("penstock",)),
}
