"""Read lanes on as many ranks as torchrun started, with two worker processes each, and lose some of them.

killed_lanes.py FOLDER STEPS [KILL-A-WORKER-AT KILL-THE-RANK-AT]     (on the last rank)

Rank 0 writes the global sequence and the state after each step to FOLDER/steps.jsonl, and goes on from its last line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "support"))
from worker_pids import worker_pids

import penstock
from penstock import Filter, Loader, Shuffle, Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

GLOBAL_BATCH = 12


def numbers(shard: int) -> Iterator[int]:
    yield from range(1000 * shard, 1000 * shard + 6 + 37 * shard % 11)


def mostly_of_some(number: int) -> bool:
    """Like labels that lie together: of some shards little is left, and of others all."""
    return number // 1000 % 4 != 1 or number % 10 == 0


def marked(number: int) -> int:
    return 1000 * number + int(penstock.sample().rng.integers(1000))


def new_loader(world_size: int = 1, **options: Any) -> Loader[Any]:
    data = Stream(
        24,
        numbers,
        epoch_size=120,
        lanes=8,
        steps=[Filter(mostly_of_some), Shuffle(6)],
        transform=marked,
        bookmarks="bookmarks",
    )
    return Loader.from_dataset(data, GLOBAL_BATCH // world_size, True, seed=5, **options)


def main(folder: Path, steps: int, worker_at: int, rank_at: int) -> None:
    from ranks import RANK, WORLD_SIZE, gathered, in_order  # known under torchrun only

    dist.init_process_group("gloo")
    file = folder / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    with new_loader(WORLD_SIZE, num_workers=2) as loader:
        if lines:
            loader.load_state_dict(json.loads(lines[-1])["state"])
        batches = (batch for _ in range(99) for batch in loader)
        for step in range(steps):
            last = WORLD_SIZE - 1 == RANK
            if last and step == worker_at:
                os.kill(worker_pids()[1], signal.SIGKILL)
            if step == rank_at:
                dist.barrier()  # rank 0 has written the step before
            if last and step == rank_at:
                os.kill(os.getpid(), signal.SIGKILL)
            sequence = in_order(gathered(next(batches).tolist()))
            state = loader.state_dict()
            assert gathered(state) == [state] * WORLD_SIZE
            if RANK == 0:
                with file.open("a") as sink:
                    sink.write(json.dumps({"ranks": WORLD_SIZE, "sequence": sequence, "state": state}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *(map(int, sys.argv[3:]) if len(sys.argv) > 3 else (-1, -1)))
