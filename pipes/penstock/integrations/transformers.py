"""The Hugging Face `Trainer`: ``class MyTrainer(HFTrainerMixin, Trainer): pass`` trains and evaluates from penstock's loaders, and resumes exactly.

To use your own loader, return it from ``get_train_dataloader``, add the `HFTrainerCallback`, and pass ``ignore_data_skip=True``; otherwise the
trainer reads and discards the batches already trained.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch.utils.data import IterableDataset, Sampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_pt_utils import find_batch_size

from penstock import Loader, StateError
from penstock.integrations.accelerate import AccelerateLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import EvalLoopOutput, TrainOutput

    _Trainer = Trainer
else:
    _Trainer = object

log = logging.getLogger("penstock")

FILE = "loader.json"
"""The file in a checkpoint's folder that holds the loader's state."""


@final
class HFTrainerCallback(TrainerCallback):
    """Write ``checkpoint-N/loader.json`` with every checkpoint, and load it when the trainer resumes.

    It also corrects ``epoch`` in the logs of a resumed run, because the trainer counts only the batches it has read itself.

    Args:
        checkpoint: The folder to resume from, if it is not ``output_dir/checkpoint-N``.

    Raises:
        TypeError: When training begins: the trainer's loader is not a `penstock.Loader`.
        ValueError: When training resumes without ``ignore_data_skip=True``.
        StateError: When training resumes: the checkpoint has no ``loader.json``, or it belongs to another loader.
    """

    def __init__(self, checkpoint: str | os.PathLike[str] | None = None) -> None:
        self.checkpoint = checkpoint
        self._resumed: tuple[int, int] | None = None  # the epoch in which the run resumed, and its batches trained before
        self._begun = -1  # epochs that this run has begun, not counting the first
        self._loaded: int | None = None  # the state's epoch, if the state may be on its last batch without knowing it
        self._told_of_short_windows = False  # whether the trainer knows how many batches are left in the epoch in which it resumes

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """On every process, load the state if the trainer resumes."""
        loader = _loader(kwargs)
        self._resumed, self._begun, self._loaded = None, -1, None
        if state.global_step == 0:
            return
        if not args.ignore_data_skip:
            raise ValueError(
                "penstock resumes on its own, so the trainer would skip the same batches again. Pass ignore_data_skip=True to TrainingArguments."
            )
        file = Path(self.checkpoint or Path(_output(args)) / f"checkpoint-{state.global_step}") / FILE
        if not file.exists():
            raise StateError(
                f"{file} does not exist. Resume from a checkpoint that was saved with this callback or HFTrainerMixin. If you add HFTrainerCallback "
                f"yourself, you can pass another folder: HFTrainerCallback(checkpoint=...). A checkpoint from before the change to penstock has no such "
                f"file: resume it with the old Trainer, or start a new run with its weights."
            )
        loader.load_state_dict(json.loads(file.read_text()))
        batches = _batches_per_epoch(loader, args, state)
        self._resumed = divmod(round((state.epoch or 0) * batches), batches)
        if _length(loader) is None:
            self._loaded = None if loader.infinite else loader.epoch
        elif (short := (loader.remaining or 0) % args.gradient_accumulation_steps) and not self._told_of_short_windows:
            log.warning(
                f"the trainer will make no optimizer step for the last {short} batches of epoch {loader.epoch}, in which it resumes: it counts from the resume, so "
                f"they do not fill gradient_accumulation_steps={args.gradient_accumulation_steps}. Their gradients go into the next step. Use HFTrainerMixin "
                f"with transformers 5, a number that divides the {batches} batches of an epoch, or save at the end of an epoch."
            )

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the epoch."""
        self._begun += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Set ``state.epoch`` to its value in a run that was never stopped, before it is logged and saved."""
        if self._resumed is None or state.epoch is None:
            return
        loader = _loader(kwargs)
        if (length := _length(loader)) is not None:
            state.epoch = loader.epoch + (loader.position or 0) / length
            return
        epoch, before = self._resumed
        batches = _batches_per_epoch(loader, args, state)
        read = (round(state.epoch * batches) - 1) % batches + 1
        if self._loaded is not None and loader.epoch > self._loaded:  # it was: the first batch belongs to the next epoch
            self._resumed = epoch, before = epoch + 1, 0
        self._loaded = None
        state.epoch = epoch + self._begun + (read + (0 if self._begun else before)) / batches

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """On the process that saves, write the state: completely or not at all."""
        if not args.should_save:
            return
        file = Path(_output(args)) / f"checkpoint-{state.global_step}" / FILE
        new = file.with_suffix(".new")
        with new.open("w") as out:
            json.dump(_loader(kwargs).state_dict(), out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(new, file)


class HFTrainerMixin(_Trainer):
    """A `Trainer` whose loaders are penstock's: ``class MyTrainer(HFTrainerMixin, Trainer): pass`` is the whole recipe.

    It builds the loaders from the trainer's own arguments: batch sizes, collator, removal of unused columns, ``data_seed`` (or ``seed``), and
    ``dataloader_drop_last``, ``_num_workers``, ``_pin_memory``, ``_prefetch_factor``, ``_multiprocessing_context``, ``_in_order``. It sets
    ``ignore_data_skip`` and adds the `HFTrainerCallback`. Evaluation delivers every sample once, in dataset order, on any number of ranks.

    Raises:
        TypeError: A class lists the mixin after the trainer, whose own loaders would then be used.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for one in cls.__mro__[: cls.__mro__.index(HFTrainerMixin)]:
            if issubclass(one, Trainer) and not issubclass(one, HFTrainerMixin):
                raise TypeError(
                    f"in {cls.__name__}, {one.__name__} comes before HFTrainerMixin, so its own loaders would be used and would not resume. "
                    f"Write class {cls.__name__}(HFTrainerMixin, {one.__name__})."
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.ignore_data_skip = True
        self._training_loader: Loader[Any] | None = None
        if not any(isinstance(one, HFTrainerCallback) for one in self.callback_handler.callbacks):
            self.add_callback(HFTrainerCallback())

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """See `Trainer.train`; the workers end when it returns."""
        for one in self.callback_handler.callbacks:
            if isinstance(one, HFTrainerCallback):
                one._told_of_short_windows = hasattr(Trainer, "_run_epoch")
                if isinstance(resume_from_checkpoint, str | os.PathLike):
                    one.checkpoint = resume_from_checkpoint
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._close_training_loader()

    def _run_epoch(self, *args: Any, **given: Any) -> None:
        """Tell the trainer (of transformers 5) how many batches are left in the epoch in which it resumes.

        It detects the last, short window of gradient accumulation by its number in the epoch, but with ``ignore_data_skip`` it counts from the
        resume, so that window made no step, and its gradients went into the next one.
        """
        loader: Any = given.get("train_dataloader")
        window = self.args.gradient_accumulation_steps
        sized = isinstance(loader, Loader) and _length(loader) == given.get("steps_in_epoch")
        if sized and loader.epoch == given["epoch"] and (left := loader.remaining):
            given |= {"steps_in_epoch": left, "num_update_steps_per_epoch": -(-left // window)}
        super()._run_epoch(*args, **given)  # type: ignore[no-untyped-call]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """See `Trainer.evaluation_loop`; the workers end when it returns."""
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            if isinstance(dataloader, _Evaluation):
                dataloader.close()

    def get_train_dataloader(self) -> Any:
        """A `Loader` over ``train_dataset``: shuffled, or in order with ``train_sampling_strategy="sequential"``.

        Raises:
            ValueError: There is no ``train_dataset``; or the sampling strategy needs lengths, or a mesh decides which rank gets what.
        """
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset, and this trainer has none. Pass one to the Trainer.")
        dataset, options = self._loader_options(self.train_dataset, "training")
        if isinstance(dataset, IterableDataset):
            options["split"] = "items"
        else:
            options["shuffle"] = _strategy(self.args) == "random"
            options["drop_last"] = self.args.dataloader_drop_last
        self._close_training_loader()
        self._training_loader = Loader.from_dataset(dataset, batch_size=self._train_batch_size, **options)
        return self._training_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches of ``eval_dataset`` in its order, dealt to the ranks the way the trainer gathers them.

        Raises:
            ValueError: There is no ``eval_dataset``; or it has no length and there are several ranks.
        """
        given: Any = self.eval_dataset
        eval_dataset = given if eval_dataset is None else given[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        if eval_dataset is None:
            raise ValueError("evaluation needs an eval_dataset, and this trainer has none. Pass one to the Trainer.")
        return self._evaluation(eval_dataset, "evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Like `get_eval_dataloader`."""
        return self._evaluation(test_dataset, "test")

    def _close_training_loader(self) -> None:
        """Close it now: its workers would otherwise live until garbage collection."""
        if self._training_loader is not None:
            self._training_loader.close()

    def _evaluation(self, dataset: Any, description: str) -> _Evaluation:
        given, (dataset, options) = dataset, self._loader_options(dataset, description)
        size, ranks = self.args.eval_batch_size, self.accelerator.num_processes
        # The trainer repeats every loss for a whole batch, and `gather_for_metrics` has to cut off the surplus of a short last one.
        remainder: int | Callable[[Any], int | None] = find_batch_size
        if isinstance(dataset, IterableDataset):
            if ranks > 1:
                raise ValueError(
                    f"{type(given).__name__} has no length, so {ranks} ranks cannot evaluate each of its samples once. Evaluate on one rank, or "
                    f"use a dataset with a length."
                )
            loader: Loader[Any] = Loader.from_dataset(dataset, batch_size=size, prefetch_next_epoch=False, **options)
        else:
            batches = _Rounds(len(dataset), size, ranks, self.args.dataloader_drop_last)
            loader = Loader.from_dataset(dataset, batch_sampler=batches, prefetch_next_epoch=False, **options)
            remainder = batches.remainder
        return _Evaluation(AccelerateLoader(loader, self.accelerator, save=False, remainder=remainder), given)

    def _loader_options(self, dataset: Any, description: str) -> tuple[Any, dict[str, Any]]:
        """The dataset without the columns that the model does not use, and the loader options from the trainer's arguments."""
        args = self.args
        if _strategy(args) not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={_strategy(args)!r} needs the lengths of the samples, which HFTrainerMixin does not read. Use 'random', or "
                f"override get_train_dataloader to return penstock.Loader.from_dataset(..., batch_sampler=your_sampler) and get_eval_dataloader too."
            )
        if any(getattr(self, size, lambda: 1)() > 1 for size in ("get_tp_size", "get_cp_size", "get_sp_size")):
            raise ValueError(
                "tensor-, context- or sequence-parallel ranks must read the same batches, and HFTrainerMixin does not know the mesh. Override "
                "get_train_dataloader to return penstock.Loader.from_dataset(..., mesh=your_mesh['dp'])."
            )
        collate: Callable[[Any], Any] = self.data_collator
        if hasattr(dataset, "remove_columns") and hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        return dataset, {
            "collate_fn": collate,
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
            "in_order": getattr(args, "dataloader_in_order", True),
        }


@final
class _Evaluation:
    """The loader that the trainer evaluates from. The trainer reads its ``dataset``; it marks the last batch for the accelerator."""

    def __init__(self, batches: AccelerateLoader[Any], dataset: Any) -> None:
        self._batches = batches
        self.dataset = dataset
        self.close = batches.loader.close

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


@final
class _Rounds(Sampler[list[int]]):
    """Batches in dataset order, the same number of full ones on every rank, so that the batches of one round, joined in rank order, are a slice of the dataset.

    The last round is filled up with samples from the start of the dataset; ``gather_for_metrics`` cuts them off, keeping ``remainder`` samples.
    """

    def __init__(self, n: int, batch_size: int, ranks: int, drop_last: bool) -> None:
        self.n, self.batch_size = n, batch_size
        in_round = batch_size * ranks
        self.stop = n - n % in_round if drop_last else n if ranks == 1 else -(-n // in_round) * in_round
        self.remainder = -1 if drop_last else n % in_round

    def __len__(self) -> int:
        return -(-self.stop // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, self.stop, self.batch_size):
            yield [i % self.n for i in range(first, min(first + self.batch_size, self.stop))]


def _strategy(args: TrainingArguments) -> str:
    """The sampling strategy, also under the name it has in transformers 4."""
    return getattr(args, "train_sampling_strategy", None) or ("group_by_length" if getattr(args, "group_by_length", False) else "random")


def _batches_per_epoch(loader: Loader[Any], args: TrainingArguments, state: TrainerState) -> int:
    """Batches per epoch, as the trainer computes ``epoch``."""
    return _length(loader) or int(state.max_steps * args.gradient_accumulation_steps)


def _length(loader: Loader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _loader(kwargs: dict[str, Any]) -> Loader[Any]:
    loader = kwargs["train_dataloader"]
    if not isinstance(loader, Loader):
        raise TypeError(
            f"the trainer trains from a {type(loader).__name__}, not a penstock.Loader. Return the loader itself from get_train_dataloader()."
        )
    return loader


def _output(args: TrainingArguments) -> str:
    if args.output_dir is None:
        raise ValueError("TrainingArguments has no output_dir, so there is no place for checkpoints. Set output_dir.")
    return args.output_dir
