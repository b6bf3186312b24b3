"""A progress bar that is right after a resume, too: it goes on where the epoch was left, with the totals of the whole epoch.

python progress.py
"""

from __future__ import annotations

import sys

from tqdm import tqdm

import penstock

EPOCHS = 3


def train(loader: penstock.Loader, stop_after: int | None = None) -> None:
    """All epochs from where the loader stands, each with a bar of its own; or fewer batches."""
    done = 0
    for epoch in range(loader.epoch, EPOCHS):
        for _ in tqdm(loader, f"epoch {epoch}", initial=loader.position, unit="batch", file=sys.stdout, ncols=70):
            done += 1
            if done == stop_after:
                return


def main() -> None:
    """Stop in the middle of the second epoch, and go on."""

    def build() -> penstock.Loader:
        return penstock.Loader.from_dataset(range(1000), batch_size=10, shuffle=True, seed=1)

    with build() as loader:
        train(loader, stop_after=140)
        state = loader.state_dict()
    print("stopped, and resumed:")
    with build() as loader:
        loader.load_state_dict(state)
        print(loader)
        train(loader)
        print(loader)


if __name__ == "__main__":
    main()
