"""The chats of examples/finetune_chat.py by TRL's `SFTTrainer`. Killed at any step, it goes on.

killed_sft.py --folder FOLDER [--resume] [--die-after STEP]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from datasets import Dataset
from penstock.integrations.transformers import HFTrainerCallback

sys.path.append(str(Path(__file__).parent.parent.parent / "examples"))
from finetune_chat import ROWS, SAVE_EVERY, STEPS, inputs, make_data, model, packed, record


class ChatTrainer(SFTTrainer):
    """As docs/guides/fine_tune.md has it, and each row is recorded."""

    arguments: argparse.Namespace

    def get_train_dataloader(self) -> Any:
        return packed(self.arguments.folder, ROWS)

    def training_step(self, model: Any, row: Any, *others: Any) -> Any:
        record(self.arguments, 0, self.state.global_step + 1, row)
        return super().training_step(model, inputs(row), *others)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die-after", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.folder
    if not folder.exists():
        folder.mkdir()
        make_data(folder)
    options: dict[str, Any] = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "ignore_data_skip": True,
        "logging_steps": 1,
    }
    words = {"skip_prepare_dataset": True}
    settings = SFTConfig(
        str(folder), max_steps=STEPS, save_steps=SAVE_EVERY, dataset_kwargs=words, bf16=False, **options
    )
    unread = Dataset.from_list([{"input_ids": [0], "labels": [0]}])  # SFTTrainer looks at its first row only
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    trainer = ChatTrainer(
        model(), settings, train_dataset=unread, processing_class=tokenizer, callbacks=[HFTrainerCallback()]
    )
    trainer.arguments = arguments
    trainer.train(resume_from_checkpoint=arguments.resume)


if __name__ == "__main__":
    main()
