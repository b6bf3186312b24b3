"""The program of GRPO over a `Ledger` is killed on two ranks, and goes on with one: each prompt is trained on, dropped
or open, once."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "grpo_ledger.py"
N = 64

pytestmark = pytest.mark.slow


def last_checkpoint(folder: Path) -> Any:
    """The step of the last checkpoint, and what the rollouts had."""
    if (folder / "checkpoint.pt").exists():
        saved = torch.load(folder / "checkpoint.pt")
        return saved["step"], saved["rollouts"]
    steps = {
        int(file.parent.name.removeprefix("checkpoint-")): file for file in folder.glob("checkpoint-*/ledger.json")
    }
    return max(steps), json.loads(steps[max(steps)].read_text())


def opened(ledger_state: Any) -> list[int]:
    with penstock.Loader.from_dataset(range(N), batch_size=None, shuffle=True, seed=1, infinite=True) as loader:
        ledger = penstock.Ledger(loader)
        ledger.load_state_dict(ledger_state)
        return [number(at.json()) for at in ledger.open]


def number(at: Any) -> int:
    """A prompt of the sequence that the loader gives, by its epoch and position."""
    return int(at[0] * N + at[1])


@pytest.mark.parametrize("trainer", ["plain", "trl"])
def test_grpo_killed_on_two_ranks_goes_on_with_one(
    trainer: str, tmp_path: Path, run_program: Callable[..., str]
) -> None:
    """Seen to fail: with ``done`` once a rollout is finished, and with a state from before the settlements of its
    step."""
    if trainer == "trl" and find_spec("trl") is None:
        pytest.skip("TRL is not installed")
    words = ["--folder", "run", *(["--plain"] if trainer == "plain" else [])]
    run_program(EXAMPLE, *words, "--die-after", "10", ranks=2, killed=True)
    step, before = last_checkpoint(tmp_path / "run")
    assert step == 8
    assert "prompts are open, and come first" in (said := run_program(EXAMPLE, *words, "--resume"))
    assert "48 prompts trained on" in said
    assert ", 0 lost, 0 twice" in said
    end = json.loads((tmp_path / "run" / "end.json").read_text())
    with penstock.Loader.from_dataset(
        range(N), batch_size=None, shuffle=True, seed=1, infinite=True, collate_fn=int
    ) as loader:
        sequence = list(islice(loader, 4 * N))
    settled = [*end["settled"]["done"], *end["settled"]["dropped"]]
    assert all(index == sequence[number(at)] for *at, index in settled)
    assert len(end["settled"]["done"]) == 2 * 24
    for how in ("done", "dropped"):  # of the life that was killed: what its last checkpoint has, and in that order
        assert end["settled"][how][: len(before["settled"][how])] == before["settled"][how]
    everything = sorted([*map(number, settled), *opened(end["ledger"])])
    assert everything == [*range(len(everything))]
    was_open, reached = (
        opened(before["ledger"]),
        sum(map(len, before["settled"].values())) + len(opened(before["ledger"])),
    )
    assert was_open
    served = sorted(map(number, end["served"]))
    assert served == [*was_open, *range(reached, reached + len(served) - len(was_open))]
