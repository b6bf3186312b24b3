"""How long a resumed run waits for its first batch, at 1, 50 and 99 % of a shuffled epoch, for growing datasets.

    python resume.py [--largest 1000000000000] [--peers-to 10000000] [--repeats 5]

Every loader has running workers and has delivered a batch before it gets a state; the clock runs from
``load_state_dict`` to the first batch. The dataset is virtual: item i is i. The other loaders are set up as their
documentation recommends: StatefulDataLoader with shuffle=True (a RandomSampler), torchdata.nodes with a SamplerWrapper
over a RandomSampler and a ParallelMapper. Rounds are interleaved, and medians are printed. Writes ``resume.png`` into
the current folder.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import torchdata.nodes as tn
from torch.utils.data import RandomSampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable

mpl.use("Agg")
from matplotlib import pyplot as plt

BATCH_SIZE = 64
WORKERS = 2
PLACES = (0.01, 0.5, 0.99)


class Virtual:
    """n items that take no memory."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def penstock_loader(n: int, method: str) -> penstock.Loader:
    """penstock, with a keyed permutation as its order."""
    return penstock.Loader.from_dataset(
        Virtual(n), batch_size=BATCH_SIZE, shuffle=True, num_workers=WORKERS, method=method
    )


def penstock_state(loader: penstock.Loader, position: int) -> dict:
    """The state after ``position`` samples, as a run up to there would have saved it."""
    state = json.loads(loader.state_dict()["penstock"])
    state["state"] = {"epoch": 0, "source": {"epoch": 0, "position": position}}
    return {"penstock": json.dumps(state)}


def time_penstock(n: int, method: str) -> Callable[[float], float]:
    """A function that resumes at a place in the epoch and returns the seconds."""
    loader = penstock_loader(n, method)
    next(iter(loader))

    def resume(place: float) -> float:
        state = penstock_state(loader, int(n * place) // BATCH_SIZE * BATCH_SIZE)
        start = time.perf_counter()
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - start

    return resume


def time_stateful_dataloader(n: int) -> Callable[[float], float]:
    """The StatefulDataLoader of torchdata.

    Its state is also made by hand, because a run up to there would take hours.
    """
    loader = StatefulDataLoader(Virtual(n), batch_size=BATCH_SIZE, shuffle=True, num_workers=0)
    iterator = iter(loader)
    next(iterator)
    template = loader.state_dict()

    def resume(place: float) -> float:
        batches = int(n * place) // BATCH_SIZE
        state = {**template, "_num_yielded": batches}
        state["_sampler_iter_yielded"] = batches
        inner = dict(template["_sampler_iter_state"])
        inner["samples_yielded"] = batches * BATCH_SIZE
        if isinstance(inner.get("sampler_iter_state"), dict):
            inner["sampler_iter_state"] = {**inner["sampler_iter_state"], "yielded": batches * BATCH_SIZE}
        state["_sampler_iter_state"] = inner
        start = time.perf_counter()
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - start

    return resume


def time_nodes(n: int) -> Callable[[float], float]:
    """torchdata.nodes, with batches made in the workers."""
    dataset = Virtual(n)
    node = tn.Batcher(tn.SamplerWrapper(RandomSampler(range(n))), BATCH_SIZE)
    loader = tn.Loader(
        tn.ParallelMapper(
            node, lambda indices: default_collate([dataset[i] for i in indices]), num_workers=WORKERS, method="thread"
        )
    )
    next(iter(loader))

    def with_count(state: object, count: int) -> object:
        if isinstance(state, dict):
            return {key: count if key == "_num_yielded" else with_count(value, count) for key, value in state.items()}
        return state

    def resume(place: float) -> float:
        state = with_count(loader.state_dict(), int(n * place) // BATCH_SIZE * BATCH_SIZE)
        start = time.perf_counter()
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - start

    return resume


def measure(largest: int, peers_to: int, repeats: int) -> dict[str, dict[tuple[int, float], float]]:
    """Loader -> (n, place) -> median seconds."""
    results: dict[str, dict[tuple[int, float], float]] = {}
    n = 10**5
    while n <= largest:
        timers = {"penstock, threads": time_penstock(n, "thread"), "penstock, processes": time_penstock(n, "process")}
        if n <= peers_to:
            timers |= {"StatefulDataLoader": time_stateful_dataloader(n), "torchdata.nodes": time_nodes(n)}
        rounds = {(name, place): [] for name in timers for place in PLACES}
        for _ in range(repeats):
            for (name, place), seconds in rounds.items():
                seconds.append(timers[name](place))
        for (name, place), seconds in rounds.items():
            results.setdefault(name, {})[n, place] = statistics.median(seconds)
        n *= 10
    return results


def draw(results: dict[str, dict[tuple[int, float], float]], file: Path) -> None:
    """Draw one line per loader and place."""
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    colors = dict(zip(results, ("#d1495b", "#edae49", "#30638e", "#6b7a8f"), strict=False))
    for name, times in results.items():
        for place, style in zip(PLACES, (":", "--", "-"), strict=True):
            sizes = sorted({n for n, at in times if at == place})
            axes.plot(
                sizes,
                [1000 * times[n, place] for n in sizes],
                style,
                color=colors[name],
                marker="o",
                markersize=4,
                label=f"{name}, at {place:.0%}",
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="samples in the dataset",
        ylabel="from load_state_dict to the first batch (ms)",
    )
    axes.set_title("Resuming a shuffled epoch", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(file, dpi=120)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=10**12)
    parser.add_argument("--peers-to", type=int, default=10**7)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    results = measure(options.largest, options.peers_to, options.repeats)
    print(f"{'median ms to the first batch':32}" + "".join(f"{f'at {place:.0%}':>12}" for place in PLACES))
    for name, times in results.items():
        for n in sorted({n for n, _ in times}):
            print(f"{name:22}{n:10.0e}" + "".join(f"{1000 * times[n, place]:12.2f}" for place in PLACES))

    with penstock_loader(options.largest, "thread") as loader:
        list(zip(range(3), loader, strict=False))
        start = time.perf_counter()
        for _ in range(1000):
            state = loader.state_dict()
        print(
            f"\nstate_dict(): {1000 * (time.perf_counter() - start):.0f} us; state: {len(json.dumps(state))} bytes at "
            f"n = {options.largest:.0e}"
        )
    print(
        f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB, other loaders "
        f"included"
    )
    draw(results, Path("resume.png"))


if __name__ == "__main__":
    main()
