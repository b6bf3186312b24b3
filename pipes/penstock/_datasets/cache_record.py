"""The samples of a cache as bytes: their arrays in sequence, then their structure as JSON, and a checksum. Pure."""

from __future__ import annotations

import functools
import json
import re
import struct
import sys
import zlib
from types import ModuleType
from typing import Any

import numpy as np
import torch

from penstock._memory.buffers import bytes_of, dtype_name, tensor_over

FOOTER = struct.Struct("=QQII")  # sample, bytes of arrays, bytes of JSON, CRC-32


class NotCacheable(Exception):
    """A sample cannot be cached; the argument names the part of it and the reason."""


def record_of(place: int, value: Any) -> bytes:
    arrays: list[Any] = []
    try:
        structure = json.dumps(_structure(value, arrays, ""), separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise NotCacheable(f" cannot be described in JSON: {error}") from error
    parts = [*arrays, structure, FOOTER.pack(place, sum(map(len, arrays)), len(structure), 0)[:-4]]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([*parts, struct.pack("=I", crc)])


def is_record(memory: memoryview, end: int, place: int) -> bool:
    """Whether an undamaged record of sample ``place`` ends at ``end``."""
    number, arrays, structure, crc = FOOTER.unpack_from(memory, end - FOOTER.size)
    start = end - FOOTER.size - structure - arrays
    return bool(number == place and start >= 0 and zlib.crc32(memory[start : end - 4]) == crc)


def value_at(memory: memoryview, end: int) -> Any:
    """A copy of the sample whose record ends at ``end``. The record is untrusted: others can write to the folder.

    Raises:
        Exception: The record is invalid.
    """
    foot = end - FOOTER.size
    _, arrays, structure, _ = FOOTER.unpack_from(memory, foot)
    text = str(memory[foot - structure : foot], "ascii")  # given bytes, `json` would guess an encoding, and import it
    parsed = _parsed(text) if structure <= _SHORT else json.loads(text)
    return _Reader(memory[foot - structure - arrays : foot - structure]).value(parsed)


def _structure(value: Any, arrays: list[Any], where: str) -> Any:
    """``value`` as JSON: a plain value stands for itself, a list describes anything else; large contents go into
    ``arrays``.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (bytes, np.bytes_):
        arrays.append(bytes(value))
        return [kind.__name__, len(value)]
    if kind is np.str_:
        return ["str_", "".join(value)]  # `str` would drop trailing NULs
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is torch.Tensor:
        arrays.append(_bytes_of(value, where))
        return ["tensor", dtype_name(value.dtype), list(value.shape), len(arrays[-1])]
    if kind is np.ndarray or (isinstance(value, np.generic) and kind is value.dtype.type):
        if not _round_trips(value):
            raise NotCacheable(f"{where} has the dtype {value.dtype}")
        arrays.append(value.tobytes())
        return ["array" if kind is np.ndarray else "scalar", value.dtype.str, list(value.shape), len(arrays[-1])]
    if kind is dict:
        for key in value:
            if key is not None and type(key) not in (bool, int, float, str):
                raise NotCacheable(f"{where} has the key {key!r:.80}, of type {type(key).__name__}")
        return ["dict", list(value), [_structure(one, arrays, f"{where}[{key!r}]") for key, one in value.items()]]
    if kind in (list, tuple) or (
        isinstance(value, tuple) and hasattr(kind, "_fields") and _named(module_of(kind), kind.__qualname__) is kind
    ):
        inside = [_structure(one, arrays, f"{where}[{place}]") for place, one in enumerate(value)]
        return (
            [kind.__name__, inside]
            if kind in (list, tuple)
            else ["named", module_of(kind), kind.__qualname__, kind._fields, inside]
        )
    raise NotCacheable(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, but a cache stores only NumPy arrays, tensors, "
        f"numbers, strings, bytes, None, and dicts, lists and (named) tuples of these, and no other subclasses"
    )


def _bytes_of(tensor: torch.Tensor, where: str) -> Any:
    more = {
        "requires grad (return its .detach())": tensor.requires_grad,
        f"is on {tensor.device} (return its .cpu())": tensor.device.type != "cpu",
        f"has the layout {tensor.layout} (return its .to_dense())": tensor.layout is not torch.strided,
        "is quantized": tensor.is_quantized,
        "has custom attributes": tensor.__dict__,
    }
    for what, so in more.items():
        if so:
            raise NotCacheable(f"{where} {what}")
    try:
        return bytes_of(tensor).tobytes()
    except RuntimeError as error:
        raise NotCacheable(f"{where} has the dtype {tensor.dtype} ({error})") from error


def _round_trips(value: Any) -> bool:
    """Whether the dtype's name describes it completely, which is not so for structured dtypes."""
    try:
        again = np.dtype(value.dtype.str)
    except TypeError:
        return False
    return again == value.dtype and not again.hasobject and (type(value) is np.ndarray or type(value) is again.type)


class _Reader:
    """Builds a sample from its structure, copying its arrays out of ``memory``."""

    __slots__ = ("_at", "_memory")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def _next(self, nbytes: int) -> memoryview:
        start = self._at
        self._at = end = start + nbytes
        found = self._memory[start:end]
        if len(found) != nbytes:
            raise ValueError(f"it does not contain an array of {nbytes!r:.80} bytes")
        return found

    def _array(self, dtype: str, shape: Any, nbytes: int) -> np.ndarray:
        made: np.ndarray = _checked(
            np.ndarray(shape, _plain_dtype(dtype), bytearray(self._next(nbytes))), shape, nbytes
        )
        return made

    def value(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        match node:
            case ["tensor", dtype, shape, nbytes]:
                return _checked(tensor_over(bytearray(self._next(nbytes)), shape, dtype), shape, nbytes)
            case ["array", dtype, shape, nbytes]:
                return self._array(dtype, shape, nbytes)
            case ["scalar", dtype, shape, nbytes]:
                return self._array(dtype, shape, nbytes)[()]
            case ["dict", keys, inside]:
                return dict(zip(keys, map(self.value, inside), strict=True))
            case ["list", inside]:
                return list(map(self.value, inside))
            case ["tuple", inside]:
                return tuple(map(self.value, inside))
            case ["named", module, name, fields, inside]:
                return _named_tuple_class(module, name, tuple(fields))._make(map(self.value, inside))
            case ["bytes", nbytes]:
                return bytes(self._next(nbytes))
            case ["bytes_", nbytes]:
                return np.bytes_(bytes(self._next(nbytes)))
            case ["str_", text]:
                return np.str_(text)
            case ["complex", real, imag]:
                return complex(real, imag)
        raise ValueError(f"{node!r:.80} does not describe a value")


_parsed = functools.lru_cache(1024)(json.loads)  # most datasets have samples of a single structure
_SHORT = 512  # keep JSON up to this many bytes parsed; that is a few MB at most
_PLAIN = re.compile(r"[<>|][biufcSUV]\d+|[<>][mM]8(\[\d*\w+\])?", re.ASCII)  # `dtype.str` of dtypes without pointers


@functools.lru_cache(64)
def _plain_dtype(name: str) -> np.dtype[Any]:
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"{name!r:.80} is not a dtype that a cache can hold")
    return np.dtype(name)


def _checked(made: Any, shape: Any, nbytes: int) -> Any:
    if made.nbytes != nbytes or list(made.shape) != shape:
        raise ValueError(f"the shape {shape!r:.80} does not take {nbytes} bytes")
    return made


def _named(module: str, name: str) -> Any:
    """The object of that name in an imported module, or in a class there.

    Reads no attribute, because that could run code or import a module.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        inside = [vars(kind)["__dict__"].__get__(found) for kind in (ModuleType, type) if issubclass(type(found), kind)]
        found = inside[0].get(part) if inside else None
    return found


def _named_tuple_class(module: str, name: str, fields: tuple[str, ...]) -> Any:
    found = _named(module, name)
    if not (issubclass(type(found), type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields):
        raise ValueError(
            f"the cache holds named tuples {module}.{name}({', '.join(fields)}), but this process has no such class. "
            f"Import {module} first; if the class has changed, delete the cache."
        )
    return found


def module_of(kind: type) -> str:
    """The module of a class, under the name used in cache files: a spawned process imports the main script under
    another name.
    """
    return "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
