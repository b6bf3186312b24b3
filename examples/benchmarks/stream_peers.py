"""The loaders that streams.py compares: how each reads tars and lines, writes and mixes token files, stops and resumes.

Everybody is set up as its own documentation says. A loader is a function of the folder with the data; it returns
batches without end (X1 to X4, X11), one pass after another (X10), an order of sources (X8), or batches of durations for
each rank (X9). What is not installed is left out, and said.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import multiprocessing
import os
import random
import socket
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, WeightedRandomSampler, get_worker_info

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
        write: Writes its files into the folder, from those that are there.
        huge: X5 and X7 measure it with much more, too.
    """

    open: Callable[..., Any]
    modules: tuple[str, ...] = ()
    write: Callable[[Path], None] | None = None
    huge: bool = False


# ------------------------------------------------------------------------------------ X1, X2, X10, X11: samples of tars
#
# Each is a function of the folder and returns batches of 64: lists of bytes; or of images, if ``then`` makes one of the
# bytes.

RECORD = 20_000  # bytes in a sample
SAMPLES = 64  # in a batch
HELD = 1000  # by a shuffle buffer; each of the two workers has one


def write_tars(folder: Path, name: str, samples: Iterable[bytes], each: int) -> None:
    """Tars of ``each`` samples, which have one file."""
    folder.mkdir(parents=True)
    numbered = enumerate(samples)
    for shard in itertools.count():
        part = list(itertools.islice(numbered, each))
        if not part:
            return
        with tarfile.open(folder / f"{shard:06}.tar", "w") as tar:
            for number, data in part:
                info = tarfile.TarInfo(f"{number:09}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def records(n: int) -> Iterator[bytes]:
    """Noise that begins with its number."""
    noise = random.Random(SEED).randbytes(RECORD - 8)
    return (number.to_bytes(8, "little") + noise for number in range(n))


def pictures(n: int) -> Iterator[bytes]:
    """JPEGs of 256 x 256, of some 20 KB."""
    from PIL import Image

    generator = np.random.default_rng(SEED)
    for _ in range(n):
        smooth = Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize(
            (256, 256), Image.Resampling.BICUBIC
        )
        noisy = np.asarray(smooth).astype(np.int16) + generator.integers(-12, 13, (256, 256, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file := io.BytesIO(), "JPEG", quality=80)
        yield file.getvalue()


def decoded(data: bytes) -> torch.Tensor:
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(data))))


def paths_of(folder: Path) -> list[str]:
    return sorted(map(str, (folder / "tars").glob("*.tar")))


def by_tarfile(path: str) -> Iterator[bytes]:
    """The files of a tar, by the standard library."""
    with tarfile.open(path, "r|") as tar:
        for member in tar:
            yield tar.extractfile(member).read()
            tar.members = []


def by_size(path: str) -> Iterator[bytes]:
    """The files of a tar: nothing but their sizes is looked at, and nothing is checked."""
    with open(path, "rb") as file:
        while (header := file.read(512))[0]:
            size = int(header[124:135], 8)
            yield file.read(size)
            file.read(-size % 512)


Then = Callable[[bytes], Any] | None


def without_loader(
    folder: Path, read: Callable[[str], Iterator[bytes]] = by_size, then: Then = None, *, stacks: bool = False
) -> Iterator[None]:
    """No loader: two processes read tars and throw away what they have read, sample by sample or in batches.

    Counts their batches.
    """
    done = multiprocessing.Semaphore(0)
    for worker in range(WORKERS):
        multiprocessing.Process(
            target=reading, args=(paths_of(folder)[worker::WORKERS], read, then, stacks, done), daemon=True
        ).start()
    while True:
        done.acquire()
        yield None


def reading(paths: list[str], read: Callable[[str], Iterator[bytes]], then: Then, stacks: bool, done: Any) -> None:
    torch.set_num_threads(1)
    samples = (sample for _ in itertools.count() for path in paths for sample in read(path))
    while True:
        if stacks:
            stacked([sample if then is None else then(sample) for sample in itertools.islice(samples, SAMPLES)])
        else:
            for sample in itertools.islice(samples, SAMPLES):
                if then is not None:
                    then(sample)
        done.release()


