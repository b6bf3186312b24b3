"""The English of README.md, docs/ and the docstrings: phrases that a native engineer would rarely write stay rare."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PHRASES = {r"nobody|whoever|somebody": 79, r"goes on": 72, r"of (?:its|their) own": 48}
"""How often each phrase occurred at 9b9d876, counted by `prose`, in its `WORDS` words."""
WORDS = 96_200
NAMES = {"place": 141, "one": 640, "said": 173, "words": 171}
"""Names in the code that mean many things, and how often they occur; a ``place`` in `_nodes` means one thing, see
`index_node`."""


@cache
def prose(root: Path) -> str:
    """README.md, every page in docs/, and every docstring below pipes/."""
    parts = [page.read_text() for page in (root / "README.md", *(root / "docs").rglob("*.md"))]
    for file in (root / "pipes").rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        parts += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    return "\n".join(parts)


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_translated_phrase_stays_rare(phrase: str) -> None:
    """Per 1,000 words, at most a quarter of what it was at 9b9d876. Seen to fail: at that commit, for each phrase."""
    text = prose(ROOT)
    found = len(re.findall(rf"\b(?:{phrase})\b", text, re.IGNORECASE))
    limit = PHRASES[phrase] / 4 / WORDS * len(text.split())
    assert found <= limit, (
        f"{found} times, where {limit:.0f} are allowed: rewrite the sentences, see Style in CONTRIBUTING.md"
    )


@cache
def occurrences() -> Counter[str]:
    """How often each of `NAMES` occurs in the code."""
    found = Counter[str]()
    for file in (ROOT / "pipes").rglob("*.py"):
        names = {*NAMES} - ({"place"} if file.parent.name in ("_nodes", "_changing") else set())
        with open(file, "rb") as source:
            inside = 0  # an f-string, whose parts are tokens from Python 3.12 on
            for token in tokenize.tokenize(source.readline):
                inside += {"FSTRING_START": 1, "FSTRING_END": -1}.get(tokenize.tok_name[token.type], 0)
                found[token.string] += token.type == tokenize.NAME and token.string in names and not inside
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_many_things_stays_rare(name: str) -> None:
    """In code, where it may be a position of the graph in one file and a path in the next. Lower the number when there
    are fewer. Seen to fail with one fewer allowed."""
    found = occurrences()[name]
    assert found <= NAMES[name], (
        f"{found} times, where {NAMES[name]} are allowed: say what it is (index, path, offset, number)"
    )
