"""The command line, ``python -m penstock``: measure a loader, show a saved state, write the indices of shards, show a
cache folder.
"""

from __future__ import annotations

import argparse
import os
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "index":
            from penstock._command.index import index_files

            return index_files(
                chosen.paths, chosen.index, "ray" if chosen.ray else chosen.workers, sys.stdout, sys.stderr
            )
        if chosen.command == "cache":
            from penstock._command import cache

            return cache.show(chosen.folder, chosen.clear, sys.stdout, sys.stderr)
        if chosen.command == "state":
            from penstock._command import state

            if chosen.skip:
                return max(
                    state.skip(path, chosen.key, chosen.skip, chosen.output or f"{path}.skip", sys.stdout, sys.stderr)
                    for path in chosen.files
                )
            return max(state.show(path, chosen.key, sys.stdout, sys.stderr) for path in chosen.files)
        if chosen.command == "which":
            from penstock._command.which import which

            return which(
                chosen.target,
                chosen.steps,
                chosen.rank,
                chosen.world_size,
                chosen.state,
                chosen.key,
                sys.stdout,
                sys.stderr,
            )
        if chosen.command == "bench":
            from penstock._command.bench import bench

            words = (
                chosen.target,
                chosen.seconds,
                chosen.step_ms / 1e3,
                chosen.compare,
                chosen.workers,
                chosen.batch_size,
            )
            return bench(*words, sys.stdout, sys.stderr)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's exit would write there once more
        return 1
    parser.print_help(sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock", description="Tools for data loaders, penstock's and others."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    about = "measure a loader: samples per second, waits, start-up, memory; and which workers to use"
    example = "example: python -m penstock bench path/to/train.py:make_loader --compare --step-ms 50"
    bench = commands.add_parser("bench", help=about, description=f"{about}.".capitalize(), epilog=example)
    bench.add_argument(
        "target", metavar="MODULE:FACTORY", help="a function that returns a loader or a dataset, in a module or a file"
    )
    bench.add_argument("--step-ms", type=_positive, default=0.0, metavar="MS", help="how long your training step takes")
    bench.add_argument(
        "--seconds", type=_positive, default=10.0, metavar="S", help="how long each measurement takes (default: 10)"
    )
    kinds = "inline, with threads, with processes, and with Ray workers if there is a cluster"
    bench.add_argument("--compare", action="store_true", help=f"load the same data {kinds}; then recommend one")
    bench.add_argument(
        "--workers", type=_count, metavar="N", help="for --compare (default: as given, or one for each core)"
    )
    bench.add_argument(
        "--batch-size", type=_count, default=32, metavar="N", help="if the factory returns a dataset (default: 32)"
    )

    about = "show a saved state, and what it means"
    source = (
        "The file is JSON or written by torch.save: a state, or a checkpoint that holds some. Nothing in it is "
        "unpickled or executed."
    )
    state = commands.add_parser("state", help=about, description=f"{about.capitalize()}. {source}")
    state.add_argument("files", nargs="+", metavar="FILE")
    state.add_argument(
        "--key", metavar="KEY", help="only the states below this key of the checkpoint, such as trainer.loader"
    )
    ranges = (
        "write a copy that skips these samples when it is loaded, counted from the start of training over all ranks; "
        "may be repeated"
    )
    state.add_argument("--skip", type=_steps, action="append", metavar="FROM:TO", help=ranges)
    state.add_argument("--output", metavar="NEW", help="the copy (default: FILE.skip)")

    about = (
        "print which samples are in some steps of training, by position, index and where they come from; loads nothing"
    )
    example = "example: python -m penstock which path/to/train.py:make_loader --steps 335:345 --rank 2 --world-size 8"
    which = commands.add_parser("which", help=about, description=f"{about}.".capitalize(), epilog=example)
    which.add_argument(
        "target", metavar="MODULE:FACTORY", help="a function that returns the loader, in a module or a file"
    )
    which.add_argument(
        "state",
        nargs="?",
        metavar="STATE",
        help=(
            "a file with a state of that loader, JSON or written by torch.save, to check that it is the same data, "
            "order and seed"
        ),
    )
    which.add_argument(
        "--steps",
        type=_steps,
        required=True,
        metavar="A:B",
        help="batches of the rank since the beginning of training, from A up to but not including B",
    )
    which.add_argument(
        "--key", metavar="KEY", help="which state, if a checkpoint holds several: its key, such as trainer.loader"
    )
    which.add_argument("--rank", type=int, default=0, metavar="R")
    which.add_argument("--world-size", type=_count, default=1, metavar="N")

    about = "write the indices of .jsonl and .tar files: how many records each has, and where they begin"
    skipped = "Files with an up-to-date index are skipped. Parquet and Arrow files need no index."
    index = commands.add_parser("index", help=about, description=f"{about.capitalize()}. {skipped}")
    index.add_argument(
        "paths", nargs="+", metavar="PATH", help="a file, or a pattern such as 'data/*.tar' or 'data/{000..127}.jsonl'"
    )
    index.add_argument(
        "--index", metavar="FOLDER", help="where to write the indices (default: beside the files, as FILE.index)"
    )
    where = index.add_mutually_exclusive_group()
    where.add_argument(
        "--workers", type=_count, metavar="N", help="how many processes to use (default: up to one for each core)"
    )
    where.add_argument(
        "--ray", action="store_true", help="read the files on a Ray cluster, where they must have the same paths"
    )

    about = "show what a cache_dir= folder holds: copies, who reads them, and how often a file was already there"
    cache = commands.add_parser("cache", help=about, description=f"{about.capitalize()}.")
    cache.add_argument("folder", metavar="FOLDER")
    cache.add_argument(
        "--clear", action="store_true", help="remove the copies that are not being read or fetched, and the counts"
    )
    return parser


def _steps(text: str) -> tuple[int, int]:
    begin, _, end = text.partition(":")
    if not begin.isdigit() or not (end.isdigit() or text == begin) or int(end or int(begin) + 1) <= int(begin):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step, such as 335, nor a range, such as 335:345")
    return int(begin), int(end or int(begin) + 1)


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    if not text.replace(".", "", 1).isdigit() or not 0 < float(text) < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return float(text)


if __name__ == "__main__":
    sys.exit(main())
