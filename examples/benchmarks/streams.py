"""Streams side by side: tars, lines, token files, resuming, states, mixes, buckets, memory.

    python streams.py [--workloads X1 X2 …] [--peers NAME ...] [--repeats 5] [--seconds 1] [--quick] [--json FILE]
                                [--python MODULE=INTERPRETER ...] [--folder FOLDER]

The loaders and their settings are in stream_peers.py. Every measurement has its own process; the loaders take turns,
and the figures are medians over the rounds. A ratio is the median of the ratios within a round. What is not installed
says so; ``--python streaming=/path/to/python`` runs what needs the module ``streaming`` in another environment, which
needs torch, NumPy and psutil, too.

X1  Samples of 20 KB from 64 tars of 1000, shuffled, in batches of 64, 2 workers, as bytes. "no loader" are two
    processes that read tars and do nothing else; the first looks at nothing but the sizes, the second uses the standard
    library's tarfile. Files are in the page cache.
X2  The same with JPEGs of 256 x 256, decoded by Pillow. "no loader" reads and decodes.
X3  Sequences of 4096 tokens from files of uint16, shuffled, a mix of three sources (.7, .2, .1), batches of 8, as
    int64. Files are in the page cache. tokens/s: at the steady speed. us CPU: of all processes, a sequence. first: from
    building everything to the first batch, packages imported. "no loader" copies random rows into new batches, and does
    nothing else.
X4  Lines of JSON, made into tokens by a toy tokeniser, in rows of 2048, in batches of 8. Some pack whole texts, others
    cut the texts where a row ends. tokens/s, without padding; fill: the share of the places that have one.
X5  From building everything to the first batch, ms, resumed at 0.1, 10, 50 and 90 % of an epoch of sequences of 64
    tokens, without worker processes unless it says so. The peers walk to the places first; MosaicML's and our states
    are made. Our larger files are sparse. Lanes: ten tars that nobody has counted. With bookmarks, half of a tar is
    read in each of the two lanes, on average.
X6  A run on 2 ranks is stopped at 40 % and goes on with 3: how many samples are lost, and how many come once more than
    in a run that was not stopped.
X7  Bytes of a state (JSON, or a pickle where it is none), and us to take it.
X8  A mix of 35 sources, weighted 1, 1/2, 1/3, …: us of CPU time an item, the best of 5 times 131,072 on one rank; over
    32,768 items on 8 ranks, the largest difference between a source's count and its share, at the ends of 1024 items
    and anywhere. Skew: how far the worst rank's count of a source is from its share, in standard deviations of a draw,
    also for two sources (3 to 1) on 4 ranks; a fair draw is at 3 or so.
X9  Batches of speech (lognormal, 9 s in the middle, at most 40), at most 200 s with padding and 64 samples, on 8 ranks:
    padding, and how long 8 ranks wait for the slowest, if a batch costs its padded seconds times (1 + longest / 30).
X10 A step with the first batch of a pass over 8 tars as in X1, and with any other batch; the work on a batch takes 4
    ms.
X11 Memory (MB, all processes, without the page cache) that reading as in X1 takes, once the buffers are full. How well
    that shuffles: neighbours: how many per cent of the records have the one after them in the file in their batch;
    distance: how many samples lie between the two, in the middle; shards: how many a batch is from.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import pickle
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import stream_peers as peers
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

PLACES = (0.001, 0.1, 0.5, 0.9)
X10_STEP_S = 0.004
LIMIT_S = 300


# ---------------------------------------------------------------------------- in a child: one measurement of one loader


def cpu_s() -> float:
    """CPU seconds of this process and its descendants, including those that have ended."""
    total = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def rows_of(batch: Any) -> np.ndarray:
    """The tokens of a batch, checked."""
    tokens = np.asarray(batch["tokens"] if isinstance(batch, dict) else batch)
    if tokens.dtype != np.int64 or tokens.shape[1:] != (peers.LENGTH,):
        raise TypeError(f"got a batch of {tokens.dtype} of shape {tokens.shape}")
    return tokens


def timed(
    peer: peers.Peer, folder: Path, options: argparse.Namespace, look: Callable[[Any], int], least: int = 0
) -> dict[str, float]:
    """Batches at the steady speed: after at least ``least`` batches.

    ``look`` checks one and says how many rows it has.
    """
    begin = time.perf_counter()
    batches = peer.open(folder)
    look(next(batches))
    first_s = time.perf_counter() - begin
    end = time.perf_counter() + options.seconds / 4
    while time.perf_counter() < end or least > 0:
        look(next(batches))
        least -= 1
    begin, busy_s, rows = time.perf_counter(), cpu_s(), 0
    while (took_s := time.perf_counter() - begin) < options.seconds:
        for _ in range(16):
            rows += look(next(batches))
    busy_s = cpu_s() - busy_s
    return {"per_s": rows / took_s, "cpu_us": 1e6 * busy_s / rows, "first_ms": 1e3 * first_s}


def x1(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    def look(batch: Any) -> int:
        if batch is None:
            return peers.SAMPLES
        if any(type(sample) is not bytes or len(sample) != peers.RECORD for sample in batch):
            raise TypeError(f"got a batch of {type(batch[0])}")
        return len(batch)

    return timed(peer, folder, options, look, 0 if options.quick else 2 * peers.HELD // peers.SAMPLES)


def x2(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    def look(batch: Any) -> int:
        if batch is None:
            return peers.SAMPLES
        if (batch.dtype, tuple(batch.shape[1:])) != (torch.uint8, (256, 256, 3)):
            raise TypeError(f"got a batch of {batch.dtype} of shape {batch.shape}")
        return len(batch)

    return timed(peer, folder, options, look)


def x3(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    sources = []

    def look(batch: Any) -> int:
        rows = rows_of(batch)
        sources.append(rows[:, 0] // peers.VOCABULARY)
        return len(rows)

    found = timed(peer, folder, options, look)
    sequences = sum(map(len, sources))
    shares = np.bincount(np.concatenate(sources), minlength=len(peers.WEIGHTS)) / sequences
    off = float(np.abs(shares - list(peers.WEIGHTS.values())).max())
    if peer.modules and sequences > 2000 and off > 0.1:
        raise ValueError(f"the shares of the sources are {shares}")
    return {"tokens_per_s": found.pop("per_s") * peers.LENGTH, **found}


def x4(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    fills = []

    def look(batch: Any) -> int:
        tokens = np.asarray(batch["tokens"] if isinstance(batch, dict) else batch)
        if tokens.dtype != np.int64 or tokens.shape[1:] != (peers.ROW,):
            raise TypeError(f"got a batch of {tokens.dtype} of shape {tokens.shape}")
        fills.append(np.count_nonzero(tokens) / tokens.size)
        return len(tokens)

    found = timed(peer, folder, options, look)
    fill = statistics.mean(fills)
    return {"tokens_per_s": found.pop("per_s") * peers.ROW * fill, "fill": fill, **found}


def x5(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    sizes = [10**5, 10**7, 10**9] if peer.huge else [x5_sequences(options)]
    found: dict[str, list[float]] = {}
    for size in sizes:
        resumable = peer.open(folder, size)
        states = resumable.states([int(place * size / peers.BATCH_SIZE) for place in PLACES])
        resumable.resume(states[0])  # imports what it needs
        for repeat in range(2 if options.quick else 5):
            for place, state in zip(PLACES, states, strict=True):
                begin = time.perf_counter()
                resumed = resumable.resume(state)
                times = found.setdefault(f"{size:.0e} {place:.1%}", [])
                times.append(1e3 * (time.perf_counter() - begin))
                if (close := resumed[1]) is not None:
                    close()
                if times[0] > 2000 and repeat:
                    break
    return {name: statistics.median(values) for name, values in found.items()}


def x5_sequences(options: argparse.Namespace) -> int:
    return 5_000 if options.quick else 100_000


def x6(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    lost, repeated = peers.lost_and_repeated(peer.open(folder))
    return {"lost": lost, "repeated": repeated}


def x7(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    found = {}
    sizes = [10**5, 10**6] if peer.huge else [10**5]  # 10^6 takes minutes to set up elsewhere
    for shards in [1000] if options.quick else sizes:
        batches, state = peer.open(shards)
        for _ in range(3):
            next(batches)
        times = []
        end = time.perf_counter() + options.seconds / 4
        while time.perf_counter() < end or len(times) < 3:
            begin = time.perf_counter()
            taken = state()
            times.append(time.perf_counter() - begin)
        try:
            size = len(json.dumps(taken))
        except TypeError:
            size = len(pickle.dumps(taken))
        found |= {f"{shards:.0e} bytes": size, f"{shards:.0e} us": 1e6 * statistics.median(times)}
    return found


def x8(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    weights, items = 1 / np.arange(1, 36), 4096 if options.quick else 32_768
    busy_s = [busy(peer.open(weights, 4 * items, 1))]
    while len(busy_s) < 5 and busy_s[0] < 1:
        busy_s.append(busy(peer.open(weights, 4 * items, 1)))
    many, two = peer.open(weights, items // 8, 8)(), peer.open(np.array([3, 1]), items // 8, 4)()
    weights = weights / weights.sum()
    counts = np.cumsum(many.T.reshape(-1, 1) == np.arange(35), axis=0)
    errors = np.abs(counts - np.arange(1, len(counts) + 1)[:, None] * weights)
    return {
        "us_per_item": 1e6 * min(busy_s) / (4 * items),
        "error_at_ends": float(errors[1023::1024].max()),
        "error": float(errors.max()),
        "skew_of_35": skew(many, weights),
        "skew_of_two": skew(two, np.array([0.75, 0.25])),
    }


def skew(rows: np.ndarray, weights: np.ndarray) -> float:
    """How far the worst rank's count of a source is from its share, in standard deviations of a draw."""
    counts = (rows[:, :, None] == np.arange(len(weights))).sum(axis=1)
    drawn = rows.shape[1] * weights
    return float((np.abs(counts - drawn) / np.sqrt(drawn * (1 - weights))).max())


