"""Lightning: one callback that makes every checkpoint of a `Trainer` resume exactly.

``Trainer(callbacks=[LightningCallback()])``. Without it the loader's state is in Lightning's checkpoint too, but Lightning restores it only
where it resumes inside an epoch, after it has fetched from an un-sized loader, and counts an epoch in steps of the old world size.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, final

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from penstock import GraphError, Loader, StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import LightningModule, Trainer


@final
class LightningCallback(Callback):
    """Save and restore the training loaders with the callbacks, which Lightning always does, and before it fetches the first batch.

    It finds every `Loader` among the training loaders by itself, also those that a ``train_dataloader`` hook makes, and

    - lets their states mean the last batch that was *trained* (`Loader.commit`), whatever was fetched ahead or failed;
    - restores them before the first batch is fetched, whichever checkpoint it is;
    - hands the position on, where ``reload_dataloaders_every_n_epochs`` makes new loaders;
    - gives up the rest of an epoch that ``limit_train_batches`` cuts short, in the state too (`Loader.end_epoch`);
    - sets Lightning's count of batches after the loader, when another number of ranks, or another batch size, goes on inside an epoch;
    - begins the next epoch where ``max_steps`` makes Lightning go on inside a finished one;
    - lets each loader count its own epochs once training goes on, whatever number Lightning tells it after a resume;
    - repeats the batches of epoch 0 under ``overfit_batches``, in training and validation;
    - refuses ranks whose epochs differ in length, and a loader inside a ``DataLoader``, before the first step.

    Use it without arguments, once; the place among the callbacks does not matter, because Lightning calls checkpoints last.
    """

    state_key = "PenstockCallback"  # under which checkpoints keep it, whatever the class is called: Lightning only warns of a key that it does not know

    def __init__(self) -> None:
        self._loaders: list[Loader[Any]] = []
        self._pending: list[dict[str, Any]] | None = None  # states that came before their loaders
        self._starts: list[dict[str, Any]] = []  # where the loaders stood before Lightning fetched from them
        self._fetch_again = False
        self._overfits = False
        self._trained = False  # a batch, in this fit

    # Saving and loading. Lightning calls both on every rank, and writes what rank 0 gave: it is the same on all of them.

    def state_dict(self) -> dict[str, Any]:
        """The states of the loaders, in order; nothing where there are none."""
        states = [loader.state_dict() for loader in self._loaders] if self._pending is None else self._pending
        return {"loaders": states} if states else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states for the loaders, or load them, where the loaders are there already."""
        self._pending = list(state_dict["loaders"])
        if self._loaders:  # A strategy that restores late, after the loaders were asked for their length.
            self._load(self._loaders)
            self._fetch_again = True

    # Where Lightning gets its loaders from. It has no hook between that and the first fetch, so its source is watched.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch for training loaders."""
        if stage == "fit":
            self._loaders, self._trained = [], False
            self._overfits = trainer.overfit_batches > 0  # type: ignore[attr-defined]
            source = trainer.fit_loop._data_source
            vars(source)["dataloader"] = lambda: self._seen(type(source).dataloader(source))
            if self._overfits:
                validation = trainer.fit_loop.epoch_loop.val_loop._data_source
                vars(validation)["dataloader"] = lambda: _fixed(type(validation).dataloader(validation), "sequential")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch no longer."""
        for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
            vars(loop._data_source).pop("dataloader", None)

    def _seen(self, dataloaders: Any) -> Any:
        """Let the loaders in ``dataloaders`` stand where they should, before anyone fetches from them."""
        combined = dataloaders if isinstance(dataloaders, CombinedLoader) else CombinedLoader(dataloaders)
        for one in combined.flattened:
            _refuse_wrapped(one)
        loaders = [one for one in combined.flattened if isinstance(one, Loader)]
        known = {id(loader) for loader in self._loaders}
        if self._pending is not None:
            self._load(loaders)
        elif len(loaders) == len(self._loaders):
            for loader, before in zip(loaders, self._loaders, strict=True):
                if id(loader) not in known:  # Reloaded: it goes on where the one before it ended, also with other data.
                    loader.load_state_dict(before.state_dict(), strict=False)
        for loader in loaders:
            if self._overfits and loader.epoch:
                _to_epoch_0(loader)
            loader.commit(0)
        self._loaders, self._starts = loaders, [loader.state_dict() for loader in loaders]
        return _fixed(dataloaders, "max_size_cycle") if self._overfits else dataloaders

    def _load(self, loaders: list[Loader[Any]]) -> None:
        states, self._pending = self._pending or [], None
        if len(states) != len(loaders):
            raise StateError(
                f"the checkpoint has the states of {len(states)} penstock loaders, and there are {len(loaders)} now. Train with those it was saved with."
            )
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)

    # While it trains.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse unequal ranks; let Lightning's counter follow the loader."""
        if self._fetch_again:
            self._fetch_again = False
            iter(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]  # its old iterator died with the load
        for loader in self._loaders:
            if (batches := _length(loader)) is not None:
                _refuse_unequal(trainer, batches)
        self._count_as_the_loader(trainer)
        if self._loaders:
            _begin_the_next_epoch(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let each loader go on by itself; put back what Lightning fetched from new un-sized ones, where it is about to call ``iter`` again."""
        if self._trained:
            # Lightning has just set its own number of the epoch: another one than the loader's behind a run that max_steps ended
            # in mid-epoch, and for a short loader that was begun several times. The loader's is in the checkpoint.
            for loader in self._loaders:
                loader._cursor.request(None)
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

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """This batch was trained."""
        self._starts, self._trained = [], True
        for loader in self._loaders:
            with contextlib.suppress(ValueError):  # A short loader among several had no batch in this step.
                loader.commit()
        self._end_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Also where the last batch was skipped."""
        self._end_epoch(trainer)

    def _end_epoch(self, trainer: Trainer) -> None:
        """When Lightning's epoch is over, so is the loader's, whatever limit ended it. Not where it only stops."""
        if trainer.is_last_batch:
            for loader in self._loaders:
                if self._overfits:
                    _to_epoch_0(loader)
                elif not loader.endless:
                    loader.end_epoch()

    def _count_as_the_loader(self, trainer: Trainer) -> None:
        """Batches done in this epoch, in steps of this world size. Lightning restored those of the old one, and ends the epoch by them."""
        batches = trainer.num_training_batches
        leading = self._loaders if len(self._loaders) == 1 else [loader for loader in self._loaders if _length(loader) == batches]
        if not leading or _length(leading[0]) is None or not trainer.fit_loop.restarting:
            return
        loop = trainer.fit_loop.epoch_loop
        done = int(batches) if loop.batch_progress.is_last_batch else min(leading[0].position or 0, int(batches))
        in_hand = int(
            loop.restarted_on_train_batch_end
        )  # Saved in the middle of on_train_batch_end: Lightning counts that batch as completed itself.
        current = loop.batch_progress.current
        if current.completed + in_hand != done:
            current.ready = current.started = current.processed = done  # type: ignore[attr-defined]
            current.completed = done - in_hand


def _begin_the_next_epoch(trainer: Trainer) -> None:
    """With ``max_steps``, Lightning takes an epoch that was saved at its very end for unfinished, and would train one more batch in it.

    Here it does what it does with ``max_epochs``.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if fit.restarted_on_epoch_end and loop.batch_progress.is_last_batch:
        fit.epoch_progress.increment_completed()
        for one in (fit, loop, loop.val_loop):
            one._restarting = False
            one.reset_restart_stage()


@final
class _Epoch0:
    """A loader that begins with the batches of epoch 0 whenever it is begun, for ``overfit_batches``.

    It has no ``sampler`` and no ``dataset``, so that Lightning does not try to build it anew with a sampler of its own.
    """

    def __init__(self, loader: Loader[Any]) -> None:
        self.loader = loader
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        self.loader.set_epoch(0)
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def _fixed(dataloaders: Any, mode: Any) -> CombinedLoader:
    """What Lightning would make of ``dataloaders``, with every `Loader` at epoch 0; the user's own `CombinedLoader` stays as it is."""
    given = dataloaders if isinstance(dataloaders, CombinedLoader) else CombinedLoader(dataloaders, mode)
    combined = CombinedLoader(given.iterables, given._mode)
    combined.flattened = [_Epoch0(one) if isinstance(one, Loader) else one for one in combined.flattened]
    return combined


def _to_epoch_0(loader: Loader[Any]) -> None:
    """Let ``loader`` stand at the start of epoch 0, in its state too."""
    ((key, text),) = loader.state_dict().items()
    loader.load_state_dict({key: json.dumps(json.loads(text) | {"state": loader.root.start_of(0)})})


def _length(loader: Loader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _refuse_unequal(trainer: Trainer, batches: int) -> None:
    if trainer.world_size == 1:
        return
    counts = trainer.strategy.all_gather(torch.tensor(batches, device=trainer.strategy.root_device)).flatten().tolist()
    if len(set(counts)) > 1:
        raise GraphError(
            f"the ranks have {counts} training batches an epoch, and DDP hangs where one has more than another. Use tail='drop' or tail='pad'; "
            f"tail='exact' is for evaluation."
        )


def _refuse_wrapped(one: Any) -> None:
    if isinstance(one, DataLoader):
        held = (one.dataset, *getattr(one.dataset, "__dict__", {}).values())
        if any(isinstance(thing, Loader) for thing in held):
            raise TypeError(
                "a penstock.Loader stands inside a DataLoader, which would shard or batch it a second time. Give the Loader itself to the Trainer."
            )
