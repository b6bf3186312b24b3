"""nanoGPT's loop on as many ranks as torchrun started, killed with a fetched batch in hand.

look_ahead_killed.py FOLDER STEPS [KILL-AT]

Every rank appends the batches of each step to FOLDER/<ranks>-<rank>.jsonl; rank 0 keeps the checkpoint of the last step
whose number is even, and the program continues from there. All ranks together read eight samples a batch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from penstock import Loader
from penstock.testing import Tagged

MICRO, N = 2, 44


def main(folder: Path, steps: int, kill_at: int = -1) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    checkpoint, done = folder / "checkpoint.json", 0
    with Loader.from_dataset(Tagged(N), 8 // ranks, shuffle=True, seed=3, infinite=True, num_workers=1) as loader:
        loader.commit(0)
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            loader.load_state_dict(saved["loader"])
            done = saved["done"]
        batches = iter(loader)
        tokens = next(batches)
        while done < steps:
            if done % 2 == 0 and rank == 0:
                checkpoint.with_suffix(".new").write_text(json.dumps({"done": done, "loader": loader.state_dict()}))
                checkpoint.with_suffix(".new").rename(checkpoint)
            trained = []
            for _ in range(MICRO):
                used, tokens = tokens, next(batches)
                trained.append(used.tolist())
            loader.commit(MICRO)
            with (folder / f"{ranks}-{rank}.jsonl").open("a") as log:
                print(json.dumps([done, trained]), file=log)
            dist.barrier()
            if done == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
