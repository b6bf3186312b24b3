"""Describe the package as boxes and arrows: ``python tests/project/house.py [FOLDER OF THE PACKAGE]``.

A *box* is a package (a room) or a file that lies directly in the package's folder; public files that hold names only (`DOORS`) are part of the front door. An *arrow* is an import from one box into another, including
imports for type checkers only. The *floor* of a box is one above the highest floor that it imports from. Imports are parsed, not executed.

It counts lines, too. With ``--walks`` it also lists the files that one batch and one state enter on their way through a loader with worker processes.
"""

from __future__ import annotations

import ast
import graphlib
import io
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Graph = dict[str, set[str]]
DOORS = ("nodes", "orders", "statistics")


def imports(tree: ast.AST, name: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line number and full dotted name of each import; also ``torch.distributed`` where it is reached as an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                parents = f"penstock.{name}".rstrip(".").split(".")[: None if level <= is_package else is_package - level]
                base = ".".join([*parents, module] if module else parents) if level else module
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in aliases)
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed" | "multiprocessing"):
                yield node.lineno, f"torch.{node.attr}"
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module


def name_of(file: Path, package: Path) -> str:
    """``penstock/_nodes/node.py`` -> ``_nodes.node``; a package has its folder's name, and the front door has an empty one."""
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files_of(package: Path) -> Graph:
    """Which file imports which."""
    files = {name_of(file, package): file for file in package.rglob("*.py")}
    return {name: {target for target in _targets(file, name, files) if target != name} for name, file in files.items()}


def boxes_of(files: Graph) -> Graph:
    """Which box imports from which."""
    boxes: Graph = {}
    for name, targets in files.items():
        box = boxes.setdefault(_box(name), set())
        box |= {_box(target) for target in targets} - {_box(name)}
    return boxes


def _box(name: str) -> str:
    first = name.split(".")[0]
    return "" if first in DOORS else first


def circles(graph: Graph) -> list[list[str]]:
    """One circle, if there is one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [error.args[1]]
    return []


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each box, from 1. A circle does not hang it."""
    found: dict[str, int] = {}

    def floor(box: str, below: frozenset[str]) -> int:
        if box not in found:
            found[box] = 1 + max((floor(target, below | {box}) for target in graph[box] - below - {box}), default=0)
        return found[box]

    return {box: floor(box, frozenset()) for box in graph}


def _targets(file: Path, name: str, files: dict[str, Path]) -> Iterator[str]:
    for _, target in imports(ast.parse(file.read_text()), name, is_package=file.name == "__init__.py"):
        parts = target.split(".")
        if parts[0] == "penstock":
            yield next(known for depth in range(len(parts), 0, -1) if (known := ".".join(parts[1:depth])) in files)


_WALKS = """
import os, sys
import penstock

package, calls = os.path.dirname(penstock.__file__), os.environ["CALLS"]

def watch(what):
    entered = set()
    def note(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package) and file not in entered:
            entered.add(file)
            with open(calls, "a") as out:
                out.write(f"{what}:{os.path.relpath(file, package)}\\n")
    sys.setprofile(note)

class Squares:
    def __len__(self): return 10_000
    def __getitem__(self, index):
        if index == 200 and os.getpid() != CONSUMER: watch("one batch, in the worker")
        return index * index

CONSUMER = os.getpid()
with penstock.Loader.from_dataset(Squares(), batch_size=10, num_workers=1, prefetch_factor=1) as loader:
    batches = iter(loader)
    for _ in range(40): next(batches)
    watch("one batch, in the consumer")
    next(batches)
    watch("state_dict()")
    state = loader.state_dict()
    watch("load_state_dict() and the start of an iterator")
    loader.load_state_dict(state)
    loader._start()
    sys.setprofile(None)
"""


def walks(package: Path) -> dict[str, list[str]]:
    """The files that a batch and a state enter on their way, in the order in which each is first entered."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "calls"
        calls.write_text("")
        env = {"PYTHONPATH": str(package.parent), "CALLS": str(calls)}
        subprocess.run([sys.executable, "-c", _WALKS], env=env, check=True)
        found: dict[str, list[str]] = {}
        for line in calls.read_text().splitlines():
            what, _, file = line.partition(":")
            found.setdefault(what, []).append(file)
    return found


def lines_of(source: str) -> int:
    """Lines of code in ``source``: no blank line, no comment, no docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(found)


_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def main(arguments: list[str]) -> None:
    folders = [Path(argument) for argument in arguments if not argument.startswith("-")]
    package = (folders or [Path(__file__).parent.parent.parent / "pipes" / "penstock"])[0].resolve()
    files = files_of(package)
    boxes = boxes_of(files)
    levels = floors(boxes)
    for level in range(max(levels.values()), 0, -1):
        print(f"floor {level}: " + "  ".join(sorted(box or "(front door)" for box in boxes if levels[box] == level)))
    arrows = sum(map(len, boxes.values()))
    found = circles(boxes) or circles(files)
    shown = ": " + " -> ".join(found[0]) if found else ""
    print(f"{len(boxes)} boxes, {max(levels.values())} floors, {arrows} arrows, {len(found)} circles{shown}")
    sources = [file.read_text() for file in package.rglob("*.py")]
    print(
        f"{sum(map(lines_of, sources)):,} lines of code, {sum(source.count(chr(10)) for source in sources):,} with comments and docstrings"
    )
    if "--walks" in arguments:
        for what, names in walks(package).items():
            print(f"{what}, {len(names)} files: {' '.join(names)}")


if __name__ == "__main__":
    main(sys.argv[1:])
