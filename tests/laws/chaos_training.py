"""A training run for test_chaos: trains on a few epochs, saves after every step, and may be killed at any moment.

    python chaos_training.py FOLDER OPTIONS LIVES

It forks one life after another from a process that has only imported, so that a life costs milliseconds and not a
second.
"""

import json
import os
import random
import select
import signal
import sys
from pathlib import Path

import penstock
from penstock.testing import Tagged

EPOCHS, N, BATCH = 4, 61, 3
STEPS = EPOCHS * -(-N // BATCH)


def train(folder: Path, options: dict) -> None:
    """One life: continue from the checkpoint, if there is one, to the end unless killed."""
    file = folder / "checkpoint.json"
    with penstock.Loader.from_dataset(Tagged(N), batch_size=BATCH, shuffle=True, seed=1, **options) as loader:
        trained = []
        if file.exists():
            saved = json.loads(file.read_text())
            trained = saved["trained"]
            loader.load_state_dict(saved["loader"])
        while len(trained) < STEPS:
            for batch in loader:
                trained.append(batch.tolist())
                save(file, {"trained": trained, "loader": loader.state_dict()})
                if len(trained) == STEPS:
                    break
    os._exit(0)


def save(file: Path, state: dict) -> None:
    """Write the file as a whole, or not at all."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(state))
    os.replace(new, file)


def main(folder: Path, options: dict, lives: int) -> None:
    """Kill ``lives`` lives at random moments, then let one run to the end; start over if one ended early."""
    rng = random.Random(7)
    runs, kills = [], 0
    while kills < lives or not runs:
        pid = os.fork()
        if pid == 0:
            train(folder, options)
        watch = os.pidfd_open(pid)
        moment = rng.uniform(0.005, 0.06) if kills < lives else 60
        ended = bool(select.select([watch], [], [], moment)[0])
        os.close(watch)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if ended:
            assert status == 0, status
            runs.append(json.loads((folder / "checkpoint.json").read_text())["trained"])
            os.unlink(folder / "checkpoint.json")
        else:
            kills += 1
    print(json.dumps({"kills": kills, "runs": runs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