class Chosen:
    """The only file of a sample."""

    def __init__(self, name: str, then: Then) -> None:
        self.name = name
        self.then = then

    def __call__(self, sample: Any) -> Any:
        data = sample[self.name]
        return data if self.then is None else self.then(data)

    def batch(self, samples: list[Any]) -> Any:
        chosen = [self(sample) for sample in samples]
        return chosen if self.then is None else torch.stack(chosen)


def stacked(samples: list[Any]) -> Any:
    return torch.stack(samples) if isinstance(samples[0], torch.Tensor) else samples


def by_webdataset(folder: Path, held: int = HELD, then: Then = None, *, passes: bool = False) -> Iterable[Any]:
    import webdataset

    dataset = webdataset.WebDataset(paths_of(folder), shardshuffle=100, seed=SEED)
    if not passes:
        dataset = dataset.repeat()
    dataset = (
        dataset.shuffle(held).map(Chosen("bin" if then is None else "jpg", then)).batched(SAMPLES, collation_fn=stacked)
    )
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True)
    return loader if passes else iter(loader)


def by_hugging_face(folder: Path, held: int = HELD, then: Then = None, *, passes: bool = False) -> Iterable[Any]:
    from datasets import load_dataset

    dataset = load_dataset(
        "webdataset", data_files=paths_of(folder), split="train", streaming=True, cache_dir=str(folder / "cache")
    )
    dataset = dataset.shuffle(seed=SEED, buffer_size=held)
    # it decodes itself
    chosen = Chosen("bin", None) if then is None else Chosen("jpg", lambda image: torch.from_numpy(np.array(image)))
    loader = DataLoader(dataset, SAMPLES, num_workers=WORKERS, persistent_workers=True, collate_fn=chosen.batch)
    return loader if passes else again(loader)


def write_energon(folder: Path) -> None:
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    names = [os.path.basename(path) for path in paths_of(folder)]
    parts = [("train", 1.0), ("val", 0.0), ("test", 0.0)]
    WebdatasetPreparator.prepare_dataset(folder / "tars", names, split_parts_ratio=parts, workers=1)
    (folder / "tars" / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )


def by_energon(folder: Path, held: int = HELD, then: Then = None, *, passes: bool = False) -> Iterable[Any]:
    import dataclasses

    from megatron import energon

    @dataclasses.dataclass
    class Raw(energon.Sample):
        data: Any

    chosen = Chosen("bin" if then is None else "jpg", then)

    @energon.stateless
    def cook(sample: Any) -> Raw:
        return Raw(**energon.basic_sample_keys(sample), data=chosen(sample))

    class Encoder(energon.DefaultTaskEncoder):
        decoder = None
        cookers = (energon.Cooker(cook),)

        @energon.stateless
        def batch(self, samples: list[Raw]) -> Any:
            return stacked([sample.data for sample in samples])

        def encode_batch(self, batch: Any) -> Any:
            return batch

    dataset = energon.get_train_dataset(
        folder / "tars",
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=WORKERS),
        batch_size=SAMPLES,
        shuffle_buffer_size=held,
        max_samples_per_sequence=100,
        virtual_epoch_length=PASS * 1000 // SAMPLES if passes else 0,
        task_encoder=Encoder(),
    )
    loader = energon.get_savable_loader(dataset)
    return loader if passes else iter(loader)


def whole_tar(path: str) -> Iterator[dict[str, bytes]]:
    for data in by_size(path):
        yield {"data": data}


def write_litdata_of_tars(folder: Path) -> None:
    from litdata import optimize

    optimize(whole_tar, paths_of(folder), str(folder / "litdata"), chunk_bytes="64MB", num_workers=1, verbose=False)


