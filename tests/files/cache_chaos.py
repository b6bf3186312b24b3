"""One of the jobs of `test_cache_chaos`: reads all records, pass after pass, over copies in a folder that others share
and spoil.

    python cache_chaos.py URL FOLDER BOUND SEED STATE METHOD

A record says which it is. The state is written after each batch, and the job begins where the one before it was killed.
A wrong record, or one that comes in another place than without a cache, ends it with the code 3.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import penstock
from penstock.formats import jsonl

SHARDS, RECORDS, BATCH = 12, 40, 16
STEP_S = 0.02


def record(shard: int, number: int) -> dict[str, object]:
    return {"id": 1000 * shard + number, "text": f"{shard} {number} " * 40}


def main(url: str, folder: str, bound: str, seed: str, state: str, method: str) -> None:
    logging.getLogger("penstock").addHandler(logging.NullHandler())
    words = {"cache_dir": folder, "max_cache_size": int(bound)} if folder else {}
    data = jsonl(f"{url}/{{0..{SHARDS - 1}}}.jsonl", counts=[RECORDS] * SHARDS, window=60, **words)
    workers = {"inline": {}, "thread": {"num_workers": 2, "method": "thread"}, "process": {"num_workers": 2}}[method]
    with penstock.Loader.from_dataset(data, BATCH, shuffle=True, seed=int(seed), collate_fn=list, **workers) as loader:
        place = Path(state)
        if place.exists():
            loader.load_state_dict(json.loads(place.read_text()))
        while True:
            for batch in loader:
                for one in batch:
                    if one != record(*divmod(one["id"], 1000)):
                        os._exit(3)
                new = place.with_suffix(".new")
                new.write_text(json.dumps(loader.state_dict()))
                os.replace(new, place)
                print(loader.epoch, *(one["id"] for one in batch), flush=True)
                time.sleep(STEP_S if folder else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
