"""Faults that a test must catch: ``python tests/project/mutations.py [-k WORD] [--part 1/3] [--list]``.

``faults.txt`` has them: for each clause of a law and each promise, one small fault that somebody could write by
mistake, and the test that was seen to fail when it was first planted. The program plants them one at a time in a copy
of the package, runs that test, and says what came of it:

    killed      the test failed, for the reason shown
    SURVIVED    the test passed: it no longer sees what it was written for
    STALE       the code has changed, and the fault no longer applies
    BROKEN      nothing was tested: the package does not import, a name is missing, or the test is gone or fails
                without the fault

It exits with 1 unless every fault is killed. The checkout is only read.

A fault takes two lines, ``place: old -> new`` and the node id of the test. The place is the qualified name of a
function or a class, wherever in the package that is; ``file.py::name`` where several files have one of that name; or a
file alone. ``old`` is an expression, or statements with semicolons between them, that the place has once: compared as
syntax, so that line breaks, quotes and comments do not matter. ``...`` in it stands for any expression, ``f(...)`` for
a call with any arguments. ``new`` stands there instead: ``None`` for a call that is left out, ``pass`` for a statement.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "pipes" / "penstock"
FAULTS = Path(__file__).with_name("faults.txt")
LIMIT_S = 60
SCOPES = (ast.ClassDef, ast.FunctionDef)


class Stale(Exception):
    """A fault does not apply; says why."""


@dataclass(frozen=True)
class Fault:
    """One fault, and the node id of the test that must see it."""

    place: str
    old: str
    new: str
    test: str

    def planted(self, package: Path = PACKAGE) -> tuple[Path, ast.Module]:
        """The file, and its code with the fault in it. Raises `Stale`."""
        path, tree, scope = _found(self.place, package)
        planted = _Planted(_parsed(self.old), _parsed(self.new))
        planted.visit(scope)
        if planted.times != 1:
            raise Stale(f"{self.place} in {path.name} has this {planted.times} times, not once")
        return path, tree

    def applied(self, package: Path = PACKAGE) -> tuple[Path, str]:
        """The file, and its text with the fault in it. Raises `Stale`."""
        path, tree = self.planted(package)
        return path, ast.unparse(ast.fix_missing_locations(tree))

    def __str__(self) -> str:
        return f"{self.place}: {self.old} -> {self.new}  [{self.test}]"


def read(text: str) -> list[Fault]:
    """The faults in the text of a file."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    faults = []
    for fault, test in zip(lines[::2], lines[1::2], strict=True):
        place, _, change = fault.partition(": ")
        old, arrow, new = change.partition(" -> ")
        if not arrow or "::" not in test:
            raise ValueError(f"two lines are no fault: {fault!r} and {test!r}")
        faults.append(Fault(place, old, new, test))
    return faults


def _found(place: str, package: Path) -> tuple[Path, ast.Module, ast.AST]:
    file, _, name = (place, "", "") if place.endswith(".py") else place.rpartition("::")
    paths = [path for path in _named(package).get(name, ()) if path.as_posix().endswith(f"/{file}" if file else "")]
    if len(paths) != 1:
        raise Stale(f"{place} is in {' and '.join(path.name for path in paths) or 'no file'}")
    tree = ast.parse(paths[0].read_text())
    (scope,) = _inside(tree, name.split(".") if name else [])
    return paths[0], tree, scope


@cache
def _named(package: Path) -> dict[str, list[Path]]:
    """The file of each function and class, by its qualified name, as often as it has one of that name; and every file,
    by the empty name."""
    found: dict[str, list[Path]] = {}

    def enter(scope: ast.AST, name: str, path: Path) -> None:
        found.setdefault(name, []).append(path)
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, SCOPES):
                enter(node, f"{name}.{node.name}".lstrip("."), path)

    for path in sorted(package.rglob("*.py")):
        enter(ast.parse(path.read_text()), "", path)
    return found