def by_litdata(folder: Path, then: Then = None, *, passes: bool = False) -> Iterable[Any]:
    """LitData: tars in its own chunks."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(folder / "litdata"), shuffle=True, seed=SEED, transform=Chosen("data", then))
    loader = StreamingDataLoader(
        dataset, batch_size=SAMPLES, num_workers=WORKERS, collate_fn=stacked, persistent_workers=True
    )
    return loader if passes else again(loader)


def by_us(
    folder: Path, held: int = 2 * HELD, lanes: int = 8, then: Then = None, *, passes: bool = False, **options: Any
) -> Iterable[Any]:
    """penstock: nobody has counted the samples. Half a window is held in each lane."""
    import penstock

    data = penstock.formats.tar(
        paths_of(folder),
        epoch_size=PASS * 1000,
        lanes=min(lanes, len(paths_of(folder))),
        steps=[penstock.Shuffle(2 * held // lanes)],
        transform=Chosen("bin" if then is None else "jpg", then),
        bookmarks=False,
    )
    loader = penstock.Loader.from_dataset(data, batch_size=SAMPLES, shuffle=True, seed=SEED, **options)
    return loader if passes else again(loader)


def write_index_of_tars(folder: Path) -> None:
    from penstock.__main__ import main

    main(["index", *paths_of(folder), "--index", str(folder / "index")])


def by_our_index(folder: Path, window: int) -> Iterable[Any]:
    """penstock: the samples are counted, and read by position in the order of a window, which holds numbers."""
    import penstock

    data = penstock.formats.tar(
        paths_of(folder), index=folder / "index", lanes=64, window=window, transform=Chosen("bin", None)
    )
    return again(
        penstock.Loader.from_dataset(data, batch_size=SAMPLES, shuffle=True, seed=SEED, **OURS["penstock, processes"])
    )


PASS = 8  # tars in a pass of X10

OURS = {
    "penstock, 0 workers": {},
    "penstock, threads": {"num_workers": WORKERS, "method": "thread"},
    "penstock, processes": {"num_workers": WORKERS, "method": "process"},
}


def readers_of_tars(then: Then = None, **options: Any) -> dict[str, Peer]:
    more = () if then is None else ("PIL",)
    others = {
        "webdataset": Peer(by_webdataset, ("webdataset", *more)),
        "HF datasets": Peer(by_hugging_face, ("datasets", *more)),
        "Energon": Peer(by_energon, ("megatron.energon", *more), write_energon),
        "LitData": Peer(by_litdata, ("litdata", *more), write_litdata_of_tars),
        **{name: Peer(functools.partial(by_us, **ours), ("penstock", *more)) for name, ours in OURS.items()},
    }
    return {
        name: Peer(
            functools.partial(peer.open, **({} if then is None else {"then": then}), **options),
            peer.modules,
            peer.write,
        )
        for name, peer in others.items()
    }


X1 = {
    "no loader": Peer(without_loader),
    "no loader, tarfile": Peer(functools.partial(without_loader, read=by_tarfile)),
    **readers_of_tars(),
}

X2 = {
    "no loader": Peer(functools.partial(without_loader, then=decoded), ("PIL",)),
    "no loader, stacked": Peer(functools.partial(without_loader, then=decoded, stacks=True), ("PIL",)),
    **readers_of_tars(decoded),
}

X10 = readers_of_tars(passes=True)

X11 = {
    "webdataset, 2 x 5000": Peer(functools.partial(by_webdataset, held=5000), ("webdataset",)),
    "HF datasets, 2 x 5000": Peer(functools.partial(by_hugging_face, held=5000), ("datasets",)),
    **{
        f"penstock, 64 lanes, window {window}": Peer(
            functools.partial(by_us, lanes=64, held=32 * window, **OURS["penstock, processes"]), ("penstock",)
        )
        for window in (64, 512)
    },
    "penstock, 64 lanes, window 512, indexed": Peer(
        functools.partial(by_our_index, window=512), ("penstock",), write_index_of_tars
    ),
}


# ------------------------------------------------------------------------------ X4: lines of JSON, tokenised and packed
#
# Each is a function of the folder and returns batches of 8 rows of 2048 tokens, padded with 0.

ROW = 2048
WORDS = {f"word{k * k}": k + 1 for k in range(VOCABULARY)}


def write_lines(folder: Path, files: int, each: int) -> None:
    """Texts of lognormal lengths."""
    generator = np.random.default_rng(SEED)
    words = np.array(list(WORDS))
    for file in range(files):
        begins, at = [0], 0
        with open(folder / f"{file:03}.jsonl", "wb") as lines:
            for length in np.clip(generator.lognormal(6, 0.9, each), 8, ROW).astype(int):
                at += lines.write(json.dumps({"text": " ".join(generator.choice(words, length))}).encode() + b"\n")
                begins.append(at)
        np.save(folder / f"{file:03}.npy", begins)  # for who reads by position


def toy_tokens(text: str) -> list[int]:
    return [WORDS[word] for word in text.split()]


class Concatenated(IterableDataset):
    """As everybody writes it: the tokens of a file one after another, cut into rows wherever that falls."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.jsonl"))

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        tokens: list[int] = []
        for epoch in itertools.count():
            files = random.Random(f"{SEED} {epoch}").sample(self.files, len(self.files))
            for file in files[worker.id :: worker.num_workers]:
                with open(file, "rb") as lines:
                    for line in lines:
                        tokens += toy_tokens(json.loads(line)["text"])
                        while len(tokens) >= ROW:
                            yield torch.tensor(tokens[:ROW])
                            del tokens[:ROW]


