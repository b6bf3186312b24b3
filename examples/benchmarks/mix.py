"""What the orders of mixes and shards cost: computing them, jumping into them, and saving where they stand.

python mix.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

import penstock
from penstock._random.mix_order import MixOrder
from penstock.nodes import Sampler
from penstock.orders import SequentialOrder, ShardOrder, ShuffledOrder, SlidingOrder

if TYPE_CHECKING:
    from collections.abc import Callable

N = 10**9  # items of each source
READ = 2**18  # items that are timed: those of one rank
WEIGHTS = {
    "3 sources": {"web": 0.7, "code": 0.2, "math": 0.1},
    "35 equal sources": {f"source {k:02}": 1 for k in range(35)},
    "one of .9 and 34 small ones": {f"source {k:02}": 0.9 if k == 0 else 0.1 / 34 for k in range(35)},
}


def mixed(weights: dict[str, float], kind: Callable[[int], penstock.orders.Order]) -> MixOrder:
    return MixOrder({name: kind(N) for name in weights}, weights, epoch_size=N)


def orders() -> dict[str, penstock.orders.Order]:
    found: dict[str, penstock.orders.Order] = {"ShuffledOrder": ShuffledOrder(N)}
    for name, weights in WEIGHTS.items():
        found[f"MixOrder, {name}, each in order"] = mixed(weights, SequentialOrder)
        found[f"MixOrder, {name}, each shuffled"] = mixed(weights, ShuffledOrder)
    for window in (1000, 10_000):
        found[f"SlidingOrder, window {window}"] = SlidingOrder(N, window)
    for window in (0, 1000):
        found[f"ShardOrder, 10^5 shards, 96 lanes, window {window}"] = ShardOrder(np.full(10**5, 10**4), window=window)
    return found


def reading(order: penstock.orders.Order, every: int) -> float:
    """Microseconds for each item of one rank of ``every``, in batches of 256, as a loader reads it."""
    node = Sampler(order)
    place, begin = node.start(0), time.perf_counter()
    for _ in range(READ // 256):
        place = node.read(place, 256, every)[1]
    return (time.perf_counter() - begin) / READ * 1e6


def jumping(order: penstock.orders.Order) -> float:
    """Milliseconds to the index at some place of an epoch."""
    times = []
    for k in range(20):
        begin = time.perf_counter()
        order.indices(1, np.array([len(order) // 21 * (k + 1)]))
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def saving(loader: penstock.Loader) -> tuple[float, int]:
    """Microseconds and bytes of a state_dict."""
    next(iter(loader))
    times = []
    for _ in range(1000):
        begin = time.perf_counter()
        state = loader.state_dict()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6, len(state["penstock"])


def drift(order: penstock.orders.Order, share: float) -> float:
    """How far the first source is from its share, at worst, in the first million items."""
    of_first = order.indices(0, np.arange(10**6)) < N
    return float(np.abs(np.cumsum(of_first) - np.arange(1, 10**6 + 1) * share).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats

    print(f"{'':58}{'us an item':>12}{'one of 8':>13}{'ms to jump':>12}")
    for name, order in orders().items():
        alone, of_eight = (min(reading(order, every) for _ in range(repeats)) for every in (1, 8))
        print(f"{name:58}{alone:12.3f}{of_eight:13.3f}{jumping(order):12.2f}")

    print("\nstate_dict()")
    many = {name: range(N) for name in WEIGHTS["35 equal sources"]}
    shards = ShardOrder(np.full(10**6, 1000))
    for name, dataset, order in (
        ("Mix of 35 sources", penstock.Mix(many, WEIGHTS["35 equal sources"]), None),
        ("ShardOrder of 10^6 shards", range(10**9), shards),
    ):
        with penstock.Loader.from_dataset(dataset, batch_size=64, order=order) as loader:
            microseconds, size = saving(loader)
        print(f"{name:58}{microseconds:9.1f} us{size:9} bytes")

    print("\nlargest error of the first source's count over 10^6 items")
    for name, weights in WEIGHTS.items():
        first = weights[min(weights)]  # sources are sorted by name
        print(f"{name:58}{drift(mixed(weights, SequentialOrder), first / sum(weights.values())):12.1f}")


if __name__ == "__main__":
    main()
