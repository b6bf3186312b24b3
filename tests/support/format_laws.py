"""What every dataset in shards must do, whatever its format: one global sequence, exact resume, any workers, nothing left open."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from typing import Any

import numpy as np
import pytest

from penstock import Loader
from penstock.testing import assert_resumes_everywhere

WAYS = [
    pytest.param({}, id="inline"),
    pytest.param({"num_workers": 2, "method": "thread"}, id="threads"),
    pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="fork", marks=pytest.mark.slow),
    pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.soak),
]
every_way = pytest.mark.parametrize("way", WAYS)


def read(dataset: Any, epochs: int = 1, **words: Any) -> list[list[Any]]:
    """The samples of each epoch, as they come."""
    with Loader.from_dataset(dataset, **{"batch_size": 4, "collate_fn": list, "tail": "exact", **words}) as loader:
        return [[sample for batch in loader for sample in batch] for _ in range(epochs)]


def assert_keeps_the_laws(dataset: Any, way: dict[str, Any]) -> None:
    """Every sample once an epoch, in the order that one worker would read them, from wherever it resumes.

    Args:
        dataset: Of 20 to 40 samples, all different.
        way: Arguments of the loader.
    """
    words = {"shuffle": True, "seed": 7, **way}
    expected = [dataset.order(shuffle=True, seed=7).indices(epoch, np.arange(len(dataset))).tolist() for epoch in range(2)]
    samples = [[dataset[index] for index in epoch] for epoch in expected]
    if "multiprocessing_context" not in way:
        assert read(dataset, 2, **words) == samples
        assert read(pickle.loads(pickle.dumps(dataset)), 2, **words) == samples
        steps = 2 * -(-len(dataset) // 4) + 2
        assert_resumes_everywhere(lambda: Loader.from_dataset(dataset, batch_size=4, collate_fn=list, **words), steps=steps)
        return
    # Worker processes take time to start: resume once, in the middle of a shard.
    words |= {"batch_size": 4, "collate_fn": list, "tail": "exact"}
    with Loader.from_dataset(dataset, **words) as loader:
        batches = iter(loader)
        before = [sample for batch in itertools.islice(batches, 3) for sample in batch]
        state = json.loads(json.dumps(loader.state_dict()))
        assert before + [sample for batch in batches for sample in batch] == samples[0]
    with Loader.from_dataset(dataset, **words) as loader:
        loader.load_state_dict(state)
        assert before + [sample for batch in loader for sample in batch] == samples[0]


def assert_ranks_share_one_sequence(dataset: Any, **words: Any) -> None:
    """2, 3 and 4 ranks read what one reads."""
    expected = read(dataset, 2, shuffle=True, seed=7, **words)
    for world_size in (2, 3, 4):
        ranks = [read(dataset, 2, shuffle=True, seed=7, rank=rank, world_size=world_size, **words) for rank in range(world_size)]
        for epoch in range(2):
            dealt = itertools.zip_longest(*(rank[epoch] for rank in ranks))
            assert [sample for hands in dealt for sample in hands if sample is not None] == expected[epoch]


def open_files(folder: Any) -> list[str]:
    """The files in ``folder`` that this process has open or mapped, as often as they are."""
    folder = os.path.realpath(folder)
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    found = [os.readlink(link) for link in links if os.path.exists(link)]
    with open("/proc/self/maps") as maps:
        found += {words[5].strip() for line in maps if len(words := line.split(maxsplit=5)) == 6}
    return sorted(name for name in found if name.startswith(folder))
