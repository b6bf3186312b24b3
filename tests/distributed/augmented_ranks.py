"""Ranks that read one IterableDataset, which augments its records with generators that nobody seeds: a program of one
process per rank. No alarm may end it, and each record comes once."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta

import numpy as np
import torch.distributed as dist
import torchdata.nodes
from torch.utils.data import IterableDataset, get_worker_info

from penstock import Loader, Mix, StateMismatch, Stream
from penstock.nodes import Batcher, Cycler, IterableSource, Sharder

N = 96


class Augmented(IterableDataset):
    """Records whose number is in the least bits of a noisy picture, where no checksum finds it again."""

    def __init__(self, first=0):
        self.first = first

    def __iter__(self):
        info, rng = get_worker_info(), np.random.default_rng()
        for number in range(N)[info.id if info else 0 :: info.num_workers if info else 1]:
            yield self.record(self.first + number, rng)

    def record(self, number, rng):
        """A cropped picture, whose label is the same for all of the first ones."""
        picture = rng.integers(0, 2**20, (3, 4)) * 1024 + number
        return {"picture": picture, "label": number // 48}


class Held(Augmented):
    """Cannot be copied, so nobody can tell whether it would begin otherwise."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class ByRank(Augmented):
    """Deals its records to the ranks itself, without noise."""

    def __iter__(self):
        info = get_worker_info()
        mine = range(dist.get_rank(), 8 * N, dist.get_world_size())
        yield from mine[info.id if info else 0 :: info.num_workers if info else 1]


class AtItsPlace(ByRank):
    """Has a state, which it begins its next pass from."""

    at = 0

    def __iter__(self):
        records = [*super().__iter__()]
        while self.at < len(records):
            self.at += 1
            yield records[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def lanes(data, **words):
    return Loader.from_dataset(Stream(data, lanes=4, epoch_size=N), 4, collate_fn=list, **words)


def items(data, **words):
    return Loader.from_dataset(data, 4, split="items", tail="drop", collate_fn=list, **words)


def mixed(data, **words):
    sources = {"a": Stream(data, lanes=4, epoch_size=N), "b": Stream(Augmented(N), lanes=4, epoch_size=N)}
    return Loader.from_dataset(Mix(sources, {"a": 1, "b": 1}, epoch_size=N), 4, collate_fn=list, **words)


def node(data):
    wrapped = torchdata.nodes.IterableWrapper(data)
    return Loader(Batcher(Sharder(Cycler(IterableSource(wrapped, split="items")), tail="drop"), 4))


HEALTHY = {
    "pictures, stream": lambda: lanes(Augmented()),
    "pictures, in processes": lambda: lanes(Augmented(), num_workers=2),
    "pictures, items": lambda: items(Augmented()),
    "held": lambda: items(Held()),
    "mixed": lambda: mixed(Augmented()),
    "a node": lambda: node(Augmented()),
}


def number_of(record):
    return int(record["picture"][0, 0]) % 1024


def healthy(name):
    with HEALTHY[name]() as loader:
        mine = [number_of(record) for _ in range(2) for batch in loader for record in batch]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    assert max(Counter(number for one in found for number in one).values()) <= 2, name
    assert {len(one) for one in found} == {2 * N // dist.get_world_size()}, name


DIFFER = {
    "with a state, items": lambda: items(AtItsPlace()),
}


def differs(name):
    """What does not change by itself is still compared."""
    raised = False
    with DIFFER[name]() as loader:
        try:
            for _ in range(2):
                for _ in loader:
                    pass
        except StateMismatch:
            raised = True
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, raised)
    assert any(found), name


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for names, check in ((HEALTHY, healthy), (DIFFER, differs)):
        for name in names:
            check(name)
            print("good:", name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
