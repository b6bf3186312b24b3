"""For reinforcement learning whose rollouts finish in any order: GRPO over a Ledger.

Killed at any step, it loses no prompt and trains on none twice.

python grpo_ledger.py --folder run                                    # then once more, with --resume
torchrun --nproc-per-node=2 grpo_ledger.py --folder run --resume      # on any number of ranks

TRL's AsyncGRPOTrainer trains, if TRL is installed; otherwise, or with --plain, a short loop does. Threads of the first
rank take prompts from the ledger and generate. The tokenizer and the model are tiny, and made here. It needs: pip
install ".[transformers]"; and for TRL: pip install "trl>=1.16"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterable

GROUP, GROUPS, STEPS, SAVE_EVERY, MAX_OPEN, MAX_STALENESS = 4, 2, 24, 4, 12, 3
"""Rollouts of a prompt, prompts of a step, steps, steps between checkpoints, prompts in flight, and the steps after
which a rollout is too old.
"""
SYMBOLS = "0123456789+=."


class Prompts(Dataset[dict[str, Any]]):
    """Sums, each with a random number of its own, by which its rollouts are drawn: the same one after a resume."""

    def __init__(self) -> None:
        self.texts = [f"{a}+{b}=" for a in range(8) for b in range(8)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": self.texts[index], "seed": int(penstock.sample().rng.integers(2**31))}


def make_ledger() -> penstock.Ledger[dict[str, Any]]:
    """It belongs to one process, which hands the prompts out."""
    loader = penstock.Loader.from_dataset(
        Prompts(), batch_size=None, shuffle=True, seed=1, infinite=True, collate_fn=dict, rank=0, world_size=1
    )
    return penstock.Ledger(loader, MAX_OPEN)


def reward(completion: list[int]) -> float:
    """The share of even digits: as good as any for a model that has learned nothing."""
    return sum(one < 10 and one % 2 == 0 for one in completion) / len(completion)


@dataclass
class Sample:
    """One rollout, with the fields of TRL's RolloutSample."""

    input_ids: np.ndarray[Any, Any]
    completion_mask: np.ndarray[Any, Any]
    old_log_probs: np.ndarray[Any, Any]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    prompt: list[Any] = field(default_factory=list)
    completion: list[Any] = field(default_factory=list)
    enqueued_at: float | None = None


