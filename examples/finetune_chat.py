"""For fine-tuning a language model on chats: two sources by weight, a chat template, a loss on the answers only, full
rows. Killed at any step, it goes on.

python finetune_chat.py --folder run                                        # then once more, with --resume
torchrun --nproc-per-node=2 finetune_chat.py --folder run --resume          # on any number of ranks
python finetune_chat.py --folder run --trainer                              # the same rows, by the Hugging Face Trainer

The model and the tokenizer are made here; a real run takes both from `from_pretrained`. It needs: pip install
'.[transformers]'
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

import penstock
from penstock.integrations.transformers import HFTrainerCallback

STEPS, ROWS, CAPACITY, SAVE_EVERY = 24, 4, 128, 4
TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}\
{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}\
{{ m.content }}<|end|>{% endif %}{% endfor %}"""


def make_data(folder: Path) -> None:
    """Two files of chats, a line of JSON each, and a tokenizer."""
    for name, n in (("help", 90), ("code", 40)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for i in range(n):
                asked, answer = f"{name} question {i} ?", " ".join(f"{name} {i} {k}" for k in range(1 + i * 7 % 13))
                file.write(
                    json.dumps(
                        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
                    )
                    + "\n"
                )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer.train(
        [str(folder / "help.jsonl")], trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", chat_template=TEMPLATE).save_pretrained(
        folder / "tokenizer"
    )


class Chats(Dataset[dict[str, list[int]]]):
    """The chats of a file as tokens. The loss counts the assistant's tokens only: the labels of all others are -100."""

    def __init__(self, file: Path, tokenizer: Any) -> None:
        self.lines = file.read_text().splitlines()
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        messages = json.loads(self.lines[index])["messages"]
        found = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, answers = found["input_ids"], found["assistant_masks"]
        return {"input_ids": ids, "labels": [one if answer else -100 for one, answer in zip(ids, answers, strict=True)]}


def packed(folder: Path, rows: int) -> penstock.Loader[dict[str, torch.Tensor]]:
    """Rows of several chats each. Three of four chats are from ``help``."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    chats = {name: Chats(folder / f"{name}.jsonl", tokenizer) for name in ("help", "code")}
    lengths = {name: penstock.lengths(one, tokens_in, folder / f"{name}.lengths") for name, one in chats.items()}
    return penstock.Loader.from_dataset(
        penstock.Mix(chats, weights={"help": 3, "code": 1}, epoch_size=160),
        batch_size=rows,
        shuffle=True,
        seed=1,
        groups=penstock.Packs(lengths, CAPACITY, pad={"labels": -100}),
        num_workers=1,
    )


def tokens_in(chat: dict[str, list[int]]) -> int:
    return len(chat["input_ids"])


def inputs(row: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the model takes.

    Positions begin anew in each chat, by which transformers sees that no chat may look at another: without use_cache,
    and without a mask.
    """
    return {name: row[name] for name in ("input_ids", "position_ids", "labels")}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes))


@torch.no_grad()
def leak(llama: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> float:
    """How far the logits of the chats in the first row are from those of each chat alone.

    Try this with your model: a mask that is off says nothing.
    """
    together = llama(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
    worst = 0.0
    for number in range(1, int(batch["segment_ids"][0].max()) + 1):
        own = batch["segment_ids"][0] == number
        alone = llama(input_ids=batch["input_ids"][:1, own]).logits[0]
        worst = max(worst, (alone - together[own]).abs().max().item())
    return worst


def train(arguments: argparse.Namespace, rank: int, ranks: int) -> None:
    """A plain loop."""
    folder, llama = arguments.folder, model()
    trained: Any = DistributedDataParallel(llama) if ranks > 1 else llama
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-3)
    loader, step, file = packed(folder, ROWS // ranks), 0, folder / "checkpoint.pt"
    if arguments.resume and file.exists():
        saved = torch.load(file)
        step = saved["step"]
        llama.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        print(f"rank {rank} of {ranks} continues after step {step}", flush=True)
    while step < STEPS:
        for batch in loader:
            if step == 0:
                print(f"rank {rank}: no chat looks at another, to {leak(llama, batch):.0e}", flush=True)
            loss = trained(**inputs(batch)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            record(arguments, rank, step, batch)
            if rank == 0 and step % SAVE_EVERY == 0:
                state = {
                    "step": step,
                    "model": llama.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                }
                torch.save(state, folder / "new.pt")
                os.replace(folder / "new.pt", file)
            if step == STEPS:
                break
    loader.close()
    print(f"rank {rank}: loss {loss.item():.3f} after {step} steps", flush=True)


def record(arguments: argparse.Namespace, rank: int, step: int, batch: dict[str, torch.Tensor]) -> None:
    """Write down what was trained on, and die where that is asked for."""
    with (arguments.folder / f"rows-{rank}.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": step, "rows": batch["input_ids"].tolist()}) + "\n")
    if step == arguments.die_after:
        os.kill(os.getpid(), signal.SIGKILL)


class ChatTrainer(Trainer):
    """A Trainer with that loader. `HFTrainerCallback` saves its position with each checkpoint."""

    arguments: argparse.Namespace

    def get_train_dataloader(self) -> Any:
        return packed(self.arguments.folder, ROWS // self.args.world_size)

    def training_step(self, model: Any, row: Any, *others: Any) -> torch.Tensor:
        record(self.arguments, 0, self.state.global_step + 1, row)
        return super().training_step(model, inputs(row), *others)


def train_by_the_trainer(arguments: argparse.Namespace) -> None:
    folder = arguments.folder
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "ignore_data_skip": True}
    settings = TrainingArguments(str(folder), max_steps=STEPS, save_steps=SAVE_EVERY, **options)
    trainer = ChatTrainer(model(), settings, callbacks=[HFTrainerCallback()])
    trainer.arguments = arguments
    checkpoint = max(folder.glob("checkpoint-*/"), key=lambda one: int(one.name[11:]), default=None)
    trainer.train(resume_from_checkpoint=str(checkpoint) if arguments.resume and checkpoint else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--die-after", type=int, default=0)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    if rank == 0 and not (arguments.folder / "code.jsonl").exists():
        arguments.folder.mkdir(exist_ok=True)
        make_data(arguments.folder)
    if ranks > 1:
        dist.barrier()
    if arguments.trainer:
        train_by_the_trainer(arguments)
    else:
        train(arguments, rank, ranks)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
