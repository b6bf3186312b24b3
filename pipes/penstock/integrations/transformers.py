"""The Hugging Face `Trainer`: a callback that keeps the loader's state in its checkpoints.

The trainer takes the loader from ``get_train_dataloader``, and must be told ``ignore_data_skip=True``: it would skip by reading.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from transformers import TrainerCallback

from penstock import Loader, StateError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

FILE = "loader.json"
"""In a checkpoint's folder."""


@final
class HFTrainerCallback(TrainerCallback):
    """Write ``checkpoint-N/loader.json`` with every checkpoint, and go on from it where the trainer resumes.

    Args:
        checkpoint: The folder that is resumed from, where that is not ``output_dir/checkpoint-N``.

    Raises:
        TypeError: When training begins: the trainer's loader is not a `penstock.Loader`.
        ValueError: When training resumes without ``ignore_data_skip=True``.
        StateError: When training resumes: the checkpoint has no ``loader.json``, or one of another loader.
    """

    def __init__(self, checkpoint: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint = checkpoint

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Load, on every process, where the trainer does not begin anew."""
        loader = _loader(kwargs)
        if state.global_step == 0:
            return
        if not args.ignore_data_skip:
            raise ValueError(
                "penstock resumes by itself: give TrainingArguments ignore_data_skip=True, or the trainer would skip batches once more."
            )
        file = Path(self._checkpoint or Path(_output(args)) / f"checkpoint-{state.global_step}") / FILE
        if not file.exists():
            raise StateError(
                f"{file} is not there. Resume from a checkpoint that was saved with this callback, or tell it where: HFTrainerCallback(checkpoint=...)."
            )
        loader.load_state_dict(json.loads(file.read_text()))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save, on the process that saves; whole or not at all."""
        if not args.should_save:
            return
        file = Path(_output(args)) / f"checkpoint-{state.global_step}" / FILE
        new = file.with_suffix(".new")
        with new.open("w") as out:
            json.dump(_loader(kwargs).state_dict(), out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(new, file)


def _loader(kwargs: dict[str, Any]) -> Loader[Any]:
    loader = kwargs["train_dataloader"]
    if not isinstance(loader, Loader):
        raise TypeError(
            f"the trainer trains from a {type(loader).__name__}, not a penstock.Loader: let get_train_dataloader() return the loader itself."
        )
    return loader


def _output(args: TrainingArguments) -> str:
    if args.output_dir is None:
        raise ValueError("TrainingArguments has no output_dir, so there is no place for checkpoints.")
    return args.output_dir
