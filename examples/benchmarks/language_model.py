"""nanochat's loader beside penstock, on the same texts with the same tokenizer: texts in Parquet, tokenised and packed
into full rows.

    python language_model.py [--nanochat FOLDER] [--rounds 5] [--seconds 6] [--resume]
    # needs: pip install '.[formats]' tokenizers

``--nanochat`` is a checkout of https://github.com/karpathy/nanochat; without it, that row is left out. The texts are
the sources of Python's standard library, cut to lengths that are lognormal, with a median of 2 KB; the tokenizer is
trained on them. Each loader runs in a process of its own, in turns, and the consumer does nothing. Everybody may use
two tokenizer threads at a time: one process with two, or two processes with one each. *No loader* is the same tokenizer
and the same packing in two processes that keep nothing.

``--resume`` measures how long the first batch takes at 10, 50 and 90 % of a shard, without bookmarks, beside what
reading that part of a shard takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

import penstock

sys.path.append(str(Path(__file__).parents[1]))

from port_nanochat import Tokenize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONTEXT, BATCH_SIZE, WINDOW, VOCABULARY = 2048, 8, 1000, 16384


def write_corpus(folder: Path, files: int = 9, texts: int = 10_000) -> None:
    """Parquet files with row groups of 1000 texts, and a tokenizer; nanochat keeps the last file for validation."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) + sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("[a-t]*/*.py")
    )
    prose = "\n".join(path.read_text(errors="replace") for path in sources if "site-packages" not in str(path))
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(2000), 0.9, (files, texts)).astype(int) + 20
    starts = generator.integers(0, len(prose) - lengths.max(), (files, texts))
    (folder / "base_data_climbmix").mkdir(parents=True)
    for number in range(files):
        cuts = [
            prose[start : start + length]
            for start, length in zip(starts[number].tolist(), lengths[number].tolist(), strict=True)
        ]
        pq.write_table(
            pa.table({"text": cuts}), folder / f"base_data_climbmix/shard_{number:05}.parquet", row_group_size=1000
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        [prose[:8_000_000]], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<bos>"], show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))


def files_in(folder: Path) -> list[str]:
    return sorted(map(str, (folder / "base_data_climbmix").glob("*.parquet")))[:-1]


def steps(folder: Path) -> list[Any]:
    return [Tokenize(str(folder / "tokenizer.json")), penstock.Pack(CONTEXT + 1, crop=True, window=WINDOW)]


def by_nanochat(folder: Path) -> Iterator[Any]:
    """Its own loader, with a tokenizer that has the method that it calls."""
    from nanochat.dataloader import tokenizing_distributed_data_loader_bos_bestfit  # type: ignore[import-not-found]

    class Adapted:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

        def get_bos_token_id(self) -> int:
            return 0

        def encode(self, texts: list[str], prepend: int, num_threads: int) -> list[list[int]]:
            # which prepends it, in threads of its own
            return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts)]

    for inputs, _ in tokenizing_distributed_data_loader_bos_bestfit(
        Adapted(), BATCH_SIZE, CONTEXT, "train", device="cpu", buffer_size=WINDOW
    ):
        yield inputs


def by_penstock(folder: Path, **options: Any) -> Iterator[Any]:
    data = penstock.formats.parquet(
        files_in(folder), ["text"], unit="file", epoch_size=10_000, steps=steps(folder), bookmarks=False
    )
    loader = penstock.Loader.from_dataset(data, batch_size=BATCH_SIZE, shuffle=True, seed=1, **options)
    while True:
        for batch in loader:
            yield batch["tokens"]


def alone(folder: Path, part: int, parts: int) -> Iterator[Any]:
    """The work: rows that nobody gets."""
    tokenize, pack = steps(folder)
    while True:
        for file in files_in(folder)[part::parts]:
            rows = (
                {"text": text}
                for batch in pq.ParquetFile(file).iter_batches(1024)
                for text in batch["text"].to_pylist()
            )
            done = 0
            for done, _ in enumerate(pack(tokenize(rows)), 1):
                if not done % BATCH_SIZE:
                    yield None


LOADERS: dict[str, tuple[int, Callable[..., Iterator[Any]], dict[str, Any]]] = {
    "no loader, one process": (2, alone, {"part": 0, "parts": 1}),
    "no loader, two processes": (1, alone, {"parts": 2}),
    "nanochat": (2, by_nanochat, {}),
    "penstock, inline": (2, by_penstock, {}),
    "penstock, threads": (2, by_penstock, {"num_workers": 2, "method": "thread"}),
    "penstock, processes": (
        1,
        by_penstock,
        {"num_workers": 2, "multiprocessing_context": "fork", "prefetch_factor": 16},
    ),
}
"""For each the tokenizer threads of a process, how to open it, and with what."""


def count(batches: Iterator[Any], seconds: float) -> float:
    """Tokens per second, once it has given 8 batches."""
    for _ in islice(batches, 8):
        pass
    begin, number = time.perf_counter(), 0
    while (now := time.perf_counter()) < begin + seconds:
        next(batches)
        number += 1
    return number * BATCH_SIZE * (CONTEXT + 1) / (now - begin)


def measured(name: str, folder: Path, seconds: float) -> dict[str, float]:
    """In this process and its children: tokens per second, and CPU seconds per million tokens."""
    _, open, words = LOADERS[name]
    begin = cpu_s()
    if words.get("parts") == 2:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            speed = sum(pool.starmap(_part, [(folder, part, seconds) for part in range(2)]))
    else:
        batches = open(folder, **words)
        speed = count(batches, seconds)
        with contextlib.suppress(AttributeError):
            batches.close()  # type: ignore[attr-defined]
    return {"tokens_s": speed, "cores": (cpu_s() - begin) / seconds}


def _part(folder: Path, part: int, seconds: float) -> float:
    return count(alone(folder, part, 2), seconds)


def cpu_s() -> float:
    """Of this process and of those of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def resumed(folder: Path) -> None:
    """How long the first batch takes after a resume in a shard, and what it takes to tokenise and pack that part of
    one.
    """
    file = files_in(folder)[0]

    def built() -> penstock.Loader:
        data = penstock.formats.parquet(
            file, ["text"], unit="file", lanes=1, epoch_size=100_000, steps=steps(folder), bookmarks=False
        )
        return penstock.Loader.from_dataset(data, batch_size=BATCH_SIZE, seed=1)

    tokenize, pack = steps(folder)
    rows = sum(1 for _ in pack(tokenize({"text": text} for text in pq.read_table(file)["text"].to_pylist())))
    print(f"a shard of {rows} rows, one lane, inline")
    for share in (0.1, 0.5, 0.9):
        with built() as loader:
            batches, begin = iter(loader), time.perf_counter()
            for _ in islice(batches, int(rows * share) // BATCH_SIZE):
                pass
            read, state = time.perf_counter() - begin, loader.state_dict()
        with built() as loader:
            loader.load_state_dict(state)
            begin = time.perf_counter()
            next(iter(loader))
            print(f"  at {share:.0%}: {time.perf_counter() - begin:.2f} s; reading up to there takes {read:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nanochat", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one[0], Path(options.one[1]), options.seconds)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder)
        if options.resume:
            resumed(folder)
            return
        found: dict[str, list[dict[str, float]]] = {}
        path = os.pathsep.join(filter(None, [options.nanochat and str(options.nanochat), os.environ.get("PYTHONPATH")]))
        for _ in range(options.rounds):
            for loader, (threads, _, _) in LOADERS.items():
                if loader == "nanochat" and not options.nanochat:
                    continue
                own = {
                    "RAYON_NUM_THREADS": str(threads),
                    "TOKENIZERS_PARALLELISM": "true",
                    "NANOCHAT_BASE_DIR": name,
                    "PYTHONPATH": path,
                }
                command = [sys.executable, __file__, "--seconds", str(options.seconds), "--one", loader, name]
                out = subprocess.run(
                    command, check=True, capture_output=True, text=True, env={**os.environ, **own}, timeout=600
                ).stdout
                found.setdefault(loader, []).append(json.loads(out.splitlines()[-1]))
        reference = "nanochat" if options.nanochat else "no loader, one process"
        print(f"| | tokens/s | times {reference} | of no loader, two processes | cores |\n|---|---|---|---|---|")
        for loader, runs in found.items():
            speeds = [run["tokens_s"] for run in runs]
            ratios = [
                statistics.median(
                    speed / other["tokens_s"] for speed, other in zip(speeds, found[against], strict=True)
                )
                for against in (reference, "no loader, two processes")
            ]
            cores = statistics.median(run["cores"] for run in runs)
            print(f"| {loader} | {statistics.median(speeds):,.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {cores:.1f} |")


if __name__ == "__main__":
    main()
