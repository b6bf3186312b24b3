"""Writes the indices of many files in parallel, for ``python -m penstock index``."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Final, Literal, TextIO

from penstock._command.index_one import Outcome, all_formats, index_file
from penstock._files.files import stamp
from penstock._files.index_file import SUFFIX, places_of
from penstock._files.paths import bare, expanded
from penstock._streams.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


WORTH_A_WORKER: Final = 2**28
"""Bytes. A process takes some seconds to start, because it imports torch."""


def index_files(paths: Iterable[str], folder: str | None, workers: int | Literal["ray"] | None, out: TextIO, err: TextIO) -> int:
    """Index files, except those whose index is up to date.

    Args:
        paths: Paths or patterns; see `expanded`. Indices and folders among them are skipped.
        folder: Folder for the indices; None: next to the files.
        workers: Number of processes; None: as many as are worthwhile; ``"ray"``: those of a Ray cluster.
        out: Stream for a one-line summary.
        err: Stream for errors, one line per file, and for the progress: a bar if this is a terminal, or else a line every ten seconds.

    Returns:
        The exit code: 0 if every file now has its index, 1 if one does not, 2 if it is unclear which files are meant.
    """
    try:
        paths = list(paths)
        folders = [path for path in paths if os.path.isdir(path) and not _is_dataset(path)]
        files = [
            path for path in expanded(paths) if not bare(path).endswith((SUFFIX, ".tmp")) and (not os.path.isdir(path) or _is_dataset(path))
        ]
        places = dict(zip(files, places_of(files, folder), strict=True))
    except (OSError, ValueError) as exc:
        print(f"penstock index: {exc}", file=err)
        return 2
    if workers == "ray":
        from penstock._command.indexing_on_ray import outcomes as on_ray
    known = {path: all_formats().get(os.path.splitext(bare(path).lower())[1]) for path in places}
    without = {path: found[0] for path, found in known.items() if found is not None and found[1] is None}
    todo = {path: place for path, place in places.items() if path not in without}
    outcomes = [Outcome(path, error=f"it is a folder. Pass the files in it: '{os.path.join(path, '*')}'") for path in folders]
    for outcome in outcomes:
        print(f"penstock index: {outcome.path}: {outcome.error}", file=err)
    with Progress("indexing", len(todo), "files", stream=err, say=lambda line: print(line, file=err, flush=True)) as progress:
        for outcome in on_ray(todo) if workers == "ray" else in_processes(todo, workers):
            outcomes.append(outcome)
            if outcome.error:
                progress.clear()
                print(f"penstock index: {outcome.path}: {outcome.error}", file=err)
            progress.at(len(outcomes))
    print(_summary(outcomes, list(without.values())), file=out)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def _is_dataset(path: str) -> bool:
    """Whether a folder is a dataset of one of the formats."""
    return os.path.splitext(path.rstrip("/").lower())[1] in all_formats()


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
        context.set_forkserver_preload([__name__])  # imports torch once instead of in every process
    with ProcessPoolExecutor(min(workers, len(todo)), context) as pool:
        largest_first = sorted(todo, key=lambda path: -sizes[path])
        waiting = {pool.submit(index_file, path, todo[path]): path for path in largest_first}
        try:
            for future in as_completed(waiting):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    yield Outcome(waiting[future], error="a process was killed, possibly for lack of memory. Use fewer: --workers 1")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()  # it may be waiting for a disk that is gone, and the pool would wait for it
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
    except Exception:  # `index_file` reports whatever a server raises
        return 0
