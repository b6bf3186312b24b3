"""One link of an elastic chain: go on from a checkpoint for some steps, on as many ranks as torchrun started, and leave another.

chain.py SAVE-TO STEPS LOAD-FROM [LOOK-AT …]     ("-": begin anew; what is only looked at is loaded first, and read for a step)

The checkpoints are torch.distributed.checkpoint's. The global sequence is written to SAVE-TO/sequence.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RANK, WORLD_SIZE, gathered, in_order

from penstock import Loader
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Iterator

N, GLOBAL_BATCH = 62, 12  # 5 batches and 2 samples that are left over


def new_loader() -> Loader[Any]:
    return Loader.from_dataset(
        Tagged(N), batch_size=GLOBAL_BATCH // WORLD_SIZE, shuffle=True, seed=5, drop_last=True, num_workers=1, method="thread"
    )


def endless(loader: Loader[Any]) -> Iterator[list[int]]:
    while True:
        for batch in loader:
            yield batch.tolist()


def main(save_to: Path, steps: int, load_from: str, look_at: list[str]) -> None:
    dist.init_process_group("gloo")
    with new_loader() as loader:
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
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
