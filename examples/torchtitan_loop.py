"""For torchtitan: a dataloader whose checkpoint loads on another data-parallel degree, and the calls that torchtitan
makes to it.

python torchtitan_loop.py --folder run  # one rank; run again, it continues after its last checkpoint
torchrun --nproc-per-node=2 torchtitan_loop.py --folder run  # continues on two

`PenstockDataLoader` is for your project. Below it is what torchtitan does with a dataloader, in its order and with its
names, from https://github.com/pytorch/torchtitan at b5bcd76 (August 2026): it needs no GPU and does not import
torchtitan. The global batch is NUM_TOKENS_PER_TRAIN_STEP on any number of ranks, so one rank accumulates the gradients
of two batches where two ranks take one each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CONTEXT_LENGTH, VOCABULARY = 16, 256
NUM_TOKENS_PER_MICROBATCH_PER_DP_RANK = 4 * MAX_CONTEXT_LENGTH
NUM_TOKENS_PER_TRAIN_STEP = 2 * NUM_TOKENS_PER_MICROBATCH_PER_DP_RANK
STEPS, INTERVAL = 30, 4

TrainerBatch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Documents(Dataset[np.ndarray]):
    """Made-up texts of a fixed length.

    The first token is the index, the others are drawn at random, anew in each epoch.
    """

    def __len__(self) -> int:
        return 96  # a multiple of the global batch, so that an epoch is as many steps on any number of ranks

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = penstock.sample().rng.integers(VOCABULARY, size=MAX_CONTEXT_LENGTH + 1)
        tokens[0] = index
        return tokens


def trainer_batch(rows: list[np.ndarray]) -> TrainerBatch:
    """Inputs, positions and labels, each of shape (tokens of all rows,)."""
    tokens = torch.from_numpy(np.stack(rows))
    positions = torch.arange(tokens.shape[1] - 1).repeat(len(rows))
    return {"input": tokens[:, :-1].flatten(), "positions": positions}, tokens[:, 1:].flatten()


class PenstockDataLoader:
    """Each rank has the same state, so a checkpoint has one, for any data-parallel degree."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        max_context_length: int,
        num_tokens_per_batch: int,
        **others: Any,
    ) -> None:
        self.loader: penstock.Loader[TrainerBatch] = penstock.Loader.from_dataset(
            Documents(),
            batch_size=num_tokens_per_batch // max_context_length,
            shuffle=True,
            seed=config.seed,
            num_workers=config.num_workers,
            collate_fn=trainer_batch,
            infinite=True,  # a StopIteration would end the training
            drop_last=True,  # every batch has as many tokens
            rank=dp_rank,
            world_size=dp_world_size,
        )

    def __iter__(self) -> Iterator[TrainerBatch]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        self.loader.close()


@dataclass(kw_only=True, slots=True)
class Config:
    """Inside torchtitan, the ``Config`` of a subclass of `PenstockDataLoader` and ``BaseDataLoader``, which gives it
    `build`.
    """

    seed: int = 1
    num_workers: int = 1

    def build(self, **others: Any) -> PenstockDataLoader:
        return PenstockDataLoader(self, **others)


# ---- From here on: what torchtitan has.


class CheckpointManager:
    """The model's states stand beside the others, as torchtitan has them.

    A folder without ``.metadata`` was not finished.
    """

    def __init__(
        self, folder: Path, dataloader: PenstockDataLoader, model: torch.nn.Module, states: dict[str, Any]
    ) -> None:
        self.folder, self.model = folder, model
        self.states = {**states, "dataloader": dataloader}

    def load(self) -> None:
        steps = [
            int(found[1])
            for path in self.folder.glob("step-*/.metadata")
            if (found := re.search(r"step-(\d+)", str(path.parent.name)))
        ]
        if steps:
            states = {**self.states, **self.model.state_dict()}
            dcp.load(states, checkpoint_id=self.folder / f"step-{max(steps)}")
            self.model.load_state_dict(states, strict=False)

    def save(self, curr_step: int) -> None:
        if curr_step % INTERVAL == 0:
            dcp.save({**self.states, **self.model.state_dict()}, checkpoint_id=self.folder / f"step-{curr_step}")


class Trainer:
    """Its optimizer has no state, to be short."""

    def __init__(self, folder: Path, die_after: int) -> None:
        self.folder, self.die_after = folder, die_after
        dp_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("batch",))
        dp_degree, self.dp_rank = dp_mesh.size(), dp_mesh.get_local_rank()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))
        sharded = fully_shard(self.model, mesh=dp_mesh)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
        sharded.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all ranks
        self.gradient_accumulation_steps = NUM_TOKENS_PER_TRAIN_STEP // (
            NUM_TOKENS_PER_MICROBATCH_PER_DP_RANK * dp_degree
        )
        self.optimizers = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.step = self.ntokens_seen = 0
        self.dataloader = Config().build(
            dp_world_size=dp_degree,
            dp_rank=self.dp_rank,
            tokenizer=None,
            max_context_length=MAX_CONTEXT_LENGTH,
            num_tokens_per_batch=NUM_TOKENS_PER_MICROBATCH_PER_DP_RANK,
        )
        self.checkpointer = CheckpointManager(folder / "checkpoint", self.dataloader, self.model, {"train_state": self})

    def batch_generator(self, data_iterable: PenstockDataLoader) -> Iterator[TrainerBatch]:
        data_iterator = iter(data_iterable)
        while True:
            yield next(data_iterator)

    def train_step(self, data_iterator: Iterator[TrainerBatch]) -> None:
        self.optimizers.zero_grad()
        microbatches, global_valid_tokens = [], torch.tensor(0)
        for _ in range(self.gradient_accumulation_steps):
            microbatches.append(next(data_iterator))
            global_valid_tokens += microbatches[-1][1].numel()
        dist.all_reduce(global_valid_tokens)
        loss = torch.tensor(0.0)
        for input_dict, labels in microbatches:
            predictions = self.model(input_dict["input"])
            one = torch.nn.functional.cross_entropy(predictions, labels, reduction="sum") / global_valid_tokens
            one.backward()
            loss += one.detach()
            self.ntokens_seen += labels.numel()
            self.record(input_dict["input"])
        self.optimizers.step()
        dist.all_reduce(loss)
        if self.dp_rank == 0:
            print(f"step {self.step}: loss {loss:.4f}", flush=True)

    def record(self, tokens: torch.Tensor) -> None:
        """For the test, not of torchtitan: the first two tokens of each row, its index and a random number."""
        rows = tokens.view(-1, MAX_CONTEXT_LENGTH)[:, :2].tolist()
        with (self.folder / f"seen-{self.dp_rank}.jsonl").open("a") as lines:
            lines.write(json.dumps({"step": self.step, "rows": rows}) + "\n")

    def train(self) -> None:
        self.checkpointer.load()
        print(f"rank {self.dp_rank}: training starts at step {self.step + 1}", flush=True)
        data_iterator = self.batch_generator(self.dataloader)
        while self.step < STEPS:
            self.step += 1
            self.train_step(data_iterator)
            self.checkpointer.save(self.step)
            if self.step == self.die_after:
                os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]

    def close(self) -> None:
        self.dataloader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--die-after", type=int, default=0)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    arguments.folder.mkdir(exist_ok=True)
    trainer = Trainer(arguments.folder, arguments.die_after)
    try:
        trainer.train()
    finally:
        trainer.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
