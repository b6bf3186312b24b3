"""The whole graph, node by node, and the same graph in one call.

python graph.py
"""

from __future__ import annotations

import warnings

import numpy as np
from torch.utils.data import Dataset

from penstock import Loader
from penstock.nodes import Batcher, Cycler, Fetch, ParallelMapper, PinMemory, Prefetcher, Sampler, Sharder
from penstock.orders import ShuffledOrder


class Squares(Dataset):
    """1000 numbers and their squares."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[np.float32, np.float32]:
        return np.float32(index), np.float32(index**2)


def by_hand() -> Loader:
    """Each line is a node that reads from the one before it."""
    node = Sampler(ShuffledOrder(1000, seed=1))  # which sample comes when, for any epoch
    node = Cycler(node)  # epoch after epoch, with an end-of-epoch marker between them
    node = Sharder(node)  # this rank's share, for any number of ranks
    node = Batcher(node, batch_size=32)  # indices of one batch; nothing is loaded yet
    node = ParallelMapper(node, Fetch(Squares()), num_workers=2, method="process")  # load and collate
    node = PinMemory(node)  # without an accelerator it does nothing, and says so
    node = Prefetcher(node, prefetch_factor=2)  # keep two batches ready
    return Loader(node)  # cut the stream into epochs; save and load


def in_one_call() -> Loader:
    """The same, with `DataLoader`'s arguments."""
    return Loader.from_dataset(Squares(), batch_size=32, shuffle=True, seed=1, num_workers=2, pin_memory=True)


def main() -> None:
    """Compare the two, batch for batch, over three epochs."""
    with by_hand() as graph, in_one_call() as call:
        for epoch in range(3):
            pairs = list(zip(graph, call, strict=True))
            assert all(x.equal(u) and y.equal(v) for (x, y), (u, v) in pairs)
            print(
                f"epoch {epoch}: {len(pairs)} batches, the first one begins with {pairs[0][0][0][:5].tolist()}; the same from both graphs"
            )
        print("state, the same from both:", graph.state_dict())
        assert graph.state_dict() == call.state_dict()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="PinMemory")
    main()
