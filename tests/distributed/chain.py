"""One link of an elastic chain: go on from a checkpoint for some steps, on as many ranks as torchrun started, and leave another.

chain.py DATA SAVE-TO STEPS LOAD-FROM [LOOK-AT …]     ("-": begin anew; what is only looked at is loaded first, and read for a step)

The checkpoints are torch.distributed.checkpoint's. The global sequence is written to SAVE-TO/sequence.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from penstock import Loader, Mix
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Iterator

GLOBAL_BATCH = 12
STAGES = [(0, {"a": 0.7, "b": 0.2, "c": 0.1}), (90, {"b": 0.5, "c": 0.5}), (150, {"a": 1})]
DATA = {  # an epoch of each has 5 batches, and 2 samples that are left over
    "tagged": lambda: Tagged(62),
    "mix": lambda: Mix({"a": range(40), "b": range(1000, 1900), "c": range(2000, 2007)}, STAGES, epoch_size=62),
}


def new_loader(data: str, world_size: int = 1, **options: Any) -> Loader[Any]:
    return Loader.from_dataset(DATA[data](), batch_size=GLOBAL_BATCH // world_size, shuffle=True, seed=5, drop_last=True, **options)


def endless(loader: Loader[Any]) -> Iterator[list[int]]:
    while True:
        for batch in loader:
            yield batch.tolist()


def main(data: str, save_to: Path, steps: int, load_from: str, look_at: list[str]) -> None:
    from ranks import RANK, WORLD_SIZE, gathered, in_order  # known under torchrun only

    dist.init_process_group("gloo")
    with new_loader(data, WORLD_SIZE, num_workers=1, method="thread") as loader:
        for other in look_at:
            dcp.load({"loader": loader}, checkpoint_id=other)
            expected = json.loads((Path(other) / "next.json").read_text())
            assert in_order(gathered(next(endless(loader)))) == expected, f"{WORLD_SIZE} ranks go on from {other} with another batch"
        if load_from != "-":
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
