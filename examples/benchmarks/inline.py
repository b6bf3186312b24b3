"""Small batches without workers: the CPU time of a batch beside ``DataLoader``'s, the Python calls it takes, and where
those are.

    python inline.py [--pairs 30] [--only NAME ...] [--calls] [--layers]

A pair is an epoch of 300 batches of each loader, in one process, which takes turns. The work is the same: samples are
made in ``__getitem__``. The time is that of the process, so other load on the machine counts little. ``--calls`` lists
the files in which penstock's calls of one batch are. ``--layers`` takes penstock's loader apart: the samples and their
collation alone, the indices of batches alone, a mapper over them without and with its watch over the global generators,
and the loader over that mapper.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from loader_peers import Made, fields, of_detection, tokenized
from torch.utils.data import DataLoader, default_collate

import penstock
from penstock import nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BATCHES = 300


def text(index: int) -> torch.Tensor:
    """32 to 511 tokens."""
    return torch.full((32 + index % 480,), index)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def numbers(index: int) -> dict[str, float]:
    """A dict of three Python numbers."""
    return {"a": index, "b": float(index), "c": index + 1}


def arrays(index: int) -> dict[str, np.ndarray]:
    """A dict of three arrays."""
    return {
        "a": np.full((3, 8, 8), index, np.float32),
        "b": np.full((3, 8, 8), index, np.float32),
        "c": np.full(5, index),
    }


def row(index: int) -> tuple[torch.Tensor, int]:
    """32 float32 and a number."""
    return torch.full((32,), float(index)), index


CASES: dict[str, tuple[Callable[[int], Any], int, Callable[[list[Any]], Any] | None]] = {
    **{f"fields, {n}": (fields, n, None) for n in (1, 4, 16, 64)},
    **{f"tokens, {n}": (tokenized, n, None) for n in (4, 16)},
    "padded text, 32": (text, 32, padded),
    "collate_fn of lists, 4": (fields, 4, of_detection),
    "collate_fn=list, 8": (int, 8, list),
    "numbers, 8": (int, 8, None),
    "dicts of numbers, 8": (numbers, 8, None),
    "dicts of arrays, 16": (arrays, 16, None),
    "row and number, 16": (row, 16, None),
}


def batch_us(loader: Iterable[Any]) -> float:
    """CPU time of a batch in an epoch."""
    begin = time.process_time()
    count = sum(1 for _ in loader)
    return 1e6 * (time.process_time() - begin) / count


def calls(loader: Any, batches: int = 100) -> collections.Counter[str]:
    """Python calls of a batch, by file, in the middle of an epoch; those of torch and of the samples included."""
    found: collections.Counter[str] = collections.Counter()

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_filename] += 1

    iterator = iter(loader)
    for _ in range(60):
        next(iterator)
    sys.setprofile(seen)
    for _ in range(batches):
        next(iterator)
    sys.setprofile(None)
    collections.deque(iterator, maxlen=0)
    return collections.Counter({name: count / batches for name, count in found.items()})


def layers(data: Made, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None, turns: int) -> dict[str, float]:
    """CPU time of a batch, in us, for more and more of the loader; the layers take turns."""

    def indices(seed: int) -> Any:
        return nodes.Batcher(
            nodes.Sharder(nodes.Cycler(nodes.Sampler(penstock.orders.ShuffledOrder(len(data), seed=seed))), 0, 1),
            batch_size,
        )

    def mapped(seed: int, watch: bool) -> Any:
        return nodes.Mapper(indices(seed), nodes.Fetch(data, collate_fn), seed_global_rngs=watch)

    def alone() -> Iterator[Any]:
        collate = collate_fn or default_collate
        while True:
            for start in range(0, len(data), batch_size):
                yield collate([data[index] for index in range(start, start + batch_size)])

    def forever(loader: Iterable[Any]) -> Iterator[Any]:
        while True:
            yield from loader

    loader = penstock.Loader(mapped(3, True))
    running = {
        "samples and collation": alone(),
        "indices": iter(indices(0)),
        "mapper": iter(mapped(1, False)),
        "mapper that watches": iter(mapped(2, True)),
        "loader": forever(loader),
        "DataLoader": forever(DataLoader(data, batch_size=batch_size, shuffle=True, collate_fn=collate_fn)),
    }
    found: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(turns + 2):
        for name, batches in running.items():
            took_us = batch_us(islice(batches, BATCHES))
            if turn >= 2:  # the first ones watch more, and warm up
                found[name].append(took_us)
    loader.close()
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--layers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'CPU time of a batch':24}{'DataLoader, us':>16}{'penstock, us':>14}"
        f"{'ratio':>7}{'quartiles':>14}{'calls':>7}{'of':>5}"
    )
    for name in options.only:
        make, batch_size, collate_fn = CASES[name]
        data = Made(BATCHES * batch_size, make)
        theirs = DataLoader(data, batch_size=batch_size, shuffle=True, collate_fn=collate_fn)
        with penstock.Loader.from_dataset(data, batch_size=batch_size, shuffle=True, collate_fn=collate_fn) as ours:
            for _ in range(2):
                batch_us(theirs), batch_us(ours)
            pairs = []
            for number in range(options.pairs):
                first, second = (theirs, ours) if number % 2 else (ours, theirs)
                times = {id(first): batch_us(first), id(second): batch_us(second)}
                pairs.append((times[id(theirs)], times[id(ours)]))
            ratios = sorted(mine / other for other, mine in pairs)
            medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
            low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
            of_theirs, of_ours = calls(theirs), calls(ours)
        print(
            f"{name:24}{medians[0]:16.1f}{medians[1]:14.1f}{statistics.median(ratios):7.2f}{low:8.2f}-{high:4.2f}"
            f"{of_ours.total():8.0f}{of_theirs.total():5.0f}"
        )
        if options.layers:
            print(
                "".join(
                    f"    {took_us:6.1f}  {part}\n"
                    for part, took_us in layers(data, batch_size, collate_fn, options.pairs).items()
                ),
                end="",
            )
        if options.calls:
            home = str(Path(penstock.__file__).parent)
            for file, count in of_ours.most_common():
                print(
                    f"    {count:5.1f}  {file.removeprefix(home + '/') if file.startswith(home) else Path(file).name}"
                )


if __name__ == "__main__":
    main()
