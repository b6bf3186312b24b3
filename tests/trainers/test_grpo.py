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


def numbered(rounds: list[list[int]]) -> list[list[int]]:
    """Prompts by the order in which an epoch has them, because penstock's seed shuffles, and not the sampler's own."""
    numbers: dict[tuple[int, int], int] = {}
    return [[numbers.setdefault((at // 12, one), len(numbers)) for one in row] for at, row in enumerate(rounds)]


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed, whose sampler this is: pip install trl")
def test_trls_own_sampler_is_dealt_as_by_accelerate(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """On 2, 4 and 1 ranks, and from the middle of the second epoch on, where the run before it had other ranks.

    Seen to fail: with ``split="items"``.
    """
    whole: Any = None
    for ranks in (2, 4, 1):
        run_program(Path(__file__).with_name("repeated_prompts.py"), tmp_path, ranks=ranks, ACCELERATE_USE_CPU="true")
        found = json.loads((tmp_path / f"ranks-{ranks}.json").read_text())
        told = found["DataLoader, shuffle=False"]
        assert [found[f"{name}, shuffle=False"] for name in ("Accelerate", "Loader")] == [told, told]
        assert told[:4] == [[0] * 4 + [1] * 4] * 2 + [[2] * 4 + [3] * 4] * 2
        mixed = [found[f"{name}, shuffle=True"] for name in ("DataLoader", "Accelerate", "Loader")]
        assert {json.dumps(numbered(one)) for one in mixed} == {json.dumps(numbered(mixed[0]))}
        whole = whole or mixed[2]
        assert mixed[1] == mixed[2] == whole
        for name in ("Accelerate", "Loader"):
            assert found.get(f"{name}, resumed", whole[17:]) == whole[17:]
    assert [len({prompt for row in whole[at : at + 12] for prompt in row}) for at in (0, 12, 24)] == [12] * 3
    assert len({json.dumps(whole[at : at + 12]) for at in (0, 12, 24)}) == 3
    assert "Loader, resumed" in found


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
