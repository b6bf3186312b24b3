"""What type checkers and editors make of penstock, as a user's own program sees it.

mypy, and pyright where one is installed (``pip install basedpyright``), read the programs in ``typed/``. torch and
NumPy are left out for mypy: nothing there depends on their types, and reading them takes ten times as long.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Loader

PROGRAMS = Path(__file__).parent / "typed" / "programs.py"
PLACE = Path(penstock.__file__).parent.parent
INSTALLED = PLACE.name == "site-packages"
MYPY = """
[mypy]
strict = true
[mypy-penstock.*]
follow_imports = silent
[mypy-numpy.*,torch.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_mypy_knows_what_a_loop_gets(tmp_path: Path) -> None:
    """Seen to fail: a loader of what ``collate_fn`` takes; ``Loader[Batch]`` claimed of torch's own batches; any name
    taken for one of `penstock.formats`; nodes with an untyped base, which passed for each other."""
    (tmp_path / "mypy.ini").write_text(MYPY)
    environment = {**os.environ, "MYPYPATH": "" if INSTALLED else str(PLACE)}
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        "--cache-dir",
        "cache",
        "--no-error-summary",
        str(PROGRAMS),
    ]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ended.stdout + ended.stderr, ended.returncode) == ("", 0)


@pytest.mark.slow
def test_pyright_agrees(tmp_path: Path) -> None:
    pyright = next((name for name in ("basedpyright", "pyright") if find_spec(name)), None)
    if pyright is None:
        pytest.skip("no pyright: pip install basedpyright")
    settings = {
        "include": [str(PROGRAMS)],
        "extraPaths": [] if INSTALLED else [str(PLACE)],
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": True,
        "reportUnusedExpression": False,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", pyright, "-p", str(tmp_path), "--pythonpath", sys.executable, "--outputjson"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    assert told["summary"]["filesAnalyzed"] == 1
    assert [(one["range"]["start"]["line"] + 1, one["message"]) for one in told["generalDiagnostics"]] == []


def explanations(function: Any) -> dict[str, str]:
    """Each argument, with what the docstring says of it, as one line. The arguments stand in groups, before
    ``Raises``."""
    text = (inspect.getdoc(function) or "").partition("\nRaises:\n")[0]
    text = re.sub(r"^\w[^\n]*$", "", text, flags=re.MULTILINE)  # the summary, and the headings
    found = re.split(r"^    (\w+): ", text, flags=re.MULTILINE)[1:]
    assert len(found[::2]) == len(set(found[::2]))
    return {name: " ".join(words.split()) for name, words in zip(found[::2], found[1::2], strict=True)}


def test_every_argument_of_from_dataset_explains_itself() -> None:
    """In a tooltip there is nothing to look up. Seen to fail: 14 of them said "See `ParallelMapper`"."""
    found = explanations(Loader.from_dataset)
    assert sorted(found) == sorted(inspect.signature(Loader.from_dataset).parameters)
    assert [
        (name, words)
        for name, words in found.items()
        if words.lower().startswith("see ") or len(words.split("; see")[0]) < 20
    ] == []
