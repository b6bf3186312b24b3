"""An order of your own, in ten lines: easy samples first, shuffled within a window. The dataset brings it along.

python own_order.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import penstock
from penstock.testing import assert_order_is_pure, assert_resumes_everywhere


class EasyToHard:
    def __init__(self, difficulty: np.ndarray, window: int, seed: int) -> None:
        self.ranked = np.argsort(difficulty, kind="stable")
        self.shuffled = penstock.orders.SlidingOrder(len(difficulty), window, seed)

    def __len__(self) -> int:
        return len(self.ranked)

    def indices(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self.ranked[self.shuffled.indices(epoch, positions)]

    def settings(self) -> dict[str, Any]:
        return {**self.shuffled.settings(), "order": "easy to hard"}


class Sentences:
    """1000 sentences; the longer, the harder."""

    lengths = np.random.default_rng(0).integers(1, 100, 1000)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> int:
        return int(self.lengths[index])

    def order(self, *, shuffle: bool, seed: int) -> EasyToHard:
        """`Loader.from_dataset` asks for this."""
        return EasyToHard(self.lengths, 200 if shuffle else 0, seed)


def loader(**options: Any) -> penstock.Loader:
    return penstock.Loader.from_dataset(Sentences(), batch_size=100, shuffle=True, seed=1, **options)


def main() -> None:
    assert_order_is_pure(Sentences().order(shuffle=True, seed=1), again=Sentences().order(shuffle=True, seed=1))
    print("the order depends on its settings, the epoch and the position, and on nothing else")

    with loader(num_workers=2, method="thread") as threads:
        for epoch in range(2):
            means = [f"{batch.double().mean():.0f}" for batch in threads]
            print(f"epoch {epoch}: mean length of each batch {' '.join(means)}")

    assert_resumes_everywhere(loader, steps=25)
    print("stopping after any batch and going on from the saved state changes no sample")


if __name__ == "__main__":
    main()
