"""``python -m penstock which``: the samples of some steps, as the loader that a function builds would deliver them.

Loads nothing.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, TextIO

from penstock._command.state import dotted, states
from penstock._command.target import TargetError, built
from penstock._errors import PenstockError
from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.packing import Document
from penstock._loader.address import Address
from penstock._loader.ledger import parts
from penstock._loader.loader import Loader
from penstock._nodes.index_node import IndexNode
from penstock._nodes.sharder import ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def which(
    target: str,
    steps: tuple[int, int],
    rank: int,
    world_size: int,
    state: str | None,
    key: str | None,
    out: TextIO,
    err: TextIO,
) -> int:
    """Print one line of JSON for each sample of the steps, or for each pack, with its documents.

    Args:
        target: Names a function that returns a `Loader`.
        steps: The first one and the one after the last, counted from the first batch of training, from 0.
        rank: Whose steps; the loader finds it where ``torchrun`` leaves it.
        world_size: Number of ranks.
        state: A file with a state of that loader, or of its `Ledger`, which is checked; see
            `penstock._command.state.show`.
        key: Where in the file; needed if there are several.
        out: Stream for the output.
        err: Stream for errors.

    Returns:
        The exit code.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        loader = built(target)
        if not isinstance(loader, Loader):
            raise TargetError(
                f"{target} returns a {type(loader).__name__}, but only a penstock.Loader knows which samples are in a "
                f"step."
            )
        if (of := ranks_of(loader.root)) != (rank, world_size):
            raise TargetError(
                f"{target} builds the loader of rank {of[0]} of {of[1]}, whatever is asked for. Pass --rank {of[0]} "
                f"--world-size {of[1]}, or leave its rank and world_size out, so that the loader finds them in RANK "
                f"and WORLD_SIZE."
            )
        if state is not None:
            saved = states(state, key)
            if len(saved) > 1:
                raise TargetError(
                    f"{state} holds several states. Choose one with --key: "
                    f"{', '.join(dotted(names) for names, _ in saved)}."
                )
            loader.load_state_dict(parts(saved[0][1])[0])
        facts = DatasetFacts(loader.dataset if loader._words is not None else None)
        for step, address in _addresses(loader, *steps):
            indices = address.indices if isinstance(address.position, tuple) else [address.indices]
            for position, index in zip(
                address.positions.tolist(), indices, strict=len(indices) == len(address.positions)
            ):
                found = {"step": step, "epoch": address.epoch, "position": position, **_said(facts, index)}
                print(json.dumps(found, default=str), file=out)
    except (TargetError, PenstockError, OSError, ValueError, RecursionError) as exc:
        print(f"penstock which: {exc}", file=err)
        return 1
    return 0


def _said(facts: DatasetFacts, index: Any) -> dict[str, Any]:
    """What is known of an index of the dataset, or of the documents of a pack."""
    if isinstance(index, list) and index and isinstance(index[0], Document):
        return {
            "documents": [
                {**_said(facts, document.index), "start": document.start, "length": document.length}
                for document in index
            ]
        }
    where = facts.where(index) if isinstance(index, int) else None
    return {"index": index} if where is None else {"index": index, "where": where}


def _addresses(loader: Loader[Any], begin: int, end: int) -> Iterator[tuple[int, Address]]:
    node: Any = next(node for node in loader.root.chain() if isinstance(node, IndexNode))
    if not node.first.has_indices:
        raise TargetError(
            "this loader reads its data from the beginning: only reading it shows which samples are in a step."
        )
    here, step, empty = node.seek(node.start(0)), 0, False
    begin_of_epoch = here
    while step < end:
        left = node.left(here)
        many = min((begin if step < begin else end) - step, end if left is None else left)
        items, here = node.read(here, max(many, 1))  # an empty read would not go past what drop_last drops
        for number, item in enumerate(items, step):
            if number >= begin:
                yield number, Address.of(item, with_indices=True)
        step += len(items)
        if len(items) < many or node.left(here) == 0:
            _, here = node.over(here)
            if empty and not len(items) and not loader._reader.positions.skipped(begin_of_epoch, here):
                raise TargetError(f"an epoch after step {step} has no batch on this rank.")
            empty, begin_of_epoch = not len(items), here
