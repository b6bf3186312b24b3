"""A run that changes while a `Ledger` has batches of several epochs open: what is served, and served again, is what one
sequence of samples has at its address.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

import penstock
from penstock import Ledger, Loader, Mix

SOURCES = {"a": range(70), "b": range(1000, 1050), "c": range(2000, 2020)}
WEIGHTS = {"a": 1, "b": 2, "c": 0}
SKIPPED = [(10, 30), (70, 90)]


def build(kind: str, epoch_size: int, **words: Any) -> Loader[Any]:
    words = {"batch_size": 4, "seed": 5, "infinite": True, "drop_last": True, **words}
    if kind == "ramp":
        words["batch_size"] = penstock.Ramp([(0, 2), (20, 4), (64, 7)])
    if kind == "skip":
        words["skip"] = SKIPPED
    return Loader.from_dataset(Mix(SOURCES, WEIGHTS, epoch_size=epoch_size), **words)


def walked(seed: int) -> bool:
    """Three lives of one run. Returns whether a state had open batches of several epochs."""
    chance = random.Random(seed)
    kind = chance.choice(["plain", "ramp", "skip"])
    stages: list[tuple[int, Any]] = [(0, WEIGHTS)]
    begins, sizes = {0: 0}, {0: 40}  # of each epoch: its first sample, and how many it has
    served: dict[penstock.Address, list[int]] = {}
    epoch, state, several = 0, None, False
    for life in range(3):
        size = chance.choice([40, 56]) if life else 40
        workers = chance.choice([{}, {"num_workers": 2, "method": "thread"}])
        with build(kind, size, **workers) as loader, Ledger(loader, max_open=50) as ledger:
            if state is not None:
                ledger.load_state_dict(state)
                sizes[epoch] = max(size, loader.here["source"]["position"])  # an epoch that is longer already ends here
            pending = []
            for _ in range(chance.randrange(5, 25)):
                if chance.random() < 0.2:
                    weights = {"a": chance.choice([0, 1, 2]), "b": 1, "c": chance.choice([0, 1])}
                    begin = loader.reweight(weights)
                    stages = [*(stage for stage in stages if stage[0] < begin), (begin, weights)]
                at, batch = next(ledger)
                if at.epoch > epoch:
                    epoch, sizes[at.epoch] = at.epoch, size
                for one in range(epoch):
                    begins[one + 1] = begins[one] + sizes[one]
                assert served.setdefault(at, batch.tolist()) == batch.tolist()
                pending.append(at)
                while pending and chance.random() < 0.4:
                    ledger.done(pending.pop(chance.randrange(len(pending))))
            several |= len({at.epoch for at in ledger.open}) > 1
            state = json.loads(json.dumps(ledger.state_dict()))
    with Loader.from_dataset(Mix(SOURCES, stages, epoch_size=2000), batch_size=None, seed=5) as straight:
        sequence = [int(value) for value in straight]
    for at, values in served.items():
        assert values == [sequence[begins[at.epoch] + position] for position in at.positions]
    return several


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 400), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_several_epochs_are_open(seeds: range) -> None:
    """Weights that change, ramps, ranges to skip, and other lengths of epochs. Seen to fail: epochs that begin where
    those of the present length would.
    """
    assert sum(map(walked, seeds)) > len(seeds) // 4
