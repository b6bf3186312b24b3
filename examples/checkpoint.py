"""Stop in the middle of an epoch, and continue from the file with more workers, at the exact sample.

python checkpoint.py
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from torch.utils.data import Dataset

import penstock


class Noisy(Dataset):
    """100 numbers plus noise. Even the noise is the same after a resume, because it depends on the sample's position in the epoch."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> float:
        return index + penstock.sample().rng.normal()


def new_loader(num_workers: int) -> penstock.Loader:
    """The loader of both runs, with any number of workers."""
    return penstock.Loader.from_dataset(Noisy(), batch_size=8, shuffle=True, seed=1, num_workers=num_workers)


def save(state: dict, file: Path) -> None:
    """Write atomically: if the process dies in here, the old file survives."""
    new = file.with_suffix(".new")
    with new.open("w") as out:
        json.dump(state, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, file)


def main() -> None:
    """Run 40 batches without a stop, then 20 and 20 more."""
    with new_loader(num_workers=0) as loader:
        whole = [batch.tolist() for _ in range(4) for batch in loader][:40]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "loader.json"
        first = []
        with new_loader(num_workers=2) as loader:
            while len(first) < 20:
                for batch in loader:
                    first.append(batch.tolist())
                    if len(first) == 20:
                        save(loader.state_dict(), file)
                        break

        second = []
        with new_loader(num_workers=3) as loader:
            loader.load_state_dict(json.loads(file.read_text()))
            print(f"resuming in epoch {loader.epoch}, after batch {loader.position} of {len(loader)}")
            while len(second) < 20:
                second += [batch.tolist() for batch in loader]

    print("saved:", json.dumps(json.loads(loader.state_dict()["penstock"])["state"]))
    print("20 batches + 20 batches equal the 40 of a single run, including the noise:", first + second[:20] == whole)
    assert first + second[:20] == whole


if __name__ == "__main__":
    main()