def cut_by_a_generator(folder: Path) -> Iterator[torch.Tensor]:
    return iter(DataLoader(Concatenated(folder), BATCH_SIZE, num_workers=WORKERS))


def texts_to_tokens(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    return {"tokens": [toy_tokens(text) for text in batch["text"]]}


def grouped(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """As in its examples of language modelling: concatenated, cut, and the rest dropped."""
    tokens = list(itertools.chain(*batch["tokens"]))
    return {"tokens": [tokens[at : at + ROW] for at in range(0, len(tokens) - ROW + 1, ROW)]}


def cut_by_hugging_face(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    from datasets import load_dataset

    files = sorted(map(str, folder.glob("*.jsonl")))
    dataset = load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache"))
    dataset = dataset.shuffle(seed=SEED, buffer_size=HELD).map(texts_to_tokens, batched=True, remove_columns=["text"])
    dataset = dataset.map(grouped, batched=True).with_format("torch")
    return again(DataLoader(dataset, BATCH_SIZE, num_workers=WORKERS, persistent_workers=True))


class Lines:
    """Lines by position."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.jsonl"))
        self.begins = [np.load(file.with_suffix(".npy")) for file in self.files]
        self.ends = np.cumsum([len(begins) - 1 for begins in self.begins])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> bytes:
        file = int(np.searchsorted(self.ends, index, "right"))
        line = index - int(self.ends[file - 1] if file else 0)
        begin, end = map(int, self.begins[file][line : line + 2])
        with open(self.files[file], "rb") as lines:
            lines.seek(begin)
            return lines.read(end - begin)


def line_to_tokens(line: bytes) -> dict[str, np.ndarray]:
    return {"tokens": np.array(toy_tokens(json.loads(line)["text"]))}


def packed_by_grain(folder: Path, packing: str) -> Iterator[dict[str, np.ndarray]]:
    import grain.python as pygrain
    from grain import experimental

    lines = pygrain.MapDataset.source(Lines(folder)).seed(SEED).shuffle().repeat().map(line_to_tokens)
    rows = getattr(experimental, packing)(lines.to_iter_dataset(), length_struct={"tokens": ROW}, num_packing_bins=64)
    return iter(rows.batch(BATCH_SIZE).mp_prefetch(pygrain.MultiprocessingOptions(num_workers=WORKERS)))


def tokenised(lines: Iterator[dict[str, str]]) -> Iterator[list[int]]:
    for line in lines:
        yield toy_tokens(line["text"])


def packed_by_us(folder: Path, **options: Any) -> Iterator[dict[str, torch.Tensor]]:
    import penstock

    data = penstock.formats.jsonl(
        folder / "*.jsonl", epoch_size=10_000, steps=[tokenised, penstock.Pack(ROW)], bookmarks=False
    )
    return again(penstock.Loader.from_dataset(data, batch_size=BATCH_SIZE, shuffle=True, seed=SEED, **options))


X4 = {
    "DataLoader and a generator, cuts": Peer(cut_by_a_generator),
    "HF datasets, cuts": Peer(cut_by_hugging_face, ("datasets",)),
    "Grain, first fit": Peer(functools.partial(packed_by_grain, packing="FirstFitPackIterDataset"), ("grain",)),
    "Grain, best fit": Peer(functools.partial(packed_by_grain, packing="BestFitPackIterDataset"), ("grain",)),
    **{name: Peer(functools.partial(packed_by_us, **ours), ("penstock",)) for name, ours in OURS.items()},
}


# --------------------------------------------------------------------------------------- X3: sequences from token files


def write_tokens(folder: Path, sequences: int, length: int = LENGTH, files: int = 4) -> None:
    """Files of uint16 for each source; each has its share of ``sequences``."""
    generator = np.random.default_rng(SEED)
    for source, (name, weight) in enumerate(WEIGHTS.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file in range(files):
            tokens = generator.integers(
                0, VOCABULARY, (max(8, int(sequences * weight) // files), length), dtype=np.uint16
            )
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
        read = (
            mixed.to_iter_dataset().batch(BATCH_SIZE).mp_prefetch(pygrain.MultiprocessingOptions(num_workers=WORKERS))
        )
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
            str(folder / "litdata" / name),
            item_loader=TokensLoader(LENGTH),
            shuffle=True,
            drop_last=True,
            seed=SEED,
            transform=to_int64,
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

    parts = [
        load_from_disk(str(folder / "hugging_face" / name)).shuffle(seed=SEED).with_format("torch") for name in WEIGHTS
    ]
    mixed = interleave_datasets(
        parts, probabilities=list(WEIGHTS.values()), seed=SEED, stopping_strategy="all_exhausted"
    )
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
    **{name: Peer(functools.partial(ours, **options), ("penstock",)) for name, options in OURS.items()},
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
    import penstock
    from penstock.formats import tokens

    file = folder / f"sparse-{sequences}.bin"
    with open(file, "wb") as sparse:
        sparse.truncate(2 * SHORT * sequences)

    def build() -> Any:
        return penstock.Loader.from_dataset(
            tokens(file, SHORT), batch_size=BATCH_SIZE, shuffle=True, seed=SEED, **options
        )

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
        dataset = StreamingDataset(
            local=str(folder / "mds" / "web"), batch_size=BATCH_SIZE, shuffle=True, shuffle_seed=SEED
        )
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
            str(folder / "litdata" / "web"),
            item_loader=TokensLoader(SHORT),
            shuffle=True,
            drop_last=True,
            seed=SEED,
            transform=to_int64,
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


def resume_webdataset(folder: Path, sequences: int) -> Resumable:
    """It has no state: a resumed run reads what it has read before, and throws it away."""
    import webdataset

    def resume(place: int) -> Any:
        dataset = webdataset.WebDataset(paths_of(folder), shardshuffle=100, seed=SEED).shuffle(1000).batched(BATCH_SIZE)
        return next(itertools.islice(iter(dataset), place, None)), None

    return Resumable(lambda places: places, resume)


def resume_energon(folder: Path, sequences: int) -> Resumable:
    from megatron import energon

    class Encoder(energon.DefaultTaskEncoder):
        decoder = None
        cookers = (energon.Cooker(energon.stateless(lambda sample: sample)),)

        @energon.stateless
        def batch(self, samples: list[Any]) -> Any:
            return [sample["bin"] for sample in samples]

        def encode_batch(self, batch: Any) -> Any:
            return batch

    def build() -> Any:
        alone = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
        options = {"shuffle_buffer_size": HELD, "max_samples_per_sequence": 100, "task_encoder": Encoder()}
        return energon.get_savable_loader(
            energon.get_train_dataset(folder / "tars", worker_config=alone, batch_size=BATCH_SIZE, **options)
        )

    def begin() -> tuple[Iterator[Any], Callable[[], Any]]:
        loader = build()
        return iter(loader), loader.save_state_rank

    def resume(state: Any) -> Any:
        loader = build()
        loader.restore_state_rank(state)
        return next(iter(loader)), None

    return Resumable(functools.partial(walked, begin), resume)


def resume_lanes(folder: Path, sequences: int, *, bookmarks: bool) -> Resumable:
    """penstock: lanes of tars that nobody has counted, two of them."""
    import penstock

    def build() -> Any:
        data = penstock.formats.tar(
            paths_of(folder), epoch_size=sequences, lanes=2, bookmarks=str(folder / "bookmarks") if bookmarks else False
        )
        return penstock.Loader.from_dataset(data, batch_size=BATCH_SIZE, shuffle=True, seed=SEED)

    def states(places: list[int]) -> list[Any]:
        with build() as loader:
            last = places[-1] if bookmarks else 0  # whoever saved this state has read up to there, and left bookmarks
            for _ in itertools.islice(loader, last + 1):
                state = json.loads(loader.state_dict()["penstock"])
        found = []
        for place in places:
            state["state"]["source"] = {**state["state"]["source"], "position": place * BATCH_SIZE}
            found.append({"penstock": json.dumps(state)})
        return found

    def resume(state: Any) -> Any:
        loader = build()
        loader.load_state_dict(state)
        return next(iter(loader)), loader.close

    return Resumable(states, resume)


def half_a_shard(folder: Path, sequences: int) -> Resumable:
    """No loader: half of each of two tars is read, which is what bookmarks leave to read, on average.

    There are ten tars.
    """

    def resume(place: int) -> Any:
        lanes = [by_size(path) for path in paths_of(folder)[:2]]
        return [list(itertools.islice(lane, sequences // 20))[-1] for lane in lanes], None

    return Resumable(lambda places: places, resume)


X5 = {
    "Grain": Peer(resume_grain, ("grain",)),
    "MosaicML Streaming": Peer(resume_mds, ("streaming",), functools.partial(write_mds, length=SHORT)),
    "LitData": Peer(resume_litdata, ("litdata",), functools.partial(write_litdata, length=SHORT)),
    "HF datasets": Peer(resume_hugging_face, ("datasets",), functools.partial(write_hugging_face, length=SHORT)),
    "Energon": Peer(resume_energon, ("megatron.energon",), write_energon),
    "webdataset": Peer(resume_webdataset, ("webdataset",)),
    "no loader, half a shard a lane": Peer(half_a_shard),
    "penstock, lanes": Peer(functools.partial(resume_lanes, bookmarks=True), ("penstock",)),
    "penstock, lanes without bookmarks": Peer(functools.partial(resume_lanes, bookmarks=False), ("penstock",)),
    **{name: Peer(functools.partial(resume_ours, **ours), ("penstock",), huge=True) for name, ours in OURS.items()},
}


# ---------------------------------------------------------------------------------------- X6: going on with other ranks
#
# Each is a function of the folder. It returns a function of (ranks, state, steps) that returns the samples of all ranks
# and the state of one.

ITEMS = 4800  # in all
Run = Callable[[int, Any, int], tuple[list[int], Any]]


def elastic_grain(folder: Path) -> Run:
    import grain.python as pygrain
    from grain import experimental

    def run(ranks: int, state: Any, steps: int) -> tuple[list[int], Any]:
        data = pygrain.MapDataset.source(range(ITEMS)).seed(SEED).shuffle()
        shares = [
            iter(experimental.ElasticIterator(data, BATCH_SIZE * ranks, pygrain.ShardOptions(rank, ranks)))
            for rank in range(ranks)
        ]
        for share in shares:
            if state is not None:
                share.set_state(state)
        return [int(number) for _ in range(steps) for share in shares for number in next(share)], shares[0].get_state()

    return run


def write_numbers(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds"), columns={"number": "int"}, size_limit=1000) as writer:
        for number in range(ITEMS):
            writer.write({"number": number})


def elastic_mds(folder: Path) -> Run:
    """MosaicML Streaming: its ranks are processes, which talk to each other."""
    context = multiprocessing.get_context("fork")

    def run(ranks: int, state: Any, steps: int) -> tuple[list[int], Any]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        results = context.Queue()
        for rank in range(ranks):
            context.Process(
                target=rank_of_mds, args=(folder, rank, ranks, port, state, steps, results), daemon=True
            ).start()
        found = [results.get(timeout=60) for _ in range(ranks)]
        return [number for numbers, _ in found for number in numbers], found[0][1]

    return run


def rank_of_mds(folder: Path, rank: int, ranks: int, port: int, state: Any, steps: int, results: Any) -> None:
    from streaming import StreamingDataset

    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    dataset = StreamingDataset(local=str(folder / "mds"), batch_size=BATCH_SIZE, shuffle=True, shuffle_seed=SEED)
    if state is not None:
        dataset.load_state_dict(state)
    numbers = [int(sample["number"]) for sample in itertools.islice(dataset, BATCH_SIZE * steps)]
    results.put((numbers, dataset.state_dict(BATCH_SIZE * ranks * steps, from_beginning=True)))


class Numbers:
    """Shards of uneven lengths."""

    def __call__(self, shard: int) -> Iterator[int]:
        return iter(range(1000 * shard, 1000 * shard + 60 + 7 * (shard % 13)))


def not_a_multiple_of_three(number: int) -> bool:
    return number % 3 > 0


def elastic_ours(folder: Path, **options: Any) -> Run:
    """penstock: filtered shards, which nobody has counted."""
    import penstock

    def run(ranks: int, state: Any, steps: int) -> tuple[list[int], Any]:
        loaders = []
        for rank in range(ranks):
            kept = [penstock.Filter(not_a_multiple_of_three), penstock.Shuffle(32)]
            data = penstock.Stream(
                96, Numbers(), epoch_size=ITEMS, lanes=24, steps=kept, bookmarks=str(folder / "bookmarks")
            )
            loaders.append(
                penstock.Loader.from_dataset(
                    data, batch_size=BATCH_SIZE, shuffle=True, seed=SEED, rank=rank, world_size=ranks, **options
                )
            )
            if state is not None:
                loaders[-1].load_state_dict(state)
        with contextlib.ExitStack() as stack:
            for loader in loaders:
                stack.enter_context(loader)
            read = [iter(loader) for loader in loaders]
            numbers = [int(number) for _ in range(steps) for batches in read for number in next(batches)]
            return numbers, loaders[-1].state_dict()

    return run


def lost_and_repeated(run: Run) -> tuple[int, int]:
    """Of a run on 2 ranks that goes on with 3, compared with one that does not."""
    whole, _ = run(2, None, ITEMS // (2 * BATCH_SIZE))
    before, state = run(2, None, 120)
    after, _ = run(3, state, (ITEMS - len(before)) // (3 * BATCH_SIZE))
    should, found = Counter(whole), Counter(before + after)
    return sum((should - found).values()), sum((found - should).values())


X6 = {
    "Grain, elastic": Peer(elastic_grain, ("grain",)),
    "MosaicML Streaming": Peer(elastic_mds, ("streaming",), write_numbers),
    "penstock": Peer(elastic_ours, ("penstock",)),
}


# -------------------------------------------------------------------------------------------- X7: states of many shards


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

    dataset = IterableDataset.from_generator(nothing, gen_kwargs={"shards": list(range(shards))}).shuffle(
        seed=SEED, buffer_size=1000
    )
    return iter(dataset.batch(64)), dataset.state_dict


X7 = {
    "HF datasets": Peer(state_hugging_face, ("datasets",)),
    "penstock, 8 threads": Peer(state_ours, ("penstock",), huge=True),
}


# --------------------------------------------------------------------------------------------- X8: which source is next
#
# Each is a function of (weights, items, ranks) that returns a function; that one returns the source of each item, rank
# by rank: shape (ranks, items). The items are dealt to the ranks as its documentation says.

Drawing = Callable[[], np.ndarray]


def mix_ours(weights: np.ndarray, items: int, ranks: int, shuffled: bool = True) -> Drawing:
    """The order that a `Mix` brings; each rank reads its positions."""
    import penstock
    from penstock._random.mix_order import MixOrder

    n = 10**9
    kind = penstock.orders.ShuffledOrder if shuffled else penstock.orders.SequentialOrder
    names = [f"{k:03}" for k in range(len(weights))]
    order = MixOrder({name: kind(n) for name in names}, dict(zip(names, weights, strict=True)), epoch_size=n)

    def read(rank: int) -> np.ndarray:
        node, found = penstock.nodes.Sampler(order), []
        place = {**node.start(0), "position": rank}
        for _ in range(-(-items // 256)):
            indices, place = node.read(place, 256, ranks)
            found.append(indices.values)
        return np.concatenate(found)[:items] // n

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
        [part.to_iterable_dataset() for part in parts],
        probabilities=probabilities,
        seed=SEED,
        stopping_strategy="all_exhausted",
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
        [Part(k) for k in range(len(weights))],
        seed=SEED,
        weights=(weights / weights.sum()).tolist(),
        iterate_over_all=False,
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
        dataset = StreamingDataset(
            streams=streams, batch_size=1, shuffle=True, shuffle_seed=SEED, epoch_size=items * ranks, **defaults
        )
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


# ---------------------------------------------------------------------------------------- X9: batches of similar length
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

    cuts = CutSet.from_cuts(
        MonoCut(id=f"{k}", start=0.0, duration=float(duration), channel=0) for k, duration in enumerate(seconds)
    )
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
            groups=penstock.Buckets(seconds, budget, max_samples=most, same_size_run=ranks),
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
