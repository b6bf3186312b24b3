"""Memory for a batch: what is asked for, and two ways to get it that recycle nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

Allocate = Callable[[Sequence[Spec]], list[torch.Tensor]]
"""Memory for one batch: contiguous CPU tensors, contents undefined. Asked again for the same batch, it may give the same memory."""


def afresh(specs: Sequence[Spec]) -> list[torch.Tensor]:
    """`Allocate` without anything to recycle."""
    return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in specs]


def pinned(specs: Sequence[Spec]) -> list[torch.Tensor]:
    """`Allocate` in page-locked memory of torch's own cache, which waits for copies to a device that are still on their way."""
    return [torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True) for shape, dtype in specs]
