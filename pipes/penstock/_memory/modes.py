"""Modes of torch that one thread is in: inference, gradients, autocast, the default device."""

from __future__ import annotations

import contextlib
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import is_grad_enabled, is_inference_mode_enabled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


P = ParamSpec("P")
T = TypeVar("T")

_AS_IT_IS = contextlib.nullcontext()


def _autocast_kinds() -> list[str]:
    """The kinds of device on which this thread casts. Asks no driver: a fork of a process that uses one must not."""
    kinds = ["cpu"]
    with contextlib.suppress(RuntimeError):  # torch 2.6 raises where there is no accelerator
        accelerator = torch.accelerator.current_accelerator()
        kinds += [] if accelerator is None else [accelerator.type]
    return [kind for kind in kinds if torch.is_autocast_enabled(kind)]


# torch has no public words for these. Without the first, only time is lost; without the others, the default device and function modes of
# the consumer reach the dataset, as they do with `DataLoader(num_workers=0)`.
_casts: Any = getattr(torch._C, "_is_any_autocast_enabled", _autocast_kinds)
_pop: Any = getattr(torch._C, "_pop_torch_function_stack", None)
_push: Any = getattr(torch._C, "_push_on_torch_function_stack", None)
_depth: Any = getattr(torch._C, "_len_torch_function_stack", int) if _pop and _push else int  # which gives 0


def neutral_modes() -> contextlib.AbstractContextManager[None]:
    """The modes that a new thread starts with, whatever this one has entered; costs 0.3 us where it has entered none.

    Batches are loaded under them, so that a batch is the same in whichever thread or process it was made, and so that what the training
    loop does around ``next`` (``torch.inference_mode``, ``no_grad``, ``autocast``, ``torch.device``) never reaches the dataset.
    """
    if is_grad_enabled() and not (is_inference_mode_enabled() or _depth() or _casts()):
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
    with contextlib.ExitStack() as stack:
        # The default device is one of these. Another one on top would not do: `torch.as_tensor` of a tensor would then move it there.
        for _ in range(_depth()):
            stack.callback(_push, _pop())
        stack.enter_context(torch.inference_mode(False))  # and with gradients
        for kind in _autocast_kinds():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
