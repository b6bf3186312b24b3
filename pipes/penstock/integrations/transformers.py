"""The Hugging Face `Trainer`: ``class MyTrainer(HFTrainerMixin, Trainer): pass`` trains and evaluates from penstock's
loaders, and resumes exactly.

To use your own loader, return it from ``get_train_dataloader``, add the `HFTrainerCallback`, and pass
``ignore_data_skip=True``; otherwise the trainer reads and discards the batches already trained.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data import IterableDataset, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import find_batch_size

from penstock import Loader, StateError
from penstock.integrations.accelerate import AccelerateLoader
from penstock.nodes import Batcher, Cycler, Fetch, IterableSource, ParallelMapper, PinMemory, SamplerWrapper, Sharder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import EvalLoopOutput, TrainOutput

    _Trainer = Trainer
else:
    _Trainer = object

log = logging.getLogger("penstock")


@final
class HFTrainerCallback(TrainerCallback, ExportableState):
    """Save the loader's state in the ``trainer_state.json`` of every checkpoint, and load it from there when the
    trainer resumes, from any folder.

    It also corrects ``epoch`` in the logs of a resumed run, because the trainer counts only the batches it has read
    itself.

    Raises:
        TypeError: When training begins: the trainer's loader is not a `penstock.Loader`.
        ValueError: When training resumes without ``ignore_data_skip=True``. When it begins: the epochs differ in
            length, and the trainer has no `HFTrainerMixin`.
        StateError: When training resumes: the checkpoint has no state of a loader, or it belongs to another loader.
    """

    def __init__(self) -> None:
        self._training: Loader[Any] | None = None  # the loader that is being trained from
        # the epoch in which the run resumed, and its batches trained before
        self._resumed: tuple[int, int] | None = None
        self._begun = -1  # epochs that this run has begun, not counting the first
        self._loaded: int | None = None  # the state's epoch, if the state may be on its last batch without knowing it
        # whether the trainer knows how many batches each epoch has, and how many are left where it resumes
        self._told_of_lengths = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """On every process, load the state if the trainer resumes."""
        self._training = loader = _loader(kwargs)
        if not self._told_of_lengths:
            _refuse_lengths_that_differ(loader, state)
        self._resumed, self._begun, self._loaded = None, -1, None
        if state.global_step == 0:
            return
        if not args.ignore_data_skip:
            raise ValueError(
                "penstock resumes on its own, so the trainer would skip the same batches again. Pass "
                "ignore_data_skip=True to TrainingArguments."
            )
        if (saved := _saved(state)) is None:
            raise StateError(
                f"the checkpoint of step {state.global_step} has no state of a loader in its trainer_state.json. "
                f"Resume from one that was saved with HFTrainerCallback or HFTrainerMixin. One from before the change "
                f"to penstock: resume it with the old Trainer, or start a new run with its weights."
            )
        loader.load_state_dict(saved)
        # the trainer only replaces what is there
        vars(state)["stateful_callbacks"][type(self).__name__] = self.state()
        batches = _batches_per_epoch(loader, args, state)
        self._resumed = divmod(round((state.epoch or 0) * batches), batches)
        if _length(loader) is None:
            self._loaded = None if loader.infinite else loader.epoch
        elif (short := (loader.remaining or 0) % args.gradient_accumulation_steps) and not self._told_of_lengths:
            log.warning(
                f"the trainer will make no optimizer step for the last {short} batches of epoch {loader.epoch}, in "
                f"which it resumes: it counts from the resume, so they do not fill "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}. Their gradients go into the next "
                f"step. Use HFTrainerMixin with transformers 5, a number that divides the {batches} batches of an "
                f"epoch, or save at the end of an epoch."
            )

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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
        # it was: the first batch belongs to the next epoch
        if self._loaded is not None and loader.epoch > self._loaded:
            self._resumed = epoch, before = epoch + 1, 0
        self._loaded = None
        state.epoch = epoch + self._begun + (read + (0 if self._begun else before)) / batches

    def state(self) -> dict[str, Any]:
        """What the trainer saves of this callback: the loader's state."""
        saved = None if self._training is None else self._training.state_dict()
        return {"args": {}, "attributes": {"loader": saved, "_told_of_lengths": self._told_of_lengths}}


