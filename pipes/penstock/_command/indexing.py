"""Write the indices of many files, in parallel: what ``python -m penstock index`` does."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TextIO

from penstock import formats
from penstock._fetch.error_policy import describe
from penstock._streams.files import bare, compression, expanded, is_remote, stamp, whole
from penstock._streams.index_file import SUFFIX, places_of, read_header, read_offsets, write_index
from penstock._streams.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np

    from penstock._streams.files import Stamp
    from penstock._streams.known_files import Format

WORTH_A_WORKER: Final = 2**28
"""Bytes. A process takes some seconds to start, because it imports torch."""


class Outcome(NamedTuple):
    """What came of one file.

    Attributes:
        path: The file's.
        records: How many it has; None if that could not be found out.
        is_new: Whether an index was written.
        error: Why not, or an empty text.
    """

    path: str
    records: int | None = None
    is_new: bool = False
    error: str = ""


def index_files(paths: Iterable[str], folder: str | None, workers: int | Literal["ray"] | None, out: TextIO, err: TextIO) -> int:
    """Index files, except those whose index is up to date.

    Args:
        paths: Paths or patterns; see `expanded`. Indices and folders among them are left out.
        folder: Where to write the indices; None: beside the files.
        workers: How many processes; None: as many as are worth it; ``"ray"``: what a Ray cluster has.
        out: Where to say what was done, in one line.
        err: Where to say what is wrong, in a line for each file; and how far it is: a bar if this is a terminal, else a line each ten seconds.

    Returns:
        The exit code: 0 if every file has its index now, 1 if one has not, 2 if it is not clear which files are meant.
    """
    try:
        files = [path for path in expanded(paths) if not bare(path).endswith((SUFFIX, ".tmp")) and not os.path.isdir(path)]
        places = dict(zip(files, places_of(files, folder), strict=True))
    except (OSError, ValueError) as exc:
        print(f"penstock index: {exc}", file=err)
        return 2
    if workers == "ray":
        from penstock._command.indexing_on_ray import outcomes as on_ray
    known = {path: _formats().get(os.path.splitext(bare(path).lower())[1]) for path in places}
    without = {path: found[0] for path, found in known.items() if found is not None and found[1] is None}
    todo = {path: place for path, place in places.items() if path not in without}
    outcomes: list[Outcome] = []
    with Progress("indexing", len(todo), "files", stream=err, say=lambda line: print(line, file=err, flush=True)) as progress:
        for outcome in on_ray(todo) if workers == "ray" else in_processes(todo, workers):
            outcomes.append(outcome)
            if outcome.error:
                progress.clear()
                print(f"penstock index: {outcome.path}: {outcome.error}", file=err)
            progress.at(len(outcomes))
    print(_summary(outcomes, list(without.values())), file=out)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def index_file(path: str, place: str) -> Outcome:
    """Write the index of one file to ``place``, unless it is there and up to date."""
    found = looked_at(path, place)
    return found if isinstance(found, Outcome) else written(path, place, found, offsets_in(path, found))


def looked_at(path: str, place: str) -> Outcome | Stamp:
    """What came of a file that need not be read; the version to read of any other."""
    try:
        format = format_of(path)
        if is_remote(place):
            raise ValueError("an index cannot be written beside it. Say --index FOLDER.")
        now = stamp(path)
        if now.size < 0:
            raise ValueError("the server does not say how many bytes it has, so nobody can know whether all have come. Download it first.")
        try:
            header = read_header(place)
            if header.kind == format.kind and header.stamp == now:
                read_offsets(place, header)
                return Outcome(path, header.records)
        except (FileNotFoundError, ValueError):
            pass  # none, or one that is damaged
    except Exception as exc:
        return _failed(path, exc)
    return now


def offsets_in(path: str, now: Stamp) -> np.ndarray | Outcome:
    """Where the records of a file begin, and where the last one ends; how it failed, if it did."""
    try:
        with whole(path, now) as file:
            return format_of(path).offsets(file, path)
    except Exception as exc:
        return _failed(path, exc)


def written(path: str, place: str, now: Stamp, offsets: np.ndarray | Outcome) -> Outcome:
    """What came of a file whose offsets are known."""
    if isinstance(offsets, Outcome):
        return offsets
    try:
        write_index(place, format_of(path).kind, now, offsets)
    except Exception as exc:
        return _failed(path, exc)
    return Outcome(path, len(offsets) - 1, is_new=True)


def _failed(path: str, exc: Exception) -> Outcome:
    """A damaged file and a server fail in ways of their own, and the other files are to be indexed."""
    return Outcome(path, error=str(exc) if isinstance(exc, OSError | EOFError | ValueError | ImportError) else describe(exc))


def format_of(path: str) -> Format:
    """How a file is read, by the end of its name.

    Raises:
        ValueError: Nobody knows.
    """
    name, indexed = bare(path).lower(), {suffix: format for suffix, (_, format) in _formats().items() if format is not None}
    for suffix in (os.path.splitext(name)[1], os.path.splitext(name.removesuffix(compression(name)))[1]):
        if suffix in indexed:
            return indexed[suffix]
    raise ValueError(f"the name must end in one of {', '.join(indexed)}, or in one of them and .gz, .zst, .xz or .bz2.")


def _formats() -> dict[str, tuple[str, Format | None]]:
    """The formats by what the names of their files end in: their name, and how they are indexed; None: they need no index."""
    modules = {name: import_module(f"penstock.formats._{name}") for name in formats.__all__}
    return {end: (name, getattr(module, "FORMAT", None)) for name, module in modules.items() for end in getattr(module, "SUFFIXES", ())}


def in_processes(todo: dict[str, str], workers: int | None) -> Iterator[Outcome]:
    sizes = {path: _size(path) for path in todo}
    if workers is None:
        workers = min(os.cpu_count() or 1, 1 + sum(sizes.values()) // WORTH_A_WORKER)
    if min(workers, len(todo)) <= 1:
        for path, place in todo.items():
            yield index_file(path, place)
        return
    context = multiprocessing.get_context("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload([__name__])  # torch is imported once, and not in each process
    with ProcessPoolExecutor(min(workers, len(todo)), context) as pool:
        largest_first = sorted(todo, key=lambda path: -sizes[path])
        waiting = {pool.submit(index_file, path, todo[path]): path for path in largest_first}
        try:
            for future in as_completed(waiting):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    yield Outcome(waiting[future], error="a process was killed, perhaps for lack of memory. Use fewer: --workers 1")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()  # one may be waiting for a disk that is gone, and the pool would wait for it
            raise


def _summary(outcomes: list[Outcome], need_none: list[str]) -> str:
    new = [outcome.records or 0 for outcome in outcomes if outcome.is_new]
    old = [outcome.records or 0 for outcome in outcomes if not outcome.is_new and not outcome.error]
    said = [f"indexed {_files(len(new))} ({sum(new):,} records)"]
    if old:
        said.append(f"{_files(len(old))} up to date ({sum(old):,} records)")
    if need_none:
        said.append(f"{_files(len(need_none))} of {' or '.join(sorted({*need_none}))}, which need no index")
    if errors := sum(bool(outcome.error) for outcome in outcomes):
        said.append(f"{_files(errors)} failed")
    return "; ".join(said)


def _files(n: int) -> str:
    return "1 file" if n == 1 else f"{n:,} files"


def _size(path: str) -> int:
    try:
        return stamp(path).size
    except Exception:  # whatever a server raises, `index_file` says it
        return 0
