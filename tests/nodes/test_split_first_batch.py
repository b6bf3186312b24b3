"""The first batch of an empty pipeline is loaded by all workers at once. What comes of it: `test_lanes_and_workers`.

Gates, not sleeps: a sample that begins a worker's part reports through one pipe, and waits at another until all have
reported.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

import pytest
import torch

from penstock import Loader
from penstock.testing import Tagged

METHODS = ["thread", "process"]
by_method = pytest.mark.parametrize("method", METHODS)
N, BATCH = 36, 12


def loading(dataset, method, workers=3, **options):
    options = {"batch_size": BATCH, "seed": 4, **options}
    if method == "process" and workers:
        options["multiprocessing_context"] = "fork"
    return Loader.from_dataset(dataset, num_workers=workers, method=method, **options)


class Gates:
    """A gate where a thread or a forked process reports that it has begun, and waits."""

    def __init__(self):
        self.begun, self.begin = os.pipe()
        self.wait, self.go = os.pipe()

    def pass_(self, word=b"."):
        os.write(self.begin, word)
        os.read(self.wait, 1)

    def seen(self, n, within=3.0):
        """The reports of the first ``n``; fewer if no more came in time."""
        words = b""
        while len(words) < n and select.select([self.begun], [], [], within)[0]:
            words += os.read(self.begun, n - len(words))
        return words

    def open(self, n):
        os.write(self.go, b"g" * n)

    def close(self):
        for fd in (self.begun, self.begin, self.wait, self.go):
            os.close(fd)


@pytest.fixture
def gates():
    gates = Gates()
    yield gates
    gates.close()


class Gated(Tagged):
    """Reports at some of its samples, and waits at the gate."""

    def __init__(self, n, gates, at):
        super().__init__(n)
        self.gates, self.at = gates, at

    def __getitem__(self, index):
        value = super().__getitem__(index)
        if value in self.at:
            self.gates.pass_(bytes([index]))
        return value


@contextlib.contextmanager
def opened(gates, n):
    """Gates that open once ``n`` workers are there, and a list that holds their reports at the end."""
    words = []

    def guard():
        words.extend(gates.seen(n))
        gates.open(200)

    thread = threading.Thread(target=guard)
    thread.start()
    yield words
    thread.join()


# The batch is split.


@by_method
@pytest.mark.parametrize(("batch_size", "workers", "firsts"), [(12, 3, [0, 4, 8]), (5, 4, [0, 2, 4]), (2, 3, [0, 1])])
def test_all_workers_load_the_first_batch(gates, method, batch_size, workers, firsts):
    """No worker continues before all have begun. Seen to fail: `parts` that returns nothing (only one worker reaches
    the gate in three seconds)."""
    with loading(Gated(N, gates, firsts), method, workers, batch_size=batch_size) as loader:
        with opened(gates, len(firsts)) as words:
            batches = list(loader)
        assert sorted(words) == firsts
    assert torch.cat(batches).tolist() == list(range(N))


@by_method
def test_the_batches_behind_it_are_loaded_meanwhile(gates, method):
    """By the workers that have finished their part."""
    with loading(Gated(N, gates, [0, 12, 24]), method, 2) as loader:
        with opened(gates, 2) as words:
            assert torch.cat(list(loader)).tolist() == list(range(N))
        assert sorted(words) in ([0, 12], [0, 24])


# A worker that hangs.


@by_method
@pytest.mark.slow
def test_a_part_that_hangs(gates, method):
    """Is named, and its batch is lost; the others come. Seen to fail: `_Split.under_way` without the parts that are not
    done."""
    with loading(Gated(N, gates, [5]), method, timeout=0.3) as loader:
        iterator = iter(loader)
        with pytest.raises(TimeoutError, match=r"dataset index 5 \(epoch 0, position 5\)"):
            next(iterator)
        gates.open(1)
        assert torch.cat([patient(iterator), patient(iterator)]).tolist() == list(range(12, N))


def patient(iterator):
    """The next batch. On a busy machine it has not begun in time; then it is still to come."""
    while True:
        with contextlib.suppress(TimeoutError):
            return next(iterator)
