"""``python -m penstock index``: writes the indices of files, which are read here, in several processes, or on the
machines of a Ray cluster.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TextIO

from penstock import formats
from penstock._fetch.error_policy import describe
from penstock._files.files import Stamp, stamp, whole
from penstock._files.index_file import SUFFIX, index_paths_of, read_header, read_offsets, write_index
from penstock._files.paths import bare, compression, expanded, is_remote
from penstock._streams.progress import Progress
from penstock._workers.limits import cores
from penstock._workers.ray_actors import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future

    import numpy as np

    from penstock._streams.known_files import Format

    Read = Callable[[str, Stamp], Future[np.ndarray | str]]

WORTH_A_WORKER: Final = 2**28
"""Bytes. A process takes some seconds to start, because it imports torch."""


class Outcome(NamedTuple):
    """The result for one file: how many records it has, whether an index was written, and why not (empty if there was
    no error).
    """

    path: str
    records: int = 0
    is_new: bool = False
    error: str = ""


def index_files(
    paths: Iterable[str], folder: str | None, workers: int | Literal["ray"] | None, out: TextIO, err: TextIO
) -> int:
    """Index files, except those whose index is up to date.

    Args:
        paths: Paths or patterns; see `expanded`. Indices and folders that match a pattern are skipped.
        folder: Folder for the indices; None: next to the files.
        workers: Number of processes; None: as many as are worthwhile; ``"ray"``: those of a Ray cluster.
        out: Stream for a one-line summary.
        err: Stream for errors, one line per file, and for the progress where there is no terminal, a line every ten
            seconds.

    Returns:
        The exit code: 0 if every file now has its index, 1 if one does not, 2 if it is unclear which files are meant.
    """
    try:
        paths = list(paths)
        refused = [
            Outcome(path, error=f"it is a folder. Pass the files in it: '{path.rstrip('/')}/*'")
            for path in paths
            if _is_folder(path)
        ]
        files = [path for path in expanded(paths) if not bare(path).endswith((SUFFIX, ".tmp")) and not _is_folder(path)]
        todo = [path for path in files if not _needs_none(path)]
        index_paths = dict(zip(todo, index_paths_of(todo, folder), strict=True))
    except (OSError, ValueError) as exc:
        print(f"penstock index: {exc}", file=err)
        return 2
    outcomes: list[Outcome] = []
    with Progress(
        "indexing", len(refused) + len(index_paths), "files", say=partial(print, file=err, flush=True)
    ) as progress:
        for outcome in chain(refused, outcomes_of(index_paths, workers)):
            outcomes.append(outcome)
            if outcome.error:
                progress.clear()
                print(f"penstock index: {outcome.path}: {outcome.error}", file=err)
            progress.at(len(outcomes))
    new = [outcome.records for outcome in outcomes if outcome.is_new]
    failed = sum(bool(outcome.error) for outcome in outcomes)
    others = (
        f"up to date: {len(outcomes) - len(new) - failed:,}, no index needed: {len(files) - len(todo):,}, failed: "
        f"{failed:,}"
    )
    print(f"indexed: {len(new):,} ({sum(new):,} records), {others}", file=out)
    return 1 if failed else 0


def outcomes_of(index_paths: Mapping[str, str], workers: int | Literal["ray"] | None) -> Iterator[Outcome]:
    """The result for each file, as it completes. ``index_paths`` has the path of its index."""
    stamps: dict[str, Stamp] = {}
    for path, index_path in index_paths.items():
        found = _looked_at(path, index_path)
        if isinstance(found, Stamp):
            stamps[path] = found
        else:
            yield found
    if workers is None:
        workers = min(int(cores()), 1 + sum(now.size for now in stamps.values()) // WORTH_A_WORKER)
    if workers != "ray" and min(workers, len(stamps)) <= 1:
        for path, now in stamps.items():
            yield _written(path, index_paths[path], now, partial(offsets_in, path, now))
        return
    with _readers(workers if workers == "ray" else min(workers, len(stamps))) as read:
        reading = {read(path, stamps[path]): path for path in sorted(stamps, key=lambda path: -stamps[path].size)}
        for future in as_completed(reading):
            path = reading.pop(future)  # its offsets may be large
            yield _written(path, index_paths[path], stamps[path], future.result)


@contextlib.contextmanager
def _readers(workers: int | Literal["ray"]) -> Iterator[Read]:
    """A function that has `offsets_in` called by one of so many workers."""
    if workers == "ray":
        there = connected().remote(_offsets_there)
        yield lambda path, now: there.remote(path if is_remote(path) else os.path.abspath(path), now).future()
    else:
        context = multiprocessing.get_context(
            "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        )
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload([__name__])  # imports torch once instead of in every process
        with ProcessPoolExecutor(workers, context) as pool:
            try:
                yield lambda path, now: pool.submit(offsets_in, path, now)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.kill()  # it may be waiting for a disk that is gone, and the pool would wait for it
                raise


def _looked_at(path: str, index_path: str) -> Outcome | Stamp:
    """The result for a file that need not be read; for any other, the version to read."""
    try:
        format = format_of(path)
        if is_remote(index_path):
            raise ValueError("an index cannot be written next to it. Pass --index FOLDER.")
        now = stamp(path)
        if now.size < 0:
            raise ValueError(
                "the server does not report its size, so a truncated download could not be detected. Download the file "
                "first."
            )
        with contextlib.suppress(FileNotFoundError, ValueError):  # there is no index, or a damaged one
            header = read_header(index_path)
            if header.kind == format.kind and header.stamp == now:
                read_offsets(index_path, header)
                return Outcome(path, header.records)
    except Exception as exc:
        return Outcome(path, error=_reason(exc))
    return now


def offsets_in(path: str, now: Stamp) -> np.ndarray | str:
    """Where the records of a file begin, and where the last one ends; or why it cannot be read."""
    try:
        with whole(path, now) as file:
            return format_of(path).offsets(file, path)
    except Exception as exc:
        return _reason(exc)


def _offsets_there(path: str, now: Stamp) -> np.ndarray | str:
    import ray

    found = offsets_in(path, now)
    return f"on node {ray.util.get_node_ip_address()}: {found}" if isinstance(found, str) else found


def _written(path: str, index_path: str, now: Stamp, offsets: Callable[[], np.ndarray | str]) -> Outcome:
    try:
        found = offsets()
        if isinstance(found, str):
            return Outcome(path, error=found)
        write_index(index_path, format_of(path).kind, now, found)
    except BrokenProcessPool:
        return Outcome(path, error="a process was killed, possibly for lack of memory. Use fewer: --workers 1")
    except Exception as exc:
        return Outcome(path, error=_reason(exc))
    return Outcome(path, len(found) - 1, is_new=True)


def _reason(exc: Exception) -> str:
    """Damaged files, servers and Ray raise errors of any type, and the other files must still be indexed."""
    return str(exc) if isinstance(exc, OSError | EOFError | ValueError | ImportError) else describe(exc)


def format_of(path: str) -> Format:
    """How to read a file, by its suffix.

    Raises:
        ValueError: The suffix is unknown.
    """
    name, indexed = bare(path).lower(), {suffix: format for suffix, format in _formats().items() if format is not None}
    for suffix in (os.path.splitext(name)[1], os.path.splitext(name.removesuffix(compression(name)))[1]):
        if suffix in indexed:
            return indexed[suffix]
    raise ValueError(
        f"the name must end in one of {', '.join(indexed)}, optionally followed by .gz, .zst, .xz or .bz2."
    )


def _formats() -> dict[str, Format | None]:
    """How files are indexed, by their suffix; None: they need no index."""
    modules = [import_module(getattr(formats, name).__module__) for name in formats.__all__]
    return {suffix: getattr(module, "FORMAT", None) for module in modules for suffix in getattr(module, "SUFFIXES", ())}


def _needs_none(path: str) -> bool:
    """Whether the file is of a format that needs no index."""
    return _formats().get(os.path.splitext(bare(path).lower())[1], False) is None


def _is_folder(path: str) -> bool:
    """Whether this is a folder, and not a dataset of one of the formats, such as ``x.parquet``."""
    return os.path.isdir(path) and os.path.splitext(path.rstrip("/").lower())[1] not in _formats()
