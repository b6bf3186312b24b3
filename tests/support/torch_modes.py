"""Modes that a thread can be in, by name; each is a function that makes a context manager."""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode


class Counting(TorchFunctionMode):
    """Counts what it sees, and changes nothing."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


# In this order, because torch 2.6 can leave a default device only where no other is within it.
MODES = {
    "none": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: default_device("meta"),
    "device": lambda: torch.device("meta"),
    "function mode": Counting,
}


@contextlib.contextmanager
def every_mode():
    """All of them at once."""
    with contextlib.ExitStack() as stack:
        for enter in MODES.values():
            stack.enter_context(enter())
        yield


def seen():
    """What code can see of its thread's modes, as plain values."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ weight
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        product.requires_grad,
        str(product.dtype),
        str(torch.empty(2).device),
        torch._C._len_torch_function_stack(),
    )
