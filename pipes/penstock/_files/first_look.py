"""Recognizes a file that is not what it was taken for, by its first bytes."""

from __future__ import annotations

from typing import Final

ENOUGH: Final = 16
"""Bytes that `kind_of` needs."""

_KINDS: Final = {
    b"\x1f\x8b\x08": "it is compressed by gzip, so its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd, so its name must end in .zst",
    b"\xfd7zXZ\0": "it is compressed by xz, so its name must end in .xz",
    b"BZh": "it is compressed by bzip2, so its name must end in .bz2",
    b"PK\x03\x04": "it is a zip archive; read a file in it as 'zip://NAME::PATH'",
    b"PAR1": "it is a Parquet file; read it by penstock.formats.parquet",
    b"FEA1": "it is a Feather file of version 1; write it again by pyarrow.feather.write_feather",
    b"ARROW1": "it is an Arrow file; read it by penstock.formats.arrow",
    b"\xff\xff\xff\xff": "it is an Arrow stream; read it by penstock.formats.arrow",
    b"\x93NUMPY": "it is a NumPy array; penstock.formats.tokens reads one-dimensional ones of integers",
    b"MMIDIDX\0\0": (
        "it is the index of a Megatron dataset, whose tokens are in the .bin file; penstock.formats.megatron reads both"
    ),
}


def kind_of(head: bytes, asked: str | None = None) -> str:
    """What a file is that begins like this, to end a sentence with; empty if that is unknown, or what the format
    ``asked`` reads.
    """
    kind = next((kind for magic, kind in _KINDS.items() if head.startswith(magic)), "")
    return f" ({kind})" if kind and not (asked and kind.endswith(f"read it by penstock.formats.{asked}")) else ""
