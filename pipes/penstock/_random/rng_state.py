"""The random state of the training process, for a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_rng_state() -> dict[str, Any]:
    """Return the state of every generator that the training loop draws from (dropout, mixup), to be saved with
    ``loader.state_dict()``.

    These are ``random``, ``numpy.random``, and torch's default generators on the CPU and on the current accelerator, if
    this process has used it. The random numbers of the samples are not included: they follow from the loader's own
    state. Ranks draw different numbers, so each rank saves its own state.

    Returns:
        A dict of about 15 KB that contains only numbers, lists and tensors, which ``torch.load(weights_only=True)``
        accepts.
    """
    device = _device_module()
    return {
        "python": random.getstate(),
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "device": device.get_rng_state()
        if device is not None and getattr(device, "is_initialized", lambda: True)()
        else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the result of `get_rng_state`.

    Call it last, right before the loop, because building a model draws random numbers too.
    """
    version, words, deviate = state["python"]
    random.setstate((version, tuple(words), deviate))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())  # `torch.load(map_location=…)` moves all tensors
    device = _device_module()
    if device is not None and state["device"] is not None:
        device.set_rng_state(state["device"].cpu())


get_rng_state.__module__ = set_rng_state.__module__ = "penstock"


def _device_module() -> Any:
    """The module of the current accelerator, such as ``torch.cuda``; None if there is none."""
    return (
        torch.get_device_module(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else None
    )


def _plain(state: Any) -> Any:
    """The state of a NumPy generator, of any kind, with lists in place of arrays."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state
