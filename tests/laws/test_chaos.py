"""A training process is killed at random moments, and continues from its last saved state."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from tests.laws.chaos_training import BATCH, EPOCHS, N

import penstock
from penstock.testing import Tagged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "in_order", "kills"),
    [
        ("process", True, 12),
        *(pytest.param(*case, 50, marks=pytest.mark.soak) for case in product(["thread", "process"], [True, False])),
    ],
)
def test_what_was_trained_is_what_an_uninterrupted_run_trains(tmp_path, run_program, method, in_order, kills):
    """In order, batch for batch; out of order, epoch by epoch each batch exactly once. Seen to fail when the state ran
    a batch ahead."""
    options = {"num_workers": 2, "method": method, "in_order": in_order}
    said = json.loads(
        run_program(
            Path(__file__).with_name("chaos_training.py"), str(tmp_path), json.dumps(options), str(kills)
        ).splitlines()[-1]
    )
    with penstock.Loader.from_dataset(Tagged(N), batch_size=BATCH, shuffle=True, seed=1) as loader:
        whole = [[batch.tolist() for batch in loader] for _ in range(EPOCHS)]
    assert said["kills"] == kills
    for run in said["runs"]:
        epochs = [run[start : start + len(loader)] for start in range(0, len(run), len(loader))]
        assert (
            epochs == whole if in_order else [sorted(epoch) for epoch in epochs] == [sorted(epoch) for epoch in whole]
        )
