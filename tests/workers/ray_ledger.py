"""One life of a loop that settles samples in any order, with workers on a Ray cluster: a program for `ray_cases`, which
kills it.

    python ray_ledger.py ADDRESS FOLDER WORKERS STEPS

It resumes from the checkpoint in FOLDER, says each sample that it is served (address, checksum) in one line of its
output, and saves after each step. It ends after STEPS of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock


class Draws:
    """Sample ``i``: its address, and what each generator gives it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        sample = penstock.sample()
        drawn = [random.random(), np.random.rand(), float(torch.rand(())), float(sample.rng.random())]
        return torch.tensor([1000 * sample.epoch + i, *drawn], dtype=torch.float64)


def build(workers: int) -> penstock.Loader[Any]:
    more: dict[str, Any] = {"num_workers": workers, "method": "ray"} if workers else {}
    return penstock.Loader.from_dataset(Draws(), batch_size=None, shuffle=True, seed=3, infinite=True, **more)


def checksum(sample: torch.Tensor) -> str:
    return hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16]


def main(address: str, folder: Path, workers: int, steps: int) -> None:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="warning")
    file, rng = folder / "checkpoint.json", random.Random(workers)
    saved: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"settled": [], "ledger": None}
    with build(workers) as loader, penstock.Ledger(loader, 12, timeout=60) as ledger:
        if saved["ledger"] is not None:
            ledger.load_state_dict(saved["ledger"])
        held: list[list[Any]] = []
        for _ in range(steps):
            while len(held) < 12:
                at, sample = next(ledger)
                held.append([at.json(), checksum(sample)])
                print(json.dumps(held[-1]), flush=True)
            rng.shuffle(held)
            for one in held[:5]:
                (ledger.drop if rng.random() < 0.3 else ledger.done)(penstock.Address.from_json(one[0]))
            saved["settled"] += held[:5]
            held = held[5:]
            if held and rng.random() < 0.5:
                ledger.again(penstock.Address.from_json(held.pop()[0]))
            saved["ledger"] = ledger.state_dict()
            file.with_suffix(".new").write_text(json.dumps(saved))
            os.replace(file.with_suffix(".new"), file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
