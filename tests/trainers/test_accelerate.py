"""What `AccelerateLoader` adds: the last window of an epoch synchronises, batches move, the state is saved."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from tests.trainers import loops
from tests.trainers.loops import PENSTOCK

from penstock import Loader
from penstock.integrations.accelerate import AccelerateLoader
from penstock.testing import Tagged

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:Counted has no state_dict")]


def new_accelerator(steps: int = 1) -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_steps=steps)


def windows(loader, accelerator: Accelerator, model: torch.nn.Module) -> list[bool]:
    """At which batches of an epoch gradients are synchronised."""
    seen = []
    for _ in loader:
        with accelerator.accumulate(model):
            seen.append(accelerator.sync_gradients)
    return seen


def test_the_last_window_of_an_epoch_synchronises() -> None:
    """Six batches in windows of four. The bare loader's last two are lost: it is what the shim is for."""
    accelerator = new_accelerator(4)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with Loader.from_dataset(Tagged(24), batch_size=4) as loader:
        assert windows(loader, accelerator, model) == [False, False, False, True, False, False]
    accelerator.step = 0
    with Loader.from_dataset(Tagged(24), batch_size=4) as loader:
        shim = AccelerateLoader(loader, accelerator)
        assert [windows(shim, accelerator, model) for _ in range(2)] == [[False, False, False, True, False, True]] * 2
        assert not accelerator.gradient_state.in_dataloader
        state = next(islice((loader.state_dict() for _ in shim), 2, None))
        loader.load_state_dict(state)
        accelerator.step = 0
        assert windows(shim, accelerator, model) == [False, False, True]
        assert len(shim) == 6


def test_an_unsized_loader_is_read_one_ahead_and_its_state_is_not(tmp_path: Path) -> None:
    """Seen to fail without commit(): the resumed run began one batch late."""
    whole, synced = loops.accelerate(PENSTOCK, tmp_path, save_at=18, unsized=True)
    assert whole == [list(range(1000 * e + first, 1000 * e + first + 4)) for e in range(3) for first in range(0, 48, 4)]
    assert synced == [5, 10, 12, 17, 22, 24, 29, 34, 36]
    resumed, again = loops.accelerate(PENSTOCK, tmp_path, resume=True, unsized=True)
    assert resumed == whole[18:]
    assert again == [step - 18 for step in synced if step > 18]


def test_an_old_pass_that_closes_late_leaves_the_new_one_alone() -> None:
    """Seen to fail when the loader itself was registered: the old pass took the new one's entry away."""
    accelerator = new_accelerator()
    with Loader.from_dataset(Tagged(24), batch_size=4) as loader:
        shim = AccelerateLoader(loader, accelerator, save=False)
        old = iter(shim)
        next(old)
        new = iter(shim)
        next(new)
        old.close()
        assert accelerator.gradient_state.in_dataloader
        list(new)
        assert not accelerator.gradient_state.in_dataloader


def test_batches_move_and_evaluation_is_not_saved() -> None:
    accelerator = new_accelerator()
    accelerator.state.device = torch.device("meta")
    try:
        with Loader.from_dataset(Tagged(24), batch_size=4) as loader:
            saved = len(accelerator._custom_objects)
            assert {batch.device.type for batch in AccelerateLoader(loader, accelerator, save=False)} == {"meta"}
            assert len(accelerator._custom_objects) == saved
            AccelerateLoader(loader, accelerator)
            assert accelerator._custom_objects[saved:] == [loader]
    finally:
        accelerator.state.device = torch.device("cpu")


def test_prepare_leaves_the_loader_as_it_is() -> None:
    """So nothing is told there, and nothing breaks; a DataLoader in the shim is refused."""
    accelerator = new_accelerator()
    with Loader.from_dataset(Tagged(24), batch_size=4) as loader:
        assert accelerator.prepare(loader) is loader
        shim = AccelerateLoader(loader, accelerator, save=False)
        assert accelerator.prepare(shim) is shim
    with pytest.raises(TypeError, match=r"DataLoader came.*accelerator\.prepare"):
        AccelerateLoader(torch.utils.data.DataLoader([1]), accelerator)
