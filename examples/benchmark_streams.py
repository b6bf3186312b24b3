"""Streams side by side: token files, resuming, states, mixes, buckets.

    python benchmark_streams.py [--workloads X3 X5 X7 X8 X9] [--peers NAME ...] [--repeats 5] [--seconds 1] [--quick] [--json FILE]
                                [--python MODULE=INTERPRETER ...] [--folder FOLDER]

The loaders and their settings are in benchmark_stream_peers.py. Every measurement has its own process; the loaders take turns, and the figures are medians
over the rounds. A ratio is the median of the ratios within a round. What is not installed says so; ``--python streaming=/path/to/python`` runs what needs
the module ``streaming`` in another environment, which needs torch, NumPy and psutil, too.

X3  Sequences of 4096 tokens from files of uint16, shuffled, a mix of three sources (.7, .2, .1), batches of 8, as int64. Files are in the page cache.
    tokens/s: at the steady speed. us CPU: of all processes, a sequence. first: from building everything to the first batch, packages imported.
    "no loader" copies random rows into new batches, and does nothing else.
X5  From building everything to the first batch, ms, resumed at 0.1, 10, 50 and 90 % of an epoch of sequences of 64 tokens, without worker processes unless it
    says so. The peers walk to the places first; MosaicML's and our states are made. Our larger files are sparse.
X7  Bytes of a state (JSON, or a pickle where it is none), and us to take it.
X8  A mix of 35 sources, weighted 1, 1/2, 1/3, …: us of CPU time an item, the best of 5 times 131,072 on one rank; over 32,768 items on 8 ranks, the largest difference between a source's
    count and its share, at the ends of 1024 items and anywhere. Skew: how far the worst rank's count of a source is from its share, in standard deviations
    of a draw, also for two sources (3 to 1) on 4 ranks; a fair draw is at 3 or so.
X9  Batches of speech (lognormal, 9 s in the middle, at most 40), at most 200 s with padding and 64 samples, on 8 ranks: padding, and how long 8 ranks wait for
    the slowest, if a batch costs its padded seconds times (1 + longest / 30).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

import benchmark_stream_peers as peers

if TYPE_CHECKING:
    from collections.abc import Callable

PLACES = (0.001, 0.1, 0.5, 0.9)
LIMIT_S = 300


# --------------------------------------------------------------------------------------------- in a child: one measurement of one loader


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


def x3(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    begin = time.perf_counter()
    batches = peer.open(folder)
    rows_of(next(batches))
    first_s = time.perf_counter() - begin
    end = time.perf_counter() + options.seconds / 4
    while time.perf_counter() < end:
        next(batches)
    sources = []
    begin, busy_s, sequences = time.perf_counter(), cpu_s(), 0
    while (took_s := time.perf_counter() - begin) < options.seconds:
        for _ in range(16):
            rows = rows_of(next(batches))
            sequences += len(rows)
            sources.append(rows[:, 0] // peers.VOCABULARY)
    busy_s = cpu_s() - busy_s
    shares = np.bincount(np.concatenate(sources), minlength=len(peers.WEIGHTS)) / sequences
    off = float(np.abs(shares - list(peers.WEIGHTS.values())).max())
    if peer.modules and sequences > 2000 and off > 0.1:
        raise ValueError(f"the shares of the sources are {shares}")
    return {"tokens_per_s": sequences * peers.LENGTH / took_s, "cpu_us": 1e6 * busy_s / sequences, "first_ms": 1e3 * first_s}


def x5(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    sizes = [10**5, 10**7, 10**9] if peer.modules == ("penstock",) else [x5_sequences(options)]
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


def x7(peer: peers.Peer, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    found = {}
    sizes = [10**5, 10**6] if peer.modules == ("penstock",) else [10**5]  # 10^6 takes minutes to set up elsewhere
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
    busy_s = [timed(peer.open(weights, 4 * items, 1))]
    while len(busy_s) < 5 and busy_s[0] < 1:
        busy_s.append(timed(peer.open(weights, 4 * items, 1)))
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


def timed(function: Callable[[], Any]) -> float:
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


WORKLOADS = {
    "X3": (peers.X3, x3),
    "X5": (peers.X5, x5),
    "X7": (peers.X7, x7),
    "X8": (peers.X8, x8),
    "X9": (peers.X9, x9),
}


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
        for module in peer.modules:
            importlib.import_module("penstock.formats" if module == "penstock" else module)
        folder = Path(options.folder)
        try:
            if options.write:
                peer.write(folder)
            result = {} if options.write else measure(peer, folder, options)
        except Exception as exc:  # whatever a loader raises is its result
            result = {"failed": f"{type(exc).__name__}: {exc}"[:200]}
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # some peers hang when the interpreter ends


# --------------------------------------------------------------------------------------------- in the parent: rounds, and tables


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
        [python, __file__, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
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
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "web").exists():
        return
    if workload == "X3":
        peers.write_tokens(folder, 1000 if options.quick else 24_000)
    if workload == "X5":  # the peers resume in one source
        peers.write_tokens(folder, int(x5_sequences(options) / peers.WEIGHTS["web"]) + 100, peers.SHORT, 1)


def rounds_of(workload: str, folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The loaders in turn, ``--repeats`` times. What is missing or fails is not tried again; All but X3 repeat within, or have no use for it."""
    prepare(workload, folder, options)
    names = [
        name for name in WORKLOADS[workload][0] if options.peers is None or any(word.lower() in name.lower() for word in options.peers)
    ]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.repeats if workload == "X3" else 1):
        for name, found in results.items():
            if not found or not {"skipped", "failed"} & found[0].keys():
                found.append(measured(workload, name, folder, options))
                print(f"{workload} {name}: {found[-1]}", file=sys.stderr, flush=True)
    return results


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    good = [found for found in rounds if "failed" not in found]
    return {key: statistics.median(found[key] for found in good) for key in good[0]} if good else {}


