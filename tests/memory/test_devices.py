"""Devices are queried in a way that every supported torch version answers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from penstock import Loader
from penstock._memory.devices import can_pin, present_accelerator
from penstock._memory.modes import neutral_modes
from penstock.nodes import PinMemory

needs_none = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@needs_none
def test_pin_memory_without_an_accelerator_is_no_error():
    """Used to raise with torch 2.6: `can_pin` asked which accelerator there is before it asked whether there is one."""
    assert present_accelerator() is None
    assert not can_pin()
    data = TensorDataset(torch.arange(4))
    with Loader.from_dataset(data, batch_size=2, pin_memory=True, num_workers=1, method="thread") as loader:
        assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]
    with pytest.warns(UserWarning, match="no accelerator"):
        PinMemory(Loader.from_dataset(data).root)


@needs_none
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_are_left_without_an_accelerator(mode):
    """Used to raise with torch 2.6: the autocast kinds included an accelerator that does not exist."""
    with mode(), neutral_modes():
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
    with mode(), Loader.from_dataset(TensorDataset(torch.arange(4)), batch_size=2) as loader:
        assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]
