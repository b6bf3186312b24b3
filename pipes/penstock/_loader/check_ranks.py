"""check_ranks: verify that all ranks load parts of the same sequence.

The only code in which ranks wait for each other, and only on request.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch.distributed

from penstock._errors import GraphError, StateMismatch
from penstock._loader.rank_notes import dealt_twice
from penstock._nodes.node import place_of
from penstock._nodes.rank_checks import users
from penstock._nodes.sampler_wrapper import SamplerWrapper
from penstock._nodes.sharder import ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

    from penstock._loader.loader import Loader
    from penstock._nodes.node import State


_PLAN: Final = "the checksum of the sampler's indices"


def check_ranks(loader: Loader[Any], group: ProcessGroup | None = None) -> None:
    """Compare this loader across ranks: settings, lengths, the state, and whether each share is loaded by some rank.

    A collective: every rank of ``group`` must call it. Call it once before training, and after loading a state. It
    costs one ``all_gather_object`` of under 2 KB per rank, loads no sample, and does not move the loader. If one rank
    raises, all do, with the same message.

    A sampler is compared by a checksum of its indices in the next epoch (inside an epoch: in this one). Samples and the
    items of an iterable are not compared, and neither is a sampler that can be neither pickled nor copied, because
    reading it early would change it.

    Args:
        loader: The loader on this rank; need not be started.
        group: The ranks to compare; default: all. With a subset, shares that no rank loads are not detected.

    Raises:
        StateMismatch: The ranks do not load the same sequence; the message names each difference, with the ranks of
            each value.
        GraphError: There is no process group.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise GraphError(
            "check_ranks needs a process group, and there is none. Call torch.distributed.init_process_group first."
        )
    cause: Exception | None = None
    try:
        mine = _fingerprint(loader)
    except Exception as exc:  # the other ranks must learn of it, or they would wait forever
        mine, cause = {"error": f"{type(exc).__name__}: {exc}"}, exc
    all_of_them: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(all_of_them, (torch.distributed.get_rank(), mine), group=group)
    said = dict(all_of_them)
    faults = [f"rank {rank} failed with {one['error']}" for rank, one in said.items() if "error" in one]
    faults = faults or _differing(said) or (_unloaded(said) if group is None else [])
    if faults:
        text = f"the ranks do not load parts of one sequence: {'; '.join(faults)}. Build the loader from the same data "
        text += "and settings on every rank."
        if any(fault.startswith(_PLAN) for fault in faults):
            text += f" {dealt_twice(loader._reader.positions.first)}"
        if own := ", ".join(type(node).__name__ for node in users(list(loader.root.chain()), "get_state")):
            text += f" What {own} keeps in its state must be the same on every rank, too."
        raise StateMismatch(text) from cause


check_ranks.__module__ = "penstock"


def _fingerprint(loader: Loader[Any]) -> dict[str, Any]:
    saved = json.loads(loader.state_dict()["penstock"])
    rank, world_size = ranks_of(loader.root)
    first, facts = loader._reader.positions.first, loader._reader.positions.facts
    # A source that splits itself and keeps its own state is at a different position on each rank, so only its epoch can
    # be compared.
    state = {"epoch": loader.epoch} if first.state_is_per_rank() else saved["state"]
    lengths: dict[str, Any] = {"world_size": world_size}
    if facts.sharded_by != "own":  # the ranks' own shares may differ
        lengths["items in an epoch"] = first.left(first.start(0))
        if isinstance(first, SamplerWrapper) and (plan := _plan(first, saved["state"])) is not None:
            lengths[_PLAN] = plan
    of_rank = dict(facts.rank_settings)
    dealt = of_rank.pop("dealt", {})
    what = {**of_rank, **dealt, **lengths, **saved["settings"], **first.choices(), "state": state}
    return {"rank": rank, "world_size": world_size, "what": dict(_leaves("", what))}


def _plan(first: SamplerWrapper, state: State) -> int | None:
    """A checksum of the next epoch, or of the whole epoch that ``state`` is inside."""
    place = place_of(state)
    if place is None:
        return None
    epoch, source = place
    if source is None or first.left(source) == 0:
        source = first.start(epoch + 1)
    said = first.known(source)
    return first.upcoming(source) if said is None else said


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each value in nested dicts and lists, by its path.

    Values are complete: they might differ only where a message cuts them off.
    """
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list | tuple) and value:
        for place, inner in enumerate(value):
            yield from _leaves(f"{name}[{place}]", inner)
    else:
        yield name, repr(value)


def _differing(said: dict[int, dict[str, Any]]) -> list[str]:
    """One line for each entry that differs between ranks: its values, and which ranks have each."""
    faults = []
    for name in sorted({name for one in said.values() for name in one["what"]}):
        holders: dict[str, list[int]] = {}
        for rank, one in said.items():
            if name != _PLAN or name in one["what"]:  # one rank may not know it yet, while another has read it already
                holders.setdefault(one["what"].get(name, "missing"), []).append(rank)
        if len(holders) > 1:
            faults.append(
                f"{name} is " + " and ".join(f"{value:.200} on {_named(ranks)}" for value, ranks in holders.items())
            )
    return faults


def _unloaded(said: dict[int, dict[str, Any]]) -> list[str]:
    shares: dict[int, list[int]] = {}
    for rank, one in said.items():
        shares.setdefault(one["rank"], []).append(rank)
    world_size = next(iter(said.values()))["world_size"]
    if not (lacking := [str(share) for share in range(world_size) if share not in shares]):
        return []
    loaded = ", ".join(f"{share} by {_named(ranks)}" for share, ranks in sorted(shares.items())[:4])
    return [f"no rank loads share {', '.join(lacking[:8])} of {world_size}; loaded are {loaded}"]


def _named(ranks: list[int]) -> str:
    """Ranks in words, the first few by number."""
    numbers = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"
