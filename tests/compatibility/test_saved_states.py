"""States saved by earlier versions load forever, and continue with the same samples.

Only ever add to ``saved_states.json``. To add the states of this version: ``python tests/compatibility/test_saved_states.py``.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from corpus import LENGTHS, SEQUENCES, SOURCES, STAGES, WEIGHTS, N
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from torchdata.nodes import IterableWrapper

from penstock import Buckets, Loader, Mix, Packs, Shards
from penstock.nodes import Batcher, Cycler, IterableSource, ParallelMapper, Sharder
from penstock.orders import SequentialOrder, ShardOrder, SlidingOrder, TorchOrder, WeightedOrder
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = Path(__file__).with_name("saved_states.json")


def rows(packs: list) -> list:
    return [pack["tokens"].tolist() for pack in packs]


def records(shard: int) -> Iterator[int]:
    yield from range(100 * shard, 100 * shard + (9, 4, 10)[shard])


BUILDS = {
    "sequential": lambda: Loader.from_dataset(Tagged(N), batch_size=4, order=SequentialOrder(N)),
    "shuffled": lambda: Loader.from_dataset(Tagged(N), batch_size=4, shuffle=True, seed=5),
    "shuffled, rank 1 of 3": lambda: Loader.from_dataset(Tagged(N), batch_size=2, shuffle=True, seed=5, rank=1, world_size=3),
    "torch": lambda: Loader.from_dataset(Tagged(N), batch_size=4, order=TorchOrder(N, seed=5)),
    "weighted": lambda: Loader.from_dataset(Tagged(N), batch_size=4, order=WeightedOrder(list(range(1, N + 1)), N, seed=5)),
    "sampler": lambda: Loader.from_dataset(Tagged(N), batch_size=4, sampler=RandomSampler(range(N)), seed=5),
    "batch sampler": lambda: Loader.from_dataset(Tagged(N), batch_sampler=BatchSampler(RandomSampler(range(N)), 4, False), seed=5),
    "within": lambda: Loader.from_dataset(
        Tagged(N), batch_sampler=BatchSampler(RandomSampler(range(N)), 4, True), split="within", seed=5, rank=1, world_size=2
    ),
    "large": lambda: Loader.from_dataset(range(10**12), batch_size=4, shuffle=True, seed=2**62),
    "iterated": lambda: Loader(IterableSource(range(N))),
    "foreign": lambda: Loader(ParallelMapper(Batcher(Sharder(Cycler(IterableWrapper(range(N))), tail="drop"), 4), list, num_workers=0)),
    "exact, rank 0 of 2": lambda: Loader.from_dataset(Tagged(N), batch_size=4, shuffle=True, seed=5, rank=0, world_size=2, tail="exact"),
    "drop_last": lambda: Loader.from_dataset(Tagged(N), batch_size=4, shuffle=True, seed=5, drop_last=True),
    "endless": lambda: Loader.from_dataset(Tagged(N), batch_size=4, shuffle=True, seed=5, infinite=True),
    "out of order": lambda: Loader.from_dataset(Tagged(N), batch_size=4, shuffle=True, seed=5, num_workers=1, in_order=False),
    "taken over": lambda: Loader.from_dataset(
        Tagged(N), batch_size=4, sampler=DistributedSampler(range(N), num_replicas=2, rank=1, seed=5)
    ),
    "mix": lambda: Loader.from_dataset(Mix(SOURCES, WEIGHTS, epoch_size=N), batch_size=4, shuffle=True, seed=5),
    "mix in stages": lambda: Loader.from_dataset(Mix(SOURCES, STAGES, epoch_size=24, run=4), batch_size=4, seed=5),
    "sliding": lambda: Loader.from_dataset(Tagged(N), batch_size=4, order=SlidingOrder(N, 6, 5)),
    "shards": lambda: Loader.from_dataset(Tagged(N), batch_size=4, order=ShardOrder([5, 0, 7, 3, 8], 3, 4, 5)),
    "data in shards": lambda: Loader.from_dataset(
        Shards(3, records, counts=[9, 4, 10], lanes=2, window=3, settings={"columns": ["x"]}), batch_size=4, shuffle=True, seed=5
    ),
    "data in shards, in order": lambda: Loader.from_dataset(Shards(3, records, counts=[9, 4, 10]), batch_size=4),
    "packs": lambda: Loader.from_dataset(
        SEQUENCES, batch_size=2, shuffle=True, seed=5, groups=Packs(LENGTHS, 12, block=8, pad=-1), collate_fn=rows
    ),
    "buckets": lambda: Loader.from_dataset(
        Tagged(N), shuffle=True, seed=5, groups=Buckets(LENGTHS, 30.0, max_samples=4, block=16, same_size_run=2)
    ),
    "threads": lambda: Loader.from_dataset(Tagged(N), batch_size=4, shuffle=True, seed=5, num_workers=2, method="thread"),
}


def shown(batch: object) -> object:
    return batch.tolist() if hasattr(batch, "tolist") else batch


def record(name: str, stop: int) -> dict:
    """The state after ``stop`` batches, and the three batches that follow."""
    with BUILDS[name]() as loader:
        taken = 0
        while taken < stop:
            taken += len(list(islice(loader, stop - taken)))
        state = loader.state_dict()
    rest: list = []
    with BUILDS[name]() as loader:
        loader.load_state_dict(state)
        while len(rest) < 3:
            rest += [shown(batch) for batch in islice(loader, 3 - len(rest))]
    return {"name": name, "stop": stop, "state": state, "next": rest}


@pytest.mark.filterwarnings("ignore:range has no state_dict")
@pytest.mark.parametrize(
    "saved", json.loads(FILE.read_text()) if FILE.exists() else [], ids=lambda saved: f"{saved['name']}-{saved['stop']}"
)
def test_a_saved_state_loads_for_ever(saved):
    with BUILDS[saved["name"]]() as loader:
        loader.load_state_dict(saved["state"])
        now, then = (json.loads(state["penstock"]) for state in (loader.state_dict(), saved["state"]))
        for seed in {"sample_seed", "stream_seed"} & now["settings"].keys() - then["settings"].keys():
            del now["settings"][seed]  # not saved by versions before the first release
        assert now == then
        batches = []
        while len(batches) < 3:
            batches += [shown(batch) for batch in islice(loader, 3 - len(batches))]
        assert batches == saved["next"]


if __name__ == "__main__":
    kept = json.loads(FILE.read_text()) if FILE.exists() else []
    new = [record(name, stop) for name in BUILDS for stop in (0, 2, 6, 9)]
    kept += [one for one in new if one not in kept]
    FILE.write_text("[\n" + ",\n".join(json.dumps(one) for one in kept) + "\n]\n")
