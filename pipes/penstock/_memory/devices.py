"""Devices: which ones this machine has, page-locked memory for copies to them, and the streams that copy."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from penstock._memory.tree import has_method, mapped

if TYPE_CHECKING:
    from collections.abc import Iterator


def present_accelerator() -> torch.device | None:
    """The machine's accelerator, as a device without an index; None if there is none."""
    # Ask `is_available` first: without an accelerator `current_accelerator` raises in torch 2.6, and names the build's
    # target in later versions.
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

    A tensor on a device stays where it is; torch's own function would raise. A container that torch would replace by a
    list or a dict, such as a ``range``, is unchanged too, so that the type of a batch does not depend on the machine.
    """
    return mapped(batch, _pinned, "pin_memory")


def _pinned(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
        return leaf
    pinned = pin_memory(leaf)  # type: ignore[no-untyped-call]
    return leaf if type(pinned) in (dict, list) and not has_method(leaf, "pin_memory") else pinned


def can_pin() -> bool:
    """Whether pinned memory speeds up copies to this machine's accelerator."""
    accelerator = present_accelerator()
    return accelerator is not None and accelerator.type != "mps"


def device_module(device: torch.device) -> Any:
    """The module of a kind of device, such as ``torch.cuda``; None if its backend has none."""
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


@final
class Streams:
    """A separate stream for copies to ``device``, and the current streams of callers.

    It uses torch's generic interface (``torch.Stream``, ``torch.accelerator``), or the backend's module if the backend
    does not implement that.

    Attributes:
        own: A new stream, with ``record_event`` and ``wait_event``; None if the device has only its default stream.
        records: Whether ``tensor.record_stream`` keeps memory from being reused before a stream is done with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None
        self.own: Any
        try:
            current, self.own = self.current(), torch.Stream(device)
        except (RuntimeError, TypeError, ValueError):
            # the backend does not implement it, or this is another accelerator
            self._module = device_module(device)
            self.own = self._module.Stream(device) if hasattr(self._module, "Stream") else None
        else:
            if self.own == current:  # as on MPS
                self.own = None
        self.records = self.own is not None and self._can_record()

    def _can_record(self) -> bool:
        try:
            torch.empty(1, device=self._device).record_stream(self.own)
        except RuntimeError:  # also NotImplementedError
            return False
        return True

    def current(self) -> Any:
        """The current stream of the calling thread."""
        return (torch.accelerator if self._module is None else self._module).current_stream(self._device)

    def enter_thread(self) -> None:
        """Make the device the calling thread's current one."""
        if self._module is None:
            torch.accelerator.set_device_index(self._device)
        else:
            self._module.set_device(self._device)

    @contextlib.contextmanager
    def on_own(self) -> Iterator[None]:
        """Make the new stream the calling thread's current one."""
        if self._module is not None:
            with self._module.stream(self.own):
                yield
            return
        before = self.current()
        torch.accelerator.set_stream(self.own)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
