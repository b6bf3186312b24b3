"""This version reads a cache filled by an earlier one: ``saved_cache/`` was written before the files of the package
were moved."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.compatibility.saved_dataset import FOLDER, Point, Saved

import penstock
from penstock.testing import plain

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(sys.byteorder != "little", reason="it was written on a little-endian machine, and says so")
def test_a_saved_cache_is_read_and_loads_nothing_again(tmp_path: Path) -> None:
    """Seen to fail: with one byte of the data changed, one sample is loaded again."""
    shutil.copytree(FOLDER, tmp_path / "cache")
    cache = penstock.Cached(Saved(), tmp_path / "cache", fingerprint={"version": 1})
    before = Saved.calls
    samples = [cache[index] for index in range(len(cache))]
    assert Saved.calls == before
    cache.close()
    assert [plain(sample) for sample in samples] == [plain(Saved()[index]) for index in range(5)]
    assert all(type(sample["point"]) is Point and type(sample["point"].x) is np.float64 for sample in samples)
