"""SharedValues: small values in memory that the loop shares with the workers, such as a ``multiprocessing.Value`` with the epoch.

A dataset that reads one may be asked for samples of an epoch before the loop has set the value for it. So the mapper reads these values when it begins an
epoch ahead of the loop, and again when the loop asks for that epoch.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from penstock._arguments import checksum
from penstock._errors import is_own_error
from penstock._fetch.fetch import Fetch
from penstock._fetch.held import SMALL, held

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGE: Final = 64 * 1024
"""Bytes of the largest value of which a checksum is kept. One of more than 1 KB is what another process holds."""


@final
class SharedValues:
    """The shared values that ``map_fn`` or ``iterable`` holds. Modules are looked up, not imported: an unimported one has made no value.

    Args:
        map_fn: A `Fetch`, whose dataset, transform and collate function are looked into, or any function.
        iterable: What the items are read from; None if it is no iterable.
        worker_init_fn: May hold one for the workers, as a ``functools.partial`` does.
    """

    def __init__(self, map_fn: Callable[[Any], Any], iterable: Any, worker_init_fn: Any = None) -> None:
        self._told = hasattr(iterable, "set_epoch")
        roots: dict[str, Any] = {"iterable": iterable, "function": map_fn}
        if isinstance(map_fn, Fetch):
            roots = {"iterable": iterable, "dataset": map_fn.dataset, "transform": map_fn.transform, "collate_fn": map_fn.collate_fn}
        found, _ = held({**roots, "worker_init_fn": worker_init_fn})
        self._readers = {one.path: reader for one in found if (reader := _reader(one.value)) is not None}

    def read(self) -> dict[str, bytes]:
        """The values now, by their paths. One that cannot be read, such as a proxy whose manager has ended, is left out from then on."""
        values = {}
        for path, reader in list(self._readers.items()):
            try:
                values[path] = reader()
            except Exception as exc:
                if not is_own_error(exc):
                    raise
                del self._readers[path]
        return {path: value if len(value) <= SMALL else checksum(value).encode() for path, value in values.items() if len(value) <= _LARGE}

    def begun(self, before: dict[str, bytes], waited: bool) -> dict[str, bytes]:
        """The values with which an epoch begins. One in which an iterable with a ``set_epoch`` keeps its epoch does not count from then on.

        Args:
            before: The values before the first item of the epoch was read.
            waited: Whether the loop waited meanwhile, and so cannot have set one.
        """
        now = self.read()
        if self._told:
            own = {path for path, value in now.items() if path.startswith("iterable") and before.get(path) != value}
            self._readers = {path: reader for path, reader in self._readers.items() if path not in own}
            now, before = ({path: value for path, value in values.items() if path not in own} for values in (now, before))
        return now if waited else before

    def changed(self, before: dict[str, bytes]) -> str | None:
        """The path of a value that is no longer what it was ``before``; None if all are."""
        now = self.read()
        return next((path for path, value in before.items() if path in now and now[path] != value), None)


def _reader(value: Any) -> Callable[[], bytes] | None:
    """A function that returns ``value`` as bytes, if it is small and in shared memory."""
    if isinstance(value, torch.Tensor):
        plain: Any = value  # torch has no types for what follows
        small = plain.device.type == "cpu" and plain.layout == torch.strided and plain.nbytes <= SMALL and plain.is_shared()
        return (lambda: value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if small else None
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
    """Whether ``array`` lies in memory that NumPy has not allocated: of a file, of ctypes, of a tensor, of shared memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.base is None:
            return False
        base = base.base
    return not isinstance(base, bytes)
