"""Decoders for the values of MDS, following the layout of MosaicML Streaming 0.13: its class ``Encoding`` and its
subclasses.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import struct
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock._files.paths import extra

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WHO: Final = "penstock.formats.mds"


def _int(data: bytes) -> int:
    (value,) = struct.unpack("<q", data)
    return int(value)


def _scalar(data: bytes, dtype: str) -> Any:
    (value,) = np.frombuffer(data, dtype)
    return value


def _ndarray(data: bytes, dtype: str | None, shape: Sequence[int] | None) -> np.ndarray:
    """The array in ``data``.

    Whatever the column does not fix comes first: a code for the dtype, then the number of axes together with the width
    of their lengths.
    """
    at = 0
    if dtype is None:
        dtype, at = _DTYPES[data[0]], 1
    if shape is None:
        axes, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = np.frombuffer(data, f"<u{width}", axes, at + 1).tolist()
        at += 1 + axes * width
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=at).reshape(shape).copy()


_DTYPES: Final = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"},
    **{64: "uint64", 65: "int64", 66: "float64"},
}


def _image(data: bytes) -> Any:
    return _pillow().open(io.BytesIO(data))


def _pixels(data: bytes) -> Any:
    width, height, mode = struct.unpack_from("<III", data)
    return _pillow().frombytes(data[12 : 12 + mode].decode(), (width, height), data[12 + mode :])


def _several(data: bytes, decode: Callable[[bytes], Any], begin: int) -> list[Any]:
    """Values preceded, from ``begin`` on, by their number and their sizes."""
    (n,) = struct.unpack_from("<I", data, begin)
    found, at = [], begin + 4 + 4 * n
    for size in np.frombuffer(data, "<u4", n, begin + 4).tolist():
        found.append(decode(data[at : at + size]))
        at += size
    if at != len(data):
        raise ValueError(f"it ends at byte {len(data)} instead of {at}")
    return found


def _decimal(data: bytes) -> Decimal:
    return Decimal(data.decode())


def _pillow() -> Any:
    return extra("PIL.Image", f"{WHO} of images", "pillow")


def _by_streaming(data: bytes, encoding: str) -> Any:
    return _encodings(encoding).mds_decode(encoding, data)


def _encodings(encoding: str) -> Any:
    why = f"the encoding {encoding!r} is unknown to {WHO}, so reading it"
    return extra("streaming.base.format.mds.encodings", why, "mosaicml-streaming")


_DECODERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": _int,
    "json": json.loads,
    "str_int": int,
    "str_float": float,
    "str_decimal": _decimal,
    "pkl": pickle.loads,
}
_IMAGES: Final[dict[str, Callable[[bytes], Any]]] = {"jpeg": _image, "png": _image, "pil": _pixels}


def decoder(encoding: str) -> Callable[[bytes], Any]:
    """A function that decodes a value from its bytes.

    Raises:
        ValueError: There is no such encoding.
        ImportError: A package that it needs is not installed.
    """
    name, _, rest = encoding.partition(":")
    if encoding in _DECODERS:
        return _DECODERS[encoding]
    if encoding in _DTYPES.values():
        return functools.partial(_scalar, dtype=np.dtype(encoding).newbyteorder("<").str)
    if name == "ndarray":
        dtype, _, lengths = rest.partition(":")
        shape = [int(length) for length in lengths.split(",")] if lengths else None
        if (dtype and dtype not in _DTYPES.values()) or (shape is not None and min(shape) < 1):
            raise ValueError(f"{encoding!r:.200} is not an array encoding")
        return functools.partial(_ndarray, dtype=dtype or None, shape=shape)
    of = encoding.removeprefix("list[").removesuffix("]")
    if encoding in _IMAGES or (of in _IMAGES and encoding == f"list[{of}]"):
        _pillow()
        return _IMAGES[of] if encoding in _IMAGES else functools.partial(_several, decode=_IMAGES[of], begin=4)
    if encoding in ("jpegarray", "jpeg_array"):
        _pillow()
        return functools.partial(_several, decode=_image, begin=0)
    if not _encodings(encoding).is_mds_encoding(encoding):
        raise ValueError(
            f"neither {WHO} nor the installed version of streaming supports the encoding {encoding!r:.200}"
        )
    return functools.partial(_by_streaming, encoding=encoding)


def runs_code(encoding: str) -> bool:
    """Whether decoding runs code that is in the data. Raises the same errors as `decoder`."""
    decode = decoder(encoding)
    if getattr(decode, "func", None) is _by_streaming:
        return not _encodings(encoding).is_mds_encoding_safe(encoding)
    return decode is pickle.loads
