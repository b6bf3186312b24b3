"""Describe the package as boxes and arrows: ``python tests/project/house.py [FOLDER OF THE PACKAGE]``.

A *box* is a package (a room) or a file that lies directly in the package's folder; public files that hold names only
(`DOORS`) are part of the front door. An *arrow* is an import from one box into another, including imports for type
checkers only. The *floor* of a box is one above the highest floor that it imports from. Imports are parsed, not
executed. *Code* is lines without blanks, comments and docstrings, those of attributes too.
"""

from __future__ import annotations

import ast
import graphlib
import inspect
import io
import itertools
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

Graph = dict[str, set[str]]
DOORS = ("nodes", "orders", "statistics")
ONLY_A_TYPE = ("_loader.canonical_graph", "_loader.loader")  # what `Loader.from_dataset` returns: no arrow


def imports(tree: ast.AST, name: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line number and full dotted name of each import; also ``torch.distributed`` where it is reached as an
    attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                parents = f"penstock.{name}".rstrip(".").split(".")[
                    : None if level <= is_package else is_package - level
                ]
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
    """``penstock/_nodes/node.py`` -> ``_nodes.node``; a package has its folder's name, and the front door has an empty
    one."""
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def files_of(package: Path) -> Graph:
    """Which file imports which, when this is first asked."""
    files = {name_of(file, package): file for file in package.rglob("*.py")}
    return {
        name: {target for target in _targets(file, name, files) if target != name and (name, target) != ONLY_A_TYPE}
        for name, file in files.items()
    }


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


def code_of(package: Path) -> Counter[str]:
    """Lines of code in each box."""
    lines: Counter[str] = Counter()
    for file in package.rglob("*.py"):
        lines[_box(name_of(file, package))] += _lines(file.read_text())
    return lines


def _lines(source: str) -> int:
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in nothing for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= {*range(node.lineno, node.end_lineno + 1)}
    return len(lines)


class Walk:
    """The functions of a package that are given one object in this thread, each once, in the order of their first call.

    A *stay* is such a function: one of its arguments is the object, or a tuple or a dict that has it; ``self`` and what
    it keeps do not count. A *climb* is a stay on a higher floor than the one before it.
    """

    def __init__(self, one: Any, package: Path) -> None:
        self._one = one
        self._package = package
        self.stays: dict[tuple[str, str], int] = {}  # file and function: its floor

    def __enter__(self) -> Self:
        self._floors = floors(boxes_of(files_of(self._package)))
        self._names: dict[str, str | None] = {}
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def climbs(self) -> int:
        levels = list(self.stays.values())
        return sum(one < other for one, other in itertools.pairwise(levels))

    def __str__(self) -> str:
        lines = [f"{level}  {file}: {function}" for (file, function), level in self.stays.items()]
        return "\n".join([*lines, f"{len(self.stays)} stays, {self.climbs} climbs"])

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (file := self._file(frame.f_code.co_filename)) is None:
            return
        code = frame.f_code
        given = (
            code.co_argcount
            + code.co_kwonlyargcount
            + bool(code.co_flags & inspect.CO_VARARGS)
            + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        )
        values = [frame.f_locals.get(name) for name in code.co_varnames[:given] if name != "self"]
        values += [
            part
            for value in values
            if isinstance(value, tuple | dict)
            for part in (value.values() if isinstance(value, dict) else value)
        ]
        if any(value is self._one for value in values):
            self.stays.setdefault((file, code.co_qualname), self._floors[_box(file)])

    def _file(self, path: str) -> str | None:
        if path not in self._names:
            inside = Path(path).is_relative_to(self._package)
            self._names[path] = name_of(Path(path), self._package) if inside else None
        return self._names[path]


def _targets(file: Path, name: str, files: dict[str, Path]) -> Iterator[str]:
    for _, target in imports(ast.parse(file.read_text()), name, is_package=file.name == "__init__.py"):
        parts = target.split(".")
        if parts[0] == "penstock":
            yield next(known for depth in range(len(parts), 0, -1) if (known := ".".join(parts[1:depth])) in files)


def main(arguments: list[str]) -> None:
    package = Path(*arguments or [Path(__file__).parent.parent.parent / "pipes" / "penstock"])
    files = files_of(package)
    boxes = boxes_of(files)
    levels = floors(boxes)
    for level in range(max(levels.values()), 0, -1):
        print(f"floor {level}: " + "  ".join(sorted(box or "(front door)" for box in boxes if levels[box] == level)))
    arrows = sum(map(len, boxes.values()))
    found = circles(boxes) or circles(files)
    shown = ": " + " -> ".join(found[0]) if found else ""
    code = code_of(package)
    print(
        "  ".join(f"{box or '(front door)'} {lines:,}" for box, lines in code.most_common())
        + f": {sum(code.values()):,} lines of code"
    )
    print(f"{len(boxes)} boxes, {max(levels.values())} floors, {arrows} arrows, {len(found)} circles{shown}")


if __name__ == "__main__":
    main(sys.argv[1:])
