"""Tensors and the bytes that they lie in. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._memory.allocation import Spec


_ALIGN = 64  # a cache line, and what vector instructions and `torch` like


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up."""
    return (nbytes + _ALIGN - 1) & -_ALIGN


def carved_bytes(specs: Sequence[Spec]) -> int:
    """How much memory `carved` needs."""
    return sum(aligned(_nbytes(*spec)) for spec in specs)


def carved(memory: np.ndarray, specs: Sequence[Spec]) -> list[torch.Tensor]:
    """Tensors that are views of ``memory`` (uint8), one after another, and keep it alive."""
    tensors, start = [], 0
    for shape, dtype in specs:
        nbytes = _nbytes(shape, dtype)
        tensors.append(tensor_over(memory[start : start + nbytes], shape, dtype_name(dtype)))
        start += aligned(nbytes)
    return tensors


def tensor_over(memory: Any, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A tensor whose bytes are ``memory``, which is kept alive: of an array a *slice*.

    Not the whole of a `SlotView`: NumPy, which shortens the chain of bases, would reach through it to the memory itself.
    """
    # Shaped in NumPy where it has the type, because a tensor made by `view` would answer `_is_view()` with yes.
    if dtype in IN_NUMPY:
        return torch.from_numpy(np.ndarray(shape, IN_NUMPY[dtype], memory))
    if not len(memory):
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(getattr(torch, dtype)).reshape(shape)


IN_NUMPY = {
    name: np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128")
}


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``"float32"``."""
    return str(dtype)[6:]


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    return nbytes


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a plain CPU tensor, contiguous: a view where they are that already, else a copy.

    Raises:
        RuntimeError: A dtype without bytes of its own, or a tensor without storage.
    """
    if dtype_name(tensor.dtype) in IN_NUMPY and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.numpy()
    flat: np.ndarray = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat
