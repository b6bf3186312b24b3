"""Devices: which ones this machine has, and page-locked memory for copies to them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from penstock._memory.tree import has_method, mapped


def present_accelerator() -> torch.device | None:
    """The machine's accelerator, as a device without an index; None if there is none."""
    # Ask `is_available` first: without an accelerator `current_accelerator` raises in torch 2.6, and names the build's target in later versions.
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def resolve_device(device: torch.device | str) -> torch.device:
    """``device``, with an index if its kind has indices.

    Raises:
        ValueError: This machine has no such device.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a torch device: {error}") from error
    found = ["cpu"]
    accelerator = present_accelerator()
    if accelerator is not None:
        found += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.index is None and accelerator is not None and wanted.type == accelerator.type:
        wanted = torch.device(wanted.type, torch.accelerator.current_device_index())
    if str(wanted) not in found:
        raise ValueError(f"device={str(device)!r} does not exist here. This machine has: {', '.join(found)}.")
    return wanted


def pin(batch: Any) -> Any:
    """``batch`` in page-locked memory, as with ``DataLoader(pin_memory=True)``; dataclasses are pinned too.

    A tensor on a device stays where it is; torch's own function would raise. So does a container that torch would replace by a list or a dict,
    such as a ``range``: what a batch is does not depend on the machine.
    """
    return mapped(batch, _pinned, "pin_memory")


def _pinned(leaf: Any) -> Any:
    if _on_device(leaf):
        return leaf
    pinned = pin_memory(leaf)  # type: ignore[no-untyped-call]
    return leaf if type(pinned) in (dict, list) and not has_method(leaf, "pin_memory") else pinned


def _on_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"


def can_pin() -> bool:
    """Whether pinned memory speeds up copies to this machine's accelerator."""
    accelerator = present_accelerator()
    return accelerator is not None and accelerator.type != "mps"
