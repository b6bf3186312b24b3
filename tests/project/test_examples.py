"""Every example runs to its end from any folder, prints something, and leaves no process behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.slow]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
LONG = ["ddp_elastic", "demo", "ray_train", "ray_workers"]  # they start interpreters themselves
SCRIPTS = sorted(
    file
    for file in EXAMPLES.glob("*.py")
    # test_ports.py and test_fine_tuning.py run these
    if not file.name.startswith(("port_", "finetune_")) and file.stem not in LONG
)


def test_there_are_few_and_each_says_for_whom_it_is() -> None:
    heads = [file.read_text().partition("\n")[0] for file in EXAMPLES.glob("*.py")]
    assert len(heads) <= 24
    assert [head for head in heads if not head.startswith('"""For ')] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_example_runs(script: Path, run_program: Callable[..., str]) -> None:
    assert run_program(script).strip()


@pytest.mark.soak
@pytest.mark.parametrize("stem", LONG)
def test_a_long_example_runs(stem: str, tmp_path: Path, run_script: Callable[..., str]) -> None:
    if stem.startswith("ray_"):
        pytest.importorskip("ray", reason="Ray has no wheel here")
    assert run_script(EXAMPLES / f"{stem}.py").strip()
    if stem == "demo":
        assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


HELP = """
import contextlib, io, json, runpy, sys, torch, penstock

for program in sys.argv[1:]:
    sys.argv, sys.path[0] = [program, "--help"], program.rpartition("/")[0]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        runpy.run_path(program, run_name="__main__")
    print(json.dumps([program, said.getvalue()]))
"""
"""Programs say in one process how to run them, because that takes as long as what they import."""


def test_the_benchmarks_say_how_to_run_them(tmp_path: Path, run_program: Callable[..., str]) -> None:
    programs = [str(file) for file in (EXAMPLES / "benchmarks").glob("*.py") if "ArgumentParser" in file.read_text()]
    assert len(programs) >= 8
    (tmp_path / "help.py").write_text(HELP)
    said = dict(map(json.loads, run_program(tmp_path / "help.py", *programs).splitlines()))
    assert [*said] == programs
    assert [program for program in programs if not said[program].startswith("usage: ")] == []


@pytest.mark.soak
def test_the_benchmark_of_streams_runs(run_script: Callable[..., str]) -> None:
    """Every workload, with small data and whoever is installed; the others are named."""
    printed = run_script(
        EXAMPLES / "benchmarks" / "streams.py", "--quick", "--peers", "penstock", "no loader", "torchdata", "lhotse"
    )
    tables = printed[printed.index("\n## X1") :]
    for workload in ("X1", "X2", "X3", "X4", "X5", "X6", "X7", "X8", "X9", "X10", "X11"):
        assert f"## {workload}\n" in tables
    assert "failed" not in tables
    assert "\n| penstock, 0 workers | " in tables


@pytest.mark.soak
def test_the_benchmark_of_the_number_of_workers_runs(run_script: Callable[..., str]) -> None:
    """What it concludes depends on the machine; here only that it comes to its end."""
    pytest.importorskip("PIL")
    options = ("--rounds", "1", "--seconds", "0.05", "--patience", "0.5", "--workloads", "jpeg", "python")
    printed = run_script(EXAMPLES / "benchmarks" / "auto.py", *options)
    assert re.findall(
        r"^(\w+): \d\.\d\d of the best fixed number \(\d\); \d (\w+) workers, \d are enough", printed, re.MULTILINE
    ) == [
        ("jpeg", "thread"),
        ("python", "process"),
    ]


@pytest.mark.soak
def test_the_known_runs_are_resumed(tmp_path: Path, run_script: Callable[..., str]) -> None:
    """With the loaders that the tests have. Seen to fail: `DataLoader` calls ``iter`` twice, and only the first
    iterator began at the right batch."""
    pytest.importorskip("PIL")
    words = (
        "--quick",
        "--rounds",
        "1",
        "--seconds",
        "0.05",
        "--device",
        "cpu",
        "--json",
        str(tmp_path / "figures.json"),
    )
    peers = ("DataLoader", "StatefulDataLoader", "torchdata.nodes", "penstock")
    printed = run_script(EXAMPLES / "benchmarks" / "known_runs.py", *words, "--peers", *peers)
    assert re.findall(r"^\| ([\w.]+) \| 2 \|.*\| ([\w ]+) \|$", printed, re.MULTILINE) == [
        *((peer, "same bits") for peer in peers),
        *((peer, "same samples") for peer in peers[:-1]),  # whose flips are drawn anew
        ("penstock", "same bits"),
    ]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {row["loader"] for row in figures["turns"]} == {"no loader", *peers}
