"""One loader of every kind, over data that never changes: what `test_corpus` replays.

``python tests/support/corpus.py`` adds the kinds that ``tests/data/corpus.json.gz`` does not have yet; it never
replaces one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torchdata.nodes
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import penstock
from penstock import Filter, Loader, Mix, Packs, Shards, Stream
from penstock.__main__ import main as command
from penstock.nodes import Batcher, Cycler, IterableSource, ParallelMapper, Prefetcher, Sampler, Sharder
from penstock.testing import Tagged, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILE = Path(__file__).parents[1] / "data" / "corpus.json.gz"
N = 23
TOKENS = 200
CHUNK = 10
STOPS = (*range(10), 13, 21, 34, 55, 89, 100, 120, 144, 160, 180)
END = "end of epoch"
RANKS = (1, 2, 3)
TAILS = ("pad", "drop", "exact")

LENGTHS = [7 * k % 13 + 1 for k in range(N)]
SEQUENCES = [[100 * k + place for place in range(length)] for k, length in enumerate(LENGTHS)]
SOURCES = {"a": range(5), "b": range(100, 190), "c": range(200, 211)}
WEIGHTS = {"a": 0.7, "b": 0.2, "c": 0.1}
STAGES = [(0, {"a": 0.5, "b": 0.5}), (20, {"b": 0.9, "c": 0.1})]
COUNTS = [9, 4, 10, 7]


class Draws(Tagged):
    """Every sample shows a draw from each generator that is seeded for it."""

    def __getitem__(self, index: int) -> list[int]:
        sample = penstock.sample()
        own = [int(sample.rng.integers(2**31)), int(torch.randint(2**31, (), generator=sample.torch_generator))]
        return [index, *own, random.getrandbits(31), int(np.random.randint(2**31)), int(torch.randint(2**31, ()))]


class Countdown(IterableDataset[int]):
    """An iterable with a state of its own."""

    def __init__(self, n: int) -> None:
        self.n = self.left = n

    def __iter__(self) -> Iterator[int]:
        while self.left:
            self.left -= 1
            yield self.left
        self.left = self.n

    def state_dict(self) -> dict[str, int]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.left = state["left"]


class Own(IterableDataset[int]):
    """Splits itself: gives the items of one rank."""

    def __iter__(self) -> Iterator[int]:
        yield from range(11)


class Halved(penstock.nodes.Node):
    """A user's node that only transforms."""

    def transform(self, item: Any) -> Any:
        return [value // 2 for value in item]


def records(shard: int) -> Iterator[int]:
    yield from range(100 * shard, 100 * shard + COUNTS[shard])


def indexed(shard: int) -> range:
    return range(100 * shard, 100 * shard + COUNTS[shard])


def sequences(shard: int) -> Iterator[list[int]]:
    for at in range(COUNTS[shard]):
        yield [1000 * shard + 100 * at + place for place in range((3 * at + shard) % 7 + 1)]


def even(record: int) -> bool:
    return record % 2 == 0


def twice(source: Iterator[int]) -> Iterator[int]:
    for record in source:
        yield record
        yield -record


def as_list(items: list[Any]) -> list[Any]:
    return items


def add_a_draw(sample: int) -> list[int]:
    return [sample, int(penstock.sample().rng.integers(1000))]


def own(dataset: Any, **words: Any) -> Callable[..., Loader[Any]]:
    """A kind that is built by `Loader.from_dataset`."""
    words = {"batch_size": 3, "collate_fn": as_list, "seed": 5, **words}
    if isinstance(words["batch_size"], str) or "batch_sampler" in words:
        del words["batch_size"]

    def build(**more: Any) -> Loader[Any]:
        called = {
            name: word() if callable(word) and name in ("sampler", "batch_sampler", "order") else word
            for name, word in words.items()
        }
        return Loader.from_dataset(dataset() if callable(dataset) else dataset, **{**called, **more})

    return build


def stream(open: Callable[[int], Any] = records, size: int = 24, **words: Any) -> Callable[[], Stream]:
    return lambda: Stream(4, open, epoch_size=size, bookmarks=False, **words)


def by_hand(build: Callable[..., Any]) -> Callable[..., Loader[Any]]:
    """A kind whose graph is built by hand. The words of ranks go to its `Sharder`, the words of workers to its
    mapper."""

    def loader(**more: Any) -> Loader[Any]:
        ranks = {name: more[name] for name in ("rank", "world_size", "tail") if name in more}
        workers = {name: more[name] for name in ("num_workers", "method", "multiprocessing_context") if name in more}
        return Loader(build(ranks, {"num_workers": 0, **workers}))

    return loader


def files(folder: Path) -> dict[str, Callable[..., Loader[Any]]]:
    """The kinds that read files of common formats; they are written into ``folder``."""
    import io
    import tarfile

    rows = [[{"x": value, "text": f"row {value}"} for value in records(shard)] for shard in range(4)]
    for shard, here in enumerate(rows):
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in here))
        np.array([row["x"] for row in here for _ in range(5)], np.uint16).tofile(folder / f"{shard}.bin")
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for row in here:
                info = tarfile.TarInfo(f"{row['x']:06}.txt")
                info.size = len(row["text"])
                tar.addfile(info, io.BytesIO(row["text"].encode()))
    for ending in ("jsonl", "tar"):
        assert command(["index", str(folder / f"*.{ending}")]) == 0
    every = {
        ending: [str(folder / f"{shard}.{ending}") for shard in range(4)]
        for ending in ("jsonl", "bin", "tar", "parquet", "arrow")
    }
    formats = penstock.formats
    words: dict[str, Any] = {"epoch_size": 24, "bookmarks": False}
    kinds = {
        "jsonl": own(lambda: formats.jsonl(every["jsonl"]), shuffle=True),
        "jsonl, a stream": own(lambda: formats.jsonl(every["jsonl"], **words), shuffle=True),
        "tar": own(lambda: formats.tar(every["tar"]), shuffle=True),
        "tar, a stream": own(lambda: formats.tar(every["tar"], **words), shuffle=True),
        "tokens": own(lambda: formats.tokens(every["bin"], sequence_length=4, dtype="uint16"), shuffle=True),
    }
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return kinds
    for shard, here in enumerate(rows):
        table = pyarrow.Table.from_pylist(here)
        pyarrow.parquet.write_table(table, every["parquet"][shard], row_group_size=3)
        with pyarrow.ipc.new_file(every["arrow"][shard], table.schema) as out:
            out.write_table(table, max_chunksize=3)
    return kinds | {
        "parquet": own(lambda: formats.parquet(every["parquet"]), shuffle=True),
        "parquet, a stream": own(lambda: formats.parquet(every["parquet"], **words), shuffle=True),
        "arrow": own(lambda: formats.arrow(every["arrow"]), shuffle=True),
    }


