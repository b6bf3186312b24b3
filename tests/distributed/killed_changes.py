"""Train on a mix that changes in each life, on as many ranks as torchrun started, with two worker threads each.

killed_changes.py FOLDER LIFE STEPS [KILL-THE-LAST-RANK-AT]

In its third step each life gives the sources other weights; from the second on there is a new source, and a range that
is skipped. Batches double at sample 400. Rank 0 writes the global sequence and the state after each step to
FOLDER/steps.jsonl, and goes on from its last line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import penstock
from penstock import Loader, Mix, Ramp

OLD = {"web": range(500), "code": range(1000, 1090)}
WEIGHTS = [{"web": 1, "code": 3}, {"web": 1, "new": 1}, {"code": 1, "new": 2, "web": 1}]
SKIP = [(300, 347)]
SIZES = [(0, 12), (400, 24)]
EPOCH = 180


def new_loader(life: int, plan: Any, world_size: int = 1, **options: Any) -> Loader[Any]:
    sources = OLD if life == 0 else {**OLD, "new": range(2000, 2033)}
    sizes = Ramp([(start, size // world_size) for start, size in SIZES])
    words: dict[str, Any] = {
        "drop_last": True,
        "tail": "drop",
        "shuffle": True,
        "seed": 5,
        "skip": SKIP if life else (),
        **options,
    }
    return Loader.from_dataset(Mix(sources, plan, epoch_size=EPOCH), sizes, **words)


def plan_of(life: int) -> dict[str, int]:
    return {"web": 1, "code": 1} if life == 0 else {"web": 1, "code": 1, "new": 0}


def main(folder: Path, life: int, steps: int, rank_at: int) -> None:
    from ranks import RANK, WORLD_SIZE, gathered, in_order  # known under torchrun only

    dist.init_process_group("gloo")
    file = folder / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    with new_loader(life, plan_of(life), WORLD_SIZE, num_workers=2, method="thread", infinite=True) as loader:
        if lines:
            loader.load_state_dict(json.loads(lines[-1])["state"])
        batches = iter(loader)
        for step in range(steps):
            begins = loader.reweight(WEIGHTS[life]) if step == 2 else None
            assert gathered(begins) == [begins] * WORLD_SIZE
            penstock.check_ranks(loader)
            if step == rank_at:
                dist.barrier()  # rank 0 has written the step before
                if WORLD_SIZE - 1 == RANK:
                    os.kill(os.getpid(), signal.SIGKILL)
            sequence = in_order(gathered(next(batches).tolist()))
            state = loader.state_dict()
            assert gathered(state) == [state] * WORLD_SIZE
            if RANK == 0:
                with file.open("a") as sink:
                    sink.write(
                        json.dumps({"ranks": WORLD_SIZE, "sequence": sequence, "begins": begins, "state": state}) + "\n"
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), int(sys.argv[4]) if len(sys.argv) > 4 else -1)
