"""DatasetCopies: copies of a dataset within one process, each with a distinct position."""

from __future__ import annotations

import io
import mmap
import pickle
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, final

import numpy as np
import torch

from penstock._errors import GraphError, is_own_error
from penstock._fetch.held import EndOfWalk
from penstock._memory.parcel import Reducers, reduce_as_torch

LARGE: Final = 2**16
"""Bytes of the largest array or tensor that is copied. A larger one is data, which all copies share."""
_LONG: Final = 256
"""Bytes or characters of the longest ``bytes`` or ``str`` that is copied. They cannot change."""
_FEW: Final = 64
"""Bytes of the largest tensor in shared memory that is compared, because the loop may set it."""
_SHARED: Final = (mmap.mmap, FunctionType, BuiltinFunctionType, ModuleType, type)
_OF_PROCESSES: Final = ("multiprocessing.sharedctypes", "multiprocessing.synchronize")
"""Modules of values and locks that processes share."""
_OF_ARROW: Final = ("Table", "RecordBatch", "ChunkedArray", "Array", "Buffer")


@final
class DatasetCopies(EndOfWalk):
    """Makes copies of ``dataset`` as it is when the first one is made, in each process.

    Copies share functions, classes, values and locks of multiprocessing, Arrow's tables, long strings, and arrays and
    tensors over 64 KB: one copy of a 10 GB array per lane would not fit, and of a memory map it would be read whole. A
    shared array cannot be written to,
    because a shuffle in place would shuffle it for all copies. Torch has no tensor of that kind; see `changed`.

    Attributes:
        attributes: Its plain ones, as they are in a new copy.

    Args:
        dataset: Anything that pickle can copy. Its functions may be local ones.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._pickled: tuple[bytes, list[Any]] | None = None
        self._versions: list[tuple[Any, int]] = []
        self.attributes: dict[str, Any] = {}
        self.left: set[str] = set()  # see `ToldParts`

    def __call__(self) -> Any:
        """Another copy.

        Raises:
            GraphError: It cannot be copied.
        """
        try:
            if self._pickled is None:
                pickler = _Pickler(file := io.BytesIO())
                pickler.dump(self.dataset)
                tensors = [one for one in pickler.shared if isinstance(one, torch.Tensor) and not one.is_inference()]
                self._versions = [(one, one._version) for one in tensors]
                self._pickled, self.attributes = (file.getvalue(), pickler.shared), plain(self.dataset)
            return _Unpickler(*self._pickled).load()
        except Exception as exc:
            if not is_own_error(exc):
                raise
            raise GraphError(
                f"{type(self.dataset).__name__} cannot be copied ({type(exc).__name__}: {exc}), but each lane reads a "
                f"copy with a position of its own. Open files and connections, and make generators and locks, in "
                f"__iter__; and instead of a value that your loop shares with it, give it a set_epoch(epoch)."
            ) from exc

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle of a copy, without what copies share; 0 before the first one."""
        return 0 if self._pickled is None else len(self._pickled[0])

    def forget(self) -> None:
        """Copy the dataset as it is at the next call."""
        self._pickled = None

    def are_old(self) -> bool:
        """Whether the dataset's own attributes have changed since the first copy."""
        return self._pickled is not None and self.attributes != plain(self.dataset)

    def changed(self) -> bool:
        """Whether a shared tensor was changed in place."""
        return any(tensor._version != version for tensor, version in self._versions)

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_pickled": None, "_versions": [], "attributes": {}, "left": {*self.left}}


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.shared: list[Any] = []
        self.dispatch_table = Reducers()
        arrow = sys.modules.get("pyarrow")
        self._shared = (*_SHARED, *(getattr(arrow, name) for name in _OF_ARROW)) if arrow else _SHARED

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, np.ndarray) and obj.nbytes > LARGE and not obj.dtype.hasobject:
            obj = obj.view()
            obj.flags.writeable = False
        elif not (
            isinstance(obj, self._shared)
            or type(obj).__module__ in _OF_PROCESSES
            or (isinstance(obj, torch.Tensor) and _nbytes(obj) > LARGE)
            or (type(obj) in (bytes, str) and len(obj) > _LONG)
        ):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1

    def reducer_override(self, obj: Any) -> Any:
        # torch would pickle all of what a view is a part of
        if type(obj) is torch.Tensor and 0 < _nbytes(obj) < obj.untyped_storage().nbytes() and not obj.requires_grad:
            return reduce_as_torch(obj.clone())
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, shared: list[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._shared = shared

    def persistent_load(self, number: Any) -> Any:
        return self._shared[number]


def plain(dataset: Any) -> dict[str, Any]:
    """The attributes by which an object may make its next pass another one."""
    return {
        name: repr(value.tolist()) if type(value) is torch.Tensor else value
        for name, value in getattr(dataset, "__dict__", {}).items()
        if issubclass(type(value), int | float | str | None) or (type(value) is torch.Tensor and _is_told(value))
    }


def _is_told(tensor: torch.Tensor) -> bool:
    """Whether it is a few values in shared memory, such as an epoch that the loop sets."""
    return 0 < _nbytes(tensor) <= _FEW and bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided and not tensor.is_quantized else 0
