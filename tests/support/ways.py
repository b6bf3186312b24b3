"""Who loads: words of `Loader.from_dataset`, as parameters of a test. An interpreter for each worker takes long, and
says the same again."""

from __future__ import annotations

import pytest

INLINE = pytest.param({"num_workers": 0}, id="inline")
THREAD = pytest.param({"num_workers": 2, "method": "thread"}, id="thread")
FORK = pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="fork")
SPAWN = pytest.param({"num_workers": 2, "multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.soak)
WAYS = [INLINE, THREAD, FORK]
every_way = pytest.mark.parametrize("way", WAYS)
NAMED = {
    "inline": {},
    "thread": {"num_workers": 2, "method": "thread"},
    "process": {"num_workers": 2, "multiprocessing_context": "fork"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
}
