"""Ranks that change a run differently are told. Each check runs on all ranks together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from ranks import RANK, WORLD_SIZE, error, gathered, run

import penstock
from penstock import Loader, Mix, Shards, Stream
from penstock._loader import rank_notes
from penstock.orders import WeightedOrder


def other_weights_of_a_mix() -> None:
    """Seen to fail: without `choices` in the fingerprint."""
    with Loader.from_dataset(
        Mix({"a": range(90), "b": range(90)}, {"a": 1, "b": 1}, epoch_size=400), batch_size=2
    ) as loader:
        next(iter(loader))
        loader.reweight({"a": 1})
        penstock.check_ranks(loader)
        loader.reweight({"a": 1, "b": RANK}, at=100)
        found = error(lambda: penstock.check_ranks(loader))
        assert "all stages.stages is" in found
        assert gathered(found) == [found] * WORLD_SIZE


def other_ranges() -> None:
    with Loader.from_dataset(range(100), batch_size=2, skip=[(50, 60 + RANK)]) as loader:
        assert "skip[0][1] is 60 on rank 0 and 61 on rank 1" in error(lambda: penstock.check_ranks(loader))


def other_weights_of_a_draw() -> None:
    """Epoch 1 is drawn alike, and epoch 2 is not, which only a check sees, until a state is loaded. Seen to fail:
    without marks, all epochs come."""
    order = WeightedOrder([1.0] * 50, 400, seed=3)
    with Loader.from_dataset(range(50), order=order, batch_size=2) as loader:
        order.update([2.0] * 25 + [1.0] * 25)
        seen = [index for batch in loader for index in batch.tolist()]
        both = gathered(seen)
        assert both[0] != both[1]
        order.update([1.0] * 49 + [1.0 + RANK])
        dist.barrier()
        found = error(lambda: penstock.check_ranks(loader))
        assert "next weights is" in found
        assert gathered(error(lambda: list(loader))) == ["no error"] * WORLD_SIZE
        loader.load_state_dict(loader.state_dict())
        found = gathered(error(lambda: list(loader)))
        assert ["The weights differ" in one for one in found].count(True) == WORLD_SIZE - 1, found


def other_files() -> None:
    """One rank finds one more. Seen to fail: without `note`; with the number of shards in the settings, by which two
    loaders are known to be the same one."""
    told = [_told(Loader.from_dataset(data, batch_size=2, **words)) for data, words in _found(6, 200)]
    assert told == [[], [], []]
    told = [_told(Loader.from_dataset(data, batch_size=4, **words)) for data, words in _found(6 + RANK, 200 + 9 * RANK)]
    for of_check, *of_epochs in told:
        assert "on rank 0 and" in of_check
        assert any("The ranks have found different data" in one for one in of_epochs)


def _found(shards: int, samples: int) -> list[Any]:
    counted = Shards(shards, lambda shard: [shard] * 40, counts=[40] * shards, lanes=2, grow=True)
    stream = Stream(shards, lambda shard: [shard] * 40, epoch_size=200, lanes=2, bookmarks=False, grow=True)
    return [(counted, {}), (stream, {}), (range(samples), {"grow": True})]


def _told(loader: Loader[Any]) -> list[str]:
    """The errors of this check, and of an epoch on both ranks."""
    with loader:
        found = [error(lambda: penstock.check_ranks(loader)), *gathered(error(lambda: list(loader)))]
        return [one for one in found if one != "no error"]


if __name__ == "__main__":
    rank_notes.PATIENCE_S = 100.0
    dist.init_process_group("gloo")
    run([other_weights_of_a_mix, other_ranges, other_weights_of_a_draw, other_files])
