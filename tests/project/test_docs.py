"""What README.md, CONTRIBUTING.md, docs/ and the pages of evidence say is true: their code runs, their JSON parses,
their commands and links exist.

The ``python`` blocks of a page make one script, which runs in its own process in an empty folder. A block with a file's
name behind the label is that file, and ``torchrun`` lines of a ``console`` block are run. A block that is not meant to
run has another label.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import itertools
import json
import os
import re
import shlex
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from packaging.requirements import Requirement
from torch.utils.data import DataLoader

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
EVIDENCE = ROOT / "examples" / "measurements"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted(EVIDENCE.glob("*.md")),
]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = [
    "penstock",
    "penstock.formats",
    "penstock.nodes",
    "penstock.orders",
    "penstock.statistics",
    "penstock.testing",
]
INTEGRATIONS = {
    "accelerate": "AccelerateLoader",
    "lightning": "LightningCallback",
    "transformers": "HFTrainerCallback HFTrainerMixin",
}
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<label>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)|(?:<img[^>]* src|<source[^>]* srcset)=\"(?P<image>[^\"]+)\"")
TORCHRUN = ["-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]

Page = tuple[str, Path, str]
EVERY: list[Page] = [(str(page.relative_to(ROOT)), page, page.read_text()) for page in PAGES]
"""The name, the file and the text of each page."""


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


def launches(block: Block) -> list[list[str]]:
    """What the ``torchrun`` lines of a block say behind ``torchrun``."""
    lines = block.text.splitlines() if block.label == "console" else []
    return [shlex.split(line)[2:] for line in lines if line.startswith("$ torchrun ")]


def script(markdown: str, *, launch: bool = True) -> str:
    """The blocks as one program in which each line keeps its number in the page, so that a traceback names the right
    line; with torchrun, or without."""
    lines: list[str] = []
    for block in blocks(markdown):
        label, _, file = block.label.partition(" ")
        if label == "python":
            lines += [""] * (block.line - 1 - len(lines))
            lines += [f"open({file!r}, 'w').write({block.text!r})"] if file else block.text.splitlines()
        elif launch and (runs := launches(block)):
            lines += [""] * (block.line - 1 - len(lines))
            lines += [
                f"__import__('subprocess').run([__import__('sys').executable, *{TORCHRUN}, *{words}], check=True)"
                for words in runs
            ]
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
    return next(
        (word for word in words if word.startswith(("examples/", "tests/", "docs/")) and not (ROOT / word).exists()),
        None,
    )


def written(page: Path) -> set[str]:
    """The modules that a page writes itself."""
    return {file.removesuffix(".py") for block in blocks(page.read_text()) if (file := block.label.partition(" ")[2])}


RUNNABLE = [page for page in PAGES if script(page.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=[str(page.relative_to(ROOT)) for page in RUNNABLE])
def test_python_blocks_of_a_page_run(page: Path, tmp_path: Path, run_program: Callable[..., str]) -> None:
    """What the page launches comes last here, on forked ranks. pages.py runs it where it stands, with torchrun."""
    program = script(page.read_text(), launch=False)
    packages = {
        found.partition(".")[0] for found in re.findall(r"^(?:from|import) ([\w.]+)", program, re.MULTILINE)
    } - written(page)
    lacking = [package for package in sorted(packages) if find_spec(package) is None]
    if lacking and not os.environ.get("CI"):
        pytest.skip(f"{lacking} not installed: pip install --group docs")
    file = tmp_path / f"{page.name}.py"
    file.write_text(program)
    assert "Exception ignored" not in run_program(file)  # as when the interpreter ends
    for option, ranks, launched, *words in (line for block in blocks(page.read_text()) for line in launches(block)):
        assert option == "--nproc-per-node"
        run_program(tmp_path / launched, *words, ranks=int(ranks))


RECIPES = {
    title: "\n".join(block.text for block in blocks(text) if block.label == "py")
    for title, text in re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)", (DOCS / "data" / "other_formats.md").read_text(), re.MULTILINE | re.DOTALL
    )
}
"""The code of each section of that page, in which a block may need a package that the tests lack."""
SHARED, USE = RECIPES.pop("Once per process"), RECIPES.pop("Any of them, in a loader")
CHECK = """
from torch.utils._pytree import tree_map
from torch.utils.data import Subset
from penstock.testing import assert_resumes_everywhere

