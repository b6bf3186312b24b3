"""``python -m penstock index PATHS``: write the indices that make data in shards readable by position."""

from __future__ import annotations

import argparse
import sys

from penstock._streams.indexing import index_files


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m penstock", description="Tools for penstock's data.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    index = commands.add_parser(
        "index",
        help="write the indices of .jsonl and .tar files",
        description="Write the index of each .jsonl or .tar file, compressed or not: how many records it has, and where each begins. "
        "Files whose index is up to date are left alone. Parquet and Arrow files need none.",
    )
    index.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a pattern such as 'data/*.tar' or 'data/{000..127}.jsonl'")
    index.add_argument("--index", metavar="FOLDER", help="where to write the indices (default: beside the files, as FILE.index)")
    index.add_argument("--workers", type=_positive, metavar="N", help="how many processes to use (default: up to one for each CPU)")
    chosen = parser.parse_args(arguments)
    try:
        return index_files(chosen.paths, chosen.index, chosen.workers, sys.stdout, sys.stderr)
    except KeyboardInterrupt:
        return 130


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
