"""The mutations still fit the code and the tests, and the program that plants them tells a caught fault from one that nobody saw."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from tests.project.mutations import MUTATIONS, PACKAGE, ROOT, Mutation

SHARE = "tests/nodes/test_tails.py::test_share_is_what_dealing_by_hand_gives"


def exists(test: str) -> bool:
    """Whether there is a test of that node id, leaving its parameters aside."""
    file, *names = test.split("[")[0].split("::")
    if not (ROOT / file).exists():
        return False
    scope: ast.AST = ast.parse((ROOT / file).read_text())
    for name in names:
        found = next((node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name), None)
        if found is None:
            return False
        scope = found
    return True


def test_every_mutation_still_applies() -> None:
    """Change the mutation along with the code: plant the same mistake where it would now be made."""
    assert [
        str(one) for one in MUTATIONS if not (PACKAGE / one.file).exists() or one.applied((PACKAGE / one.file).read_text()) is None
    ] == []
    assert [str(one) for one in MUTATIONS if one.old == one.new] == []


def test_every_mutation_names_a_test_that_exists() -> None:
    assert [one.test for one in MUTATIONS if not exists(one.test)] == []


@pytest.mark.parametrize(
    "test", ["tests/nodes/test_tails.py::test_nothing", "tests/nowhere.py::test_it", "tests/random/test_orders.py::A::test_b"]
)
def test_a_test_that_is_gone_is_seen(test: str) -> None:
    assert not exists(test)
    assert exists(SHARE + "[pad]")


def test_text_that_is_not_there_once_is_not_replaced() -> None:
    twice = Mutation("x.py", "a", "b", SHARE)
    assert twice.applied("a + a") is None
    assert twice.applied("c") is None
    assert twice.applied("a + c") == "b + c"


def run(*chosen: Mutation) -> tuple[int, str]:
    """Exit status and output of the program over these mutations alone."""
    listed = f"from tests.project import mutations as m; from tests.project.mutations import Mutation; m.MUTATIONS[:] = {list(chosen)!r}"
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; {listed}; sys.exit(m.main([]))"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout


@pytest.mark.slow
def test_the_program_tells_what_came_of_each() -> None:
    """And leaves the checkout alone."""
    file = "_nodes/tails.py"
    killed = Mutation(file, "rank < left else 0", "rank <= left else 0", SHARE)
    unseen = Mutation(file, "Pure arithmetic.", "Pure guesswork.", SHARE)
    stale = Mutation(file, "what is not there", "", SHARE)
    no_name = Mutation(file, "divmod(items", "divmode(items", SHARE)
    no_import = Mutation(file, "import Literal, get_args", "import Literal, got_args", SHARE)
    before = {path: path.read_bytes() for path in PACKAGE.rglob("*.py")}
    assert run(killed)[0] == 0
    code, output = run(killed, unseen, stale, no_name, no_import)
    assert code == 1
    words = [line.split()[0] for line in output.splitlines() if not line.startswith(" ")]
    assert words == ["killed", "SURVIVED", "STALE", "BROKEN", "BROKEN", "1"]
    assert {path: path.read_bytes() for path in PACKAGE.rglob("*.py")} == before


@pytest.mark.slow
def test_nothing_is_planted_among_tests_that_fail_already() -> None:
    code, output = run(Mutation("_nodes/tails.py", "rank < left else 0", "rank <= left else 0", SHARE + "_no_more"))
    assert code == 1
    assert "Without any mutation these tests fail already" in output