def _inside(scope: ast.AST, names: list[str]) -> list[ast.AST]:
    """What has this qualified name in ``scope``."""
    if not names:
        return [scope]
    return [
        one
        for node in ast.iter_child_nodes(scope)
        if isinstance(node, SCOPES) and node.name == names[0]
        for one in _inside(node, names[1:])
    ]


def _parsed(code: str) -> ast.expr | list[ast.stmt]:
    try:
        return ast.parse(code, mode="eval").body
    except SyntaxError:
        return ast.parse(code).body


class _Planted(ast.NodeTransformer):
    """Puts ``new`` wherever ``old`` is, and counts."""

    def __init__(self, old: ast.expr | list[ast.stmt], new: ast.expr | list[ast.stmt]) -> None:
        if isinstance(old, list) or isinstance(new, list):
            old, new = ([ast.Expr(one)] if isinstance(one, ast.AST) else one for one in (old, new))
        self._old, self._new = old, new
        self.times = 0

    def visit(self, node: ast.AST) -> Any:
        if (
            isinstance(self._old, ast.AST)
            and _same(self._old, node)
            and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        ):
            self.times += 1
            return self._new
        node = self.generic_visit(node)
        for name, block in ast.iter_fields(node):
            if isinstance(self._old, list) and isinstance(block, list):
                setattr(node, name, self._replaced(block))
        return node

    def _replaced(self, block: list[Any]) -> list[Any]:
        length = len(self._old)
        for at in range(len(block) - length + 1):
            if _same(self._old, block[at : at + length]):
                self.times += 1
                return [*block[:at], *self._new, *self._replaced(block[at + length :])]
        return block


def _same(pattern: Any, node: Any) -> bool:
    if isinstance(pattern, ast.Constant) and pattern.value is ...:
        return isinstance(node, ast.expr)
    calls = isinstance(pattern, ast.Call) and isinstance(node, ast.Call)
    if calls and [ast.dump(one) for one in pattern.args] == ["Constant(value=Ellipsis)"]:
        return _same(pattern.func, node.func)
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            _same(value, getattr(node, name)) for name, value in ast.iter_fields(pattern) if name != "ctx"
        )
    if isinstance(pattern, list):
        return isinstance(node, list) and len(pattern) == len(node) and all(map(_same, pattern, node))
    return pattern == node


_NOT_TESTED = re.compile(
    r"^E +((?:ImportError|ModuleNotFoundError|NameError|SyntaxError|IndentationError)\b.*)", re.MULTILINE
)
_REASON = re.compile(r"^E +(.+)", re.MULTILINE)


