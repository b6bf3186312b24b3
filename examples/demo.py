"""For a first look: train a small network, kill it in mid-epoch, resume it exactly, and see what an epoch boundary
costs.

    python demo.py        # needs: pip install torch-penstock matplotlib scikit-learn tqdm
    python demo.py --picture FOLDER     # only the picture, as waits-light.svg and waits-dark.svg

Three runs train on handwritten digits, each in its own process: one without interruption, one that kills itself with
SIGKILL, and one that continues from the last checkpoint of the killed run. Then the demo measures how long training
waits for each batch, with ``torch.utils.data.DataLoader`` and with penstock, and draws the waits into ``demo.png`` in
the current folder.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import penstock

mpl.use("Agg")
from matplotlib import pyplot as plt

EPOCHS = 12
BATCH_SIZE = 32
CHECKPOINT_EVERY = 70  # steps; an epoch has 45, so checkpoints are in mid-epoch
KILL_AT = 250  # 40 steps after a checkpoint, and in the epoch after it
WORKERS = 2


class Digits(Dataset):
    """scikit-learn's 1797 handwritten digits, 8 x 8 pixels; every fifth is held out. Nothing here knows of penstock."""

    def __init__(self, *, held_out: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        chosen = (np.arange(len(labels)) % 5 == 0) == held_out
        self.images = (images[chosen] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
        self.labels = labels[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        shift = np.random.randint(-1, 2)  # NumPy's global generator: penstock seeds it from (seed, epoch, position)
        noise = np.random.normal(0, 0.1, (1, 8, 8))
        image = np.roll(self.images[index], shift, axis=2) + noise
        return image.astype(np.float32), int(self.labels[index]), index


class Training:
    """A model, its optimizer and one step of training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            nn.Linear(64 * 4 * 4, 10),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()


def new_loader() -> penstock.Loader:
    """`DataLoader`'s arguments build the whole graph: order, epochs, ranks, batches, two worker processes."""
    return penstock.Loader.from_dataset(
        Digits(held_out=False), batch_size=BATCH_SIZE, shuffle=True, seed=1, num_workers=WORKERS
    )


def train(folder: Path, name: str, kill_at: int | None) -> None:
    """One training run; it continues from the checkpoint in ``folder``, if there is one."""
    training, loader, seen = Training(), new_loader(), []
    if (folder / "checkpoint.pt").exists():
        saved = torch.load(folder / "checkpoint.pt")
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        seen = saved["seen"]

    with loader, tqdm(desc=name, total=EPOCHS * len(loader), initial=len(seen), unit="step", ncols=100) as bar:
        for _ in range(loader.epoch, EPOCHS):
            for images, labels, indices in loader:
                training.step(images, labels)
                seen.append(indices.tolist())
                bar.update()
                if len(seen) % CHECKPOINT_EVERY == 0:
                    save(folder / "checkpoint.pt", training, loader, seen)
                if len(seen) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)  # no clean-up, like the out-of-memory killer
        save(folder / "result.pt", training, loader, seen)


def save(file: Path, training: Training, loader: penstock.Loader, seen: list[list[int]]) -> None:
    """Write everything that a resumed run needs, atomically."""
    model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
    state = {"model": model, "optimizer": optimizer, "loader": loader.state_dict(), "seen": seen}
    torch.save(state, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


def run(folder: Path, name: str, kill_at: int | None = None) -> int:
    """Run `train` in its own process; returns the exit status, which is minus the signal number if a signal ended
    it.
    """
    folder.mkdir(exist_ok=True)
    return subprocess.run([sys.executable, __file__, str(folder), name, str(kill_at or "")], check=False).returncode


def accuracy(weights: dict[str, torch.Tensor]) -> float:
    """The share of the held-out digits that a network with ``weights`` recognizes."""
    model, digits = Training().model, Digits(held_out=True)
    model.load_state_dict(weights)
    guesses = model(torch.from_numpy(digits.images)).argmax(dim=1).numpy()
    return float((guesses == digits.labels).mean())


def waits(loader: DataLoader | penstock.Loader, epochs: int = 6) -> list[list[float]]:
    """Seconds that a training loop waited for each batch, epoch by epoch."""
    training, measured, start = Training(), [], time.perf_counter()
    for _ in range(epochs):
        measured.append([])
        for images, labels, _ in loader:
            measured[-1].append(time.perf_counter() - start)
            training.step(images, labels)
            start = time.perf_counter()
    return measured


def measure() -> dict[str, list[list[float]]]:
    """The waits of three loaders that do the same work."""
    digits = Digits(held_out=False)
    shared = {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": WORKERS}
    measured = {
        "DataLoader": waits(DataLoader(digits, **shared)),
        "DataLoader, persistent_workers=True": waits(DataLoader(digits, **shared, persistent_workers=True)),
    }
    with new_loader() as loader:
        measured["penstock"] = waits(loader)
    return measured


def typical(epochs: list[list[float]]) -> tuple[float, float]:
    """Median wait in ms for the first batch of an epoch (except the very first, which starts the workers), and for any
    other batch.
    """
    first = statistics.median(epoch[0] for epoch in epochs[1:])
    other = statistics.median(wait for epoch in epochs for wait in epoch[1:])
    return 1000 * first, 1000 * other


def draw(
    measured: dict[str, list[list[float]]],
    file: Path,
    ink: str = "#24292f",
    paper: str = "#ffffff",
    figsize: tuple[float, float] = (10, 7.5),
) -> None:
    """Draw every wait as a dot, in one row per loader, with the first batch of each epoch highlighted."""
    mpl.rcParams.update(
        dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink)
    )
    # so that it can be read whatever the page's colours are
    mpl.rcParams.update({"axes.facecolor": paper, "figure.facecolor": paper})
    mpl.rcParams["svg.hashsalt"] = "waits"  # equal waits make equal files
    figure, rows = plt.subplots(len(measured), sharex=True, sharey=True, figsize=figsize, layout="constrained")
    figure.suptitle("How long training waits for each batch", x=0.01, ha="left", fontsize=15, weight="bold")
    for axes, (name, epochs) in zip(rows, measured.items(), strict=True):
        length = len(epochs[0])
        first, other = typical(epochs)
        for boundary in range(length, length * len(epochs), length):
            axes.axvline(boundary, color="#8a97a6", alpha=0.4, linewidth=1, zorder=0)
        axes.plot(
            [1000 * wait for epoch in epochs for wait in epoch],
            ".",
            color="#8a97a6",
            markersize=4,
            label="any other batch",
        )
        firsts = [1000 * epoch[0] for epoch in epochs]
        axes.plot(
            range(0, length * len(epochs), length),
            firsts,
            "o",
            color="#d1495b",
            markersize=8,
            label="first batch of an epoch",
        )
        axes.annotate("workers start", (0, firsts[0]), (9, 0), textcoords="offset points", va="center", color="#d1495b")
        axes.set_title(name, loc="left", fontsize=12, weight="bold")
        axes.set_title(f"median: first batch {first:.2f} ms, others {other:.2f} ms", loc="right", fontsize=11)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} ms")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*rows[0].get_legend_handles_labels(), loc="upper right", ncols=2, frameon=False, fontsize=11)
    rows[-1].set_xlabel(
        "training step (grey lines: a new epoch begins; penstock's bursts: its workers get the next few batches to "
        "load at once)"
    )
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)


def picture(folder: Path) -> None:
    """The picture of docs/index.md, on a light and on a dark page."""
    measured = measure()
    for name, ink, paper in (("light", "#24292f", "#ffffff"), ("dark", "#d0d7de", "#131416")):
        draw(measured, folder / f"waits-{name}.svg", ink, paper, (10, 5.6))


def main() -> str | None:
    """The three runs and the measurement; returns what went wrong, if anything did."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if run(folder / "whole", "undisturbed") != 0 or run(folder / "cut", "killed", KILL_AT) != -signal.SIGKILL:
            return "a training run did not end as it should"
        kept = KILL_AT - KILL_AT % CHECKPOINT_EVERY
        print(f"\n  killed by SIGKILL at step {KILL_AT}, last checkpoint at step {kept}", file=sys.stderr)
        if run(folder / "cut", "resumed") != 0:
            return "the resumed run did not end as it should"
        whole, cut = (torch.load(folder / part / "result.pt") for part in ("whole", "cut"))

    same_order = whole["seen"] == cut["seen"]
    same_weights = all(torch.equal(weight, cut["model"][key]) for key, weight in whole["model"].items())
    right = accuracy(cut["model"])
    print(
        f"\nresumed run trained on the same samples in the same order: {same_order} ({sum(map(len, cut['seen']))} "
        f"samples)"
    )
    print(f"resumed run ended with the same weights, bit for bit:      {same_weights}")
    print(f"accuracy on held-out digits:                               {right:.1%}")

    measured = measure()
    print(f"\n{'wait for a batch, median in ms':38}{'first of an epoch':>20}{'any other':>12}")
    for loader, epochs in measured.items():
        first, other = typical(epochs)
        print(f"  {loader:36}{first:20.2f}{other:12.2f}")
    draw(measured, Path("demo.png"))
    print("\nEvery wait is drawn in demo.png. All that the loader saved:")
    print(json.dumps({key: json.loads(text) for key, text in cut["loader"].items()}, indent=2))
    return None if same_order and right >= 0.97 else "the resumed run differs, or the network did not learn"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--picture"]:
        picture(Path(sys.argv[2]))
    elif len(sys.argv) > 1:
        train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if sys.argv[3] else None)
    else:
        sys.exit(main())
