"""What ``python -m penstock cache`` says of a folder of copies, and what it removes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.__main__ import main
from penstock._files.copies import CacheFolder

if TYPE_CHECKING:
    from collections.abc import Callable


def writes(size: int) -> Callable[[str], None]:
    return lambda path: Path(path).write_bytes(bytes(size)) and None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a lock")
def test_a_folder_is_shown_and_what_nobody_uses_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: by removing what is read."""
    (tmp_path / "important.tar").write_bytes(b"x")
    cache = CacheFolder(str(tmp_path), 2_500_000)
    for number in range(3):
        if copy := cache.opened(f"s3://data/{number}.tar", 1_000_000, "1", writes(1_000_000)):
            copy.close()
    with cache.opened("s3://data/2.tar", 1_000_000, "1", writes(1_000_000)) as copy:  # type: ignore[union-attr]
        assert main(["cache", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines.pop(1).startswith("1 files were there, 3 were fetched (3.0 MB), 0 had no room; ")
        assert lines == [
            "2 copies, 2.0 MB; 0 unfinished copies",
            f"process {os.getpid()} reads 1 of them",
        ]
        assert main(["cache", str(tmp_path), "--clear"]) == 0
        assert capsys.readouterr().out.splitlines()[:2] == [
            "removed 1 unused copies",
            "1 copies, 1.0 MB; 0 unfinished copies",
        ]
        assert copy.read() == bytes(1_000_000)
    assert main(["cache", str(tmp_path), "--clear"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["important.tar", "penstock.lock"]
    assert main(["cache", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
