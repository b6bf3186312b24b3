"""Datasets over files of common formats, for `Loader.from_dataset`.

Each is a `penstock.Shards` or has the same methods.
"""

# To add a format, write a file ``_<name>.py`` with a function ``<name>`` (or several, ``<name>_…``), and add its import
# and its name here. ``python -m penstock index`` also reads two constants of that file: ``SUFFIXES``, the file endings,
# and ``FORMAT``, how to index such files. A format without them needs no index. The file names start with an underscore
# because importing a submodule named `tar` would replace the function `tar` in this namespace.

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.formats._arrow import arrow as arrow
    from penstock.formats._hf import hf as hf
    from penstock.formats._jsonl import jsonl as jsonl
    from penstock.formats._lance import lance as lance
    from penstock.formats._mds import mds as mds
    from penstock.formats._megatron import megatron as megatron
    from penstock.formats._megatron import megatron_documents as megatron_documents
    from penstock.formats._parquet import parquet as parquet
    from penstock.formats._tar import tar as tar
    from penstock.formats._tokens import tokens as tokens

__all__ = ["arrow", "hf", "jsonl", "lance", "mds", "megatron", "megatron_documents", "parquet", "tar", "tokens"]

if not TYPE_CHECKING:  # a type checker would take this to mean that any name exists

    def __getattr__(name: str) -> object:
        """Import a format on first use."""
        if name in __all__:
            return sys.modules["penstock"]._loaded(globals(), name, f"formats._{name.partition('_')[0]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "annotations", "sys"})
