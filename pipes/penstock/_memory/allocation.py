"""How memory for a batch is requested, and three allocators that recycle nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

Allocate = Callable[[Sequence[Spec]], list[torch.Tensor] | None]
"""Returns contiguous CPU tensors for one batch, contents undefined; None: it may be anywhere.

A second call for the same batch may return the same memory.
"""


def anywhere(specs: Sequence[Spec]) -> None:
    """An `Allocate` that leaves it to the caller."""


def afresh(specs: Sequence[Spec]) -> list[torch.Tensor]:
    """An `Allocate` of new memory."""
    return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in specs]


def pinned(specs: Sequence[Spec]) -> list[torch.Tensor]:
    """An `Allocate` of page-locked memory from torch's own cache, which does not reuse a block while a copy to a device
    is in flight.
    """
    return [torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True) for shape, dtype in specs]