def busy(function: Callable[[], Any]) -> float:
    """Its CPU seconds."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def x9(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    n = 10_000 if options.quick else 30_000
    seconds = np.clip(np.random.default_rng(peers.SEED).lognormal(np.log(9), 0.6, n), 0.5, 40)
    begin = time.perf_counter()
    padded = real = busy = slowest = 0.0
    batches = 0
    for hands in peer.open(seconds, 8, 200.0, 64):
        longest = np.array([hand.max() for hand in hands])
        sizes = longest * [len(hand) for hand in hands]
        costs = sizes * (1 + longest / 30)
        padded, real = padded + sizes.sum(), real + sum(hand.sum() for hand in hands)
        busy, slowest, batches = busy + costs.sum(), slowest + 8 * costs.max(), batches + 8
    took_s = time.perf_counter() - begin
    return {
        "padding": 1 - real / padded,
        "wait": 1 - busy / slowest,
        "seconds_per_batch": real / batches,
        "left_out": 1 - real / seconds.sum(),
        "us_per_sample": 1e6 * took_s / n,
    }


def x10(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    loader = peer.open(folder)
    first, other = [], []
    begin = last = time.perf_counter()
    while len(first) < 3 or (len(first) < 20 and time.perf_counter() - begin < 4 * options.seconds):
        for number, _ in enumerate(loader):
            time.sleep(X10_STEP_S)
            (other if number else first).append(1e3 * (time.perf_counter() - last))
            last = time.perf_counter()
    found = {"first_ms": statistics.median(first[1:]), "other_ms": statistics.mean(other)}
    return {**found, "ratio": found["first_ms"] / found["other_ms"]}


def memory() -> float:
    """MB of this process and its descendants; what they share is divided among them."""
    me = psutil.Process()
    return sum(process.memory_full_info().pss for process in (me, *me.children(recursive=True))) / 1e6


def x11(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    before = memory()
    batches = peer.open(folder)
    for _ in range(10 if options.quick else 400):
        next(batches)
    most, numbers = 0.0, []
    for batch in range(20 if options.quick else 800):
        numbers.append([int.from_bytes(sample[:8], "little") for sample in next(batches)])
        if batch % 50 == 0:
            most = max(most, memory() - before)
    places = {number: place for place, number in enumerate(itertools.chain(*numbers))}
    distances = np.array([abs(places[number + 1] - place) for number, place in places.items() if number + 1 in places])
    together = [sum(number + 1 in batch for number in batch) for batch in map(set, numbers)]
    return {
        "MB": most,
        "neighbours": 100 * sum(together) / len(places),
        "distance": float(np.median(distances)),
        "shards": statistics.mean(len({number // 1000 for number in batch}) for batch in numbers),
    }


WORKLOADS = {
    "X1": (peers.X1, x1),
    "X2": (peers.X2, x2),
    "X3": (peers.X3, x3),
    "X4": (peers.X4, x4),
    "X5": (peers.X5, x5),
    "X6": (peers.X6, x6),
    "X7": (peers.X7, x7),
    "X8": (peers.X8, x8),
    "X9": (peers.X9, x9),
    "X10": (peers.X10, x10),
    "X11": (peers.X11, x11),
}

DATA = {"X11": "X1"}  # which workloads read another's
REPEATED = ("X1", "X2", "X3", "X4", "X10")  # the others repeat within, or have no use for it


def import_all(penstock: Any) -> None:
    """Import what a loader takes: penstock's modules are imported when they are first used, the other packages' at
    once.
    """
    for module in (penstock, importlib.import_module("penstock.formats"), importlib.import_module("penstock.nodes")):
        for name in module.__all__:
            getattr(module, name)
    for method in ("thread", "process"):
        penstock.Loader.from_dataset([0], 1, num_workers=1, method=method)  # starts nothing


def child(options: argparse.Namespace) -> None:
    """One measurement, printed as JSON in the last line."""
    workload, name = options.child
    table, measure = WORKLOADS[workload]
    peer = table[name]
    torch.set_num_threads(1)
    missing = [module for module in peer.modules if importlib.util.find_spec(module.split(".")[0]) is None]
    if missing:
        result: dict[str, Any] = {"skipped": f"{', '.join(missing)} is not installed"}
    else:
        for module in map(importlib.import_module, peer.modules):
            if module.__name__ == "penstock":
                import_all(module)
        folder = Path(options.folder)
        try:
            if options.write:
                peer.write(folder)
            result = {} if options.write else measure(peer, folder, options)
        except Exception as exc:  # whatever a loader raises is its result
            result = {"failed": f"{type(exc).__name__}: {exc}"[:200]}
    print("\n" + json.dumps(result), flush=True)
    for process in psutil.Process().children(recursive=True):  # they hold on to the pipe that the parent reads
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(0)  # some peers hang when the interpreter ends


# ------------------------------------------------------------------------------------ in the parent: rounds, and tables


def in_a_child(workload: str, name: str, folder: Path, options: argparse.Namespace, *words: str) -> dict[str, Any]:
    """One measurement in a process of its own; with ``--write``, its data is written."""
    modules = WORKLOADS[workload][0][name].modules
    chosen = dict(pair.split("=", 1) for pair in options.python)
    python = next((chosen[module] for module in modules if module in chosen), sys.executable)
    arguments = [
        "--child",
        workload,
        name,
        "--folder",
        str(folder),
        "--seconds",
        str(options.seconds),
        *(["--quick"] if options.quick else []),
        *words,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else what is imported late is compiled each time
    process = subprocess.Popen(
        [python, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
        return json.loads(out.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {LIMIT_S} s"}
    except (json.JSONDecodeError, IndexError):
        return {"failed": f"ended with {process.returncode}: {err.strip()[-160:]}"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # its workers, if it left any
        process.communicate()


def measured(workload: str, name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    written = folder / f"{name}.written"
    if WORKLOADS[workload][0][name].write is not None and not written.exists():
        if result := in_a_child(workload, name, folder, options, "--write"):
            return result
        written.touch()
    return in_a_child(workload, name, folder, options)


def prepare(workload: str, folder: Path, options: argparse.Namespace) -> None:
    """The data that the loaders read, or make theirs of."""
    if (folder / "prepared").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    quick = options.quick
    if workload == "X1":
        peers.write_tars(folder / "tars", "bin", peers.records(800 if quick else 64_000), 50 if quick else 1000)
    if workload == "X2" and importlib.util.find_spec("PIL"):
        peers.write_tars(folder / "tars", "jpg", peers.pictures(320 if quick else 3200), 20 if quick else 100)
    if workload == "X3":
        peers.write_tokens(folder, 1000 if quick else 24_000)
    if workload == "X4":
        peers.write_lines(folder, 8, 40 if quick else 4000)
    if workload == "X5":  # the peers resume in one source
        peers.write_tokens(folder, int(x5_sequences(options) / peers.WEIGHTS["web"]) + 100, peers.SHORT, 1)
        rows = [row.tobytes() for row in peers.sequences_of(folder, "web", peers.SHORT)]
        peers.write_tars(folder / "tars", "bin", rows, -(-len(rows) // 10))
    if workload == "X10":
        peers.write_tars(folder / "tars", "bin", peers.records(1000 * peers.PASS), 1000)
    (folder / "prepared").touch()


def rounds_of(workload: str, folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The loaders in turn, ``--repeats`` times; with ``--quick``, two at a time.

    What is missing or fails is not tried again.
    """
    names = [
        name
        for name in WORKLOADS[workload][0]
        if options.peers is None or any(word.lower() in name.lower() for word in options.peers)
    ]
    if names:
        prepare(DATA.get(workload, workload), folder, options)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    def measure(name: str) -> None:
        found = results[name]
        if not found or not {"skipped", "failed"} & found[0].keys():
            found.append(measured(workload, name, folder, options))
            print(f"{workload} {name}: {found[-1]}", file=sys.stderr, flush=True)

    for _ in range(options.repeats if workload in REPEATED else 1):
        with ThreadPoolExecutor(2 if options.quick else 1) as together:
            list(together.map(measure, names))
    return results


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    good = [found for found in rounds if "failed" not in found]
    return {key: statistics.median(found[key] for found in good) for key in good[0]} if good else {}


