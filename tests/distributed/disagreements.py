"""What `check_ranks` says on two ranks, of loaders that differ and of loaders that are equal. Writes it into the file
given, as JSON by name.

The numbers are passed as arguments, so that the ranks leave no notes for each other. Each process has another seed of
hashes (``PYTHONHASHSEED`` is not set), so a set of texts has another order on each rank.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import tempfile
import warnings
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from corpus import KINDS, files, own
from ranks import RANK, error, gathered
from torch.utils.data import BatchSampler, SubsetRandomSampler, WeightedRandomSampler

from penstock import GraphError, Loader, Shards, check_ranks
from penstock.nodes import Batcher, Cycler, Fetch, Mapper, Prefetcher, SamplerWrapper, Sharder
from penstock.testing import Tagged

sys.path.append(str(Path(__file__).parents[1] / "nodes"))
first_items: Any = importlib.import_module("test_first_items")
N = 24


class Yields:
    """A sampler of the indices that a function makes."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return N

    def __iter__(self):
        return iter(self.make(self))


class OwnGenerator(Yields):
    def __init__(self, seed=None, make=None):
        super().__init__(make or by_own_generator)
        self.rng = random.Random(seed)


class LaterEpochs(Yields):
    """The same on all ranks in its first epoch, if it is read in order."""

    epoch = -1

    def __init__(self):
        super().__init__(by_later_epochs)


def by_own_generator(sampler):
    return sampler.rng.sample(range(N), N)


def by_later_epochs(sampler):
    sampler.epoch += 1
    return np.roll(range(N), sampler.epoch * RANK).tolist()


def by_a_set(sampler):
    return [int(text) for text in {f"{index}" for index in range(N)}]


def weighted(sampler):
    return np.roll(range(N), sampler.by).tolist()


class Updated(Yields):
    """One that the training loop updates, on each rank by its own losses."""

    by = 0

    def __init__(self):
        super().__init__(weighted)

    def set_epoch(self, epoch):
        """So it is known to remember nothing."""


def four(path):
    return [path] * 4


def named(paths):
    return Shards(paths, four, counts=[4] * len(paths))


FILES = [f"/data/{number}.bin" for number in range(6)]
SAMPLERS = {
    "random.Random()": OwnGenerator,
    "the order of a set": lambda: Yields(by_a_set),
    "other weights": lambda: WeightedRandomSampler([1.0 + RANK * (k % 3) for k in range(N)], N),
    "other indices": lambda: SubsetRandomSampler(range(RANK, N + RANK)),
    "a list": lambda: [*range(RANK, N), *range(RANK)],
    "differs from the second epoch on": LaterEpochs,
}


def by_hand(sampler):
    return Loader(
        Prefetcher(Mapper(Batcher(Sharder(Cycler(SamplerWrapper(sampler)), RANK, 2), 4), Fetch(Tagged(2 * N))))
    )


LOADERS = {
    **{name: lambda make=make, **words: own(Tagged(2 * N), sampler=make())(**words) for name, make in SAMPLERS.items()},
    "random.Random(), read by a thread": lambda **_: by_hand(OwnGenerator()),
    "other batches": own(Tagged(N), batch_sampler=lambda: [[1, 2], [3], [4]] if RANK else [[1], [2, 3], [4]]),
    "other batches, within": own(Tagged(N), batch_sampler=lambda: BatchSampler(LaterEpochs(), 4, True), split="within"),
    "another order of the files": own(lambda: named(FILES[:: 1 - 2 * RANK])),
}


EQUAL = {
    "a memory": own(Tagged(2 * N), sampler=lambda: OwnGenerator(3)),
    "a memory, read by a thread": lambda **_: by_hand(OwnGenerator(3)),
    "files": own(lambda: named([path.replace("data", f"data/{RANK}") for path in FILES])),
}


def said_at_each_moment(loader):
    """Before training, in the middle of an epoch, behind it, and where another one loads the state."""
    with loader:
        said = [error(lambda: check_ranks(loader))]
        batches = iter(loader)
        list(islice(batches, 2))
        said.append(error(lambda: check_ranks(loader)))
        list(islice(batches, 40))
        said.append(error(lambda: check_ranks(loader)))
        next(iter(loader))  # it goes on
        loader.load_state_dict(loader.state_dict())
        said.append(error(lambda: check_ranks(loader)))
    return said


def updated():
    """Before the training loop has updated the sampler, and behind that."""
    sampler = Updated()
    with Loader.from_dataset(
        Tagged(N), batch_size=4, sampler=sampler, plan_ahead=False, rank=RANK, world_size=2
    ) as loader:
        said = [error(lambda: check_ranks(loader))]
        list(loader)
        sampler.by = RANK
        return [*said, error(lambda: check_ranks(loader))]


def equal(kind):
    """On ranks that are built in the same way: by the first tail that this kind takes."""
    for tail in ("drop", "pad", "exact"):
        try:
            return said_at_each_moment(kind(rank=RANK, world_size=2, tail=tail))
        except (ValueError, GraphError):
            continue
    raise AssertionError("no tail fits")


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    warnings.simplefilter("ignore")
    said = {name: said_at_each_moment(make(rank=RANK, world_size=2)) for name, make in LOADERS.items()}
    said["updated"] = updated()
    with tempfile.TemporaryDirectory() as folder:
        said |= {f"equal: {name}": equal(kind) for name, kind in {**KINDS, **files(Path(folder)), **EQUAL}.items()}
    marks = gathered({kind: first_items.marks(map(make, range(8))) for kind, make in first_items.KINDS.items()})
    said["equal: marks of first items"] = ["no error" if marks[0] == marks[1] else f"{marks}"] * 4
    everyones = gathered(said)
    if RANK == 0:
        Path(sys.argv[1]).write_text(json.dumps(everyones))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
