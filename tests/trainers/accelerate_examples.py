"""Example scripts of Accelerate or Diffusers, from a checkout, with a ``DataLoader`` or with an `AccelerateLoader` in
the line of the loader.

No text of a script is kept here: it is read, and only its data, its model and tokenizer (Bert, small and random), its
metric, its batch size and the line of the loader are replaced. Gradients are zeroed, so that the order of the samples
does not change the weights, and predictions can be compared. Each rank writes what it saw.

python accelerate_examples.py DataLoader|penstock FILE RUNS    # or under torchrun; RUNS: [[SCRIPT, ARGUMENT, …], …]
"""

from __future__ import annotations

import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import accelerate
import tokenizers
import torch
import transformers
from accelerate.scheduler import AcceleratedScheduler

import datasets
import penstock
from penstock.integrations.accelerate import AccelerateLoader

KIND, FILE, RUNS = sys.argv[1:]
SIZES = {"train": 86, "validation": 43}
TOLD: dict[str, Any] = {}  # of the script that runs
DELETED = {  # what skips batches: left out with penstock
    r"accelerator\.skip_first_batches\((\w+), \w+\)": r"\1",
    r"and step < resume_step": "and False",
}


class Accelerator(accelerate.Accelerator):
    """Remembers the newest one, for the line of the loader."""

    newest: Any = None

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        Accelerator.newest = self

    def prepare(self, *objects: Any, **words: Any) -> Any:
        for one in objects:
            if isinstance(one, torch.nn.Module):
                one.register_forward_pre_hook(trained, with_kwargs=True)
                for parameter in one.parameters():
                    parameter.register_hook(torch.zeros_like)
        before = [len(one) for one in objects if isinstance(one, torch.utils.data.DataLoader)]
        prepared = super().prepare(*objects, **words)
        loaders = (prepared,) if len(objects) == 1 else prepared
        after = [len(one) for one in loaders if isinstance(one, torch.utils.data.DataLoader)]
        TOLD["lengths"].append([before, after])
        return prepared

    def end_training(self) -> None:
        sums = [parameter.double().abs().sum() for model in self._models for parameter in model.parameters()]
        TOLD["weights"] = float(sum(sums))
        # the process group stays for the next script


def loader_of(*args: Any, **words: Any) -> Any:
    """The line of the loader."""
    if KIND == "DataLoader":
        return torch.utils.data.DataLoader(*args, **words)
    return AccelerateLoader(penstock.Loader.from_dataset(*args, **words), Accelerator.newest)


def trained(model: Any, args: Any, words: Any) -> None:
    if model.training and "labels" in words:
        TOLD["trained"].append(words["labels"].tolist())


def step_of(self: Any, *args: Any, _step: Any = AcceleratedScheduler.step, **words: Any) -> None:
    _step(self, *args, **words)
    TOLD["rates"].append((self.get_last_lr()[0], self.gradient_state.sync_gradients))


class Metric:
    def __init__(self) -> None:
        self.seen: Any = [], []

    def add_batch(self, **both: Any) -> None:
        for seen, more in zip(self.seen, (both["predictions"], both["references"]), strict=True):
            seen.extend(more.tolist())

    def compute(self) -> Any:
        TOLD["evaluated"].append(self.seen)
        self.seen = [], []
        return {"accuracy": 0.5, "f1": 0.5}


def sentences(*_: Any, **__: Any) -> Any:
    """Pairs of sentences; the label of each is its number."""

    def split(size: int) -> Any:
        first = [" ".join(f"w{number * word % 31}" for word in range(3 + number % 5)) for number in range(size)]
        second = [f"w{number % 29}" for number in range(size)]
        return datasets.Dataset.from_dict(
            {"sentence1": first, "sentence2": second, "label": [*range(size)], "idx": [*range(size)]}
        )

    return datasets.DatasetDict({name: split(size) for name, size in SIZES.items()})


def tokenizer(*_: Any, **__: Any) -> Any:
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *(f"w{n}" for n in range(31))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def bert(*_: Any, **__: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=max(SIZES.values()),
        initializer_range=1.0,
    )
    return transformers.BertForSequenceClassification(config)


def pictures() -> None:
    """Diffusers: pictures come from a folder, and their grey is their number."""
    import diffusers

    add_noise = diffusers.DDPMScheduler.add_noise

    def noisy(self: Any, clean: Any, noise: Any, timesteps: Any) -> Any:
        TOLD["trained"].append(((clean.mean((1, 2, 3)) + 1) * 127.5).round().int().tolist())
        return add_noise(self, clean, noise, timesteps)

    diffusers.DDPMScheduler.add_noise = noisy
    diffusers.utils.check_min_version = lambda _: None
    diffusers.utils.is_tensorboard_available = lambda: True  # tensorboardX, which Accelerate takes too


def run(script: str, *arguments: str) -> dict[str, Any]:
    TOLD.update({name: [] for name in ("trained", "rates", "evaluated", "lengths")})
    sys.argv[:] = [script, *arguments]
    torch.manual_seed(0)
    text = re.sub(r"\b(torch\.utils\.data\.)?DataLoader\(", "loader_of(", Path(script).read_text())
    text = text.replace("GPU_BATCH_SIZE = 16", "GPU_BATCH_SIZE = 4")
    text = text.replace("EVAL_BATCH_SIZE = 32", "EVAL_BATCH_SIZE = 8")
    for line, instead in DELETED.items() if KIND == "penstock" else ():
        text = re.sub(line, instead, text)
    exec(compile(text, script, "exec"), {"__name__": "__main__", "__file__": script, "loader_of": loader_of})
    return TOLD.copy()


def main() -> None:
    runs = json.loads(RUNS)
    if "unconditional" in runs[0][0]:
        pictures()
    else:
        datasets.load_dataset = sentences
        evaluate: Any = types.ModuleType("evaluate")
        evaluate.load = lambda *_: Metric()
        sys.modules["evaluate"] = evaluate
        transformers.AutoTokenizer.from_pretrained = tokenizer
        transformers.AutoModelForSequenceClassification.from_pretrained = bert
    accelerate.Accelerator = Accelerator
    AcceleratedScheduler.step = step_of
    told = [run(*one) for one in runs]
    Path(f"{FILE}.{os.environ['RANK']}").write_text(json.dumps(told))
    accelerate.PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
