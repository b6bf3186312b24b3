"""Tests touch few private names of the package: what a name begins with an underscore for may change without a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE, TESTS = Path(penstock.__file__).parent, Path(__file__).parents[1]
MOST = 29
"""Only lowered. A test that looks at an effect (``loader.statistics()``, a process, a thread, a file, a message) fails
for its reason only."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Those that a module defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        name = getattr(node, "name", None) or getattr(node, "attr", None) or getattr(node, "id", None)
        defined = isinstance(node, ast.FunctionDef | ast.ClassDef) or isinstance(getattr(node, "ctx", None), ast.Store)
        if defined and is_private(name):
            yield str(name)


def methods_and_attributes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def touched(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of the package: an attribute, but of ``self``, or what `monkeypatch`
    replaces."""
    theirs = {*methods_and_attributes(tree)}  # of the test's own classes
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(value=ast.Attribute(attr=owner)) if is_private(owner) and owner not in ours:
                continue  # of another library
            case ast.Attribute(lineno=line, attr=name):
                pass
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr"), args=[_, ast.Constant(value=str(name)), *_], lineno=line
            ):
                pass
            case _:
                continue
        if name in ours - theirs:
            yield line, name


def test_few_private_names_are_touched() -> None:
    ours = {name for file in PACKAGE.rglob("*.py") for name in private_names(ast.parse(file.read_text()))}
    texts = {file: file.read_text() for file in sorted(TESTS.rglob("*.py"))}
    found = [
        f"{file.relative_to(TESTS)}:{line} {name}"
        for file, text in texts.items()
        if not ours.isdisjoint(re.findall(r"\b_\w+", text))  # most have none of these words at all
        for line, name in touched(ast.parse(text), ours)
    ]
    assert len(found) <= MOST, "\n".join(found)


def test_what_counts() -> None:
    """Seen to fail: the attributes of tests' own objects counted, and what `monkeypatch` replaces did not."""
    ours = {
        *private_names(ast.parse("class Ours:\n    def _of_a_class(self):\n        self._of_an_object = _local = 1"))
    }
    assert ours == {"_of_a_class", "_of_an_object", "_local"}
    code = (
        "def _of_a_class(): self._of_an_object\nours._of_an_object; mine._of_a_class\nours._of_others\n"
        "others._theirs._of_a_class\nmonkeypatch.setattr(ours, '_local', 1)\nours.of_all"
    )
    assert [*touched(ast.parse(code), ours)] == [(2, "_of_an_object"), (5, "_local")]
