"""Workers on other machines: the cases of ``ray_cases.py``, on a cluster of two nodes that one program starts for all
of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Loader

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("ray", reason="Ray has no wheel here")
PROGRAM = Path(__file__).with_name("ray_cases.py")
CASES = [
    pytest.param(name, marks=[pytest.mark.soak, pytest.mark.timeout(660)] if long else ())
    for long, name in re.findall(r"^@(long_)?case\ndef (\w+)", PROGRAM.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: Any) -> Iterator[Any]:
    with _started(tmp_path_factory.mktemp("ray")) as program:
        yield program


@contextlib.contextmanager
def _started(folder: Path, **environment: str) -> Iterator[Any]:
    """The program, which does one case for each line that it is told. It hangs below no test: Ray keeps processes for
    later, as it pleases."""
    command = [sys.executable, str(PROGRAM), str(folder)]
    path = os.pathsep.join(
        filter(None, [*(str(PROGRAM.parents[1] / name) for name in ("support", "laws")), os.environ.get("PYTHONPATH")])
    )
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as program,
    ):
        program.wait()  # for the process between, which has ended
        yield program
        program.stdin.close()  # type: ignore[union-attr]
        assert program.stdout.read().endswith("ended\n")  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_workers_on_other_machines(cluster: Any, case: str) -> None:
    _run(cluster, case)


def _run(cluster: Any, case: str) -> None:
    print(case, file=cluster.stdin, flush=True)
    line = next((line for line in cluster.stdout if line.startswith('["')), None)
    assert line is not None, Path(cluster.args[-1], "stderr").read_text()[-4000:]
    name, said = json.loads(line)
    assert name == case
    assert said is None, said


@pytest.mark.soak
def test_a_cluster_without_token_authentication(tmp_path: Path) -> None:
    """Ray has it on by default, so all other tests are with it."""
    with _started(tmp_path, RAY_AUTH_MODE="disabled") as cluster:
        _run(cluster, "an_actor_is_killed")


@pytest.mark.soak
def test_the_head_node_is_lost(run_script: Any) -> None:
    """Ray ends the program (ray-project/ray#36651): it never hangs in silence."""
    assert 0 < float(run_script(PROGRAM.with_name("ray_head.py")).splitlines()[-1]) < 180


@pytest.mark.parametrize("name", ["max_concurrency", "name", "lifetime", "max_restarts"])
def test_options_that_the_loader_decides_are_refused(name: str) -> None:
    """Seen to fail: with four calls at once in an actor, the samples had other random numbers."""
    with pytest.raises(ValueError, match=rf"ray_options has {name}, but the loader itself controls"):
        Loader.from_dataset(range(8), num_workers=1, method="ray", ray_options={name: 4})


def test_options_of_ray_are_for_ray() -> None:
    with pytest.raises(
        ValueError, match=r"ray_options=.* is for method='ray', but method='process'. Leave ray_options out"
    ):
        Loader.from_dataset(range(8), num_workers=1, ray_options={"num_cpus": 1})
