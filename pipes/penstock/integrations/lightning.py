"""Lightning: one callback that makes every checkpoint of a `Trainer` resume exactly.

``Trainer(callbacks=[LightningCallback()])``. Without the callback, Lightning saves the loader's state as well, but it
restores the state only when it resumes inside an epoch, does so after it has already fetched from a loader without a
length, and counts the epoch's batches in steps of the old world size.
"""

from __future__ import annotations

import contextlib
import json
import math
from typing import TYPE_CHECKING, Any, final

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from penstock import GraphError, Loader, StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import LightningModule, Trainer


@final
class LightningCallback(Callback):
    """Save and restore the training loaders as callback state.

    Lightning always restores that, and before it fetches the first batch.

    The callback finds every `Loader` among the training loaders, including those from a ``train_dataloader`` hook, and

    - makes their states describe the last batch *trained* (`Loader.commit`), regardless of batches fetched ahead or
      failed;
    - restores them before the first batch is fetched, from any checkpoint;
    - passes the position on to the new loaders that ``reload_dataloaders_every_n_epochs`` creates;
    - skips the rest of an epoch that ``limit_train_batches`` cuts short, in the state too (`Loader.end_epoch`);
    - corrects Lightning's batch counter from the loader if a run resumes inside an epoch with another number of ranks
      or batch size;
    - starts the next epoch if ``max_steps`` would make Lightning continue inside a finished one;
    - sets Lightning's number of batches anew in each epoch, because epochs of `Packs` and `Buckets` differ in length;
      ``trainer.estimated_stepping_batches`` is the sum over the epochs;
    - lets each loader count its own epochs while training continues, whatever epoch number Lightning passes it after a
      resume;
    - repeats the batches of epoch 0 under ``overfit_batches``, in training and in validation;
    - refuses ranks whose epochs differ in length, and a loader inside a ``DataLoader``, before the first step.

    Add it once, without arguments. Its place among the callbacks does not matter, because Lightning calls checkpoint
    callbacks last.
    """

    # the key in checkpoints. Never rename it with the class: for an unknown key Lightning only warns
    state_key = "PenstockCallback"

    def __init__(self) -> None:
        self._loaders: list[Loader[Any]] = []
        self._pending: list[dict[str, Any]] | None = None  # states loaded before their loaders exist
        self._starts: list[dict[str, Any]] = []  # the loaders' states before Lightning fetched from them
        self._fetch_again = False
        self._overfits = False
        self._trained = False  # whether this fit has trained a batch

    # Saving and loading. Lightning calls both on every rank and writes rank 0's answer; the states are the same on all
    # ranks.

    def state_dict(self) -> dict[str, Any]:
        """The loaders' states, in order; empty if there are no loaders."""
        states = [loader.state_dict() for loader in self._loaders] if self._pending is None else self._pending
        return {"loaders": states} if states else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states if the loaders exist already; otherwise keep them for later."""
        self._pending = list(state_dict["loaders"])
        if self._loaders:  # some strategies restore late, after the loaders were asked for their length
            self._load(self._loaders)
            self._fetch_again = True

    # Lightning has no hook between getting the loaders and the first fetch, so we wrap the method that it gets them
    # from.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Intercept the training loaders."""
        if stage == "fit":
            self._loaders, self._trained = [], False
            self._overfits = trainer.overfit_batches > 0  # type: ignore[attr-defined]
            source = trainer.fit_loop._data_source
            vars(source)["dataloader"] = lambda: self._seen(type(source).dataloader(source))
            if not isinstance(trainer, _Summing):
                kind = type(trainer)
                trainer.__class__ = type(kind.__name__, (_Summing, kind), {})
            if self._overfits:
                validation = trainer.fit_loop.epoch_loop.val_loop._data_source
                vars(validation)["dataloader"] = lambda: _at_epoch_0(
                    type(validation).dataloader(validation), "sequential"
                )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop intercepting loaders."""
        for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
            vars(loop._data_source).pop("dataloader", None)
        if isinstance(trainer, _Summing):
            trainer.__class__ = type(trainer).__bases__[1]

    def _seen(self, dataloaders: Any) -> Any:
        """Move the loaders in ``dataloaders`` to the right position before anyone fetches from them."""
        combined = dataloaders if isinstance(dataloaders, CombinedLoader) else CombinedLoader(dataloaders)
        for one in combined.flattened:
            _refuse_wrapped(one)
        loaders = [one for one in combined.flattened if isinstance(one, Loader)]
        known = {id(loader) for loader in self._loaders}
        if self._pending is not None:
            self._load(loaders)
        elif len(loaders) == len(self._loaders):
            for loader, before in zip(loaders, self._loaders, strict=True):
                # a reloaded loader continues where the one before it ended, even with other data
                if id(loader) not in known:
                    loader.load_state_dict(before.state_dict(), strict=False)
        for loader in loaders:
            if self._overfits and loader.epoch:
                _to_epoch_0(loader)
            loader.commit(0)
        self._loaders, self._starts = loaders, [loader.state_dict() for loader in loaders]
        return _at_epoch_0(dataloaders, "max_size_cycle") if self._overfits else dataloaders

    def _load(self, loaders: list[Loader[Any]]) -> None:
        states, self._pending = self._pending or [], None
        if len(states) != len(loaders):
            raise StateError(
                f"the checkpoint has the states of {len(states)} penstock loaders, but there are {len(loaders)} now. "
                f"Resume with the same loaders as when it was saved."
            )
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)

    # During training.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse ranks of unequal length, and correct Lightning's batch counter."""
        if self._fetch_again:
            self._fetch_again = False
            iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]  # the load invalidated its old iterator
        self._limit(trainer)
        self._count_as_the_loader(trainer)
        if self._loaders:
            _begin_the_next_epoch(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let each loader count its own epochs.

        If Lightning fetched from a new loader without a length and will call ``iter`` again, undo that.
        """
        if self._trained:
            # Lightning has just set its own epoch number. It differs from the loader's after a run that max_steps ended
            # in mid-epoch, and for a short loader that was restarted within an epoch. The loader's number is the one in
            # the checkpoint.
            for loader in self._loaders:
                loader._reader.cursor.request(None)
        starts, self._starts = self._starts, []
        loop = trainer.fit_loop
        if (
            trainer.current_epoch > 0
            and not loop.is_resuming
            and not loop.restarting
            and loop._data_fetcher is not None
            and loop._data_fetcher.fetched
        ):
            for loader, start in zip(self._loaders, starts, strict=False):
                loader.load_state_dict(start)
        self._limit(trainer)

    def _limit(self, trainer: Trainer) -> None:
        """Set what Lightning takes from the lengths of the loaders, which it reads only once, and refuse ranks of
        unequal length.
        """
        for loader in self._loaders:
            if (batches := _length(loader)) is not None:
                _refuse_unequal(trainer, batches)
        fit: Any = trainer.fit_loop
        if not self._overfits:
            fit._combined_loader.limits[:] = _limits(trainer)  # in place, because its iterator has them, too
        batches = sized_len(fit._combined_loader)
        if batches is None or batches == fit.max_batches:
            return
        fit.max_batches = fit._data_fetcher.length = batches
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch not in (None, math.inf):
            trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Commit the batch that was just trained."""
        self._starts, self._trained = [], True
        for loader in self._loaders:
            with contextlib.suppress(ValueError):  # a short loader among several had no batch in this step
                loader.commit()
        self._end_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the epoch even if its last batch was skipped."""
        self._end_epoch(trainer)

    def _end_epoch(self, trainer: Trainer) -> None:
        """End the loaders' epoch when Lightning's is over, whatever limit ended it, but not when training merely stops
        inside it.
        """
        if trainer.is_last_batch:
            for loader in self._loaders:
                if self._overfits:
                    _to_epoch_0(loader)
                elif not loader.infinite:
                    loader.end_epoch()

    def _count_as_the_loader(self, trainer: Trainer) -> None:
        """Set Lightning's count of batches done in this epoch.

        It restored the count of the old world size, and would end the epoch by that.
        """
        batches = trainer.num_training_batches
        leading = (
            self._loaders
            if len(self._loaders) == 1
            else [loader for loader in self._loaders if _length(loader) == batches]
        )
        if not leading or _length(leading[0]) is None or not trainer.fit_loop.restarting:
            return
        loop = trainer.fit_loop.epoch_loop
        done = int(batches) if loop.batch_progress.is_last_batch else min(leading[0].position or 0, int(batches))
        # For a state saved in the middle of on_train_batch_end, Lightning itself counts that batch as completed.
        in_hand = int(loop.restarted_on_train_batch_end)
        current = loop.batch_progress.current
        if current.completed + in_hand != done:
            current.ready = current.started = current.processed = done  # type: ignore[attr-defined]
            current.completed = done - in_hand


def _begin_the_next_epoch(trainer: Trainer) -> None:
    """With ``max_steps``, Lightning takes an epoch saved at its very end for unfinished, and would train one more batch
    in it.

    This repeats what Lightning does under ``max_epochs``.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if fit.restarted_on_epoch_end and loop.batch_progress.is_last_batch:
        fit.epoch_progress.increment_completed()
        for one in (fit, loop, loop.val_loop):
            one._restarting = False
            one.reset_restart_stage()


class _Summing:
    """Put before the class of a `Trainer` while it fits, because ``configure_optimizers`` reads
    ``estimated_stepping_batches`` before any hook of a callback knows the loaders.
    """

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps in all epochs; Lightning's own are those of the first epoch, times their number."""
        trainer: Any = self
        steps: int | float = super().estimated_stepping_batches  # type: ignore[misc]
        if trainer.max_epochs == -1 or trainer.num_training_batches == math.inf or trainer.overfit_batches:
            return steps
        together = min if trainer.fit_loop._combined_loader._mode == "min_size" else max
        batches = [together(_limits(trainer, epoch)) for epoch in range(max(trainer.max_epochs, 1))]
        steps = sum(math.ceil(count / trainer.accumulate_grad_batches) for count in batches)
        return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def _limits(trainer: Any, epoch: int | None = None) -> list[int | float]:
    """The batches that Lightning takes from each loader in an epoch; None: in the present one."""
    limit = trainer.limit_train_batches
    lengths = [_length(loader, epoch) for loader in trainer.fit_loop._combined_loader.flattened]
    whole = [math.inf if length is None else length for length in lengths]
    return [
        min(length, limit) if isinstance(limit, int) else length if limit == 1 else int(length * limit)
        for length in whole
    ]


@final
class _Epoch0:
    """A loader that starts with epoch 0 on every iteration, for ``overfit_batches``.

    It has no ``sampler`` and no ``dataset``, so Lightning does not try to rebuild it with its own sampler.
    """

    def __init__(self, loader: Loader[Any]) -> None:
        self.loader = loader
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        self.loader.set_epoch(0)
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def _at_epoch_0(dataloaders: Any, mode: Any) -> CombinedLoader:
    """``dataloaders`` as a `CombinedLoader`, like Lightning's own, with every `Loader` fixed to epoch 0.

    A user's `CombinedLoader` is not changed.
    """
    given = dataloaders if isinstance(dataloaders, CombinedLoader) else CombinedLoader(dataloaders, mode)
    combined = CombinedLoader(given.iterables, given._mode)
    combined.flattened = [_Epoch0(one) if isinstance(one, Loader) else one for one in combined.flattened]
    return combined


def _to_epoch_0(loader: Loader[Any]) -> None:
    """Move ``loader`` to the start of epoch 0, in its state too."""
    ((key, text),) = loader.state_dict().items()
    loader.load_state_dict({key: json.dumps(json.loads(text) | {"state": loader.root.start_of(0)})})


def _length(loader: Any, epoch: int | None = None) -> int | None:
    """Batches in ``epoch``; None: in the present one, or if a loader cannot tell them apart."""
    if epoch is not None and isinstance(loader, Loader):
        with contextlib.suppress(TypeError):
            return loader.count_batches([epoch])
    return sized_len(loader)


def _refuse_unequal(trainer: Trainer, batches: int) -> None:
    if trainer.world_size == 1:
        return
    counts = trainer.strategy.all_gather(torch.tensor(batches, device=trainer.strategy.root_device)).flatten().tolist()
    if len(set(counts)) > 1:
        raise GraphError(
            f"the ranks have {counts} training batches per epoch, and DDP hangs if one has more than another. Use "
            f"tail='drop' or tail='pad'; tail='exact' is for evaluation."
        )


def _refuse_wrapped(one: Any) -> None:
    if isinstance(one, DataLoader):
        held = (one.dataset, *getattr(one.dataset, "__dict__", {}).values())
        if any(isinstance(thing, Loader) for thing in held):
            raise TypeError(
                "a penstock.Loader is inside a DataLoader, which would shard or batch it a second time. Pass the "
                "Loader itself to the Trainer."
            )