def ratio(rounds: dict[str, list[dict[str, Any]]], name: str, other: str, key: str) -> str:
    """The median of the ratios within a round."""
    pairs = zip(rounds[name], rounds.get(other, []), strict=False)
    ratios = [one[key] / two[key] for one, two in pairs if key in one and key in two]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


COLUMNS = {
    "X3": {"tokens_per_s": "{:,.0f}", "cpu_us": "{:.1f}", "first_ms": "{:.0f}"},
    "X7": {},
    "X8": {"us_per_item": "{:.3f}", "error_at_ends": "{:.2f}", "error": "{:.1f}", "skew_of_35": "{:.1f}", "skew_of_two": "{:.1f}"},
    "X9": {"padding": "{:.2%}", "wait": "{:.2%}", "seconds_per_batch": "{:.1f}", "left_out": "{:.2%}", "us_per_sample": "{:.1f}"},
}


def show(workload: str, rounds: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n## {workload}\n")
    keys = list(dict.fromkeys(key for found in rounds.values() for one in found for key in one if key not in ("skipped", "failed")))
    more = ["x DataLoader", "x 0 workers", "x no loader"] if workload == "X3" else []
    print("| | " + " | ".join([key.replace("_", " ") for key in keys] + more) + " |")
    print("|---" * (1 + len(keys) + len(more)) + "|")
    for name, found in rounds.items():
        if reason := found[0].get("skipped") or found[0].get("failed"):
            print(f"| {name} | {'failed: ' if 'failed' in found[0] else ''}{reason} |")
            continue
        values = medians(found)
        cells = [COLUMNS.get(workload, {}).get(key, "{:,.1f}").format(values[key]) if key in values else "" for key in keys]
        if workload == "X3":
            cells += [ratio(rounds, name, other, "tokens_per_s") for other in ("DataLoader", "DataLoader, 0 workers", "no loader")]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="+", help="only loaders with one of these words in their name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long X3 reads")
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
        results = {workload: rounds_of(workload, folder / workload, options) for workload in options.workloads}
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    for workload, rounds in results.items():
        show(workload, rounds)
    took_s = time.perf_counter() - begin
    print(
        f"\n{os.cpu_count()} cores, load {load:.1f} before, Python {platform.python_version()}, torch {torch.__version__}, {took_s:.0f} s"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
