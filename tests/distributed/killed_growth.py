"""Train on files that have become more in each life, on as many ranks as torchrun started, with two worker processes
each.

killed_growth.py FOLDER STEPS [KILL-THE-LAST-RANK-AT]

Rank 0 writes the global sequence and the state after each step to FOLDER/steps.jsonl, and goes on from its last line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock import Loader, formats


def write(folder: Path, files: range) -> None:
    """File s has 3, 4 or 5 records, and record i of it is ``1000 * s + i``."""
    for file in files:
        rows = [json.dumps({"x": 1000 * file + record}) for record in range(3 + file % 3)]
        (folder / f"{file:03}.jsonl").write_text("\n".join(rows) + "\n")


def value(row: dict[str, Any]) -> Any:
    return row["x"]


def new_loader(folder: Path, **options: Any) -> Loader[Any]:
    data = formats.jsonl(str(folder / "0*.jsonl"), epoch_size=60, lanes=6, bookmarks=folder / "bookmarks", grow=True)
    return Loader.from_dataset(data, shuffle=True, seed=5, transform=value, infinite=True, **options)


def main(folder: Path, steps: int, rank_at: int) -> None:
    from ranks import RANK, WORLD_SIZE, gathered, in_order  # known under torchrun only

    dist.init_process_group("gloo")
    file = folder / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    with new_loader(folder, batch_size=12 // WORLD_SIZE, num_workers=2) as loader:
        if lines:
            loader.load_state_dict(json.loads(lines[-1])["state"])
        batches = iter(loader)
        for step in range(steps):
            if step == rank_at:
                dist.barrier()  # rank 0 has written the step before
                if WORLD_SIZE - 1 == RANK:
                    os.kill(os.getpid(), signal.SIGKILL)
            sequence = in_order(gathered(next(batches).tolist()))
            state = loader.state_dict()
            assert gathered(state) == [state] * WORLD_SIZE
            if RANK == 0:
                with file.open("a") as sink:
                    sink.write(json.dumps({"sequence": sequence, "state": state}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1)
