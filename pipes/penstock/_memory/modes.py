"""Modes of torch that one thread is in: inference, gradients, autocast, the default device."""

from __future__ import annotations

import contextlib
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import is_grad_enabled, is_inference_mode_enabled
from torch._C import (
    _is_any_autocast_enabled,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


P = ParamSpec("P")
T = TypeVar("T")

_AS_IT_IS = contextlib.nullcontext()


def neutral_modes() -> contextlib.AbstractContextManager[None]:
    """The modes that a new thread starts with, whatever this one has entered; costs 0.3 us where it has entered none.

    Batches are loaded under them, so that a batch is the same in whichever thread or process it was made, and so that what the training
    loop does around ``next`` (``torch.inference_mode``, ``no_grad``, ``autocast``, ``torch.device``) never reaches the dataset.
    """
    if is_grad_enabled() and not (is_inference_mode_enabled() or _len_torch_function_stack() or _is_any_autocast_enabled()):
        return _AS_IT_IS
    return _left()


def in_neutral_modes(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, called under `neutral_modes`."""

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> T:
        with neutral_modes():
            return function(*args, **options)

    return called


@contextlib.contextmanager
def _left() -> Iterator[None]:
    accelerator = torch.accelerator.current_accelerator()
    with contextlib.ExitStack() as stack:
        # The default device is one of these. Another one on top would not do: `torch.as_tensor` of a tensor would then move it there.
        for _ in range(_len_torch_function_stack()):
            stack.callback(_push_on_torch_function_stack, _pop_torch_function_stack())
        stack.enter_context(torch.inference_mode(False))  # and with gradients
        for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
