"""Two training runs that many people know, each fed by several loaders: nanoGPT's pretraining, and a classifier of a
folder of JPEGs.

    python known_runs.py [--workers 8,14] [--seconds 2] [--budget-s 330] [--device auto] [--peers DataLoader penstock]
    [--json figures.json]

- Tokens, as in https://github.com/karpathy/nanoGPT: a file of uint16, blocks of 256 or 1024, a GPT of the sizes in its
  configuration files.
- Images: JPEGs of 320 x 240 in a folder per class, decoded and resized to 224 x 224 by Pillow and flipped; a residual
  network of 18 layers.

The models are written here in plain torch, and the data are made on the spot. Without an accelerator the models are
small.

Every turn is a process that builds the model, warms it up, and then opens the loader. It reports:

- *speed*: tokens or images per second.
- *idle*: the share of time in which the device had nothing to do. On an accelerator, events on its stream measure the
  time from the end of a step to the arrival of the next batch; on a CPU, it is the time that the loop waited for
  batches.
- *first step*: seconds from opening the loader to the end of the first step.
- *resume*: seconds that a new process takes, from opening the loader to the first batch, to continue in the middle of
  an epoch; and whether that batch has the *same bits*, the *same samples* (but other flips), or *others*. A loader
  without a state is fast-forwarded: it gets the same shuffled batches of indices again, from the right one on.

*No loader* trains on one batch that is on the device already, which is the most that any loader can reach; *get_batch*
is nanoGPT's own function. Each loader is set up as its documentation recommends; see loader_peers.py. The turns of a
round are interleaved, and medians over the rounds are printed. No round begins that would end after ``--budget-s``.
Loaders that are not installed are named and skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import pickle
import pkgutil
import platform
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, default_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEED = 1
CLASSES = 10
Batch = tuple[torch.Tensor, ...]  # inputs, targets, the numbers of the samples

# ------------------------------------------------------------------------------------------------------------- the data


class Blocks(Dataset):
    """Block i of a file of tokens, and the same block one token later."""

    def __init__(self, file: Path, block: int) -> None:
        self.file = file
        self.block = block
        self.length = file.stat().st_size // 2 // (block + 1)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, int]:
        tokens = np.memmap(self.file, np.uint16, "r")  # opened for each sample, as nanoGPT does for each batch
        row = tokens[index * (self.block + 1) : (index + 1) * (self.block + 1)].astype(np.int64)
        return row[:-1], row[1:], index


class Pictures(Dataset):
    """Decoded, resized, flipped or not: uint8, (3, 224, 224). The device makes it float."""

    def __init__(self, folder: Path, times: int) -> None:
        self.files = sorted(map(str, folder.glob("*/*.jpg"))) * times

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        from PIL import Image

        file = self.files[index]
        with Image.open(file) as picture:
            pixels = np.asarray(picture.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR))
        if torch.rand(()) < 0.5:
            pixels = pixels[:, ::-1]
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), int(Path(file).parent.name), index


def write_tokens(file: Path, count: int, vocabulary: int) -> None:
    np.random.default_rng(SEED).integers(0, vocabulary, count, dtype=np.uint16).tofile(file)


def write_pictures(folder: Path, count: int) -> None:
    """Smooth patterns with noise, because pure noise does not compress."""
    from PIL import Image

    rng = np.random.default_rng(SEED)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(
            (320, 240), Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse, np.int16) + rng.integers(-16, 17, (240, 320, 3), dtype=np.int16)
        place = folder / str(number % CLASSES)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place / f"{number:05}.jpg", quality=90)


# ----------------------------------------------------------------------------------------------------------- the models


class Layer(nn.Module):
    """Of a GPT: attention, then an MLP, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, dim=2)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    """The loss of next tokens. The embedding is also the output layer."""

    def __init__(self, block: int, layers: int, heads: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.tokens(inputs) + self.places.weight[: inputs.shape[1]])
        return functional.cross_entropy((x @ self.tokens.weight.T).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = (
            nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 or inside != outside else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.path(x) + self.shortcut(x))


class Classifier(nn.Module):
    """The loss of a residual network, with ``widths`` and ``blocks`` per width."""

    def __init__(self, widths: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [
            nn.Conv2d(3, widths[0], 7, 4 if len(widths) < 4 else 2, 3, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(),
        ]
        parts.append(nn.MaxPool2d(3, 2, 1))
        inside = widths[0]
        for width in widths:
            for number in range(blocks):
                parts.append(Residual(inside, width, 2 if number == 0 and width != widths[0] else 1))
                inside = width
        self.net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.net((inputs.float() - 117) / 58), targets)


@dataclass(frozen=True)
class Run:
    """What is trained.

    Attributes:
        half: Batches in half an epoch, after which a run is resumed.
        block: Tokens in a row; 0 for images.
    """

    title: str
    batch_size: int
    half: int
    model: Callable[[], nn.Module]
    block: int = 0
    vocabulary: int = 0

    @property
    def unit(self) -> str:
        return "tokens" if self.block else "images"

    def write(self, folder: Path) -> None:
        folder.mkdir()
        if self.block:
            write_tokens(folder / "train.bin", 2 * self.half * self.batch_size * (self.block + 1), self.vocabulary)
        else:
            write_pictures(folder, self.pictures)

    @property
    def pictures(self) -> int:
        """Distinct ones. An epoch has each several times."""
        return min(256, 2 * self.half * self.batch_size)

    def dataset(self, folder: Path) -> Dataset:
        if self.block:
            return Blocks(folder / "train.bin", self.block)
        return Pictures(folder, math.ceil(2 * self.half * self.batch_size / self.pictures))


def gpt(
    title: str, batch_size: int, block: int, layers: int, heads: int, width: int, vocabulary: int, half: int = 1000
) -> Run:
    return Run(title, batch_size, half, lambda: GPT(block, layers, heads, width, vocabulary), block, vocabulary)


RUNS = {
    "small": {
        "tokens": gpt("nanoGPT, block 256, 4 layers of 128", 12, 256, 4, 4, 128, 65),
        "images": Run("JPEGs, 3 residual blocks", 32, 40, lambda: Classifier((16, 32, 64), 1)),
    },
    "accelerator": {
        "tokens 256": gpt("nanoGPT, train_shakespeare_char: block 256, 6 layers of 384", 64, 256, 6, 6, 384, 65),
        "tokens 1024": gpt("nanoGPT, train_gpt2: block 1024, 12 layers of 768", 12, 1024, 12, 12, 768, 50304),
        "images": Run("JPEGs, residual network of 18 layers", 256, 20, lambda: Classifier((64, 128, 256, 512), 2)),
    },
    "quick": {
        "tokens": gpt("nanoGPT, tiny", 4, 32, 1, 2, 16, 65, half=6),
        "images": Run("JPEGs, tiny", 4, 3, lambda: Classifier((8,), 1)),
    },
}

# ---------------------------------------------------------------------------------------------------------- the loaders


@dataclass(frozen=True)
class Task:
    """What a loader is to load, and where the batches go."""

    run: Run
    folder: Path
    workers: int
    device: torch.device

    @property
    def dataset(self) -> Dataset:
        return self.run.dataset(self.folder)

    @property
    def batch_size(self) -> int:
        return self.run.batch_size

    @property
    def pins(self) -> bool:
        """Whether batches should be in pinned memory."""
        return self.device.type != "cpu"


@dataclass(frozen=True)
class Opened:
    """Endless batches, and the state after the last one; None if the loader has none."""

    batches: Iterator[Any]
    state: Callable[[], Any] | None = None
    close: Callable[[], object] = lambda: None


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def endlessly(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class From:
    """Shuffled batches of indices; the first epoch begins with number ``skipped``."""

    def __init__(self, task: Task, skipped: int | None) -> None:
        self.batches = BatchSampler(RandomSampler(task.dataset, generator=seeded()), task.batch_size, drop_last=True)
        self.skipped = skipped or 0

    def __iter__(self) -> Iterator[list[int]]:
        skipped, self.skipped = self.skipped, 0  # at the first batch: DataLoader calls this twice before
        yield from itertools.islice(self.batches, skipped, None)

    def __len__(self) -> int:
        return len(self.batches)


class Collated:
    """Turns indices into a batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[index] for index in indices])


def no_loader(task: Task, state: Any) -> Opened:
    batch = [part.to(task.device) for part in Collated(task.dataset)(list(range(task.batch_size)))]
    return Opened(itertools.repeat(batch))


def get_batch(task: Task, state: Any) -> Opened:
    """As in nanoGPT's train.py: blocks at random places, in the process that trains."""
    file, block = task.folder / "train.bin", task.run.block

    def batches() -> Iterator[Any]:
        while True:
            data = np.memmap(file, np.uint16, "r")
            places = torch.randint(len(data) - block, (task.batch_size,))
            parts = [
                torch.stack([torch.from_numpy(data[i + by : i + by + block].astype(np.int64)) for i in places])
                for by in (0, 1)
            ]
            yield [*(part.pin_memory() if task.pins else part for part in parts), places]

    return Opened(batches())


def dataloader(task: Task, state: Any) -> Opened:
    loader: Any = DataLoader(
        task.dataset,
        batch_sampler=From(task, state),
        num_workers=task.workers,
        pin_memory=task.pins,
        persistent_workers=task.workers > 0,
    )
    return Opened(endlessly(loader))


def stateful_dataloader(task: Task, state: Any) -> Opened:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader: Any = StatefulDataLoader(
        task.dataset,
        task.batch_size,
        shuffle=True,
        generator=seeded(),
        num_workers=task.workers,
        pin_memory=task.pins,
        drop_last=True,
        persistent_workers=task.workers > 0,
    )
    if state is not None:
        loader.load_state_dict(state)
    return Opened(endlessly(loader), loader.state_dict)


def nodes(task: Task, state: Any) -> Opened:
    import torchdata.nodes as tn

    node: Any = tn.Batcher(
        tn.SamplerWrapper(RandomSampler(task.dataset, generator=seeded())), task.batch_size, drop_last=True
    )
    node = tn.ParallelMapper(node, Collated(task.dataset), num_workers=task.workers, method="process")
    node = tn.PinMemory(node) if task.pins else node
    loader = tn.Loader(tn.Prefetcher(node, prefetch_factor=2 * task.workers))
    if state is not None:
        loader.load_state_dict(state)
    return Opened(endlessly(loader), loader.state_dict)


def spdl(task: Task, state: Any) -> Opened:
    """Threads, and a stage that copies to the device, as its documentation recommends."""
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(From(task, state), continuous=True)
    builder.pipe(Collated(task.dataset), concurrency=task.workers)
    if task.device.type == "cuda":
        from spdl.io import transfer_tensor_h2d

        builder.pipe(transfer_tensor_h2d, executor=ThreadPoolExecutor(1))
    pipeline = builder.add_sink(2 * task.workers).build(num_threads=task.workers, use_thread_output_queue=True)
    return Opened(endlessly(pipeline), None, pipeline.stop)


def grain(task: Task, state: Any) -> Opened:
    """Threads for tokens in the page cache, processes for pictures."""
    from grain import MapDataset, MultiprocessingOptions, ReadOptions

    data = MapDataset.source(task.dataset).seed(SEED).shuffle().batch(task.batch_size, drop_remainder=True).repeat()
    if task.run.block:
        read = data.to_iter_dataset(ReadOptions(num_threads=task.workers, prefetch_buffer_size=2 * task.workers))
    else:
        read = data.to_iter_dataset(ReadOptions(num_threads=0, prefetch_buffer_size=0))
        read = read.mp_prefetch(MultiprocessingOptions(num_workers=task.workers, per_worker_buffer_size=2))
    batches = iter(read)
    if state is not None:
        batches.set_state(state)
    return Opened(batches, batches.get_state, batches.close)


def records(run: Run, folder: Path, shards: list[int]) -> Iterator[dict[str, Any]]:
    dataset: Any = run.dataset(folder)
    for shard in shards:
        for index in range(shard, len(dataset), 64):
            yield {str(place): part for place, part in enumerate(dataset[index])}


def hugging_face(task: Task, state: Any) -> Opened:
    """A stream of 64 shards with a shuffle buffer of 100."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from datasets import IterableDataset

    made = {"run": task.run.title, "folder": task.folder, "shards": list(range(64))}
    data = IterableDataset.from_generator(records_of, gen_kwargs=made).shuffle(seed=SEED, buffer_size=100)
    loader: Any = StatefulDataLoader(
        data, task.batch_size, num_workers=task.workers, pin_memory=task.pins, drop_last=True
    )
    if state is not None:
        loader.load_state_dict(state)
    return Opened((list(batch.values()) for batch in endlessly(loader)), loader.state_dict)


def records_of(run: str, folder: Path, shards: list[int]) -> Iterator[dict[str, Any]]:
    """As `records`, with what can be pickled."""
    return records(next(one for size in RUNS.values() for one in size.values() if one.title == run), folder, shards)


def olmo_core(task: Task, state: Any) -> Opened:
    """Rows of one token more than a block, which are cut into inputs and targets here."""
    from olmo_core.data import DataCollator, NumpyDataLoaderBase, NumpyFSLDataset

    row = task.run.block + 1
    data = NumpyFSLDataset(
        task.folder / "train.bin",
        sequence_length=row,
        pad_token_id=0,
        eos_token_id=0,
        vocab_size=task.run.vocabulary,
        dtype=np.uint16,
    )
    data.work_dir = task.folder / "olmo"
    data.prepare()
    loader = NumpyDataLoaderBase.wrap_numpy_dataset(
        data,
        global_batch_size=task.batch_size * row,
        collator=DataCollator(pad_token_id=0),
        seed=SEED,
        num_workers=task.workers,
        target_device_type=task.device.type,
    )
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[Any]:
        for epoch in itertools.count(1 if state is None else state["epoch"]):
            loader.reshuffle(epoch)
            for batch in loader:
                yield batch["input_ids"][:, :-1], batch["input_ids"][:, 1:], batch["index"]
            loader.reset()

    return Opened(batches(), loader.state_dict)


def penstock(task: Task, state: Any) -> Opened:
    import penstock

    loader = penstock.Loader.from_dataset(
        task.dataset,
        task.batch_size,
        shuffle=True,
        seed=SEED,
        num_workers=task.workers,
        drop_last=True,
        device=task.device if task.pins else None,
    )
    if state is not None:
        loader.load_state_dict(state)
    return Opened(endlessly(loader), loader.state_dict, loader.close)


@dataclass(frozen=True)
class Peer:
    """A loader: how it is opened, what is imported before, the distribution that installs that, and what it can load.

    Attributes:
        resumes: False if there is no epoch to resume.
    """

    open: Callable[[Task, Any], Opened]
    modules: tuple[str, ...] = ()
    package: str = "torch"
    units: tuple[str, ...] = ("tokens", "images")
    resumes: bool = True


NO_LOADER = "no loader"
PEERS = {
    NO_LOADER: Peer(no_loader, resumes=False),
    "get_batch": Peer(get_batch, units=("tokens",), resumes=False),
    "DataLoader": Peer(dataloader),
    "StatefulDataLoader": Peer(stateful_dataloader, ("torchdata.stateful_dataloader",), "torchdata"),
    "torchdata.nodes": Peer(nodes, ("torchdata.nodes",), "torchdata"),
    "SPDL": Peer(spdl, ("spdl.pipeline",), "spdl"),
    "Grain": Peer(grain, ("grain",), "grain"),
    "Hugging Face": Peer(hugging_face, ("datasets", "torchdata.stateful_dataloader"), "datasets"),
    "OLMo-core": Peer(olmo_core, ("olmo_core.data",), "ai2-olmo-core", units=("tokens",)),
    "penstock": Peer(penstock, ("penstock:Loader", "penstock.nodes"), "torch-penstock"),
}
WITHOUT_WORKERS = (NO_LOADER, "get_batch")


def version(name: str) -> str | None:
    """None if the loader is not installed."""
    if any(
        importlib.util.find_spec(module.partition(".")[0].partition(":")[0]) is None for module in PEERS[name].modules
    ):
        return None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(PEERS[name].package)
    return "from the path"


# ------------------------------------------------------------------------------------------------------------ the turns


def tensors(batch: Any, device: torch.device) -> Batch:
    """Its parts on the device; the numbers of the samples stay where they are."""
    inputs, targets, numbers = (torch.as_tensor(part) for part in batch)
    if device.type != "cpu" and not inputs.is_pinned() and inputs.device.type == "cpu":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True), numbers


class Trainer:
    """The model and its step."""

    def __init__(self, run: Run, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = run.model().to(device)
        if device.type != "cpu" and not run.block:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.cast = torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu")

    def step(self, batch: Batch) -> None:
        inputs, targets, _ = batch
        with self.cast:
            loss = self.model(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def mark(self) -> Any:
        """This moment on the device's own clock; None on a CPU."""
        if self.device.type == "cpu":
            return None
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event


def train(peer: str, task: Task, seconds: float) -> dict[str, Any]:
    """A turn: the speed, the share of time in which the device was idle, and seconds to the end of the first step."""
    trainer = Trainer(task.run, task.device)
    held = next(no_loader(task, None).batches)
    for _ in range(3):
        trainer.step(held)
    trainer.finish()

    begin = time.perf_counter()
    opened = PEERS[peer].open(task, None)
    trainer.step(tensors(next(opened.batches), task.device))
    trainer.finish()
    first_step_s = time.perf_counter() - begin
    for _ in range(3):
        trainer.step(tensors(next(opened.batches), task.device))
    trainer.finish()

    waited, count, marks = 0.0, 0, [(None, trainer.mark())]
    begin = now = time.perf_counter()
    while now - begin < seconds or count < 3:
        batch = tensors(next(opened.batches), task.device)
        waited += time.perf_counter() - now
        start = trainer.mark()
        trainer.step(batch)
        marks.append((start, trainer.mark()))
        count += batch[0].numel() if task.run.block else len(batch[0])
        now = time.perf_counter()
    trainer.finish()
    took = time.perf_counter() - begin
    idle = waited / took
    if task.device.type != "cpu":
        gaps_ms = sum(end.elapsed_time(start) for (_, end), (start, _) in itertools.pairwise(marks))
        idle = gaps_ms / marks[0][1].elapsed_time(marks[-1][1])
    opened.close()
    return {
        "speed": count / took,
        "idle": idle,
        "waited": waited / took,
        "steps": len(marks) - 1,
        "first_step_s": first_step_s,
    }


def values(batch: Any) -> list[np.ndarray]:
    return [np.array(part) for part in tensors(batch, torch.device("cpu"))]


def save(peer: str, task: Task, file: Path) -> dict[str, Any]:
    """Read half an epoch, and write the state and the batch that comes next."""
    opened = PEERS[peer].open(task, None)
    for _ in itertools.islice(opened.batches, task.run.half):
        pass
    state = task.run.half if opened.state is None else opened.state()
    file.write_bytes(pickle.dumps((state, values(next(opened.batches)))))
    opened.close()
    return {}


def resume(peer: str, task: Task, file: Path) -> dict[str, Any]:
    """In a new process: seconds to the first batch, and what is in it."""
    state, expected = pickle.loads(file.read_bytes())
    begin = time.perf_counter()
    opened = PEERS[peer].open(task, state)
    batch = next(opened.batches)
    took = time.perf_counter() - begin
    found = values(batch)
    opened.close()
    same = [np.array_equal(one, other) for one, other in zip(expected, found, strict=True)]
    return {"resume_s": took, "resumed": "same bits" if all(same) else "same samples" if same[-1] else "others"}


def in_child(
    function: Callable[..., dict[str, Any]], peer: str, *arguments: Any, timeout_s: float = 60
) -> dict[str, Any]:
    """What it returns in a forked process that has imported the loader. Nothing of the process survives."""
    fork = multiprocessing.get_context("fork")
    read, write = fork.Pipe(duplex=False)

    def child() -> None:
        os.setsid()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        try:
            for module in PEERS[peer].modules:
                pkgutil.resolve_name(module)
            found = function(peer, *arguments)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        write.send(found)
        os._exit(0)

    process = fork.Process(target=child)
    process.start()
    write.close()
    try:
        found = read.recv() if read.poll(timeout_s) else {"error": f"not done after {timeout_s:.0f} s"}
    except EOFError:
        found = {"error": "the process ended without a word"}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    read.close()
    return found


# ----------------------------------------------------------------------------------------------------------- the report


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every round has a turn for each run, number of workers and loader."""
    installed = {name: found for name in PEERS if name in (NO_LOADER, *options.peers) and (found := version(name))}
    for name in options.peers:
        if name not in installed:
            print(f"{name}: skipped, because {PEERS[name].package} is not installed")
    runs = RUNS["quick" if options.quick else "small" if device.type == "cpu" else "accelerator"]
    turns = [
        (name, peer, workers)
        for name, run in runs.items()
        if not options.runs or name.partition(" ")[0] in options.runs
        for workers in options.workers
        for peer in installed
        if run.unit in PEERS[peer].units and (workers == options.workers[0] or peer not in WITHOUT_WORKERS)
    ]
    rows: dict[tuple[str, str, int], list[dict[str, Any]]] = {turn: [] for turn in turns}
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).step()  # imports once what each child would import
    begin, longest, rounds, load = time.monotonic(), 0.0, 0, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in dict.fromkeys(name for name, _, _ in turns):
            runs[name].write(folder / name)
        while rounds < options.rounds and time.monotonic() - begin + longest < options.budget_s:
            start = time.monotonic()
            for turn in turns:
                name, peer, workers = turn
                task = Task(runs[name], folder / name, workers, device)
                row = in_child(train, peer, task, options.seconds)
                if PEERS[peer].resumes:
                    file, here = (
                        folder / f"{name} {peer} {workers}.state",
                        Task(runs[name], folder / name, workers, torch.device("cpu")),
                    )
                    saved = {} if file.exists() else in_child(save, peer, here, file)
                    row |= in_child(resume, peer, here, file) if file.exists() else {"resumed": saved.get("error", "")}
                rows[turn].append(row)
                print(
                    f"{time.monotonic() - begin:4.0f} s  {name}, {peer}, {workers}: {row}", file=sys.stderr, flush=True
                )
            rounds += 1
            longest = max(longest, time.monotonic() - start)
    machine = {
        "device": torch.get_device_module(device).get_device_name(device) if device.type != "cpu" else "CPU",
        "cpus": os.cpu_count(),
        "load_before": load,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "versions": {name: found for name, found in installed.items() if name not in WITHOUT_WORKERS},
    }
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": machine,
        "seconds": options.seconds,
        "rounds": rounds,
        "minutes": (time.monotonic() - begin) / 60,
        "runs": {
            name: {"title": run.title, "unit": run.unit, "batch_size": run.batch_size, "half_an_epoch": run.half}
            for name, run in runs.items()
        },
        "turns": [
            {"run": name, "loader": peer, "workers": workers, "rounds": found}
            for (name, peer, workers), found in rows.items()
        ],
    }


def median(rounds: list[dict[str, Any]], key: str) -> float | None:
    found = [row[key] for row in rounds if key in row]
    return statistics.median(found) if found else None


def tables(figures: dict[str, Any]) -> str:
    """In Markdown, one for each run."""
    machine = figures["machine"]
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    lines = [
        (
            f"{figures['date']}; {machine['device']}, {machine['cpus']} cores with a load of "
            f"{machine['load_before']:.1f} before, Python {machine['python']}, NumPy {machine['numpy']}; {versions}."
        ),
        (
            f"Medians of {figures['rounds']} rounds with turns of {figures['seconds']:g} s; {figures['minutes']:.1f} "
            f"minutes."
        ),
    ]
    for name, run in figures["runs"].items():
        turns = [turn for turn in figures["turns"] if turn["run"] == name]
        bound = next((median(turn["rounds"], "speed") for turn in turns if turn["loader"] == NO_LOADER), None)
        if not turns:
            continue
        lines += [
            "",
            f"**{run['title']}**, batches of {run['batch_size']}; resumed after {run['half_an_epoch']} batches.",
            "",
        ]
        lines.append(
            f"| | workers | {run['unit']}/s | of no loader | device idle | first step, s | resume, s | next batch |\n"
            f"|---|---|---|---|---|---|---|---|"
        )
        for turn in turns:
            rounds = turn["rounds"]
            speed, idle, first, again = (median(rounds, key) for key in ("speed", "idle", "first_step_s", "resume_s"))
            cells = [turn["loader"], "-" if turn["loader"] in WITHOUT_WORKERS else str(turn["workers"])]
            if speed is None or idle is None or first is None:
                cells += [next(row["error"] for row in rounds), *"-----"]
            else:
                cells += [f"{speed:,.0f}", f"{speed / bound:.2f}" if bound else "-", f"{idle:.1%}", f"{first:.2f}"]
                cells += [
                    "-" if again is None else f"{again:.2f}",
                    ", ".join(sorted({row["resumed"] for row in rounds if "resumed" in row})) or "-",
                ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=lambda text: [int(part) for part in text.split(",")], help="a number, or several, as in 8,14"
    )
    parser.add_argument("--seconds", type=float, default=2, help="of a turn, after the first four steps")
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--budget-s", type=float, default=330)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", nargs="+", choices=["tokens", "images"])
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--quick", action="store_true", help="tiny models and data, to try the program")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--from", dest="figures", type=Path, help="print the tables of such a file")
    options = parser.parse_args()
    if options.figures:
        print(tables(json.loads(options.figures.read_text())))
        return
    named = (
        torch.accelerator.current_accelerator()
        if options.device == "auto" and torch.accelerator.is_available()
        else options.device
    )
    device = torch.device("cpu" if named == "auto" else named)
    options.workers = options.workers or [2 if (os.cpu_count() or 1) < 8 else 8]
    figures = measure(options, device)
    print(tables(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
