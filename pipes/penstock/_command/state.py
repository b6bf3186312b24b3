"""``python -m penstock state``: prints a saved state, and what it means.

The file is untrusted: nothing in it is unpickled or executed.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, TextIO

import torch

from penstock._arguments import cut
from penstock._changing.run_changes import skipping
from penstock._errors import StateError
from penstock._loader import ledger
from penstock._loader.state_dict import KEY, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator


def show(path: str, key: str | None, out: TextIO, err: TextIO) -> int:
    """Print the states in a file: where each resumes, what it needs, on which ranks it loads, and its JSON.

    Args:
        path: A JSON file, or one written by ``torch.save``: a state, or anything that holds states under any keys.
        key: Only those below this key, such as ``trainer.loader``; None: all.
        out: Stream for the output.
        err: Stream for errors.

    Returns:
        The exit code: 0 if there is a state and each one can be read, else 1.
    """
    try:
        found = states(path, key)
    except (OSError, StateError, RecursionError) as exc:
        print(f"penstock state: {cut(str(exc), 1000)}", file=err)
        return 1
    damaged = 0
    for names, state in found:
        where = path + "".join(f"[{cut(repr(name), 60)}]" for name in names)
        try:
            of, opened, retired = ledger.parts(state)
            more = [
                f"It is of a Ledger, for one rank: {len(opened):,} open, which are served first, and {len(retired):,} "
                f"indices retired."
            ] * (of is not state)
            whole = parsed(of)
            print(
                where,
                *more,
                *_sentences(whole["settings"], whole["state"], one_rank=of is not state),
                json.dumps(whole, indent=2),
                sep="\n",
                file=out,
            )
        except ValueError as exc:  # a StateError; or Python refuses to print a number with more than 4300 digits
            damaged += 1
            print(f"penstock state: {where} is damaged: {cut(str(exc), 1000)}", file=err)
    return 1 if damaged else 0


def states(path: str, key: str | None) -> list[tuple[tuple[Any, ...], Any]]:
    """The states in a file, each with the keys that lead to it; see `show`.

    Raises:
        StateError: There is none, or the file cannot be read.
        OSError: There is no such file.
    """
    return _chosen(_loaded(path)[0], path, key)


def _chosen(whole: Any, path: str, key: str | None) -> list[tuple[tuple[Any, ...], Any]]:
    found = list(_states(whole, (), set()))
    if not found:
        keys = f"Its keys are {cut(repr([*whole]), 200)}. " if isinstance(whole, dict) else ""
        raise StateError(f"{path} contains no penstock state. {keys}Save what loader.state_dict() returns.")
    chosen = [one for one in found if key is None or f"{dotted(one[0])}.".startswith(f"{key}.")]
    if not chosen:
        raise StateError(
            f"{path} has no penstock state at {key}, but at: "
            f"{cut(', '.join(dotted(names) for names, _ in found), 500)}."
        )
    return chosen


def dotted(names: tuple[Any, ...]) -> str:
    """The keys that lead to a state, as ``--key`` takes them."""
    return ".".join(map(str, names)) or "its top level"


def skip(path: str, key: str | None, ranges: list[tuple[int, int]], output: str, out: TextIO, err: TextIO) -> int:
    """Write a copy of a file in which each state skips ``ranges`` when it is loaded.

    Args:
        path: See `show`.
        key: See `show`.
        ranges: Pairs of the first sample and the one after the last, counted from the start of training.
        output: The new file.
        out: Stream for the output.
        err: Stream for errors.

    Returns:
        The exit code: 0 if it is written, else 1.
    """
    try:
        if os.path.lexists(output):
            raise StateError(f"{output} exists. Name a new file with --output.")
        whole, is_json = _loaded(path)
        found = _chosen(whole, path, key)
        for _, state in found:
            _add(state, ranges)
        if is_json:
            text = json.dumps(whole)
            with open(output, "x") as file:
                file.write(text)
        else:
            torch.save(whole, output)
    except (OSError, ValueError, RecursionError) as exc:
        print(f"penstock state: {cut(str(exc), 1000)}", file=err)
        return 1
    print(
        f"{output}: {len(found)} state{'s' * (len(found) > 1)} that will skip "
        f"{', '.join(f'{begin:,} to {end:,}' for begin, end in ranges)}.",
        file=out,
    )
    return 0


def _add(state: dict[str, Any], ranges: list[tuple[int, int]]) -> None:
    """Have the loader that loads ``state`` skip ``ranges``.

    Raises:
        StateError: The state is damaged, or does not count samples.
        ValueError: A range begins before the state, or overlaps another one.
    """
    if ledger.KEY in state:
        of_ledger = json.loads(state[ledger.KEY])
        _add(ledger.parts(state)[0], ranges)
        _add(of_ledger["loader"], ranges)
        state[ledger.KEY] = json.dumps(of_ledger, separators=(",", ":"))
        return
    state[KEY] = json.dumps(skipping(parsed(state), ranges))


def _sentences(settings: dict[str, Any], state: Any, *, one_rank: bool) -> tuple[str, str, str]:
    at: dict[str, Any] = {}
    while isinstance(state, dict):  # from the outermost node to the source, which has the position
        at |= state
        state = state.get("source")
    return _where(settings, at), _needs(settings), _ranks(settings, at, one_rank)


def _where(settings: dict[str, Any], at: dict[str, Any]) -> str:
    epoch, position, left = _said(at.get("epoch")), at.get("position"), at.get("left", 0)
    if position is None and at.get("source", at) is None:
        return f"It is at the end of epoch {epoch}, all of which was delivered: the next loop over it is empty."
    if not isinstance(position, int) or not isinstance(left, int):
        return f"It resumes in epoch {epoch}."
    grouped = {"packs": "packs", "buckets": "batches"}.get(str(settings.get("groups")))
    unit = grouped or ("samples" if "batches_of" in settings else "batches" if "checksum" in at else "items")
    of = f" of {settings['length']:,}" if isinstance(settings.get("length"), int) and not grouped else ""
    whose = "the share of the rank that saved it" if settings.get("split") == "own" else "all ranks together"
    # the next epoch of a stream begins with what is left
    return f"It resumes in epoch {epoch}, after {position - left:,}{of} {unit} of {whose}."


def _needs(settings: dict[str, Any]) -> str:
    names = [
        name
        for name in ("order", "source", "lanes", "batch_size", "drop_last", "dataset_length", "seed", "sample_seed")
        if name in settings
    ]
    return (
        f"It needs a loader with the same settings: "
        f"{', '.join(f'{name}={_said(settings[name])}' for name in names) or 'those below'}."
    )


def _ranks(settings: dict[str, Any], at: dict[str, Any], one_rank: bool) -> str:
    if "slot" in at or (settings.get("split") == "own" and "world_size" not in at):
        return "It loads on one rank, with any number of workers."
    if "world_size" not in at:
        return f"It loads on {'one rank' if one_rank else 'any number of ranks'}, with any number of workers" + (
            ", at this batch size."
            if "batch_size" in settings
            else " and any batch size."
            if "batches_of" in settings
            else ", and with the batch_size=None, batch_sampler= or groups= that it was saved with."
        )
    ranks = f"{_said(at['world_size'])} ranks"
    return f"It loads only as rank {_said(at['rank'])} of {ranks}." if "rank" in at else f"It loads only on {ranks}."


def _said(value: Any) -> str:
    return cut(json.dumps(value).strip('"'), 80)


def _states(one: Any, names: tuple[Any, ...], seen: set[int]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every dict with a key of ours and a string value, and the keys that lead to it."""
    if not isinstance(one, dict | list | tuple) or id(one) in seen:
        return
    seen.add(id(one))
    if isinstance(one, dict) and any(isinstance(one.get(key), str) for key in (KEY, ledger.KEY)):
        yield names, one
    for key, value in one.items() if isinstance(one, dict) else enumerate(one):
        yield from _states(value, (*names, key), seen)


def _loaded(path: str) -> tuple[Any, bool]:
    """The file's contents, and whether they are JSON: otherwise what ``torch.load`` returns without unpickling anything
    but tensors and plain data.

    Raises:
        StateError: It is neither.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        is_zip = file.read(2) == b"PK"
        file.seek(0)
        text = b"" if is_zip else file.read(2**28)
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text), True
    try:
        # Mapped, so that tensors are not read.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip), False
    except Exception as exc:
        raise StateError(
            f"{path} is neither JSON nor a torch.save file that contains only tensors and plain data "
            f"({type(exc).__name__}: {str(exc).partition(chr(10))[0]}). Other objects are not unpickled, because the "
            f"file may be untrusted. Save the loader's state in a separate file: json.dump(loader.state_dict(), file)."
        ) from exc
