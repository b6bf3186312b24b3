"""What runs elsewhere (a CI service, pre-commit) is what runs here: Make's targets, and the commands of
``make lint``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[1].split())  # type: ignore[index]
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
SOAK: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "soak.yml").read_text())["jobs"]
RELEASE: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]


def commands(jobs: dict[str, Any]) -> list[list[str]]:
    """Every command line of the workflow, in words."""
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    return [shlex.split(re.sub(r"\$\{\{.*?\}\}", "", line)) for run in runs for line in run.splitlines()]


def strangers(command: list[str]) -> list[str]:
    """The words of a command that are neither a target of this Makefile, nor one of its variables, nor a program of
    this project."""
    program, *words = command
    if program != "make":
        return [] if os.access(ROOT / program, os.X_OK) else [program]
    settings = {word.partition("=")[0] for word in words if "=" in word}
    unset = {name for name in settings if not re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE)}
    return sorted(unset | {word for word in words if "=" not in word} - TARGETS)


def test_every_target_is_there() -> None:
    assert [target for target in TARGETS if not re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)] == []


def test_the_workflow_runs_what_is_here() -> None:
    assert [
        (command, found)
        for command in [*commands(JOBS), *commands(SOAK), *commands(RELEASE)]
        if (found := strangers(command))
    ] == []


def test_a_release_is_tested_and_checked_before_it_is_published() -> None:
    """And only the job that publishes may ask for an identity. Seen to fail: without ``needs``."""
    assert [command[:2] for command in commands({"build": RELEASE["build"]})] == [[".ci/run"], ["make", "release"]]
    assert RELEASE["publish"]["needs"] == "build"
    assert [name for name, job in RELEASE.items() if "id-token" in job.get("permissions", {})] == ["publish"]


def test_a_command_that_is_not_here_is_seen() -> None:
    made_up = {
        "job": {
            "steps": [
                {"uses": "x"},
                {"run": "make test lunch TORCH=2 SALT=1\nnowhere/run --all"},
                {"run": "make ${{ y }}"},
            ]
        }
    }
    assert [strangers(command) for command in commands(made_up)] == [["SALT", "lunch"], ["nowhere/run"], []]


def test_the_workflow_runs_all_that_a_change_must_pass() -> None:
    """And each Python that the project says it runs on, the newest four; and builds the wheel, and installs it for the
    demo."""
    assert [".ci/run"] in commands(JOBS)
    assert commands({"dist": JOBS["dist"]}) == [["make", "dist"], ["make", "demo"]]
    assert JOBS["versions"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
    ran = [line.split() for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")]
    assert ran[:3] == [["make", "test"], ["make", "lint"], ["make", "site"]]
    assert [command[:2] for command in ran[3:]] == [["make", "faults"]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None or shutil.which("git") is None, reason="there is no make, or no git")
def test_what_is_not_committed_is_tested_in_a_folder_of_the_projects_name_below_a_space(tmp_path: Path) -> None:
    """Again and again, in the same copy. Seen to fail: make in the checkout itself, where a test that looked for
    ``penstock/`` in paths was green."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / ".gitignore").write_text("/build/\n.venv\n")
    (tmp_path / "Makefile").write_text("test lint site faults:\n\t@echo $@: $(CURDIR); ls -A; touch .venv\n")
    for name in ("is there", "is gone later", ".venv"):
        (tmp_path / name).touch()
    subprocess.run("git init -q && git add --all", shell=True, cwd=tmp_path, check=True)

    # `make test` sets them
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}

    def run() -> list[str]:
        said = subprocess.run(
            [".ci/run"], cwd=tmp_path, env=alone, check=True, capture_output=True, text=True, timeout=300
        ).stdout
        heads = [f"{target}: {tmp_path}/build/a clone/penstock" for target in ("test", "lint", "site", "faults")]
        assert [line for line in said.splitlines() if ":" in line] == heads
        return said.partition("lint:")[0].splitlines()[1:]

    own = [".ci", ".git", ".gitignore", "Makefile"]
    assert sorted(run()) == sorted([*own, "is gone later", "is there"])
    (tmp_path / "is gone later").unlink()
    (tmp_path / "is new").touch()
    assert sorted(run()) == sorted([*own, ".venv", "is new", "is there"])


def test_pre_commit_runs_what_make_lint_runs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook["entry"].removeprefix(".venv/bin/") for hook in local["hooks"]]
    recipe = re.search(r"^lint:.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    assert hooks == [line.strip().removeprefix("$(BIN)/") for line in recipe[1].splitlines()]
