"""What the tests of the formats share."""

from __future__ import annotations

import os
from typing import Any

import pytest

from penstock import Loader

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


def open_files(folder: Any) -> list[str]:
    """The files in ``folder`` that this process has open or mapped, as often as they are."""
    folder = os.path.realpath(folder)
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    found = [os.readlink(link) for link in links if os.path.exists(link)]
    with open("/proc/self/maps") as maps:
        found += {words[5].strip() for line in maps if len(words := line.split(maxsplit=5)) == 6}
    return sorted(name for name in found if name.startswith(folder))