class HFTrainerMixin(_Trainer):
    """A `Trainer` whose loaders are penstock's: ``class MyTrainer(HFTrainerMixin, Trainer): pass`` is the whole recipe.

    It builds every loader that the trainer builds with ``_get_dataloader``, so what a class overrides (`GRPOTrainer`
    its sampler and its batch size) counts. It uses the trainer's own arguments: batch sizes, collator, removal of
    unused columns, ``data_seed`` (or ``seed``), and ``dataloader_drop_last``, ``_num_workers``, ``_pin_memory``,
    ``_persistent_workers``, ``_prefetch_factor``, ``_multiprocessing_context``, ``_in_order``. It sets
    ``ignore_data_skip`` and adds the `HFTrainerCallback`. Evaluation delivers every sample once, in the order of the
    trainer's sampler, on any number of ranks.

    Raises:
        TypeError: A class lists the mixin after the trainer, whose own loaders would then be used.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for one in cls.__mro__[: cls.__mro__.index(HFTrainerMixin)]:
            if issubclass(one, Trainer) and not issubclass(one, HFTrainerMixin):
                raise TypeError(
                    f"in {cls.__name__}, {one.__name__} comes before HFTrainerMixin, so its own loaders would be used "
                    f"and would not resume. Write class {cls.__name__}(HFTrainerMixin, {one.__name__})."
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.ignore_data_skip = True
        self._training_loader: Loader[Any] | None = None
        self._kept: dict[str, _Evaluation] = {}  # the loaders whose workers outlive an evaluation
        self._steps: list[int] = []  # optimizer steps in each epoch; empty if the loader cannot count them
        self._resumes = False  # whether this run goes on from a checkpoint
        if not any(isinstance(one, HFTrainerCallback) for one in self.callback_handler.callbacks):
            self.add_callback(HFTrainerCallback())

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """See `Trainer.train`; the workers end when it returns."""
        self._resumes = bool(resume_from_checkpoint)
        for one in self.callback_handler.callbacks:
            if isinstance(one, HFTrainerCallback):
                one._told_of_lengths = hasattr(Trainer, "_run_epoch")
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._close_training_loader()

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any, *more: Any) -> Any:
        """See `Trainer.set_initial_training_values`, which takes all epochs for as long as the first.

        The steps, for the learning rate too, are the sum over the epochs.
        """
        *values, steps = super().set_initial_training_values(args, dataloader, *more)
        self._steps, self._counted = [], dataloader
        if isinstance(dataloader, Loader) and getattr(self, "get_sp_size", lambda: 1)() == 1:
            with suppress(TypeError):
                self._steps = _steps_by_epoch(dataloader, args)
        if self._steps:
            # those before may have had fewer steps, so that there are more of them
            values[0] = args.max_steps + 1 if args.max_steps > 0 and self._resumes else len(self._steps)
            if args.max_steps <= 0:
                *whole, last = self._steps
                steps = sum(whole) + math.ceil(last * (args.num_train_epochs - len(whole)))
        return *values, steps

    def _init_training_state(self, *args: Any, **given: Any) -> Any:
        """Tell the trainer (of transformers 5) in which epoch it resumes, and correct the number of steps.

        It counts both in steps of the present number of ranks, but those before may have been of another.
        """
        trained, steps = super()._init_training_state(*args, **given)
        if self._steps and self.state.global_step and (saved := _saved(self.state)) is not None:
            self._counted.load_state_dict(saved)
            epoch, left = self._counted.epoch, self._counted.remaining
            behind = sum(self._steps[: epoch + 1]) - math.ceil(left / self.args.gradient_accumulation_steps)
            self.state.max_steps += 0 if self.args.max_steps > 0 else self.state.global_step - behind
            trained = epoch + (left == 0)
        return trained, steps

    def _prepare_for_training(self, max_steps: int, *args: Any, **given: Any) -> Any:
        """Make the schedule of the corrected number of steps."""
        return super()._prepare_for_training(self.state.max_steps, *args, **given)  # type: ignore[no-untyped-call]

    def _run_epoch(self, *args: Any, **given: Any) -> None:
        """Tell the trainer (of transformers 5) how many batches the epoch has, or has left where it resumes.

        It detects the last, short window of gradient accumulation by its number in the epoch, but with
        ``ignore_data_skip`` it counts from the resume, so that window made no step, and its gradients went into the
        next one.
        """
        loader: Any = given.get("train_dataloader")
        if self._steps and isinstance(loader, Loader):
            window, left = self.args.gradient_accumulation_steps, loader.epoch == given["epoch"] and loader.remaining
            with suppress(TypeError):  # the length was wrong
                batches = left or loader.count_batches([given["epoch"]])
                given |= {"steps_in_epoch": batches, "num_update_steps_per_epoch": -(-batches // window)}
        super()._run_epoch(*args, **given)  # type: ignore[no-untyped-call]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """See `Trainer.evaluation_loop`; the workers end when it returns."""
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            if isinstance(dataloader, _Evaluation) and dataloader not in self._kept.values():
                dataloader.close()

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """A `Loader` over ``dataset``; for evaluation one that deals the samples to the ranks the way the trainer
        gathers them.

        Raises:
            ValueError: The arguments ask for what only a ``DataLoader`` does; or data without a length is evaluated on
                several ranks.
        """
        args, given, ranks = self.args, dataset, self.accelerator.num_processes
        self._refuse(description)
        if not is_training and (kept := self._kept.get(dataloader_key or "")) is not None:
            if kept.dataset is given:
                kept.set_epoch(0)
                return kept
            kept.close()
        collate: Callable[[Any], Any] = self.data_collator
        if hasattr(dataset, "remove_columns") and hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        options: dict[str, Any] = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
            "in_order": getattr(args, "dataloader_in_order", True),
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "prefetch_next_epoch": is_training,
        }
        streamed, drop_last = isinstance(dataset, IterableDataset), args.dataloader_drop_last
        sampler: Any = None if streamed or sampler_fn is None else sampler_fn(dataset)
        loader: Loader[Any]
        if streamed and ranks > 1 and not is_training:
            raise ValueError(
                f"{type(given).__name__} has no length, so {ranks} ranks cannot evaluate each of its samples once. "
                f"Evaluate on one rank, or use a dataset with a length."
            )
        own = getattr(sampler_fn, "__func__", None) is not Trainer._get_train_sampler
        if sampler is not None and not own and _strategy(args) in ("random", "sequential"):
            shuffle = _strategy(args) == "random"
            loader = Loader.from_dataset(
                dataset, batch_size, shuffle, collate_fn=collate, drop_last=drop_last, **options
            )
        else:
            source: Any
            fetch: Any
            if streamed:
                source, fetch = (
                    IterableSource(dataset, split="items", seed=options["seed"]),
                    Fetch(None, collate).collate,
                )
            else:
                sampler = SequentialSampler(dataset) if sampler is None else sampler
                even = _Even(sampler, 1 if drop_last or ranks == 1 else batch_size * ranks)
                source, fetch = SamplerWrapper(even, options["seed"]), Fetch(dataset, collate)
            # Whole batches in turn, as Accelerate deals them: some trainers, such as GRPO's, gather groups of samples
            # over the ranks.
            node: Any = Sharder(Batcher(Cycler(source), batch_size, drop_last and not streamed), tail="drop")
            node = ParallelMapper(node, fetch, **options)
            loader = Loader(
                PinMemory(node) if args.dataloader_pin_memory and torch.accelerator.is_available() else node
            )
        if is_training:
            self._close_training_loader()
            self._training_loader = loader
            return loader
        # The trainer repeats every loss for a whole batch, and `gather_for_metrics` has to cut off the surplus of a
        # short last one.
        remainder: Any = find_batch_size if streamed else -1 if drop_last else len(sampler) % (batch_size * ranks)
        evaluation = _Evaluation(AccelerateLoader(loader, self.accelerator, save=False, remainder=remainder), given)
        if dataloader_key is not None and args.dataloader_persistent_workers:
            self._kept[dataloader_key] = evaluation
        return evaluation

    def _close_training_loader(self) -> None:
        """Close it now: its workers would otherwise live until garbage collection."""
        if self._training_loader is not None:
            self._training_loader.close()

    def _refuse(self, description: str) -> None:
        if _strategy(self.args) == "batch_rebalance":
            raise ValueError(
                "train_sampling_strategy='batch_rebalance' makes the batches of each rank itself, which HFTrainerMixin "
                "cannot resume on other ranks. Use 'random', or override get_train_dataloader to return "
                "penstock.Loader.from_dataset(..., batch_sampler=your_sampler) and get_eval_dataloader too."
            )
        config: Any = self.args.accelerator_config
        if config.split_batches or config.dispatch_batches or not config.even_batches:
            raise ValueError(
                f"accelerator_config has split_batches={config.split_batches}, "
                f"dispatch_batches={config.dispatch_batches}, even_batches={config.even_batches} for the {description} "
                f"data, but penstock's loader reads on every rank, batches of the size per device, and as many on "
                f"each. Leave all three out (for split_batches=True, divide the batch size by the number of ranks), or "
                f"leave out HFTrainerMixin."
            )
        if any(getattr(self, size, lambda: 1)() > 1 for size in ("get_tp_size", "get_cp_size", "get_sp_size")):
            raise ValueError(
                "tensor-, context- or sequence-parallel ranks must read the same batches, and HFTrainerMixin does not "
                "know the mesh. Override get_train_dataloader to return penstock.Loader.from_dataset(..., "
                "mesh=your_mesh['dp'])."
            )


@final
class _Evaluation:
    """The loader that the trainer evaluates from.

    The trainer reads its ``dataset``; it marks the last batch for the accelerator.
    """

    def __init__(self, batches: AccelerateLoader[Any], dataset: Any) -> None:
        self._batches = batches
        self.dataset = dataset
        self.close = batches.loader.close
        self.set_epoch = batches.set_epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches.loader)


@final
class _Even(Sampler[Any]):
    """``sampler``, filled up with its first indices to a multiple of ``size``, so that every rank gets the same number
    of whole batches.

    ``gather_for_metrics`` cuts them off.
    """

    def __init__(self, sampler: Any, size: int) -> None:
        self.sampler = sampler
        self.size = size

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.size) * self.size

    def __iter__(self) -> Iterator[Any]:
        first, n = [], 0
        for n, index in enumerate(self.sampler, 1):
            if n <= self.size:
                first.append(index)
            yield index
        if first:
            yield from islice(cycle(first), -n % self.size)


def _saved(state: TrainerState) -> Any:
    """The loader's state in a checkpoint; None if there is none."""
    known = vars(state)["stateful_callbacks"].get("HFTrainerCallback", {})
    return (known[-1] if isinstance(known, list) else known).get("attributes", {}).get("loader")