class Rollouts:
    """Threads that generate; a real run asks a server.

    The methods up to ``destroy`` are those that TRL calls (its RolloutWorkerProtocol and WeightTransferProtocol).

    The trainer takes rollouts by `get`, and trains on them in this order, so it knows which ones it has trained on: the
    first that it took.
    """

    def __init__(self, ledger: penstock.Ledger[dict[str, Any]], model: LlamaForCausalLM) -> None:
        self.ledger, self.model = ledger, model
        self.rollout_buffer = self  # of which TRL calls get and qsize
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.finished: queue.Queue[tuple[penstock.Address, list[Sample]]] = queue.Queue()  # whole groups
        self.taken: deque[penstock.Address] = deque()  # the groups that the trainer has, not settled yet
        self.rest: list[Sample] = []  # of the last of them
        self.version = 0
        self.settled: dict[str, list[Any]] = {"done": [], "dropped": []}
        self.served: list[Any] = []
        self.weights = threading.Lock()
        self.failed: list[BaseException] = []
        self.threads = [threading.Thread(target=self._run, name=f"rollouts-{number}") for number in range(3)]

    def get(self, timeout: float) -> Sample:
        """The next rollout of a group that is not too old. Raises ``queue.Empty``."""
        while not self.rest:
            at, samples = self.finished.get(timeout=timeout)
            if self.version - samples[0].model_version > MAX_STALENESS:
                self.ledger.drop(at)
                self.settled["dropped"].append([*at.json(), at.indices])
            else:
                self.taken.append(at)
                self.rest = samples
        return self.rest.pop(0)

    def qsize(self) -> int:
        return self.finished.qsize()

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.ledger.close()  # ends each next that waits
        for thread in self.threads:
            thread.join()

    def update_model_version(self, model_version: int) -> None:
        self.version = model_version

    def check_health(self, stale_after_s: float) -> None:
        if self.failed:
            raise self.failed[0]

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        self.weights.acquire()

    @torch.no_grad()
    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        for name, weight in iterator:
            own[name].copy_(weight)

    def resume(self) -> None:
        self.weights.release()

    def destroy(self) -> None:
        pass

    def settle(self) -> None:
        """After a step. TRL may have taken the groups of the next one already."""
        for _ in range(GROUPS):
            at = self.taken.popleft()
            self.ledger.done(at)
            self.settled["done"].append([*at.json(), at.indices])

    def state_dict(self) -> dict[str, Any]:
        """Save it together with the weights, in the thread that makes the steps.

        What was settled is in it only to be looked at.
        """
        return {"ledger": self.ledger.state_dict(), "settled": self.settled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])
        self.settled = state["settled"]
        print(f"{len(self.ledger.open)} prompts are open, and come first", flush=True)

    def _run(self) -> None:
        try:
            with contextlib.suppress(penstock.ClosedError):
                for at, prompt in self.ledger:
                    self.served.append(at.json())
                    self.finished.put((at, self._generate(at, prompt)))
        except BaseException as exc:
            self.failed.append(exc)

    @torch.no_grad()
    def _generate(self, at: penstock.Address, prompt: dict[str, Any]) -> list[Sample]:
        version, group, generator = self.version, hash(at), torch.Generator().manual_seed(prompt["seed"])
        asked = [SYMBOLS.index(one) for one in prompt["text"]]
        ids, chosen = torch.tensor([asked] * GROUP), torch.zeros(GROUP, len(asked))
        for _ in range(40 if prompt["seed"] % 8 == 0 else 2 + prompt["seed"] % 7):  # some take much longer
            with self.weights:
                odds = self.model(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(odds.exp(), 1, generator=generator)
            ids, chosen = torch.cat([ids, token], 1), torch.cat([chosen, odds.gather(1, token)], 1)
        rewards = torch.tensor([reward(row[len(asked) :]) for row in ids.tolist()])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        mask = (np.arange(ids.shape[1]) >= len(asked)).astype(np.int64)
        return [
            Sample(
                ids[k].numpy(),
                mask,
                chosen[k].numpy(),
                float(advantages[k]),
                version,
                group,
                {"reward": float(rewards[k])},
            )
            for k in range(GROUP)
        ]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(pad_token_id=13, bos_token_id=14, eos_token_id=15, **sizes))


# With TRL.


