"""Tensors and the bytes underneath them. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._memory.allocation import Spec


_ALIGN = 64  # a cache line; also the alignment that vector instructions and torch prefer


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return (nbytes + _ALIGN - 1) & -_ALIGN


def carved_bytes(specs: Sequence[Spec]) -> int:
    """Bytes that `carved` needs for ``specs``."""
    return sum(aligned(_nbytes(*spec)) for spec in specs)


def carved(memory: np.ndarray, specs: Sequence[Spec]) -> list[torch.Tensor]:
    """Tensors laid out one after another in ``memory`` (uint8); they are views and keep it alive."""
    tensors, start = [], 0
    for shape, dtype in specs:
        nbytes = _nbytes(shape, dtype)
        tensors.append(tensor_over(memory[start : start + nbytes], shape, dtype_name(dtype)))
        start += aligned(nbytes)
    return tensors


def tensor_over(memory: Any, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A tensor over the bytes of ``memory``, which it keeps alive.

    Pass a *slice* of an array, never a whole `SlotView`: NumPy shortens the chain of bases and would skip the
    `SlotView`.
    """
    # NumPy does the shaping if it knows the dtype, because a tensor made by `view` reports `_is_view()`.
    if dtype in IN_NUMPY:
        return torch.from_numpy(np.ndarray(shape, IN_NUMPY[dtype], memory))
    if not len(memory):
        return torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(DTYPES[dtype]).reshape(shape)


DTYPES = {
    name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype) and not name.startswith("q")
}
"""The dtypes of unquantized tensors, by name. (Looking up a name from a file in torch itself could import a module.)"""
IN_NUMPY = {
    name: np.dtype(name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
}

"""The dtypes that torch and NumPy share, by name, in NumPy."""
IN_TORCH: dict[np.dtype[Any], torch.dtype] = {dtype: getattr(torch, name) for name, dtype in IN_NUMPY.items()}
"""The same in torch."""


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name that torch and NumPy share, such as ``"float32"``."""
    return str(dtype)[6:]


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    return nbytes


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The contiguous bytes of a plain CPU tensor: a view if the tensor is contiguous, else a copy.

    Raises:
        RuntimeError: The dtype has no bytes of its own, or the tensor has no storage.
    """
    if dtype_name(tensor.dtype) in IN_NUMPY and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.numpy()
    return flat_bytes(tensor)


def flat_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The contiguous bytes of a tensor, as uint8: a view if it is on the CPU and contiguous, else a copy.

    Raises:
        RuntimeError: As `bytes_of`, or it is not strided.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # a single number may have any stride, even so, and then it cannot be viewed as bytes
    flat: np.ndarray = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
    return flat