KINDS: dict[str, Callable[..., Loader[Any]]] = {
    # Orders of a dataset that is read by index.
    "in order": own(Tagged(N)),
    "shuffled": own(Tagged(N), shuffle=True),
    "shuffled, drop_last": own(Tagged(N), shuffle=True, drop_last=True),
    "shuffled, single samples": own(Tagged(N), shuffle=True, batch_size=None, collate_fn=None),
    "shuffled, endless": own(Tagged(N), shuffle=True, infinite=True),
    "shuffled, out of order": own(Tagged(N), shuffle=True, num_workers=1, in_order=False),
    "shuffled, 10**12": own(range(10**12), shuffle=True, seed=2**62),
    "torch's order": own(Tagged(N), order=lambda: penstock.orders.TorchOrder(N, seed=5)),
    "weighted": own(Tagged(N), order=lambda: penstock.orders.WeightedOrder(list(range(1, N + 1)), N, seed=5)),
    "sliding": own(Tagged(N), order=lambda: penstock.orders.SlidingOrder(N, 6, 5)),
    "shard order": own(Tagged(N), order=lambda: penstock.orders.ShardOrder([5, 0, 7, 3, 8], 3, 4, 5)),
    # What is drawn for a sample.
    "draws": own(Draws(N), shuffle=True),
    "draws in a transform": own(Tagged(N), shuffle=True, transform=add_a_draw),
    # Samplers.
    "RandomSampler": own(Tagged(N), sampler=lambda: RandomSampler(range(N))),
    "WeightedRandomSampler": own(Tagged(N), sampler=lambda: WeightedRandomSampler(range(1, N + 1), 17)),
    "SubsetRandomSampler": own(Tagged(N), sampler=lambda: SubsetRandomSampler([1, 3, 5, 7, 9, 11, 13])),
    "a list of indices": own(Tagged(N), sampler=lambda: [3, 1, 4, 1, 5, 9, 2, 6]),
    "DistributedSampler": own(Tagged(N), sampler=lambda: DistributedSampler(range(N), num_replicas=2, rank=1, seed=5)),
    "BatchSampler": own(Tagged(N), batch_sampler=lambda: BatchSampler(RandomSampler(range(N)), 4, False)),
    "BatchSampler, within": own(
        Tagged(N), batch_sampler=lambda: BatchSampler(RandomSampler(range(N)), 6, True), split="within"
    ),
    "lists of other lengths": own(
        Tagged(N), batch_sampler=lambda: [[1, 2], [3], [4, 5, 6], [0], [7, 8], [9], [10, 11]]
    ),
    # Iterables and nodes.
    "an iterable": own(lambda: IterableSource(range(N), split="items")),
    "an iterable with a state": own(lambda: Countdown(N), split="items"),
    "an iterable that splits itself": own(Own, split="own"),
    "torchdata's nodes": own(
        lambda: torchdata.nodes.Mapper(torchdata.nodes.IterableWrapper(range(N)), str), split="items"
    ),
    "by hand": by_hand(
        lambda ranks, workers: Prefetcher(
            Halved(
                ParallelMapper(
                    Batcher(Sharder(Cycler(Sampler(penstock.orders.ShuffledOrder(N, 5))), **ranks), 4),
                    as_values,
                    **workers,
                )
            )
        )
    ),
    "by hand, a source of torchdata's": by_hand(
        lambda ranks, workers: ParallelMapper(
            Batcher(
                Sharder(
                    Cycler(IterableSource(torchdata.nodes.IterableWrapper(range(N)), split="items")),
                    **{"tail": "drop", **ranks},
                ),
                4,
            ),
            as_values,
            **workers,
        )
    ),
    # Mixes.
    "mix": own(Mix(SOURCES, WEIGHTS, epoch_size=N), shuffle=True),
    "mix, by size": own(Mix({name: SOURCES[name] for name in "ac"}, {"a": 0.5, "c": 0.5}), shuffle=True),
    "mix in stages": own(Mix(SOURCES, STAGES, epoch_size=24, run=4)),
    "mix of shards": own(
        Mix({"a": Tagged(5), "b": Shards(4, records, counts=COUNTS)}, {"a": 0.5, "b": 0.5}, epoch_size=N), shuffle=True
    ),
    "mix of streams": own(
        lambda: Mix(
            {"a": Tagged(5), "b": stream(lanes=2)(), "c": stream(twice_records, lanes=4)()}, WEIGHTS, epoch_size=24
        ),
        shuffle=True,
    ),
    # Shards.
    "shards": own(lambda: Shards(4, records, counts=COUNTS), shuffle=True),
    "shards, in order": own(lambda: Shards(4, records, counts=COUNTS)),
    "shards, by position": own(
        lambda: Shards(4, indexed, counts=COUNTS, lanes=3, window=5, settings={"columns": ["x"]}), shuffle=True
    ),
    "stream": own(stream(), shuffle=True),
    "stream, in order": own(stream()),
    "stream, one lane": own(stream(lanes=1), shuffle=True),
    "stream, lanes that do not divide the epoch": own(stream(size=18, lanes=4), shuffle=True),
    "stream, filtered": own(stream(steps=[Filter(even)]), shuffle=True),
    "stream, shuffled": own(stream(steps=[penstock.Shuffle(4)]), shuffle=True),
    "stream, packed": own(stream(sequences, steps=[penstock.Pack(8)]), shuffle=True),
    "stream, a step of the user's": own(stream(steps=[twice, Filter(even), penstock.Shuffle(3)]), shuffle=True),
    "stream, draws in a transform": own(stream(transform=add_a_draw), shuffle=True),
    # Packs and buckets.
    "packs": own(SEQUENCES, shuffle=True, batch_size=2, groups=Packs(LENGTHS, 12, block=8, pad=-1)),
    "packs of whole sequences": own(
        SEQUENCES, shuffle=True, batch_size=2, groups=Packs(LENGTHS, 13, block=8, oversize="error")
    ),
    "packs of shards": own(
        lambda: Shards(4, sequence_list, counts=COUNTS),
        shuffle=True,
        batch_size=2,
        groups=Packs([3] * sum(COUNTS), 8, block=8, pad=-1),
    ),
    "buckets": own(
        Tagged(N),
        shuffle=True,
        batch_size="decided by the bucket",
        groups=penstock.Buckets(LENGTHS, 30.0, max_samples=4, block=16, same_size_run=2),
    ),
    "buckets by sum, full": own(
        Tagged(N),
        shuffle=True,
        batch_size="decided by the bucket",
        groups=penstock.Buckets(LENGTHS, max_tokens=30, block=16, drop_last=True),
    ),
    "buckets by key": lambda tail=None, **more: own(
        Tagged(N),
        shuffle=True,
        batch_size="decided by the bucket",
        groups=penstock.Buckets(keys=[k % 7 % 3 for k in range(N)], batch_size=2, block=16),
    )(**more),
    "packs, balanced": own(
        SEQUENCES,
        shuffle=True,
        batch_size=2,
        groups=Packs(LENGTHS, 12, block=8, pad=-1),
        balance=lambda lengths: lengths**2,
    ),
    "balanced": own(Tagged(N), shuffle=True, batch_size=3, balance=LENGTHS),
    # Our own datasets.
    "cached": own(lambda: penstock.Cached([10 * k for k in range(N)]), shuffle=True),
    "resident": own(lambda: penstock.Resident(Tagged(N)), shuffle=True),
    "kept": own(lambda: penstock.filtered(Tagged(N), even), shuffle=True),
}