def ratio(rounds: dict[str, list[dict[str, Any]]], name: str, other: str, key: str) -> str:
    """The median of the ratios within a round."""
    pairs = zip(rounds[name], rounds.get(other, []), strict=False)
    ratios = [one[key] / two[key] for one, two in pairs if key in one and key in two]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


RATE = {"per_s": "{:,.0f}", "cpu_us": "{:.1f}", "first_ms": "{:.0f}"}
COLUMNS = {
    "X1": RATE,
    "X2": RATE,
    "X3": {"tokens_per_s": "{:,.0f}", **RATE},
    "X4": {"tokens_per_s": "{:,.0f}", "fill": "{:.2%}", **RATE},
    "X6": {"lost": "{:.0f}", "repeated": "{:.0f}"},
    "X8": {
        "us_per_item": "{:.3f}",
        "error_at_ends": "{:.2f}",
        "error": "{:.1f}",
        "skew_of_35": "{:.1f}",
        "skew_of_two": "{:.1f}",
    },
    "X9": {
        "padding": "{:.2%}",
        "wait": "{:.2%}",
        "seconds_per_batch": "{:.1f}",
        "left_out": "{:.2%}",
        "us_per_sample": "{:.1f}",
    },
    "X10": {"first_ms": "{:.2f}", "other_ms": "{:.2f}", "ratio": "{:.2f}"},
    "X11": {"MB": "{:.0f}", "neighbours": "{:.2f}", "distance": "{:,.0f}", "shards": "{:.1f}"},
}
RATIOS = {  # of what, and to whom
    "X1": ("per_s", "webdataset", "no loader", "no loader, tarfile"),
    "X2": ("per_s", "webdataset", "no loader", "no loader, stacked"),
    "X3": ("tokens_per_s", "DataLoader", "DataLoader, 0 workers", "no loader"),
    "X4": ("tokens_per_s", "DataLoader and a generator, cuts", "Grain, best fit"),
}


