"""Sequences of calls on the user's sampler, the loader and a trainer's view of it, against what a ``DataLoader`` yields
for the same calls: the sampler is told the next epoch at the end of each, and whoever speaks last counts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from penstock import Loader
from penstock.testing import Tagged

N = 6
WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"num_workers": 2, "method": "thread"},
    "declared": {"num_workers": 1, "method": "thread", "plan_ahead": True},
}


class Keeps:
    """Keeps the number as ``epoch``."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return [(k + self.epoch) % N for k in range(N)]

    def __iter__(self) -> Any:
        return iter(self.order())

    def __len__(self) -> int:
        return N


class Draws(Keeps):
    """Its ``set_epoch`` draws, and counts its calls."""

    calls = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.calls, _ = epoch, self.calls + 1, random.random() + torch.rand(()).item()


class Hides(Keeps):
    """Keeps what it makes of the number, elsewhere."""

    epoch = None  # type: ignore[assignment]
    shift = 0

    def set_epoch(self, epoch: int) -> None:
        self.shift = 2 * epoch

    def order(self) -> list[int]:
        return [(k + self.shift) % N for k in range(N)]


class Walk:
    """A walk of calls by chance. ``twin`` is the sampler of the ``DataLoader``; ``told``: what it was told last, by
    nobody's wish; ``asked``: the epoch that was asked of the loader."""

    def __init__(self, kind: type[Keeps], way: str, loaders: int, chance: random.Random) -> None:
        self.kind, self.way, self.chance = kind, way, chance
        self.sampler, self.twin, self.told = kind(), kind(), 0
        self.loaders = [self.built() for _ in range(loaders)]
        self.next, self.asked = [0] * loaders, [None] * loaders
        self.states: list[tuple[int, int, Any]] = []

    def built(self) -> Loader[Any]:
        return Loader.from_dataset(Tagged(N), 2, sampler=self.sampler, seed=0, **WAYS[self.way])

    def tell(self, epoch: int) -> None:
        self.twin.set_epoch(epoch)
        self.told = epoch

    def call(self) -> None:
        epoch = self.chance.randrange(6)
        for one in (self.sampler, self.twin):
            one.set_epoch(epoch)

    def assign(self) -> None:
        if self.kind is not Hides:
            self.sampler.epoch = self.twin.epoch = self.chance.randrange(6)

    def ask(self, k: int, trainer: bool) -> None:
        epoch = self.chance.randrange(6)
        (self.loaders[k].sampler if trainer else self.loaders[k]).set_epoch(epoch)
        self.asked[k] = epoch
        self.tell(epoch)

    def read(self, k: int, batches: int) -> None:
        loader = self.loaders[k]
        epoch = self.next[k] if self.asked[k] is None else self.asked[k]
        by_user = self.kind is not Hides and self.twin.epoch != self.told
        if by_user:
            epoch = self.twin.epoch
        elif self.kind is not Hides:
            self.twin.set_epoch(epoch)
        expected = [
            [1000 * epoch + i for i in batch] for batch in DataLoader(range(N), 2, sampler=self.twin, collate_fn=list)
        ]
        got: list[Any] = []
        for batch in loader:
            assert loader.epoch == epoch
            got.append(batch.tolist())
            self.states.append((epoch, len(got), loader.state_dict()))
            if len(got) == batches:
                break
        assert got == expected[:batches]
        self.asked[k], self.next[k] = None, epoch + 1
        self.told = epoch if self.kind is Hides else self.twin.epoch
        if batches > len(expected):
            self.tell(epoch + 1)

    def load(self, k: int) -> None:
        if not self.states or len(self.loaders) > 1 or self.asked[k] is not None:
            return
        epoch, read, state = self.chance.choice(self.states)
        self.loaders[k].load_state_dict(json.loads(json.dumps(state)))
        self.tell(epoch)
        expected = [
            [1000 * epoch + i for i in batch] for batch in DataLoader(range(N), 2, sampler=self.twin, collate_fn=list)
        ]
        assert [batch.tolist() for batch in self.loaders[k]] == expected[read:]
        self.asked[k], self.next[k] = None, epoch + 1
        self.tell(epoch + 1)


@pytest.mark.parametrize(
    ("kind", "loaders", "way"),
    [
        *((Keeps, 1, way) for way in WAYS),
        (Draws, 1, "inline"),
        (Draws, 1, "declared"),
        (Hides, 1, "threads"),
        (Keeps, 2, "inline"),
    ],
)
def test_who_speaks_last_counts(kind: type[Keeps], loaders: int, way: str) -> None:
    for number in range(12):
        chance = random.Random(f"{kind.__name__} {number}")
        walk = Walk(kind, way, loaders, chance)
        for _ in range(14):
            k = chance.randrange(loaders)
            if kind is Hides:  # the loop of a script: a call before each epoch, or none
                step = chance.choice(["call", "none"])
                if step == "call" or (walk.next[k] and walk.states and walk.states[-1][1] < N // 2):
                    walk.call()
                walk.read(k, chance.choice([1, 9]))
                continue
            step = chance.choice(["call", "assign", "ask", "trainer", "read", "read", "break", "load", "refresh"])
            if step in ("call", "assign"):
                getattr(walk, step)()
            elif step in ("ask", "trainer"):
                walk.ask(k, step == "trainer")
            elif step == "load":
                walk.load(k)
            elif step == "refresh":
                walk.loaders[k].refresh()
            else:
                walk.read(k, 9 if step == "read" else chance.choice([1, 2, 3]))
        for loader in walk.loaders:
            loader.close()
