"""A new format is one file in ``penstock.formats`` and a line in its ``__init__``: nothing else of the package knows
formats."""

from __future__ import annotations

import sys

import penstock
from penstock import Loader, formats
from penstock.__main__ import main

LINES = """
from penstock._files.files import whole
from penstock._streams.known_files import Format, known_files
import numpy as np

def lines(paths, *, index=None, counts=None, **options):
    return known_files(FORMAT, paths, index, counts, 1, options)

def _offsets(file, path):
    return np.cumsum([0, *map(len, file)])

def _forward(path, expected):
    with whole(path, expected) as file:
        yield from map(bytes.strip, file)

def _parse(data, path, begin):
    return data.strip()

SUFFIXES = (".txt",)
FORMAT = Format("lines", _offsets, _forward, _parse)
"""


def test_is_indexed_and_read(tmp_path, monkeypatch, capsys):
    """Seen to fail: an index of another kind than the two that there are was refused as damaged."""
    (tmp_path / "_lines.py").write_text(LINES)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    monkeypatch.setattr(formats, "__all__", [*formats.__all__, "lines"])
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthree\n")
    try:
        assert main(["index", str(tmp_path / "a.txt")]) == 0
        assert capsys.readouterr().out.startswith("indexed: 1 (3 records)")
        dataset = penstock.formats.lines(str(tmp_path / "*.txt"))
        with Loader.from_dataset(dataset, None) as loader:
            assert list(loader) == [b"one", b"two", b"three"]
        with Loader.from_dataset(
            penstock.formats.lines(str(tmp_path / "a.txt"), epoch_size=5, bookmarks=False), None
        ) as loader:
            assert list(loader) == [b"one", b"two", b"three", b"one", b"two"]
    finally:
        sys.modules.pop("penstock.formats._lines", None)
        for name in ("lines", "_lines"):
            vars(formats).pop(name, None)
