"""For a plain training loop: only the loader is not from PyTorch.

python plain_loop.py        # needs: pip install torch-penstock scikit-learn
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import penstock


def main() -> None:
    """Train for five epochs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # enough for a tiny model
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    with penstock.Loader.from_dataset(digits, batch_size=64, shuffle=True, num_workers=2) as loader:
        for epoch in range(5):
            right = 0
            for x, y in loader:
                guess = model(x)
                optimizer.zero_grad()
                cross_entropy(guess, y).backward()
                optimizer.step()
                right += int((guess.argmax(dim=1) == y).sum())
            print(f"epoch {epoch}: {len(loader)} batches, {right / len(digits):.1%} correct during training")


if __name__ == "__main__":
    main()