def with_trl(folder: Path, resume: bool, die_after: int) -> None:
    from tokenizers import Tokenizer, models
    from transformers import AttentionInterface, PreTrainedTokenizerFast, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    from datasets import Dataset as Table

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks for the name of the GPU

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    vocabulary = {one: number for number, one in enumerate([*SYMBOLS, "<pad>", "<begin>", "<end>"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary)), pad_token="<pad>", eos_token="<end>"
    )
    policy = make_model()
    if int(os.environ.get("RANK", "0")) == 0:
        policy.save_pretrained(folder / "model")
    if ranks > 1:
        dist.barrier()
    rollouts = Rollouts(make_ledger(), policy)

    class Settle(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **words: Any) -> None:
            if state.is_world_process_zero:
                rollouts.settle()
            if state.global_step == die_after:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_save(self, args: Any, state: Any, control: Any, **words: Any) -> None:
            if state.is_world_process_zero:  # last, so a checkpoint with this file is whole
                write(Path(args.output_dir) / f"checkpoint-{state.global_step}" / "ledger.json", rollouts.state_dict())

    config = AsyncGRPOConfig(
        str(folder),
        max_steps=STEPS,
        save_steps=SAVE_EVERY,
        per_device_train_batch_size=GROUP * GROUPS // ranks,
        num_generations=GROUP,
        max_staleness=MAX_STALENESS,
        token_budget=0,  # a fixed number of rollouts for each step
        learning_rate=1e-3,
        bf16=False,
        use_cpu=True,
        logging_steps=8,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = AsyncGRPOTrainer(
        str(folder / "model"),
        args=config,
        train_dataset=Table.from_dict({"prompt": Prompts().texts}),  # TRL wants one; the prompts come from the ledger
        processing_class=tokenizer,
        callbacks=[Settle()],
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )
    AttentionInterface.register("tree_fa3", attention_on_cpu)
    whole = sorted(folder.glob("checkpoint-*/ledger.json"), key=lambda file: int(file.parent.name.split("-")[1]))
    last = whole[-1] if resume and whole else None
    if last and trainer.is_world_process_zero():
        rollouts.load_state_dict(json.loads(last.read_text()))
    trainer.train(resume_from_checkpoint=str(last.parent) if last else None)
    if trainer.is_world_process_zero():
        report(folder, rollouts)


def attention_on_cpu(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, tree_kv_index: Any, scaling: Any = None, **words: Any
) -> Any:
    """TRL's attention among rollouts that share a prompt; its own kernel needs a GPU."""
    found = []
    for q, k in zip(
        pairwise(words["tree_cu_seqlens_q"].tolist()), pairwise(words["tree_cu_seqlens_k"].tolist()), strict=True
    ):
        path = tree_kv_index[slice(*k)]
        causal = causal_lower_right(q[1] - q[0], len(path))
        found.append(
            scaled_dot_product_attention(
                query[:, :, slice(*q)], key[:, :, path], value[:, :, path], causal, scale=scaling
            )
        )
    return torch.cat(found, 2).transpose(1, 2), None


# Without TRL.


def plain(folder: Path, resume: bool, die_after: int, rank: int, ranks: int) -> None:
    model, file, step = make_model(), folder / "checkpoint.pt", 0
    trained: Any = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rollouts = Rollouts(make_ledger(), make_model())
    if resume and file.exists():
        saved = torch.load(file)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if rank == 0:
            rollouts.load_state_dict(saved["rollouts"])
    if rank == 0:
        send(model, rollouts, step)
        rollouts.start()
    while step < STEPS:
        taken: list[Any] = [take(rollouts) if rank == 0 else None]
        if ranks > 1:
            dist.broadcast_object_list(taken)
        loss = grpo(trained, taken[0][rank::ranks])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            rollouts.settle()
            send(model, rollouts, step)
            if step % SAVE_EVERY == 0:
                state = {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "rollouts": rollouts.state_dict(),
                }
                torch.save(state, folder / "new.pt")
                os.replace(folder / "new.pt", file)
        if step == die_after:
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        rollouts.stop()
        report(folder, rollouts)


def send(model: LlamaForCausalLM, rollouts: Rollouts, version: int) -> None:
    rollouts.pause()
    rollouts.send_weights(model.named_parameters())
    rollouts.update_model_version(version)
    rollouts.resume()


def take(rollouts: Rollouts) -> list[Sample]:
    taken: list[Sample] = []
    while len(taken) < GROUPS * GROUP:
        try:
            taken.append(rollouts.get(timeout=1))
        except queue.Empty:
            rollouts.check_health(60)
    return taken


def grpo(model: Any, samples: list[Sample]) -> torch.Tensor:
    """The clipped loss of https://arxiv.org/abs/2402.03300, without a reference model."""

    def padded(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(getattr(sample, name)) for sample in samples], batch_first=True
        )

    ids, mask, old = padded("input_ids"), padded("completion_mask")[:, 1:], padded("old_log_probs")[:, 1:]
    new = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    ratio, advantage = (new - old).exp(), torch.tensor([[sample.advantage] for sample in samples])
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (loss * mask).sum() / mask.sum()


# Both.


def write(file: Path, state: dict[str, Any]) -> None:
    file.with_suffix(".new").write_text(json.dumps(state))
    os.replace(file.with_suffix(".new"), file)


def report(folder: Path, rollouts: Rollouts) -> None:
    """What became of each prompt up to the last that was taken, over all lives of this run."""
    done, dropped = ([tuple(one[:2]) for one in rollouts.settled[how]] for how in ("done", "dropped"))
    opened = [tuple(at.json()) for at in rollouts.ledger.open]
    once = {*done, *dropped, *opened}
    many = max(epoch * len(Prompts()) + position for epoch, position in once) + 1
    write(folder / "end.json", {**rollouts.state_dict(), "served": rollouts.served})
    lost, twice = many - len(once), len(done) + len(dropped) + len(opened) - len(once)
    print(f"{len(done)} prompts trained on, {len(dropped)} dropped, {len(opened)} open, {lost} lost, {twice} twice")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--die-after", type=int, default=0)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and arguments.folder is None:
        parser.error("several ranks need --folder, where all of them find the model")
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)
        folder.mkdir(exist_ok=True)
        if arguments.plain or find_spec("trl") is None:
            print(
                "A plain loop trains." if arguments.plain else "TRL is not installed, so a plain loop trains.",
                flush=True,
            )
            plain(folder, arguments.resume, arguments.die_after, rank, ranks)
        else:
            with_trl(folder, arguments.resume, arguments.die_after)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
