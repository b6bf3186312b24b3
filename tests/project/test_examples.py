"""Every example runs to its end from any folder, prints something, and leaves no process behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPTS = sorted(file for file in EXAMPLES.glob("*.py") if not file.name.startswith("benchmark_"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_example_runs(script: Path, tmp_path: Path, run_script: Callable[..., str]) -> None:
    assert run_script(script, timeout_s=240).strip()
    if script.stem == "demo":
        assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
