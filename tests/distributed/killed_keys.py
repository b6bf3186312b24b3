"""Read batches by key, dealt by cost, on as many ranks as torchrun started, with two worker processes each, and lose a
rank.

killed_keys.py FOLDER STEPS [KILL-THE-RANK-AT]     (the last one)

Rank 0 writes the samples of each round and the state after it to FOLDER/steps.jsonl, and goes on from its last line.
The program ends with the epoch, or after STEPS.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from penstock import Buckets, Loader

N = 150
KEYS = [(64, 32 * (1 + index * index % 11 % 4)) for index in range(N)]
COSTS = np.random.default_rng(3).lognormal(3, 1, N)


class Images:
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return np.full((KEYS[index][1] // 32,), index)


def new_loader(**options: Any) -> Loader[Any]:
    return Loader.from_dataset(Images(), groups=Buckets(keys=KEYS, batch_size=3), shuffle=True, seed=5, **options)


def main(folder: Path, steps: int, rank_at: int = -1) -> None:
    from ranks import RANK, WORLD_SIZE, gathered  # known under torchrun only

    dist.init_process_group("gloo")
    file = folder / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    # The first life deals by cost, the others do not.
    with new_loader(num_workers=2, balance=None if lines else COSTS) as loader:
        if lines:
            loader.load_state_dict(json.loads(lines[-1])["state"])
        for step, batch in enumerate(loader):
            if step == rank_at:
                dist.barrier()  # rank 0 has written the step before
                if WORLD_SIZE - 1 == RANK:
                    os.kill(os.getpid(), signal.SIGKILL)
            hands = gathered(batch[:, 0].tolist())
            state = loader.state_dict()
            assert gathered(state) == [state] * WORLD_SIZE
            if RANK == 0:
                with file.open("a") as sink:
                    sink.write(json.dumps({"ranks": WORLD_SIZE, "hands": hands, "state": state}) + "\n")
            if step + 1 == steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