def copied(to: Path) -> Path:
    """The package, compiled, in the folder ``to``, so that each copy of it need not be compiled anew."""
    shutil.copytree(PACKAGE, to / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(to, quiet=1)
    return to


def verdict(fault: Fault, sound: Path) -> tuple[str, str]:
    """What came of a fault, and why. ``sound``: see `copied`."""
    try:
        path, changed = fault.applied()
    except Stale as why:
        return "STALE", str(why)
    with tempfile.TemporaryDirectory(prefix="penstock-mutation-") as folder:
        source = Path(folder) / "pipes"
        shutil.copytree(sound, source, copy_function=os.link)
        file = source / PACKAGE.name / path.relative_to(PACKAGE)
        for old in (file, *(file.parent / "__pycache__").glob(f"{file.stem}.*")):
            old.unlink()
        file.write_text(changed)
        code, output, _ = tested(source, [fault.test])
    reason = next(iter(_REASON.findall(output)), output.strip().splitlines()[-1] if output.strip() else "")
    if code == 0:
        return "SURVIVED", ""
    if code != 1 or (found := _NOT_TESTED.search(output)):
        return "BROKEN", found[1] if code == 1 and found else reason
    return "killed", reason


def tested(source: Path, tests: list[str]) -> tuple[int, str, list[str]]:
    """Run ``tests`` with the package in ``source``, in a fork of this process, which has imported torch already.

    Returns:
        pytest's exit status, what it said, and the node ids of those that failed: a single test stops at the first of
        its cases that fails.
    """
    assert "penstock" not in sys.modules, "the forks would have the package of this process"
    output = source.parent / "output.txt"
    pid = os.fork()
    if pid == 0:
        _run(source, tests, output)
    limit_s = LIMIT_S + 10 * len(tests)
    deadline = time.monotonic() + limit_s
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    if ended == (0, 0):
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 1, f"E no end after {limit_s} s", tests
    failed = source.parent / "failed.json"
    return (
        os.waitstatus_to_exitcode(ended[1]),
        output.read_text(),
        json.loads(failed.read_text()) if failed.exists() else [],
    )


class _Failed:
    """A pytest plugin that keeps the node ids of the tests that fail."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.tests.append(report.nodeid)


def _run(source: Path, tests: list[str], output: Path) -> None:
    """The child: it never returns."""
    code = 70
    try:
        os.setsid()
        sink = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.close(sink)
        os.chdir(source.parent)
        os.environ |= {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(source.parent / "hypothesis")
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(source))
        import pytest

        failed = _Failed()
        alone = len(tests) == 1
        options = f"-q --timeout={20 if alone else 60} --tb=short -p no:cacheprovider".split()
        options += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *["-x"][:alone]]
        code = pytest.main([*options, *(str(ROOT / test) for test in tests)], [failed])
        (source.parent / "failed.json").write_text(json.dumps(failed.tests))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def failing(sound: Path, tests: list[str]) -> dict[str, str]:
    """Those of ``tests`` that are gone, or fail without any fault; and why."""
    with tempfile.TemporaryDirectory(prefix="penstock-mutation-") as folder:
        source = Path(folder) / "pipes"
        shutil.copytree(sound, source, copy_function=os.link)
        gone: list[str] = []
        while True:
            code, output, failed = tested(source, tests)
            named = set(re.findall(r"not found: (.+)$", output, re.MULTILINE))  # without its parameters
            missing = [test for test in tests if str(ROOT / test) in named] or [
                test for test in tests if str(ROOT / test.partition("[")[0]) in named
            ]
            if code != 4 or not missing:
                break
            gone += missing
            tests = [test for test in tests if test not in gone]
    if code not in (0, 1):
        print(output, "So it is not known which tests fail without any fault.", sep="\n")
    bad = [test for test in tests if any(one == test or one.startswith((f"{test}[", f"{test}::")) for one in failed)]
    return dict.fromkeys(gone, "there is no such test") | dict.fromkeys(bad, "it fails without any fault")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Plant faults in a copy of the package, and see that the tests catch them."
    )
    parser.add_argument(
        "-k", metavar="WORD", default="", help="only faults with this word in the place, the code or the test"
    )
    parser.add_argument("--part", metavar="K/N", default="1/1", help="every Nth of them, from the Kth")
    parser.add_argument("--list", action="store_true", help="name them, and run nothing")
    parser.add_argument("--file", type=Path, default=FAULTS, help="other faults")
    chosen = parser.parse_args(arguments)
    part, parts = map(int, chosen.part.split("/"))
    faults = [one for one in read(chosen.file.read_text()) if chosen.k in str(one)][part - 1 :: parts]
    if chosen.list:
        print(*faults, sep="\n")
        return 0
    # every test would import them, and torch; so the forks have them already
    for name in ("torchdata.nodes", "pytest", "psutil"):
        importlib.import_module(name)
    alive: list[str] = []
    with tempfile.TemporaryDirectory(prefix="penstock-mutation-") as folder:
        sound = copied(Path(folder))
        bad = failing(sound, sorted({one.test for one in faults}))
        for fault in faults:
            began = time.monotonic()
            what, why = ("BROKEN", bad[fault.test]) if fault.test in bad else verdict(fault, sound)
            said = f"{what:9} {time.monotonic() - began:5.1f} s  {fault}\n{'':18}{why[:150]}"
            alive += [said] if what != "killed" else []
            print(said, flush=True)
    print(f"{len(faults) - len(alive)} of {len(faults)} killed", *alive, sep="\n")  # those last, where a log is cut
    return 1 if alive or not faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
