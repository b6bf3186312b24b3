"""For images in Parquet and tar files: exact epochs, a state that is a position, and any number of ranks.

python shards.py
"""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import penstock
from penstock import Loader, formats

if TYPE_CHECKING:
    from collections.abc import Iterable

SIZE = 8


def encoded(number: int) -> bytes:
    """An image file. Yours are JPEGs, and `decode` calls your decoder."""
    file = io.BytesIO()
    np.save(file, np.full((SIZE, SIZE, 3), number % 256, dtype=np.uint8))
    return file.getvalue()


def decode(image: bytes, label: int) -> dict[str, Any]:
    pixels = torch.from_numpy(np.load(io.BytesIO(image)))
    if penstock.sample().rng.random() < 0.5:  # the same for this sample of this epoch, wherever it is loaded
        pixels = pixels.flip(1)
    return {"image": pixels.permute(2, 0, 1), "label": label}


def decode_row(row: dict[str, Any]) -> dict[str, Any]:
    return decode(row["image"], row["label"])


def decode_files(files: dict[str, Any]) -> dict[str, Any]:
    return decode(files["npy"], int(files["cls"]))


def write_parquet(folder: Path) -> None:
    """4 files of 5 row groups of 20 rows."""
    for file in range(4):
        numbers = range(100 * file, 100 * file + 100)
        table = pa.table(
            {
                "image": [encoded(n) for n in numbers],
                "label": list(numbers),
                "caption": [f"a picture of {n}" for n in numbers],
            }
        )
        pq.write_table(table, folder / f"part-{file}.parquet", row_group_size=20)


def write_tars(folder: Path) -> None:
    """8 files of 25 samples, in webdataset's layout: 000007.npy and 000007.cls are one sample."""
    for shard in range(8):
        with tarfile.open(folder / f"shard-{shard:05d}.tar", "w") as tar:
            for number in range(25 * shard, 25 * shard + 25):
                for kind, content in (("npy", encoded(number)), ("cls", str(number).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def labels(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["label"].tolist() for batch in batches]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_parquet(folder)
        write_tars(folder)

        # Parquet: a shard is a row group, and the footers say how many rows there are.
        data = formats.parquet(f"{folder}/*.parquet", columns=["image", "label"])
        rest = {
            "batch_size": 16,
            "shuffle": True,
            "seed": 1,
            "num_workers": 2,
            "method": "thread",
            "transform": decode_row,
        }
        with Loader.from_dataset(data, **rest) as loader:
            print(f"{len(data)} rows in {len(data.shards)} row groups, {len(loader)} batches an epoch")
            batches = iter(loader)
            first = labels(itertools.islice(batches, 10))
            state = loader.state_dict()
            expected = labels(batches)

        # The state loads on any number of ranks; here on two, which a real job would run as two processes.
        ranks = []
        for rank in range(2):
            with Loader.from_dataset(data, **rest | {"batch_size": 8}, rank=rank, world_size=2) as loader:
                loader.load_state_dict(state)
                ranks.append(labels(loader))
        # dealt in turns
        together = [list(itertools.chain(*zip(*batches, strict=True))) for batches in zip(*ranks, strict=True)]
        assert together == expected
        assert sorted(itertools.chain(*first, *together)) == list(range(400))
        print(
            f"stopped after {len(first)} batches, resumed on two ranks: the other {len(together)} batches are the same"
        )

        # Tars: written once, an index makes every sample readable by its number.
        subprocess.run([sys.executable, "-m", "penstock", "index", f"{folder}/*.tar"], check=True)
        data = formats.tar(f"{folder}/shard-{{00000..00007}}.tar")
        with Loader.from_dataset(data, **rest | {"transform": decode_files}) as loader:
            assert sorted(itertools.chain(*labels(loader))) == list(range(200))
        print(f"{len(data)} samples in {len(data.shards)} tars, each seen once")


if __name__ == "__main__":
    main()
