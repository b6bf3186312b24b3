"""The command line, ``python -m penstock``: measure a loader, explain a saved state, write the indices of shards, show a cache folder."""

from __future__ import annotations

import argparse
import sys

_BENCH = """\
Measure a penstock Loader, a DataLoader, or anything else that yields batches:
throughput, epoch boundaries, time to the first batch, memory, and how long a
training step waits for its data."""
_EXAMPLES = """\
examples:
  python -m penstock bench train.py:make_loader --step-ms 50
  python -m penstock bench project.data:make_loader --compare"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command is None:
            parser.print_help(sys.stderr)
            return 2
        if chosen.command == "index":
            from penstock._command.indexing import index_files

            return index_files(chosen.paths, chosen.index, "ray" if chosen.ray else chosen.workers, sys.stdout, sys.stderr)
        if chosen.command == "cache":
            from penstock._command.cache import show

            return show(chosen.folder, chosen.clear, sys.stdout, sys.stderr)
        if chosen.command == "state":
            from penstock._command.explain import explain_file

            return max(explain_file(path, sys.stdout, sys.stderr) for path in chosen.files)
        return _bench(chosen)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock", description="Tools for data loaders, penstock's and others.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    bench = commands.add_parser(
        "bench",
        help="measure a loader: where the time goes, and which workers to use",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_BENCH,
        epilog=_EXAMPLES,
    )
    bench.add_argument(
        "target",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns the loader or a dataset, in a module or a file: project.data:make_loader, path/to/train.py:make_loader",
    )
    bench.add_argument(
        "--step-ms",
        type=_positive_number,
        default=0.0,
        metavar="MS",
        help="how long your training step takes, in milliseconds, to show how long it waits for data",
    )
    bench.add_argument("--seconds", type=_positive_number, default=10.0, metavar="S", help="how long each measurement takes (default: 10)")
    bench.add_argument(
        "--compare",
        action="store_true",
        help="load the same data inline, with threads, with processes, and with Ray workers if there is a cluster; then recommend one",
    )
    bench.add_argument(
        "--workers",
        type=_positive,
        metavar="N",
        help="with --compare: how many threads, processes and Ray workers (default: as given, or one for each CPU)",
    )
    bench.add_argument(
        "--batch-size", type=_positive, default=32, metavar="N", help="batch size, if the factory returns a dataset (default: 32)"
    )
    state = commands.add_parser(
        "state",
        help="explain a saved state in words",
        description="Explain what a saved state means: where it resumes, and what it needs. The file is JSON or written by torch.save, and holds a state, or a "
        "whole checkpoint with states somewhere in it. Nothing in it is unpickled or executed.",
    )
    state.add_argument("files", nargs="+", metavar="FILE")
    index = commands.add_parser(
        "index",
        help="write the indices of .jsonl and .tar files",
        description="Write the index of each .jsonl or .tar file, compressed or not: how many records it has, and where each begins. "
        "Files with an up-to-date index are skipped. Parquet and Arrow files need no index.",
    )
    index.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a pattern such as 'data/*.tar' or 'data/{000..127}.jsonl'")
    index.add_argument("--index", metavar="FOLDER", help="where to write the indices (default: beside the files, as FILE.index)")
    where = index.add_mutually_exclusive_group()
    where.add_argument("--workers", type=_positive, metavar="N", help="how many processes to use (default: up to one for each CPU)")
    where.add_argument(
        "--ray", action="store_true", help="read the files on the machines of a Ray cluster, where they must have the same paths"
    )
    cache = commands.add_parser(
        "cache",
        help="show what a cache folder holds",
        description="Show what a cache_dir= folder holds: how many copies, how large, who reads them, and how often a requested file was already there.",
    )
    cache.add_argument("folder", metavar="FOLDER")
    cache.add_argument("--clear", action="store_true", help="remove the copies that are not being read or fetched, and the counts")
    return parser


def _bench(chosen: argparse.Namespace) -> int:
    from penstock._command import bench, compare
    from penstock._command.target import TargetError

    step_s = chosen.step_ms / 1e3
    try:
        if chosen.compare:
            candidates = compare.compare(chosen.target, chosen.seconds, step_s, chosen.workers, chosen.batch_size)
            print(compare.text_of(candidates, step_s))
            return 0 if compare.recommended(candidates) is not None else 1
        found = bench.measure(chosen.target, chosen.seconds, step_s, chosen.batch_size)
        print(bench.text_of(found))
    except TargetError as exc:
        print(f"penstock bench: {exc}", file=sys.stderr)
        return 2
    return 0


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
