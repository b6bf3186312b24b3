"""Programs whose main module a new interpreter cannot import, and the error for each: real programs, run as a user runs
them.

A file is run by the server of programs, as ``__main__`` and with its path; its workers are new interpreters, which
import it from there.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.slow]
FORKSERVER, SPAWN = (pytest.param(method, marks=pytest.mark.soak) for method in ("forkserver", "spawn"))

PROGRAM = """
import penstock

class Squares:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index**2

loader = penstock.Loader.from_dataset({dataset}, batch_size=3, num_workers=1, {options})
print([batch.tolist() for batch in loader])
"""
GUARDED = PROGRAM.replace("loader =", "if __name__ == '__main__':\n    loader =").replace("print", "    print")
BEHIND_THE_GUARD = PROGRAM.replace("\n", "\n    ").replace(
    "    import penstock", "import penstock\nif __name__ == '__main__':", 1
)


def run(program: str, how: str, folder: Path) -> tuple[str, str]:
    """The output and the errors of a program that is no file."""
    arguments = {"python -c": ["-c", program], "standard input": ["-"]}[how]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=program,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=folder,
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("forkserver", "python -c"),
        ("spawn", "standard input"),
        pytest.param("spawn", "python -c", marks=pytest.mark.soak),
        pytest.param("forkserver", "standard input", marks=pytest.mark.soak),
    ],
)
def test_a_class_of_a_program_that_is_no_file_is_refused_at_once_with_the_remedy(
    method: str, how: str, tmp_path: Path
) -> None:
    """Seen to fail: ``Can't get attribute 'Squares' on <module '__main__' (built-in)>`` from a worker; for standard
    input a `FileNotFoundError` from there, and advice about the guard that a script needs.
    """
    output, errors = run(
        PROGRAM.format(dataset="Squares()", options=f"multiprocessing_context={method!r}"), how, tmp_path
    )
    last = errors.splitlines()[-1]
    assert output == ""
    assert last.startswith(
        "TypeError: Squares is defined in __main__"
        if how == "python -c"
        else "RuntimeError: worker processes started by"
    )
    assert method in last
    assert 'use method="thread", or multiprocessing_context="fork"' in last
    assert ".py" in last or "Save it as a file" in last
    assert errors.count("Traceback") == 1  # none from a worker


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("python -c", 'multiprocessing_context="fork"'),
        pytest.param("standard input", 'method="thread"', marks=pytest.mark.soak),
    ],
)
def test_the_remedies_work(how: str, options: str, tmp_path: Path) -> None:
    assert run(PROGRAM.format(dataset="Squares()", options=options), how, tmp_path) == (
        "[[0, 1, 4], [9, 16, 25]]\n",
        "",
    )


@pytest.mark.parametrize("method", [FORKSERVER, SPAWN])
def test_what_comes_from_a_module_needs_no_file(method: str, tmp_path: Path) -> None:
    """Although it contains the text ``__main__``."""
    dataset = "__import__('torch').utils.data.Subset(['__main__ is a word'] * 4, [0, 1, 2])"
    program = PROGRAM.format(dataset=dataset, options=f"multiprocessing_context={method!r}").replace(
        "batch.tolist()", "batch"
    )
    assert run(program, "python -c", tmp_path) == (
        "[['__main__ is a word', '__main__ is a word', '__main__ is a word']]\n",
        "",
    )


@pytest.fixture
def run_file(tmp_path: Path, run_program: Callable[..., str]) -> Callable[[str], str]:
    """Run a program as a file; what it says."""

    def run(program: str) -> str:
        (tmp_path / "program.py").write_text(program)
        return run_program(tmp_path / "program.py")

    return run


@pytest.mark.parametrize("method", ["forkserver", SPAWN])
def test_a_class_that_the_worker_does_not_find_is_named_with_the_remedy(
    method: str, run_file: Callable[[str], str]
) -> None:
    """It is defined under the guard, which no worker executes. Seen to fail: just ``Can't get attribute``."""
    with pytest.raises(AssertionError, match=r"program.py ended with \[1\]") as caught:
        run_file(BEHIND_THE_GUARD.format(dataset="Squares()", options=f"multiprocessing_context={method!r}"))
    last = str(caught.value).splitlines()[-1]
    assert last.startswith("AttributeError: Can't get attribute 'Squares'")
    assert 'under `if __name__ == "__main__":`' in last
    assert "Move them to a module" in last


@pytest.mark.parametrize("method", [FORKSERVER, "spawn"])
def test_a_script_without_a_guard_is_told_to_have_one(method: str, run_file: Callable[[str], str]) -> None:
    """In the worker that imports it and in the program itself. Seen to fail: the worker spoke of daemonic processes and
    ``num_workers=0``."""
    with pytest.raises(AssertionError, match=r"program.py ended with \[1\]") as caught:
        run_file(PROGRAM.format(dataset="Squares()", options=f"multiprocessing_context={method!r}"))
    errors = str(caught.value)
    assert "RuntimeError: this worker process imports your script" in errors
    assert "daemonic" not in errors
    assert errors.splitlines()[-1].startswith("penstock.WorkerDied")
    assert "`if __name__ == '__main__':`" in errors.splitlines()[-1]


@pytest.mark.parametrize("method", [FORKSERVER, "spawn"])
def test_a_script_with_a_guard_runs(method: str, run_file: Callable[[str], str]) -> None:
    assert (
        run_file(GUARDED.format(dataset="Squares()", options=f"multiprocessing_context={method!r}"))
        == "[[0, 1, 4], [9, 16, 25]]\n"
    )