def _strategy(args: TrainingArguments) -> str:
    """The sampling strategy, also under the name it has in transformers 4."""
    return getattr(args, "train_sampling_strategy", None) or (
        "group_by_length" if getattr(args, "group_by_length", False) else "random"
    )


def _steps_by_epoch(loader: Loader[Any], args: TrainingArguments) -> list[int]:
    """Optimizer steps in each epoch of the run."""
    steps: list[int] = []
    left = args.max_steps
    while left > 0 if args.max_steps > 0 else len(steps) < args.num_train_epochs:
        steps.append(max(1, -(-loader.count_batches([len(steps)]) // args.gradient_accumulation_steps)))
        left -= steps[-1]
    return steps


def _refuse_lengths_that_differ(loader: Loader[Any], state: TrainerState) -> None:
    with suppress(TypeError):
        counts = {loader.count_batches([epoch]) for epoch in range(state.num_train_epochs)}
        if len(counts) > 1:
            raise ValueError(
                f"the epochs have {min(counts)} to {max(counts)} batches, but the trainer takes all for as long as the "
                f"first. Write class MyTrainer(HFTrainerMixin, Trainer) and keep your get_train_dataloader: with "
                f"transformers 5 the mixin counts each epoch. Or leave out count=True, and pass max_steps."
            )


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
            f"the trainer trains from a {type(loader).__name__}, not a penstock.Loader. Return the loader itself from "
            f"get_train_dataloader()."
        )
    return loader
