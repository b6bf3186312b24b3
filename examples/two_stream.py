"""For custom batch samplers: two streams of samples in each batch, or P classes with K samples each, on any number of
ranks.

python two_stream.py                                                 # one rank
torchrun --nproc-per-node=2 two_stream.py                            # two ranks: whole batches are dealt to them

A batch sampler yields lists of indices for all ranks together, as if there were only one rank. The loader calls its
``set_epoch`` and deals its batches; the sampler itself knows nothing of ranks.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class TwoStreamBatchSampler(Sampler[list[int]]):
    """Batches with a labelled and an unlabelled part: each epoch reads the first stream once, and cycles the second.

    An epoch is a pure function of (seed, epoch), so any process can produce it, again or ahead of time. The second
    stream continues in each epoch where it stopped in the previous one, so all of its samples are used equally often.

    Args:
        primary: Indices that each come exactly once per epoch.
        secondary: Indices that fill up the batches, shuffled again for each pass.
        primary_size: Primary indices per batch; the last batch of an epoch may have fewer.
        secondary_size: Secondary indices per batch.
        seed: The seed of both orders.
    """

    def __init__(
        self, primary: Sequence[int], secondary: Sequence[int], primary_size: int, secondary_size: int, seed: int = 0
    ):
        if len(primary) == 0 or len(secondary) == 0 or primary_size < 1 or secondary_size < 1:
            raise ValueError("both streams need at least one index in total, and at least one in every batch.")
        self.primary = np.asarray(primary)
        self.secondary = np.asarray(secondary)
        self.primary_size = primary_size
        self.secondary_size = secondary_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.primary) // self.primary_size)

    def __iter__(self) -> Iterator[list[int]]:
        firsts = shuffled(self.primary, self.seed, 0, self.epoch)
        seconds = self._cycled(self.epoch * len(self) * self.secondary_size)
        for start in range(0, len(firsts), self.primary_size):
            yield firsts[start : start + self.primary_size].tolist() + list(islice(seconds, self.secondary_size))

    def _cycled(self, start: int) -> Iterator[int]:
        """The second stream from position ``start`` on, forever."""
        turn, place = divmod(start, len(self.secondary))
        while True:
            yield from shuffled(self.secondary, self.seed, 1, turn)[place:].tolist()
            turn, place = turn + 1, 0


class PKBatchSampler(Sampler[list[int]]):
    """Batches for metric learning: ``p`` classes, and ``k`` different samples of each.

    An epoch covers all classes with at least ``k`` samples once, ``p`` at a time, and is a pure function of (seed,
    epoch).

    Args:
        labels: The class of each sample.
        p: Classes per batch.
        k: Samples of each class per batch.
        seed: The seed of the order.
    """

    def __init__(self, labels: Sequence[int], p: int, k: int, seed: int = 0):
        members = [np.flatnonzero(np.asarray(labels) == one) for one in np.unique(labels)]
        self.members = [those for those in members if len(those) >= k]
        if len(self.members) < p:
            raise ValueError(
                f"{len(self.members)} classes have at least {k} samples, but a batch needs {p} classes. Choose a "
                f"smaller p or k."
            )
        self.p = p
        self.k = k
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.members) // self.p

    def __iter__(self) -> Iterator[list[int]]:
        classes = shuffled(np.arange(len(self.members)), self.seed, 0, self.epoch)
        for chosen in classes[: len(self) * self.p].reshape(-1, self.p).tolist():
            yield [
                index
                for one in chosen
                for index in shuffled(self.members[one], self.seed, 1 + one, self.epoch)[: self.k].tolist()
            ]


def shuffled(values: np.ndarray, *key: int) -> np.ndarray:
    """A permutation that depends only on ``key``."""
    return np.random.default_rng(key).permutation(values)


def all_ranks(mine: list) -> list:
    """The lists of all ranks, concatenated."""
    if not dist.is_initialized():
        return mine
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return [one for hand in everyones for one in hand]


def main() -> None:
    """Three epochs of each sampler, and what the ranks got from them."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    labelled, unlabelled = range(96), range(96, 1000)
    two_streams = TwoStreamBatchSampler(labelled, unlabelled, primary_size=8, secondary_size=24)
    once, firsts = True, []
    with penstock.Loader.from_dataset(range(1000), batch_sampler=two_streams, num_workers=1) as loader:
        for _ in range(3):
            batches = all_ranks([batch.tolist() for batch in loader])
            counts = Counter(index for batch in batches for index in batch if index < 96)
            once = (
                once
                and sorted(counts) == list(labelled)
                and set(counts.values()) == {1}
                and {len(batch) for batch in batches} == {32}
            )
            firsts.append(batches[0][:4])
    if rank == 0:
        print(f"{ranks} ranks: every labelled index exactly once in each of 3 epochs: {once}")
        print(f"the epochs differ, because set_epoch reached the sampler: {firsts}")
    assert once
    assert len({tuple(first) for first in firsts}) == 3

    labels = [index % 48 for index in range(1000)]
    pk_sampler = PKBatchSampler(labels, p=4, k=5)
    good, seen = True, set()
    with penstock.Loader.from_dataset(labels, batch_sampler=pk_sampler) as loader:
        for _ in range(3):
            batches = all_ranks([batch.tolist() for batch in loader])
            good = good and all(sorted(Counter(batch).values()) == [5] * 4 for batch in batches)
            seen.add(tuple(batches[0]))
    if rank == 0:
        print(f"{ranks} ranks: every batch of P x K has P classes with K samples of each: {good}")
    assert good
    assert len(seen) == 3

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
