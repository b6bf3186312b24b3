"""For a run that changes while it runs: a new source, other weights, larger batches, a skipped range, draws that follow
the model, and files that arrive.

python changing_run.py        # needs: pip install torch-penstock
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import penstock


class Source:
    """Samples that say where they are from."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> str:
        return f"{penstock.sample().source} {index}"


def mixed(names: str, **changes: Any) -> penstock.Loader[list[str]]:
    """A mix that begins with the web alone, in batches that double at sample 200."""
    sources = {name: Source(300) for name in names.split()}
    weights = dict.fromkeys(sources, 0) | {"web": 1}
    sizes = penstock.Ramp([(0, 8), (200, 16)])
    return penstock.Loader.from_dataset(
        penstock.Mix(sources, weights, epoch_size=1000), sizes, shuffle=True, collate_fn=list, **changes
    )


def take(loader: penstock.Loader[list[str]], samples: int) -> Counter[str]:
    """Read so many samples, and count them by source."""
    seen: Counter[str] = Counter()
    for batch in loader:
        seen += Counter(name.split()[0] for name in batch)
        if seen.total() >= samples:
            break
    return seen


def files(many: int) -> penstock.Loader[list[int]]:
    """The records of so many files, of which there will be more."""
    data = penstock.Stream(
        [f"file {k}" for k in range(many)],
        lambda name: [f"{name}/{k}" for k in range(3)],
        epoch_size=30,
        lanes=1,
        grow=True,
        bookmarks=False,
    )
    return penstock.Loader.from_dataset(data, batch_size=3, collate_fn=list)


def main() -> None:
    """Four lives of one run, each resumed from the state of the last one."""
    with mixed("web") as loader:
        print("the web alone:", dict(take(loader, 160)))
        state = loader.state_dict()

    with mixed("web code", num_workers=2) as loader:  # a source is added
        loader.load_state_dict(state)
        begins = loader.reweight({"web": 1, "code": 3})
        print(
            f"from sample {begins}, one of the web to three of code, batches of 16 from sample 200:",
            dict(take(loader, 240)),
        )
        state = loader.state_dict()

    with mixed("web code", skip=[(480, 600)]) as loader:  # a loss spike lies there
        loader.load_state_dict(state)
        print(
            "behind the range:",
            dict(take(loader, 160)),
            "the last sample is number",
            loader.last.positions[-1] if loader.last else None,
        )

    losses = torch.ones(100)  # draw the samples that the model is bad at more often
    order = penstock.orders.WeightedOrder(losses, num_samples=100)
    with penstock.Loader.from_dataset(range(100), order=order, batch_size=20) as draws:
        for _ in range(2):
            for batch in draws:
                losses[batch] *= torch.where(batch < 50, 0.1, 1.0)  # it learns the first half
            order.update(losses)
        hard = sum(int((batch >= 50).sum()) for batch in draws)
    print(f"{hard} of 100 draws are of the half that is not learned yet")

    with files(3) as stream:
        batches = iter(stream)
        print("three files:", next(batches))
        state = stream.state_dict()
    with files(4) as stream:  # one has arrived
        stream.load_state_dict(state)
        print("four files, once the pass over three is through:", *stream)


if __name__ == "__main__":
    main()
