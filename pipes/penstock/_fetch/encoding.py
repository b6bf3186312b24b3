"""Encode the states of user objects as JSON, and decode them bit for bit.

Values that JSON can express stay as they are: dicts with string keys, lists, strings, ints, finite floats, booleans,
None. Any other value becomes a dict with the key `TAG`, which names its type. A dict that already has that key is
tagged too.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock._errors import StateError
from penstock._memory.buffers import DTYPES, flat_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TAG = "__penstock__"

_AS_IT_IS = frozenset({type(None), bool, int, str})


class _NoWord(Exception):
    """The value at ``path`` (innermost key first) has no JSON form."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.path: list[str] = []


def encoded(value: Any, where: str) -> Any:
    """``value`` as JSON, in new dicts and lists.

    Args:
        value: None, booleans, numbers, strings, bytes, tensors and NumPy arrays, and dicts, lists, tuples and sets of
            them. Subclasses are refused, except ``OrderedDict``, because they would come back as another type.
        where: A name for the value, for the error.

    Raises:
        StateError: Part of the value has no JSON form; the message names the place.
    """
    try:
        return _encoded(value)
    except _NoWord as exc:
        kind = type(exc.value)
        raise StateError(
            f"{where}{''.join(reversed(exc.path))} is of type {kind.__module__}.{kind.__qualname__}, which cannot be "
            f"saved and restored exactly. Let the state_dict hold numbers, strings, bytes, tensors and NumPy arrays, "
            f"in plain dicts, lists, tuples and sets."
        ) from None
    except RecursionError:
        raise StateError(f"{where} is nested too deeply to be saved, or contains itself. Make it flatter.") from None


def decoded(value: Any) -> Any:
    """The inverse of `encoded`: a new object each time. Tensors are on the CPU.

    Raises:
        StateError: ``value`` does not come from `encoded`.
    """
    try:
        return _decoded(value)
    except Exception as exc:
        raise StateError(
            f"a value in this state cannot be read ({type(exc).__name__}: {exc}). The state is damaged; load an older "
            f"one."
        ) from exc


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "bits": struct.pack(">d", value).hex()}
    if kind is list:
        return _all(value)
    if kind is dict and TAG not in value and all(type(key) is str for key in value):
        return dict(zip(value, _all(value.values(), list(value)), strict=True))
    if kind in (dict, OrderedDict):
        keys = _all(value, ["a key"] * len(value))
        return {
            TAG: kind.__name__,
            "items": [list(pair) for pair in zip(keys, _all(value.values(), list(value)), strict=True)],
        }
    if kind is tuple:
        return {TAG: "tuple", "items": _all(value)}
    if kind in (set, frozenset):
        # a set's own order differs from process to process
        return {TAG: kind.__name__, "items": sorted(_all(value), key=json.dumps)}
    if kind in (bytes, bytearray):
        return {TAG: kind.__name__, "data": _text(value)}
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        try:
            data = flat_bytes(value)
        except RuntimeError:  # nested, or on the meta device
            raise _NoWord(value) from None
        return {
            TAG: "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "data": _text(data.tobytes()),
        }
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        descr = np.lib.format.dtype_to_descr(array.dtype)
        if not array.dtype.hasobject and np.lib.format.descr_to_dtype(descr) == array.dtype:
            tag = "array" if kind is np.ndarray else "scalar"
            return {TAG: tag, "dtype": _encoded(descr), "shape": list(array.shape), "data": _text(array.tobytes())}
    raise _NoWord(value)


def _all(values: Iterable[Any], names: list[Any] | None = None) -> list[Any]:
    """Encode each of ``values``. ``names`` are their keys, for errors."""
    made: list[Any] = []
    try:
        for value in values:
            # after an error, its length is the index of the failed value
            made.append(value if type(value) in _AS_IT_IS else _encoded(value))  # noqa: PERF401
    except _NoWord as exc:
        exc.path.append(f"[{len(made) if names is None else names[len(made)]!r}]")
        raise
    return made


def _decoded(value: Any) -> Any:
    if type(value) is list:
        return [_decoded(item) for item in value]
    if type(value) is not dict:
        return value
    if TAG not in value:
        return {key: _decoded(item) for key, item in value.items()}
    return _READ[value[TAG]](value)


def _dict(value: Any) -> dict[Any, Any]:
    return {_decoded(key): _decoded(item) for key, item in value["items"]}


def _items(value: Any) -> list[Any]:
    return [_decoded(item) for item in value["items"]]


def _tensor(value: Any) -> torch.Tensor:
    data, dtype = _bytes(value), DTYPES[value["dtype"]]
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])


def _array(value: Any) -> np.ndarray:
    dtype = np.lib.format.descr_to_dtype(_decoded(value["dtype"]))
    return np.frombuffer(_bytes(value), dtype).reshape(value["shape"]).copy()


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _bytes(value: Any) -> bytes:
    return base64.b64decode(value["data"], validate=True)


_READ: dict[str, Callable[[Any], Any]] = {
    "float": lambda value: struct.unpack(">d", bytes.fromhex(value["bits"]))[0],
    "dict": _dict,
    "OrderedDict": lambda value: OrderedDict(_dict(value)),
    "tuple": lambda value: tuple(_items(value)),
    "set": lambda value: set(_items(value)),
    "frozenset": lambda value: frozenset(_items(value)),
    "bytes": _bytes,
    "bytearray": lambda value: bytearray(_bytes(value)),
    "tensor": _tensor,
    "array": _array,
    "scalar": lambda value: _array(value)[()],
}
