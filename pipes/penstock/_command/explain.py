"""``python -m penstock state FILE``: a saved state in words. The file is untrusted: nothing in it is unpickled or executed."""

from __future__ import annotations

import codecs
import json
import os
from typing import TYPE_CHECKING, Any, Final, TextIO

import torch

from penstock._arguments import cut
from penstock._errors import StateError
from penstock._loader.state_dict import KEY, parsed

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_STATES: Final = 20
_MOST_VISITED: Final = 1_000_000
_DEEPEST: Final = 50
_LONGEST_JSON: Final = 2**28
_BEFORE_JSON: Final = b" \t\r\n\0" + codecs.BOM_UTF8 + codecs.BOM_UTF16
"""Some programs write JSON with a byte order mark, which Python reads with this encoding."""
_ORDERS: Final = {
    "sequential": "in order",
    "shuffled": "shuffled",
    "torch": "shuffled as torch's DistributedSampler does",
    "weighted": "drawn by weight",
    "sliding": "shuffled within a window",
    "shards": "shards, shuffled",
    "shards in order": "shards, in order",
    "mix": "a mix",
    "mixed lanes": "a mix of streams",
    "lanes": "lanes of shards",
}
_OF_EPOCH_SIZE: Final = ("lanes", "mixed lanes")
"""Orders of streams: their length is the user's ``epoch_size``."""
_KNOWN: Final = {"order", "length", "seed", "split", "batches_of", "dataset_length", "source", "groups", "sample_seed", "stream_seed"}


def explain_file(path: str, out: TextIO, err: TextIO) -> int:
    """Print what the states in a file say.

    Args:
        path: A JSON file, or one written by ``torch.save``: a state, or anything that holds states under any keys.
        out: Stream for the output.
        err: Stream for errors.

    Returns:
        The exit code: 0 if there is a state and each one can be read, else 1; 2 if the file cannot be read.
    """
    try:
        loaded = _loaded(path)
    except (OSError, StateError) as exc:
        print(f"penstock state: {cut(str(exc), 1000)}", file=err)
        return 2
    found = list(_found(loaded))
    if not found:
        print(
            f"penstock state: {path} contains no penstock state: nowhere in it is a dict with the key {KEY!r} and a string. Save what loader.state_dict() returns.",
            file=err,
        )
        return 1
    code = 0
    for place, state in found[:_MOST_STATES]:
        print(f"{path}{f', at {place}' if place else ''}", file=out)
        try:
            lines = words(parsed(state))
        except ValueError as exc:  # a StateError; or Python refuses to print a number with more than 4300 digits
            code = 1
            print(f"  damaged   {cut(str(exc), 1000)}", file=out)
        else:
            for name, text in lines:
                print(f"  {name:8}  {cut(text, 1000)}", file=out)
    if len(found) > _MOST_STATES:
        print(f"and {len(found) - _MOST_STATES} more states", file=out)
    return code


def words(state: dict[str, Any]) -> list[tuple[str, str]]:
    """A state in words: pairs of a heading and a sentence.

    Args:
        state: The result of ``parsed``; its contents are untrusted.
    """
    settings, inner = state["settings"], state["state"]
    lines = [("where", _where(settings, inner))]
    lines += _of_nodes(inner)
    order = settings.get("order")
    if order is not None:
        seed = "" if "seed" not in settings else f", seed {settings['seed']}"
        items = f"; {_count(settings['length'], 'items')} an epoch" if "length" in settings else ""
        window = f", window {settings['window']}" if settings.get("window") else ""
        lines.append(("order", f"{_ORDERS.get(str(order), str(order))}{seed}{window}{items}"))
    needs = []
    if "dataset_length" in settings and order in _OF_EPOCH_SIZE:
        needs.append(f"epoch_size={json.dumps(settings['dataset_length'])}")
    elif "dataset_length" in settings:
        needs.append(f"a dataset of {_count(settings['dataset_length'], 'samples')}")
    if "source" in settings:
        needs.append(f"a source of the class {settings['source']}")
    if order is not None:
        needs.append("this order")
    seeds = {name: settings[name] for name in ("sample_seed", "stream_seed") if name in settings}
    needs += [f"{name}={json.dumps(seed)}" for name, seed in seeds.items() if seed != settings.get("seed")]
    if "batches_of" in settings:
        needs.append(f"batches of {settings['batches_of']}")
    if settings.get("split", "items") != "items":
        needs.append(f"split={settings['split']!r}")
    needs += [f"{name}={json.dumps(value)}" for name, value in settings.items() if name not in _KNOWN and name != "window"]
    if "groups" in settings:
        needs.append(f"groups: {settings['groups']}")
    lines.append(("needs", ", ".join(needs) or "nothing in particular"))
    lines.append(("loads on", _loads_on(inner)))
    return lines


