"""SharedValues: small values in memory that the loop shares with the workers, such as a ``multiprocessing.Value`` with
the epoch.

A dataset that reads one may be asked for samples of an epoch before the loop has set the value for it. So the mapper
reads these values when it begins an epoch ahead of the loop, and again when the loop asks for that epoch.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from penstock._arguments import checksum
from penstock._errors import is_own_error, suppress_own
from penstock._fetch.held import SMALL, held
from penstock._memory.buffers import flat_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LARGE: Final = 64 * 1024
"""Bytes of the largest value of which a checksum is kept. One of more than 1 KB is what another process holds."""


@final
class SharedValues:
    """The shared values that some objects hold, looked for when an epoch is first begun ahead of the loop.

    Modules are looked up, not imported: an unimported one has made no value.

    Args:
        roots: The objects, by the first word of their paths.
        told: The root that is told its epoch; a value in which it keeps that does not count.

    Attributes:
        at_marker: The item that was read last ends an epoch, so the next one may be read before the loop asks for its
            epoch.
    """

    def __init__(self, roots: Mapping[str, Any], told: str | None) -> None:
        self._roots = roots
        self._told = told
        self.at_marker = False
        # the values with which the epoch was begun that the loop has not asked for yet
        self._begun: dict[str, bytes] = {}

    @cached_property
    def _readers(self) -> dict[str, Callable[[], bytes]]:
        readers = {}
        for one in held(self._roots)[0]:
            with suppress_own():  # such as a parameter whose shape is not known yet
                if (reader := _reader(one.value)) is not None:
                    readers[one.path] = reader
        return readers

    def read(self) -> dict[str, bytes]:
        """The values now, by their paths.

        One that cannot be read, such as a proxy whose manager has ended, is left out from then on.
        """
        values = {}
        for path, reader in list(self._readers.items()):
            try:
                values[path] = reader()
            except Exception as exc:
                if not is_own_error(exc):
                    raise
                del self._readers[path]
        return {
            path: value if len(value) <= SMALL else checksum(value).encode()
            for path, value in values.items()
            if len(value) <= _LARGE
        }

    def begin(self, before: dict[str, bytes] | None, waited: bool) -> None:
        """The first item of an epoch was read, and no worker has seen it yet.

        Args:
            before: The values before it was read; None if the loop asked for it.
            waited: Whether the loop waited meanwhile, and so cannot have set one.
        """
        if before is not None:
            self._begun = self._of_epoch(before, waited)
        self.at_marker = False

    def _of_epoch(self, before: dict[str, bytes], waited: bool) -> dict[str, bytes]:
        now = self.read()
        if self._told is not None:
            own = {path for path, value in now.items() if path.startswith(self._told) and before.get(path) != value}
            for path in own:
                self._readers.pop(path)
            now, before = (
                {path: value for path, value in values.items() if path not in own} for values in (now, before)
            )
        return now if waited else before

    def forget(self, *, at_marker: bool = False) -> None:
        """What was begun ahead is dropped, or, at a marker, another epoch begins."""
        self._begun, self.at_marker = {}, at_marker

    def changed(self) -> str | None:
        """The loop asks for the epoch: the path of a value that is no longer what it was when that was begun; None if
        all are.
        """
        begun, self._begun = self._begun, {}
        now = self.read() if begun else {}
        return next((path for path, value in begun.items() if path in now and now[path] != value), None)


def _reader(value: Any) -> Callable[[], bytes] | None:
    """A function that returns ``value`` as bytes, if it is small and in shared memory."""
    if isinstance(value, torch.Tensor):
        plain: Any = value  # torch has no types for what follows
        small = (
            plain.device.type == "cpu" and plain.layout == torch.strided and plain.nbytes <= SMALL and plain.is_shared()
        )
        return (lambda: flat_bytes(value).tobytes()) if small else None
    if isinstance(value, np.ndarray):
        return value.tobytes if value.nbytes <= SMALL and not value.dtype.hasobject and _is_view(value) else None
    if _is_a(value, "multiprocessing.sharedctypes", "SynchronizedBase"):
        return _reader(value.get_obj())
    if isinstance(value, ctypes._SimpleCData | ctypes.Array | ctypes.Structure):
        return (lambda: bytes(value)) if ctypes.sizeof(value) <= SMALL and hasattr(value, "_wrapper") else None
    if _is_a(value, "multiprocessing.synchronize", "Event") or _is_a(value, "multiprocessing.managers", "EventProxy"):
        return lambda: bytes([value.is_set()])
    if _is_a(value, "multiprocessing.managers", "BaseProxy"):
        return lambda: pickle.dumps(value._getvalue())
    if _is_a(value, "mmap", "mmap"):
        return (lambda: value[:]) if not value.closed and len(value) <= SMALL else None
    if _is_a(value, "multiprocessing.shared_memory", "ShareableList"):
        return lambda: pickle.dumps(list(value))
    if _is_a(value, "multiprocessing.shared_memory", "SharedMemory"):
        return (lambda: bytes(value.buf)) if value.size <= SMALL else None
    return None


def _is_a(value: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _is_view(array: np.ndarray) -> bool:
    """Whether ``array`` lies in memory that NumPy has not allocated: of a file, of ctypes, of a tensor, of shared
    memory.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.base is None:
            return False
        base = base.base
    return not isinstance(base, bytes)