def as_values(item: Any) -> list[Any]:
    return list(item.values if hasattr(item, "values") else item)


def twice_records(shard: int) -> Iterator[int]:
    yield from (1000 + record for record in records(shard))


def sequence_list(shard: int) -> list[list[int]]:
    return [[1000 * shard + 100 * at + place for place in range(3)] for at in range(COUNTS[shard])]


def walk(loader: Loader[Any]) -> Iterator[str]:
    """The batches as text, and the ends of epochs between them."""
    while True:
        for batch in loader:
            yield json.dumps(plain(batch), default=repr)
        yield END


def digests(tokens: list[str]) -> list[str]:
    """One for each ten, so that a difference says where it begins."""
    chunks = ["\n".join(tokens[at : at + CHUNK]) for at in range(0, len(tokens), CHUNK)]
    return [hashlib.blake2s(chunk.encode(), digest_size=6).hexdigest() for chunk in chunks]


def follow(loader: Loader[Any]) -> tuple[list[str], list[str]]:
    """The first tokens of a loader, and its states at `STOPS`."""
    tokens, states, steps = [], [], walk(loader)
    for at in range(TOKENS):
        if at in STOPS:
            states.append(loader.state_dict()["penstock"])
        tokens.append(next(steps))
    return tokens, states


def record(kind: Callable[..., Loader[Any]], words: dict[str, Any]) -> dict[str, Any]:
    """What a loader gives, on each of its ranks."""
    kept: dict[str, Any] = {"digests": [], "states": [], "saved_by": []}
    for rank in range(words.get("world_size", 1)):
        with kind(**words, **({"rank": rank} if "world_size" in words else {})) as loader:
            tokens, states = follow(loader)
        kept["digests"].append(" ".join(digests(tokens)))
        # ranks have the same, except out of order and inside an epoch that is dealt exactly
        if states not in kept["states"]:
            kept["states"].append(states)
            kept["saved_by"].append(rank)
    return kept


def ways() -> list[dict[str, Any]]:
    return [{}] + [{"world_size": ranks, "tail": tail} for ranks in RANKS[1:] for tail in TAILS]


def load() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return kept


def main() -> None:
    kept = load() if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kind in {**KINDS, **files(Path(folder))}.items():
            if name in kept:
                continue
            kept[name] = {}
            for words in ways():
                way = " ".join(str(word) for word in words.values())
                try:
                    kept[name][way] = record(kind, words)
                except (ValueError, TypeError) as refusal:
                    print(f"{name} {way}: {type(refusal).__name__} {str(refusal)[:120]}")
    lines = [f"{json.dumps(name)}: {json.dumps(ways, separators=(',', ':'))}" for name, ways in kept.items()]
    FILE.write_bytes(gzip.compress(("{\n" + ",\n".join(lines) + "\n}\n").encode(), mtime=0))


if __name__ == "__main__":
    import corpus  # so that its functions have the module's name, as in the test

    corpus.main()
