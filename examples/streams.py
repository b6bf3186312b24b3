"""For streams that nobody has counted: filter tars while reading, tokenise and pack a Hugging Face stream, and resume
both exactly on any number of ranks.

python streams.py
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import datasets
import penstock
from penstock import Filter, Loader, Pack, Shuffle, formats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORDS = ["a", "state", "is", "a", "position", "and", "resuming", "is", "a", "jump", "so", "nothing", "is", "lost"]


def write_tars(folder: Path) -> None:
    """12 files of 30 pictures and what is known of them."""
    for file in range(12):
        with tarfile.open(folder / f"{file:05d}.tar", "w") as archive:
            for number in range(30 * file, 30 * file + 30):
                picture = io.BytesIO()
                np.save(picture, np.full((8, 8, 3), number % 256, dtype=np.uint8))
                about = json.dumps({"number": number, "width": 150 + number * 37 % 200}).encode()
                for suffix, content in (("npy", picture.getvalue()), ("json", about)):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def large_enough(sample: dict[str, Any]) -> bool:
    return json.loads(sample["json"])["width"] >= 224


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    pixels = torch.from_numpy(np.load(io.BytesIO(sample["npy"])))
    if penstock.sample().rng.random() < 0.5:
        pixels = pixels.flip(1)
    return {"image": pixels.permute(2, 0, 1), "number": json.loads(sample["json"])["number"]}


def pictures(rank: int = 0, world_size: int = 1) -> Loader[Any]:
    data = formats.tar(
        "tars/{00000..00011}.tar",
        steps=[Filter(large_enough), Shuffle(16)],  # within a shard, on raw bytes
        transform=decode,  # in the workers, on what is kept
        epoch_size=192,
        lanes=4,
        bookmarks="bookmarks",
    )
    return Loader.from_dataset(
        data, 24 // world_size, shuffle=True, seed=1, num_workers=2, rank=rank, world_size=world_size
    )


def write_corpus(folder: Path) -> None:
    for file in range(8):
        texts = (" ".join(WORDS[: 3 + (file + line * 7) % len(WORDS)]) for line in range(40))
        (folder / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def tokenize(rows: Iterator[dict[str, Any]]) -> Iterator[list[int]]:
    for row in rows:
        yield [WORDS.index(word) + 1 for word in row["text"].split()]


def packs(rank: int = 0, world_size: int = 1) -> Loader[Any]:
    files = sorted(map(str, Path("corpus").glob("*.jsonl")))
    stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    data = formats.hf(stream, steps=[tokenize, Pack(64)], epoch_size=96, lanes=2, bookmarks="bookmarks")
    return Loader.from_dataset(data, 12 // world_size, shuffle=True, seed=1, rank=rank, world_size=world_size)


def show(what: str, new_loader: Callable[..., Loader[Any]], value: Callable[[Any], list[Any]]) -> None:
    """Stop after 3 batches, go on with 2 ranks for 2 batches, and then with 1, over the end of the epoch."""
    with new_loader() as loader:
        expected = [value(batch) for _ in range(2) for batch in loader]
        batches = len(loader)

    with new_loader() as loader:
        iterator = iter(loader)
        seen = [value(next(iterator)) for _ in range(3)]
        state = loader.state_dict()
    with new_loader(0, 2) as first, new_loader(1, 2) as second:
        first.load_state_dict(state)
        second.load_state_dict(state)
        for ours, theirs in zip(first, second, strict=True):
            seen.append([item for pair in zip(value(ours), value(theirs), strict=True) for item in pair])
            if len(seen) == 5:
                break
        state = second.state_dict()  # that of any rank
    with new_loader() as loader:
        loader.load_state_dict(state)
        seen += [value(batch) for _ in range(2) for batch in loader]

    print(
        f"{what}: {batches} batches an epoch; stopped twice, on 1, 2 and 1 ranks, the sequence is the same: "
        f"{seen == expected}"
    )
    assert seen == expected


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, write in (("tars", write_tars), ("corpus", write_corpus)):
            Path(name).mkdir()
            write(Path(name))
        show(
            "pictures of at least 224 pixels, out of tars",
            pictures,
            lambda batch: list(zip(batch["number"].tolist(), batch["image"].sum((1, 2, 3)).tolist(), strict=True)),
        )
        show("rows of 64 tokens, out of a stream of Hugging Face", packs, lambda batch: batch["tokens"].tolist())
        with packs() as loader:
            tokens = torch.cat([batch["tokens"] for batch in loader])
            print(f"{(tokens > 0).float().mean():.1%} of the places hold tokens")
        os.chdir("/")


if __name__ == "__main__":
    main()
