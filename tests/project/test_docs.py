"""What README.md, CONTRIBUTING.md and docs/ say is true: their code runs, their JSON parses, their commands and links exist.

The ``python`` blocks of a page make one script, which runs in its own process in an empty folder. A block that is not meant to run has another
label.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<label>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)|<img[^>]* src=\"(?P<image>[^\"]+)\"")

pages = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


@dataclass(frozen=True)
class Block:
    label: str
    line: int  # of its first line in the page, from 1
    text: str


def blocks(markdown: str) -> list[Block]:
    """Every fenced block of a page, in order."""
    return [
        Block(found["label"].strip(), markdown.count("\n", 0, found.start("text")) + 1, textwrap.dedent(found["text"]))
        for found in FENCE.finditer(markdown)
    ]


def script(markdown: str) -> str:
    """The ``python`` blocks as one program in which each line keeps its number in the page, so that a traceback names the right line."""
    lines: list[str] = []
    for block in blocks(markdown):
        if block.label == "python":
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def commands(markdown: str) -> list[list[str]]:
    """The shell commands of a page, split into words; in a ``console`` block, the lines with a prompt."""
    lines = []
    for block in blocks(markdown):
        if block.label in {"bash", "sh", "shell"}:
            lines += block.text.replace("\\\n", " ").splitlines()
        elif block.label == "console":
            lines += [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def missing(words: list[str]) -> str | None:
    """A target or a file that a command names and this project lacks."""
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if words[0] == "make":
        return next((word for word in words[1:] if "=" not in word and word not in targets), None)
    return next((word for word in words if word.startswith(("examples/", "tests/", "docs/")) and not (ROOT / word).exists()), None)


RUNNABLE = [page for page in PAGES if script(page.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=[str(page.relative_to(ROOT)) for page in RUNNABLE])
def test_python_blocks_of_a_page_run(page: Path, tmp_path: Path, run_script: Callable[..., str]) -> None:
    file = tmp_path / f"{page.name}.py"
    file.write_text(script(page.read_text()))
    run_script(file, timeout_s=200)


@pages
def test_json_blocks_of_a_page_parse(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.label == "json":
            json.loads(block.text)


@pages
def test_commands_of_a_page_exist(page: Path) -> None:
    assert [(words, lack) for words in commands(page.read_text()) if (lack := missing(words))] == []


@pages
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    targets = [found["target"] or found["image"] for found in LINK.finditer(prose)]
    local = [target.split("#")[0] for target in targets if not target.startswith(("https://", "http://", "#", "mailto:"))]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_readme_needs_no_other_command_than_make_and_pip() -> None:
    assert [words for words in commands((ROOT / "README.md").read_text()) if words[0] != "make" and words[:2] != ["pip", "install"]] == []


SAMPLE = """\
# A page

```python
x = 1
```

1. In a list:

   ```python
   print(x / 0)
   ```

```bash
make demo PYTHON=python3  # the demo
make lunch
```

```console
$ python examples/nowhere.py
output
```
"""


def test_script_keeps_the_lines_of_the_page() -> None:
    assert script(SAMPLE).splitlines() == ["", "", "", "x = 1", "", "", "", "", "", "print(x / 0)"]


def test_a_failing_block_is_seen(tmp_path: Path, run_script: Callable[..., str]) -> None:
    (tmp_path / "page.md.py").write_text(script(SAMPLE))
    with pytest.raises(AssertionError, match=r'page\.md\.py", line 10'):
        run_script(tmp_path / "page.md.py", timeout_s=200)


def test_commands_that_do_not_exist_are_seen() -> None:
    assert [missing(words) for words in commands(SAMPLE)] == [None, "lunch", "examples/nowhere.py"]