def show(workload: str, rounds: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n## {workload}\n")
    keys = list(
        dict.fromkeys(
            key for found in rounds.values() for one in found for key in one if key not in ("skipped", "failed")
        )
    )
    key_of_ratios, *others = RATIOS.get(workload, ("",))
    print("| | " + " | ".join([key.replace("_", " ") for key in keys] + [f"x {other}" for other in others]) + " |")
    print("|---" * (1 + len(keys) + len(others)) + "|")
    for name, found in rounds.items():
        if reason := found[0].get("skipped") or found[0].get("failed"):
            print(f"| {name} | {'failed: ' if 'failed' in found[0] else ''}{reason} |")
            continue
        values = medians(found)
        cells = [
            COLUMNS.get(workload, {}).get(key, "{:,.1f}").format(values[key]) if key in values else "" for key in keys
        ]
        cells += [ratio(rounds, name, other, key_of_ratios) for other in others]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="+", help="only loaders with one of these words in their name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long X1 to X4 read")
    parser.add_argument("--quick", action="store_true", help="small data, one round: to see that it runs")
    parser.add_argument("--python", nargs="*", default=[], metavar="MODULE=INTERPRETER")
    parser.add_argument("--folder", help="where the data is; kept, and used again if it is there")
    parser.add_argument("--json", help="write all figures into this file")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
    if options.quick:
        options.repeats, options.seconds = 1, 0.2
    folder = Path(options.folder or tempfile.mkdtemp(prefix="benchmark-streams-"))
    begin, load = time.perf_counter(), os.getloadavg()[0]
    try:
        results = {
            workload: rounds_of(workload, folder / DATA.get(workload, workload), options)
            for workload in options.workloads
        }
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    for workload, rounds in results.items():
        show(workload, rounds)
    took_s = time.perf_counter() - begin
    print(
        f"\n{os.cpu_count()} cores, load {load:.1f} before, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {took_s:.0f} s"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
