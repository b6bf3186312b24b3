"""What the tests of samplers share: some samplers, and a node that wraps one, read as a `Cycler` reads it."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Sampler:
    """Has ``n`` items, but does not say so before; without ``n`` it never ends."""

    def __init__(self, n: int | None = None) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return (self.item(k) for k in (count() if self.n is None else range(self.n)))

    def item(self, k: int) -> Any:
        raise NotImplementedError


class Drawing(Sampler):
    """Draws from all three global generators, for every item."""

    def item(self, k: int) -> int:
        return random.randrange(100) * 10**6 + int(np.random.randint(100)) * 10**3 + int(torch.randint(100, ()))


class Remembering(Sampler):
    """Goes on with a generator of its own that nobody can seed."""

    def __init__(self, n: int | None = None, seed: int = 5) -> None:
        super().__init__(n)
        self.rng = np.random.Philox(seed)

    def item(self, k: int) -> int:
        return int(self.rng.random_raw()) % 1000


class Told(Sampler):
    """Item k of epoch e is 1000 * e + k, by ``set_epoch``."""

    epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def item(self, k: int) -> int:
        assert self.epoch is not None
        return 1000 * self.epoch + k


def plain(items: Any) -> list[Any]:
    return [item.plain() for item in items]


def following(node: Any, count: int) -> tuple[list[Any], list[Any]]:
    """The next ``count`` items with the states after them, over the ends of epochs."""
    items: list[Any] = []
    states: list[Any] = []
    while len(items) < count:
        try:
            items.append(next(node))
        except StopIteration:
            node.reset(node.start_of(node.get_state()["epoch"] + 1))
        else:
            states.append(json.loads(json.dumps(node.get_state())))
    return items, states
