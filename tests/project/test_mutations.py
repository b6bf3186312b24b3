"""The faults still fit the code and the tests, and the program that plants them tells a caught fault from one that
nobody saw."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache

import pytest
from tests.project.mutations import FAULTS, PACKAGE, ROOT, Fault, Stale, main, read

SHARE = "tests/nodes/test_tails.py::test_share_is_what_dealing_by_hand_gives"


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def exists(test: str) -> bool:
    """Whether there is a test of that node id, leaving its parameters aside."""
    file, *names = test.split("[")[0].split("::")
    if not (ROOT / file).exists():
        return False
    scope: ast.AST = parsed(file)
    for name in names:
        found = next((node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name), None)
        if found is None:
            return False
        scope = found
    return True


def stale(fault: Fault) -> str:
    try:
        fault.planted()
    except Stale as why:
        return str(why)
    return ""


@pytest.mark.slow
def test_every_fault_still_applies() -> None:
    """Change the fault along with the code: plant the same mistake where it would now be made."""
    assert [why for fault in read(FAULTS.read_text()) if (why := stale(fault))] == []


def test_every_fault_names_a_test_that_exists() -> None:
    tests = {fault.test for fault in read(FAULTS.read_text())}
    assert [test for test in sorted(tests) if not exists(test)] == []


def test_a_test_that_is_gone_is_seen() -> None:
    assert exists(SHARE + "[pad]")
    assert not exists("tests/nodes/test_tails.py::test_nothing")
    assert not exists("tests/nowhere.py::test_it")
    assert not exists("tests/nodes/test_tails.py::A::test_b")


def test_the_parts_are_all_of_them(capsys) -> None:
    """Seen to fail with parts that begin one too late."""
    said = []
    for part in ("1/3", "2/3", "3/3", "1/1"):
        assert main(["--list", "--part", part]) == 0
        said.append(capsys.readouterr().out.splitlines())
    assert sorted(said[0] + said[1] + said[2]) == sorted(said[3])


def run(tmp_path, *faults: Fault) -> tuple[int, str]:
    """Exit status and output of the program over these faults alone."""
    file = tmp_path / "faults.txt"
    file.write_text("".join(f"{one.place}: {one.old} -> {one.new}\n    {one.test}\n" for one in faults))
    command = [sys.executable, ROOT / "tests" / "project" / "mutations.py", "--file", file]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout


@pytest.mark.soak
def test_the_program_tells_what_came_of_each(tmp_path) -> None:
    """And leaves the checkout alone. Seen to fail: one test that was gone ended all of it."""
    before = {path: path.read_bytes() for path in PACKAGE.rglob("*.py")}
    code, output = run(
        tmp_path,
        Fault("share", "rank < left", "rank <= left", SHARE),
        Fault("share", "rank < left", "left > rank", SHARE),
        Fault("share", "what_is_not_there", "1", SHARE),
        Fault("share", "divmod", "divmode", SHARE),
        Fault("share", "rank < left", "rank <= left", SHARE + "_no_more"),
        Fault("share", "rank < left", "rank <= left", SHARE + "[no more]"),
    )
    assert code == 1
    words = [line.split()[0] for line in output.splitlines() if not line.startswith(" ")]
    assert words == ["killed", "SURVIVED", "STALE", "BROKEN", "BROKEN", "BROKEN", "1"]
    assert {path: path.read_bytes() for path in PACKAGE.rglob("*.py")} == before


@pytest.mark.soak
def test_every_fault_is_killed() -> None:
    """Five minutes on one core."""
    ended = subprocess.run(
        [sys.executable, ROOT / "tests" / "project" / "mutations.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, "\n".join(
        line for line in ended.stdout.splitlines() if not line.startswith(("killed", " "))
    )
