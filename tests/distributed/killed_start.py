"""Train on pictures of one source, and from step 1000 on also on those of another, in smaller batches; a third would
come later still. A collective after each step.

killed_start.py FOLDER [KILL-THE-RANK-AT]     (the last one, at that step)

The shape is that of https://github.com/bghira/SimpleTuner/issues/3099, where ranks waited for each other forever as
soon as the second source began. Each rank writes what it had to FOLDER/ranks-N-RANK.jsonl; rank 0 writes the state to
FOLDER/state.json after each step, and goes on from it. The program ends with the epoch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock import Buckets, Loader, Mix

RANKS, STEP = 4, 1000
SOURCES = {"base": range(3000), "large": range(3000, 3200), "latest": range(3200, 3250)}
BATCH = {"base": 8, "large": 3, "latest": 1}
START = STEP * RANKS * BATCH["base"]
EPOCH = START + 700
SHAPES = 3

KEYS = {number: (name, number % SHAPES) for name, numbers in SOURCES.items() for number in numbers}
"""Of each picture: its source, because the sizes of batches differ, and its shape."""


def mix() -> Mix:
    later = {"base": 1, "large": 1}
    return Mix(SOURCES, [(0, {"base": 1}), (START, later), (12 * START, {**later, "latest": 1})], epoch_size=EPOCH)


def new_loader(**options: Any) -> Loader[Any]:
    pictures = mix()
    keys = [KEYS[pictures[index]] for index in range(len(pictures))]
    buckets = Buckets(keys=keys, batch_size={key: BATCH[key[0]] for key in keys})
    return Loader.from_dataset(pictures, groups=buckets, shuffle=True, seed=5, **options)


def main(folder: Path, rank_at: int = -1) -> None:
    from ranks import RANK, WORLD_SIZE  # known under torchrun only

    dist.init_process_group("gloo")
    saved = folder / "state.json"
    with new_loader() as loader, (folder / f"ranks-{WORLD_SIZE}-{RANK}.jsonl").open("w", buffering=1) as lines:
        if saved.exists():
            loader.load_state_dict(json.loads(saved.read_text()))
        dist.barrier()  # rank 0 is about to write its first state, which a rank that comes later would load
        for step, batch in enumerate(loader):
            assert loader.last is not None
            lines.write(json.dumps({"positions": loader.last.positions.tolist(), "pictures": batch.tolist()}) + "\n")
            if RANK == 0:
                (folder / "new.json").write_text(json.dumps(loader.state_dict()))
                os.replace(folder / "new.json", saved)
            dist.all_reduce(torch.ones(1))  # as a training step does
            if step == rank_at:
                dist.barrier()
                if WORLD_SIZE - 1 == RANK:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.barrier()  # for the one that is dead
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
