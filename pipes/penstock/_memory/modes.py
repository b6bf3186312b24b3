"""Torch's thread-local modes: inference, gradients, autocast, the default device."""

from __future__ import annotations

import contextlib
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, final

import torch
from torch import is_grad_enabled, is_inference_mode_enabled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


P = ParamSpec("P")
T = TypeVar("T")

_UNCHANGED = contextlib.nullcontext()


def _autocast_kinds() -> list[str]:
    """Device types that this thread autocasts on.

    Calls no driver, because a fork of a process that uses one must not.
    """
    kinds = ["cpu"]
    with contextlib.suppress(RuntimeError):  # torch 2.6 raises if there is no accelerator
        accelerator = torch.accelerator.current_accelerator()
        kinds += [] if accelerator is None else [accelerator.type]
    return [kind for kind in kinds if torch.is_autocast_enabled(kind)]


# torch has no public names for these. If the first is missing, we only lose time. If the others are missing, the
# consumer's default device and function modes reach the dataset, as they do with `DataLoader(num_workers=0)`.
_casts: Any = getattr(torch._C, "_is_any_autocast_enabled", _autocast_kinds)
_pop: Any = getattr(torch._C, "_pop_torch_function_stack", None)
_push: Any = getattr(torch._C, "_push_on_torch_function_stack", None)
_depth: Any = getattr(torch._C, "_len_torch_function_stack", int) if _pop and _push else int  # int() is 0


def are_neutral() -> bool:
    """Whether this thread is in the modes that a new thread starts with."""
    return is_grad_enabled() and not (is_inference_mode_enabled() or _depth() or _casts())


def neutral_modes() -> contextlib.AbstractContextManager[None]:
    """Run the body under the modes that a new thread starts with; costs 0.3 us if this thread is already in them.

    Batches are loaded this way, so that every thread and process makes the same batch, and so that modes entered around
    ``next`` (``torch.inference_mode``, ``no_grad``, ``autocast``, ``torch.device``) never reach the dataset.
    """
    return _UNCHANGED if are_neutral() else _neutral()


def in_neutral_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: call ``function`` under `neutral_modes`."""

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> T:
        with neutral_modes():
            return function(*args, **options)

    return called


@final
class GradientMode:
    """The gradient mode of a user's iterator, in which it goes on; a context to read it in.

    ``with torch.no_grad(): yield item`` leaves the thread without gradients until the next item. Outside of this
    context, that must reach neither the training loop nor another iterator.
    """

    __slots__ = ("_enabled", "_outside")

    def __init__(self) -> None:
        self._enabled: bool | None = None  # None: as it is outside

    def __enter__(self) -> None:
        self._outside = is_grad_enabled()
        if self._enabled is not None:
            torch.set_grad_enabled(self._enabled)

    def __exit__(self, *exc: object) -> None:
        enabled = is_grad_enabled()
        self._enabled = None if enabled == self._outside else enabled
        if self._enabled is not None:
            torch.set_grad_enabled(self._outside)


@contextlib.contextmanager
def _neutral() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        # A default device is one of these function modes. Pushing "cpu" on top instead would make `torch.as_tensor`
        # move device tensors to it.
        for _ in range(_depth()):
            stack.callback(_push, _pop())
        stack.enter_context(torch.inference_mode(False))  # this also enables gradients
        for kind in _autocast_kinds():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
