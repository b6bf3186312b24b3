"""The random state of the training process in a checkpoint: a resumed run draws in its loop what it would have
drawn."""

from __future__ import annotations

import io
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import penstock
from penstock._random.global_rng import global_rngs_kept, seed_globals


class Noisy:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((4,), index / 24 + penstock.sample().rng.normal(), dtype=torch.float32)


def trained(how, checkpoint=None, device="cpu"):
    """The losses of two epochs, or of what a checkpoint left of them, and the checkpoint after each step."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).to(device)
    losses, checkpoints = [], []
    with penstock.Loader.from_dataset(Noisy(), batch_size=8, shuffle=True, seed=1, **how) as loader:
        if checkpoint is not None:
            saved = torch.load(io.BytesIO(checkpoint), weights_only=True, map_location=device)
            model.load_state_dict(saved["model"])
            loader.load_state_dict(saved["loader"])
            penstock.set_rng_state(saved["rng"])
        for _ in range(loader.epoch, 2):
            for batch in loader:
                # each keeps a second number for the next call
                share = np.random.randn() + random.gauss(0, 1) + torch.randn(()).item()
                loss = model(share * batch.to(device) + torch.randn((), device=device)).square().mean()
                model.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 1e-3 * parameter.grad
                losses.append(loss.item())
                file = io.BytesIO()
                torch.save(
                    {"model": model.state_dict(), "loader": loader.state_dict(), "rng": penstock.get_rng_state()}, file
                )
                checkpoints.append(file.getvalue())
    return losses, checkpoints


def resumes_everywhere(how, **device):
    with global_rngs_kept():
        seed_globals(0, 0, 0)
        losses, checkpoints = trained(how, **device)
        assert len(set(losses)) == len(losses) == 6
        for step, checkpoint in enumerate(checkpoints, 1):
            seed_globals(0, 0, step)
            assert trained(how, checkpoint, **device)[0] == losses[step:], f"differs when resumed after step {step}"


@pytest.mark.parametrize("how", [{}, {"num_workers": 2, "method": "thread"}], ids=["inline", "thread"])
def test_a_loop_that_draws_resumes_bit_for_bit(how):
    """Seen to fail: without the state of any one of the generators, and, of NumPy's, without the normal deviate that it
    keeps."""
    resumes_everywhere(how)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")
def test_a_loop_that_draws_on_the_device_resumes_bit_for_bit():
    resumes_everywhere({}, device=torch.accelerator.current_accelerator())


def test_the_generator_of_a_device_is_put_back_if_the_process_uses_it(monkeypatch):
    """On a stand-in for ``torch.cuda``. Seen to fail: without the state of the device; one that was never used is left
    alone."""
    generator = torch.Generator()
    device = SimpleNamespace(
        get_rng_state=generator.get_state, set_rng_state=generator.set_state, is_initialized=lambda: True
    )
    monkeypatch.setattr("penstock._random.rng_state._device_module", lambda: device)
    state = penstock.get_rng_state()
    drawn = torch.rand((), generator=generator)
    penstock.set_rng_state(state)
    assert torch.rand((), generator=generator) == drawn
    device.is_initialized = lambda: False
    assert penstock.get_rng_state()["device"] is None


def test_another_kind_of_generator_in_numpy():
    """Seen to fail: ``numpy.random.get_state()`` as it is, which only knows the Mersenne Twister."""
    twister = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = penstock.get_rng_state()
        drawn = np.random.random()
        penstock.set_rng_state(state)
        assert np.random.random() == drawn
    finally:
        np.random.set_bit_generator(twister)


def test_a_state_can_be_used_twice_and_taking_it_draws_nothing():
    with global_rngs_kept():
        state = penstock.get_rng_state()
        drawn = [(random.random(), np.random.random(), torch.rand(()).item())]
        for _ in range(2):
            penstock.set_rng_state(state)
            drawn.append((random.random(), np.random.random(), torch.rand(()).item()))
        assert len(set(drawn)) == 1


def test_the_state_holds_what_torch_loads_safely():
    """Numbers, lists and tensors. Seen to fail: with arrays."""
    state = penstock.get_rng_state()
    assert state.keys() == {"python", "numpy", "torch", "device"}
    assert type(state["numpy"]["state"]["key"]) is list
    assert torch.load(io.BytesIO(saved(state)), weights_only=True).keys() == state.keys()


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_a_device_that_does_not_say_whether_it_is_used_is_saved(monkeypatch):
    """And one that came later is left alone. Seen to fail: both."""
    generator = torch.Generator()
    device = SimpleNamespace(get_rng_state=generator.get_state, set_rng_state=generator.set_state)
    without = penstock.get_rng_state() | {"device": None}
    monkeypatch.setattr("penstock._random.rng_state._device_module", lambda: device)
    assert torch.equal(penstock.get_rng_state()["device"], generator.get_state())
    before = generator.get_state()
    penstock.set_rng_state(without)
    assert torch.equal(generator.get_state(), before)
    monkeypatch.setattr("penstock._random.rng_state._device_module", lambda: None)
    penstock.set_rng_state(without | {"device": before})


def test_the_device_is_the_current_accelerator(monkeypatch):
    from penstock._random.rng_state import _device_module

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert _device_module() is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: "it")
    monkeypatch.setattr(torch, "get_device_module", lambda device: [device])
    assert _device_module() == ["it"]
