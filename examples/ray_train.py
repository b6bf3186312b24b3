"""For Ray Train: two workers train and stop in mid-epoch, and three resume from the checkpoint; each sample is seen
once.

pip install ".[ray]" "ray[train]"
python examples/ray_train.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch

import penstock

SAMPLES = 480


def train(config: dict) -> None:
    """What each worker runs. Ray Train has set up torch.distributed: the loader asks it for rank and world size."""
    loader = penstock.Loader.from_dataset(range(SAMPLES), batch_size=8, shuffle=True)
    seen: list[int] = []
    checkpoint = ray.train.get_checkpoint() or config["from"]  # the first is that of this run, after a failure
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            loader.load_state_dict(json.loads(Path(folder, "loader.json").read_text()))
    for batch in loader:
        seen += batch.tolist()  # the training step
        if len(seen) == config["stop_after"]:
            break
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "loader.json").write_text(json.dumps(loader.state_dict()))  # the same on every rank
        Path(config["folder"], f"{config['run']}-{ray.train.get_context().get_world_rank()}.json").write_text(
            json.dumps(seen)
        )
        ray.train.report({"seen": len(seen)}, checkpoint=ray.train.Checkpoint.from_directory(folder))
    loader.close()


def run(folder: str, run: int, workers: int, stop_after: int, checkpoint: object = None) -> object:
    """Train with so many workers; the checkpoint."""
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": folder, "run": run, "stop_after": stop_after, "from": checkpoint},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=ray.train.RunConfig(storage_path=folder, name=f"run{run}"),
    )
    return trainer.fit().checkpoint


def main() -> None:
    ray.init(log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = run(folder, 1, workers=2, stop_after=96)
        run(folder, 2, workers=3, stop_after=0, checkpoint=checkpoint)
        seen = [sample for file in Path(folder).glob("*.json") for sample in json.loads(file.read_text())]
    assert sorted(seen) == list(range(SAMPLES)), len(seen)
    print(f"2 workers, then 3: {len(seen)} of {SAMPLES} samples, each once.")


if __name__ == "__main__":
    main()