def build(**words):
    return penstock.Loader.from_dataset(data, batch_size=25, shuffle=True, seed=3, **words)

def first(state, **words):
    # The batches up to the end of the second epoch, and the state after two of them.
    with build(**words) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches, states = [], []
        while loader.epoch < 2:
            for batch in loader:
                batches.append(tree_map(lambda leaf: leaf.tolist(), batch))
                states.append(loader.state_dict())
    return batches, states[1]

expected, state = first(None)  # what is open now must not be used by a fork
assert len(expected) == 2 * -(-len(data) // 25)
for way in WAYS:
    assert first(None, **way)[0] == expected, way
    assert first(state, **way)[0] == expected[2:], way
assert_resumes_everywhere(build, steps=9)

def of(n):
    with penstock.Loader.from_dataset(Subset(data, [7, 3, 50, 3]), n) as loader:
        return tree_map(lambda *leaves: sum((leaf.tolist() for leaf in leaves), []), *loader)

assert of(4) == of(1)  # a batch is its samples, in their order
"""
THREADS, PROCESSES = {"num_workers": 2, "method": "thread"}, {"num_workers": 2, "multiprocessing_context": "fork"}
ONLY = {"ArrayRecord": [THREADS]}
VALUES = {
    "Video, and LeRobot datasets": (
        "assert [round(data[i]['image'].float().mean().item() / 4) for i in range(60)] == list(range(60))"
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_resumes_everywhere_and_gives_the_same_in_workers(
    recipe: str, tmp_path: Path, run_program: Callable[..., str]
) -> None:
    """From an empty folder. Seen to fail: HDF5 with the rows in ascending order; ArrayRecord in forked workers. Video
    by its float32 timestamps (the frame before), or with one decoder for two threads. (HDF5 and video read by a fork
    what its parent had opened, and gave the same.)"""
    for package in sorted(
        {found.partition(".")[0] for found in re.findall(r"^(?:from|import) ([\w.]+)", RECIPES[recipe], re.MULTILINE)}
    ):
        try:
            importlib.import_module(package)
        except (ImportError, OSError, RuntimeError) as exc:  # the latter two for a shared library that it needs
            pytest.skip(f"{package}: {exc}")
    ways = ONLY.get(recipe, [THREADS, PROCESSES])
    use = USE.replace("num_workers=2", 'num_workers=2, method="thread"') if PROCESSES not in ways else USE
    (tmp_path / "program.py").write_text(
        "\n".join([SHARED, RECIPES[recipe], VALUES.get(recipe, ""), use, f"WAYS = {ways}", CHECK])
    )
    run_program(tmp_path / "program.py")


NAMES = {"PIL": "pillow", "torch_geometric": "torch-geometric"}  # packages that are imported by another name
EXTRAS = {
    name: {Requirement(line).name for line in lines} for name, lines in PYPROJECT["optional-dependencies"].items()
}


def brought(page: Path) -> set[str]:
    """The packages that a reader of the page has: those that penstock needs, and those that the page says to
    install."""
    has = {Requirement(line).name for line in PYPROJECT["dependencies"]} | {"penstock"} | written(page)
    for line in re.findall(r"`pip install ([^`]+)`", page.read_text()):
        words = (f"torch-penstock{word[1:]}" if word.startswith(".[") else word for word in shlex.split(line))
        needs = [Requirement(word) for word in words if word != "."]
        has |= {need.name for need in needs} | {
            name for need in needs for extra in need.extras for name in EXTRAS[extra]
        }
    return has


def test_each_page_says_what_to_install() -> None:
    """tests/project/pages.py runs the pages with that and nothing else. Seen to fail: a progress bar without its
    package."""
    lacking = []
    for page in RUNNABLE:
        imported = {
            found.partition(".")[0]
            for found in re.findall(r"^ *(?:from|import) ([\w.]+)", script(page.read_text()), re.MULTILINE)
        }
        if lacks := {NAMES.get(name, name) for name in imported - sys.stdlib_module_names} - brought(page):
            lacking.append((page.name, lacks))
    assert lacking == []


def misnamed(code: str) -> list[str]:
    """What code that is only shown says of penstock, and is not so: names, and arguments."""
    known = {
        name: getattr(module, name) for module in map(importlib.import_module, MODULES) for name in module.__all__
    } | {"penstock": penstock}
    wrong = []

    def meant(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if not isinstance(node, ast.Attribute) or (owner := meant(node.value)) is None:
            return None
        if not hasattr(owner, node.attr) and owner in (penstock, *known.values()):
            wrong.append(ast.unparse(node))
        return getattr(owner, node.attr, None)

    for node in ast.walk(ast.parse(code.replace("…", "..."))):
        if isinstance(node, ast.Attribute):
            meant(node)
        elif isinstance(node, ast.Call) and callable(function := meant(node.func)):
            parameters = inspect.signature(function).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                wrong += [
                    f"{ast.unparse(node.func)}({word.arg}=…)"
                    for word in node.keywords
                    if word.arg and word.arg not in parameters
                ]
    return sorted(set(wrong))


def test_blocks_that_are_only_shown_name_what_there_is() -> None:
    shown = [(name, block) for name, _, text in EVERY for block in blocks(text) if block.label == "py"]
    assert [(name, block.line, wrong) for name, block in shown if (wrong := misnamed(block.text))] == []


def test_a_wrong_name_is_seen() -> None:
    code = (
        "penstock.Loader.from_data(x)\nloader = Loader.from_dataset(data, …, workers=8)\npenstock.Mix(x, y, runs=3)\n"
        "loader.anything(y=1)"
    )
    assert misnamed(code) == ["Loader.from_dataset(workers=…)", "penstock.Loader.from_data", "penstock.Mix(runs=…)"]


def test_json_blocks_parse() -> None:
    for _, _, text in EVERY:
        for block in blocks(text):
            if block.label == "json":
                json.loads(block.text)


def test_commands_exist() -> None:
    assert [
        (name, words, lack) for name, _, text in EVERY for words in commands(text) if (lack := missing(words))
    ] == []


def links(text: str) -> list[str]:
    """Where a page leads that is not elsewhere."""
    targets = [found["target"] or found["image"] for found in LINK.finditer(FENCE.sub("", text))]
    return [target for target in targets if not target.startswith(("https://", "http://", "mailto:"))]


def test_links_lead_somewhere() -> None:
    assert [
        (name, to) for name, page, text in EVERY for to in links(text) if not (page.parent / to.split("#")[0]).exists()
    ] == []


FILE = re.compile(r"`((?:docs|examples|pipes|tests)/[\w./-]+\.\w+)`")


def test_files_that_a_page_names_are_there() -> None:
    """Seen to fail: pages that were moved, in the lists of CONTRIBUTING.md."""
    assert [
        (name, file)
        for name, _, text in EVERY
        for file in FILE.findall(FENCE.sub("", text))
        if not (ROOT / file).exists()
    ] == []


def headings(markdown: str) -> set[str]:
    """The anchors of a page, as MyST and code hosts make them."""
    titles = re.findall(r"^#{1,4} (.+)$", FENCE.sub("", markdown), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()).replace(" ", "-")
        for title in titles
    }


def test_anchors_exist() -> None:
    """Seen to fail: a heading that was renamed, with a link to it elsewhere."""
    anchors = {page.resolve(): headings(text) for _, page, text in EVERY}
    lost = [
        (name, to) for name, page, text in EVERY for to in links(text) for file, hash_, anchor in [to.partition("#")]
        if hash_ and anchor not in anchors[((page.parent / file) if file else page).resolve()]
    ]  # fmt: skip
    assert lost == []


def public_names() -> Iterator[str]:
    """Everything that a user may import, with its module."""
    for module in MODULES:
        yield from (f"{module}.{name}" for name in importlib.import_module(module).__all__)
    for module, names in INTEGRATIONS.items():
        yield from (f"penstock.integrations.{module}.{name}" for name in names.split())


def documented(folder: Path = DOCS / "api") -> list[str]:
    """What the pages of the API reference document, apart from methods. A whole module is every name in it."""
    found = [
        re.findall(r"^\.\. auto(module)?(?!method)\w*:: (\S+)", page.read_text(), re.MULTILINE)
        for page in folder.glob("*.md")
    ]
    return [
        each
        for module, name in itertools.chain.from_iterable(found)
        for each in ([f"{name}.{one}" for one in importlib.import_module(name).__all__] if module else [name])
    ]


def test_every_public_name_has_one_entry_in_the_reference() -> None:
    """Seen to fail: a name that was added to ``__all__`` only."""
    listed, public = documented(), set(public_names())
    assert public - set(listed) == set(), "without an entry in docs/api/"
    assert set(listed) - public == set(), "in docs/api/, but not public"
    assert len(listed) == len(public), "one of them is listed twice"


def test_every_integration_is_listed() -> None:
    there = {file.stem for file in (Path(penstock.__file__).parent / "integrations").glob("*.py")} - {"__init__"}
    assert there == set(INTEGRATIONS)


def test_every_public_name_is_shown_outside_of_the_reference() -> None:
    """A reference says what a name does, and a guide what it is for. Seen to fail: `WeightedOrder`, which stood in the
    changelog only."""
    shown = "".join(
        page.read_text() for page in DOCS.rglob("*.md") if page.parent != DOCS / "api" and page.name != "changelog.md"
    )
    assert [name for name in public_names() if not re.search(rf"\b{name.rpartition('.')[2]}\b", shown)] == []


def test_every_argument_of_dataloader_has_a_row() -> None:
    """Seen to fail: without the row of ``in_order``."""
    table = (DOCS / "coming_from" / "dataloader.md").read_text().partition("## Arguments")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert rows == [name for name in inspect.signature(penstock.Loader.from_dataset).parameters if name in rows]
    assert set(inspect.signature(DataLoader).parameters) <= set(rows)


def test_every_tail_has_a_row() -> None:
    rows = re.findall(r'^\| `"(\w+)"`', (DOCS / "guides" / "several_gpus.md").read_text(), re.MULTILINE)
    assert rows == [*get_args(penstock.nodes.Tail)]


def said_by_the_code() -> str:
    """Every text in the package; a value in it is "…"."""
    texts = []
    for file in Path(penstock.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[a-z]", "…", node.value))
    return "\n".join(texts)


def test_messages_in_the_troubleshooting_are_those_of_the_code() -> None:
    """So that a search for one ends there. Seen to fail: a message that was changed in the code only."""
    rows = re.findall(
        r"^\| (.+?) \|", (DOCS / "troubleshooting.md").read_text().partition("## No message")[0], re.MULTILINE
    )
    parts = [part.strip(" :") for row in rows for quoted in re.findall(r"`([^`]+)`", row) for part in quoted.split("…")]
    code = said_by_the_code()
    assert [
        part for part in parts if part not in code and not hasattr(penstock, part) and not hasattr(builtins, part)
    ] == []


def test_readme_states_the_facts_of_the_package_and_stays_short() -> None:
    """Seen to fail: another version."""
    torch_version = next(
        one.specifier for line in PYPROJECT["dependencies"] if (one := Requirement(line)).name == "torch"
    )
    readme = (ROOT / "README.md").read_text()
    python, torch = (str(bound).removeprefix(">=") for bound in (PYPROJECT["requires-python"], torch_version))
    assert (
        f"\nVersion {penstock.__version__} · Python {python}+ · torch {torch}+ · Linux · {PYPROJECT['license']} · "
        in readme
    )
    assert readme.count("\n") <= 100


def test_readme_needs_no_other_command_than_git_make_and_pip() -> None:
    found = [
        words
        for words in commands((ROOT / "README.md").read_text())
        if words[0] != "make" and words[:2] != ["pip", "install"]
    ]
    assert [words[:2] for words in found] == [["git", "clone"]]


SAMPLE = """\
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


def test_a_failing_block_is_seen(tmp_path: Path, run_script: Callable[..., str]) -> None:
    (tmp_path / "page.md.py").write_text(script(SAMPLE))
    with pytest.raises(AssertionError, match=r'page\.md\.py", line 4'):
        run_script(tmp_path / "page.md.py")


def test_commands_that_do_not_exist_are_seen() -> None:
    assert [missing(words) for words in commands(SAMPLE)] == [None, "lunch", "examples/nowhere.py"]
