"""What we ship: the wheel, the source distribution, and their requirements."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import penstock

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "pipes" / "penstock"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
GROUPS = PYPROJECT["dependency-groups"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def built(distributions: Path) -> tuple[list[str], list[str]]:
    """The names in both."""
    folder = distributions
    (archive,) = folder.glob("torch_penstock-*.tar.gz")
    (wheel,) = folder.glob("torch_penstock-*.whl")
    with tarfile.open(archive) as sdist, zipfile.ZipFile(wheel) as zipped:
        return [name.split("/", 1)[1] for name in sdist.getnames()], zipped.namelist()


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(built: tuple[list[str], list[str]]) -> None:
    _, names = built
    package = {name for name in names if not re.match(r"torch_penstock-[^/]+\.dist-info/", name)}
    ours = {
        str(file.relative_to(SOURCE.parent))
        for file in SOURCE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert package == ours
    assert "penstock/py.typed" in package


@pytest.mark.slow
def test_an_index_would_take_them_and_the_wheel_is_small(distributions: Path) -> None:
    """Seen to fail: a README of a content type that the index does not know."""
    pytest.importorskip("twine")
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, distributions.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (wheel,) = distributions.glob("*.whl")
    # Comments and docstrings are a third of it; lines of 120 columns take 7 KB more than of 140; 800 lines of code came
    # with the arithmetic of trainers and with what datasets are made of, which are another 18 KB; and 7 KB are files of
    # their own for what a run changes.
    assert wheel.stat().st_size < 727_500


def test_nobody_is_sent_to_the_other_project() -> None:
    """The package index has another project called penstock. Seen to fail: one page that said
    ``pip install penstock``."""
    other = re.compile(r"pip install[^`\n]*(?<![\w/.-])penstock\b")
    files = [file for folder in ("docs", "examples", "pipes", ".github") for file in (ROOT / folder).rglob("*.*")]
    texts = {
        file: file.read_text()
        for file in (*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        if file.suffix in (".py", ".md", ".ipynb", ".yml")
    }
    found = [
        f"{file.name}: {line.strip()}"
        for file, text in texts.items()
        for line in text.splitlines()
        if other.search(line)
    ]
    assert found == []


@pytest.mark.slow
def test_source_distribution_can_be_tested(built: tuple[list[str], list[str]]) -> None:
    names, _ = built
    needed = (
        "CONTRIBUTING.md LICENSE Makefile README.md SECURITY.md constraints.txt pyproject.toml examples/demo.py "
        "tests/conftest.py"
    )
    assert {*needed.split(), ".github/workflows/ci.yml", ".pre-commit-config.yaml"} <= {*names}
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]


def test_nothing_is_importable_as_pipes(tmp_path: Path) -> None:
    look = (
        "import importlib.util as u; spec = u.find_spec('pipes'); print(spec and (spec.origin or "
        "list(spec.submodule_search_locations)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", look], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.strip()
    # the standard library's, up to Python 3.12
    assert found == "None" or Path(found).parent == Path(subprocess.__file__).parent


def test_tests_run_against_the_installed_wheel() -> None:
    if Path(penstock.__file__).is_relative_to(SOURCE):
        pytest.skip("pipes/ is on the import path; `make test` takes the wheel")
    assert "site-packages" in penstock.__file__


def test_runtime_needs_three_packages_only() -> None:
    assert {Requirement(line).name for line in PROJECT["dependencies"]} == {"numpy", "torch", "torchdata"}


def test_only_what_users_need_is_published() -> None:
    """What this project is tested and documented with is in dependency groups, which no index sees."""
    assert set(PROJECT["optional-dependencies"]) == {
        "accelerate",
        "formats",
        "lance",
        "lightning",
        "ray",
        "transformers",
    }
    assert {"docs", "site", "test"} <= set(GROUPS)


def test_classifiers_name_the_pythons_that_are_tested() -> None:
    minors = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert f">={minors[0]}" == PROJECT["requires-python"]
    tested = ", ".join(f'"{minor}"' for minor in minors)
    assert f"python: [{tested}]" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {penstock.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_constraints_are_exact_and_within_what_the_project_allows() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    groups = (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values(), *GROUPS.values())
    wanted = [Requirement(line) for group in groups for line in group if isinstance(line, str)]
    outside = [
        str(need) for need in wanted if not need.specifier.contains(pinned.get(canonicalize_name(need.name), "0"))
    ]
    assert outside == []


def imported(file: Path) -> set[str]:
    """The packages that a file imports, directly or through the modules in ``tests/support``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for name in (name.partition(".")[0] for name in names):
            own = ROOT / "tests" / "support" / f"{name}.py"
            found |= imported(own) if own.exists() else {name}
    return found - sys.stdlib_module_names


def test_make_wheels_takes_all_that_make_gpu_imports() -> None:
    """A machine without a network has nothing else. Seen to fail: without psutil, which conftest.py needs."""
    (line,) = re.findall(r"^GPU_PACKAGES := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    marked = [
        file
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", file.read_text()) and file != Path(__file__)
    ]
    assert marked
    needed = set().union(
        *map(imported, [ROOT / "tests" / "conftest.py", ROOT / "examples" / "benchmarks" / "device.py", *marked])
    )
    assert needed <= {"penstock", "torch", "numpy", *line.replace("-", "_").split()}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_make_gpu_without_an_accelerator_says_so_and_fails() -> None:
    """And installs nothing. Skipped tests would look like success."""
    command = ["make", "gpu", f"PYTHON={sys.executable}", "WHEELS=there is none"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "sees no accelerator" in ended.stderr
    assert "pip" not in ended.stdout