def _where(settings: dict[str, Any], state: Any) -> str:
    epoch, source = None, state
    while isinstance(source, dict):
        epoch = source.get("epoch", epoch)
        if "source" not in source:
            break
        source = source["source"]
    if not isinstance(epoch, int):
        return "unknown: the state names no epoch"
    if source is None:
        return (
            f"at the end of epoch {epoch}, before the loop has seen it: all of it was delivered. After loading, the loop over epoch {epoch} is empty, so that the "
            f"code after the loop runs, and then epoch {epoch + 1} begins"
        )
    position = source.get("position") if isinstance(source, dict) else None
    if not isinstance(position, int):
        return f"in epoch {epoch}"
    of_sampler = "batches" if "checksum" in source else "items"  # of a batch sampler; or a sampler's, with batch_size=None
    unit = {"packs": "packs", "buckets": "batches"}.get(str(settings.get("groups")), "samples" if "batches_of" in settings else of_sampler)
    whose = "of the saving rank's share" if settings.get("split") == "own" else "of all ranks together"
    length = settings.get("length") if "groups" not in settings else None
    if source.get("ended") is True:
        return f"at the end of epoch {epoch}: all {_count(position, unit)} were delivered"
    origin = source.get("origin")
    begun = f". The epoch began with item {origin:,} of the stream" if isinstance(origin, int) and origin else ""
    if position == 0:
        return f"at the start of epoch {epoch}: nothing was delivered yet{begun}"
    if not isinstance(length, int) or not 0 < position <= length:
        return f"in epoch {epoch}, after {_count(position, unit)} {whose}{begun}"
    kept = source.get("left")  # at the end of an epoch of a stream
    kept = kept if isinstance(kept, int) and 0 < kept <= position == length else 0
    left = f"{length - position:,} are left" if length > position else "none is left, but the loop has not seen the end"
    left = f"the last {kept:,} begin the next epoch, but the loop has not seen the end" if kept else left
    done = position - kept
    return f"in epoch {epoch}, after {done:,} of {_count(length, unit)} ({done / length:.1%}) {whose}; {left}{begun}"


def _of_nodes(state: Any) -> Iterator[tuple[str, str]]:
    while isinstance(state, dict):
        if isinstance(state.get("delivered"), list):
            ahead = len(state["delivered"])
            yield (
                "ahead",
                f"saved with in_order=False: {_count(ahead, 'later batches')} were delivered before older ones, and are not delivered again",
            )
        for name, what in (("iterable", "the iterable"), ("node", "the torchdata node")):
            if name in state:
                yield (
                    "holds",
                    f"the state of {what} itself" if state[name] is not None else f"no state of {what}: it is reread up to the position",
                )
        state = state.get("source")


def _loads_on(state: Any) -> str:
    while isinstance(state, dict):
        if "rank" in state and "world_size" in state:
            return f"only rank {state['rank']} of {state['world_size']}, which saved it"
        if "world_size" in state:
            return f"any rank, with {state['world_size']} ranks"
        state = state.get("source")
    return "any number of ranks and workers, with any batch size per rank"


def _count(n: Any, unit: str) -> str:
    return f"{n:,} {unit}" if isinstance(n, int) else f"an unknown number of {unit}"


def _found(loaded: Any) -> Iterator[tuple[str, Any]]:
    """Every dict with our key and a string value, and the path to it."""
    waiting: list[tuple[str, Any, int]] = [("", loaded, 0)]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_VISITED:
        place, one, depth = waiting.pop()
        if id(one) in seen or depth > _DEEPEST:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            if isinstance(one.get(KEY), str):
                yield place, one
            inside = [(f"{place}[{_key(key)}]", value) for key, value in one.items() if isinstance(value, dict | list | tuple)]
        elif isinstance(one, list | tuple):
            inside = [(f"{place}[{number}]", value) for number, value in enumerate(one) if isinstance(value, dict | list | tuple)]
        else:
            continue
        waiting += [(at, value, depth + 1) for at, value in reversed(inside)]


def _key(key: Any) -> str:
    return cut(repr(key), 60)


def _loaded(path: str) -> Any:
    """The file's contents: JSON, or what ``torch.load`` returns without unpickling anything but tensors and plain data.

    Raises:
        StateError: It is neither.
        OSError: It cannot be read.
    """
    if os.path.isdir(path):
        raise StateError(
            f"{path} is a folder. If it is a checkpoint of torch.distributed.checkpoint, load it, and print(loader); otherwise pass the file in it that contains the state."
        )
    with open(path, "rb") as file:
        begin = file.read(64).lstrip(_BEFORE_JSON)[:1]
        if begin in (b"{", b"["):
            if os.path.getsize(path) > _LONGEST_JSON:
                raise StateError(
                    f"{path} is JSON of {os.path.getsize(path):,} bytes, but a state has less than a thousand. Extract the state from it."
                )
            file.seek(0)
            try:
                return json.loads(file.read())
            except (ValueError, RecursionError) as exc:
                raise StateError(f"{path} is damaged: it begins like JSON, but {exc}.") from exc
    try:
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=begin == b"P"
        )  # for zip files, recognized by their signature: tensors are then not read
    except OSError:
        raise
    except Exception as exc:
        raise StateError(
            f"{path} is neither JSON nor a torch.save file that contains only tensors and plain data ({type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}). "
            f"Other objects are not unpickled, because the file may be untrusted. Save the loader's state in a separate file: json.dump(loader.state_dict(), file)."
        ) from exc
