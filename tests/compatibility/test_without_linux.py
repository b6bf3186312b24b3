"""macOS cannot be had here; a Linux that looks like it to Python code can: `without_linux.py`, in tests/support, is the
program that runs there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = Path(__file__).parents[1] / "support" / "without_linux.py"


@pytest.mark.slow
@pytest.mark.parametrize("spawns", ["few", pytest.param("all", marks=pytest.mark.soak)])
def test_every_kind_of_loader_gives_the_same_without_what_only_linux_has(
    spawns: str, run_script: Callable[..., str], tmp_path: Path
) -> None:
    """Seen to fail: cores counted by `os.sched_getaffinity` alone; a lock of an opened file, which macOS has under the
    same name for another structure; shared memory by `os.memfd_create` alone.
    """
    ran = json.loads(run_script(PROGRAM, str(tmp_path), spawns).splitlines()[-1])
    assert ran["inline"] > ran["thread"] > 50
    assert (ran["auto"], ran["fork"], ran["spawn"]) == (1, 4, {"few": 1, "all": 4}[spawns])
