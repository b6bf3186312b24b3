"""One link of an elastic chain: go on from a checkpoint for some steps, on as many ranks as torchrun started, and leave
another.

chain.py SAVE-TO STEPS LOAD-FROM [LOOK-AT …]
    ("-": begin anew; what is only looked at is loaded first, and read for a step)

It does so for each kind of data in turn. The checkpoints are torch.distributed.checkpoint's, in SAVE-TO/KIND; beside it
is the global sequence, sequence.json.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import penstock
from penstock import Loader, Mix, Packs, Shuffle, Stream
from penstock.formats import tar
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Iterator

GLOBAL_BATCH = 12
STAGES = [(0, {"a": 0.7, "b": 0.2, "c": 0.1}), (90, {"b": 0.5, "c": 0.5}), (150, {"a": 1})]
LENGTHS = np.random.default_rng(1).lognormal(2, 0.8, 400).astype(np.int64) + 1


class Documents:
    """Tokens of known numbers, drawn at random for each document and epoch."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> np.ndarray:
        return penstock.sample().rng.integers(1000, size=LENGTHS[index])


def checksums(packs: list[dict[str, np.ndarray]]) -> torch.Tensor:
    """One number for all that is in a pack."""
    return torch.tensor([zlib.crc32(b"".join(field.tobytes() for field in pack.values())) for pack in packs])


def write_tars() -> None:
    """Nine tars with an index, in the folder ``tars``; those that are compressed are read forward."""
    Path("tars").mkdir()
    for k in range(9):
        name = f"tars/{k}.tar" + (".gz" if k % 2 else "")
        with tarfile.open(name, "w:gz" if k % 2 else "w") as archive:
            for value in range(7 * k, min(7 * k + 7, 62)):
                member = tarfile.TarInfo(f"{value:02d}.cls")
                member.size = len(data := str(value).encode())
                archive.addfile(member, io.BytesIO(data))
    assert subprocess.run([sys.executable, "-m", "penstock", "index", "tars/*"], check=True).returncode == 0


def decoded(sample: dict[str, Any]) -> int:
    """The number in a sample, with a random number of its own."""
    return 1000 * int(sample["cls"]) + int(penstock.sample().rng.integers(1000))


def numbers(shard: int) -> Iterator[int]:
    """The records of a shard, of which some have none."""
    yield from range(100 * shard, 100 * shard + shard * 7 % 23)


def twice(records: Iterator[int]) -> Iterator[int]:
    """A flat map: some numbers come twice, some never."""
    for record in records:
        yield from [record] * (record % 3)


def marked(value: int) -> int:
    """A number, with a random number of its own."""
    return 1000 * value + int(penstock.sample().rng.integers(1000))


def stream(**words: Any) -> Stream:
    """Lanes of shards whose lengths nobody knows."""
    return Stream(20, numbers, epoch_size=62, transform=marked, bookmarks="bookmarks", **words)


DATA = {  # an epoch of each has 5 batches, and 2 samples that are left over
    "tagged": lambda: Tagged(62),
    "mix": lambda: Mix({"a": range(40), "b": range(1000, 1900), "c": range(2000, 2007)}, STAGES, epoch_size=62),
    "packs": Documents,
    "tars": lambda: tar("tars/*[rz]", lanes=4, window=5),
    "lanes": lambda: stream(lanes=4, steps=[twice, Shuffle(5)]),
    "mixed lanes": lambda: Mix(
        {"a": stream(lanes=4), "b": stream(lanes=2, steps=[twice]), "c": range(9)}, STAGES, epoch_size=62
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "packs": {"groups": Packs(LENGTHS, 64, block=64), "collate_fn": checksums},
    "tars": {"transform": decoded},
}


def new_loader(data: str, world_size: int = 1, **options: Any) -> Loader[Any]:
    return Loader.from_dataset(
        DATA[data](),
        batch_size=GLOBAL_BATCH // world_size,
        shuffle=True,
        seed=5,
        drop_last=True,
        **OPTIONS.get(data, {}),
        **options,
    )


def endless(loader: Loader[Any]) -> Iterator[list[int]]:
    while True:
        for batch in loader:
            yield batch.tolist()


def main(save_to: Path, steps: int, load_from: str, look_at: list[str]) -> None:
    dist.init_process_group("gloo")
    for data in DATA:
        link(
            data,
            save_to / data,
            steps,
            None if load_from == "-" else Path(load_from) / data,
            [Path(other) / data for other in look_at],
        )
    dist.destroy_process_group()


def link(data: str, save_to: Path, steps: int, load_from: Path | None, look_at: list[Path]) -> None:
    from ranks import RANK, WORLD_SIZE, gathered, in_order  # known under torchrun only

    with new_loader(data, WORLD_SIZE, num_workers=1, method="thread") as loader:
        for other in look_at:
            dcp.load({"loader": loader}, checkpoint_id=other)
            expected = json.loads((other / "next.json").read_text())
            assert in_order(gathered(next(endless(loader)))) == expected, (
                f"{WORLD_SIZE} ranks go on from {other} with another batch"
            )
        if load_from is not None:
            dcp.load({"loader": loader}, checkpoint_id=load_from)
        batches, sequence = endless(loader), []
        for _ in range(steps):
            sequence += in_order(gathered(next(batches)))
            state = loader.state_dict()
            assert gathered(state) == [state] * WORLD_SIZE
        dcp.save({"loader": loader}, checkpoint_id=save_to)
        following = in_order(gathered(next(batches)))
    if RANK == 0:
        (save_to / "sequence.json").write_text(json.dumps(sequence))
        (save_to / "next.json").write_text(json.dumps(following))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
