"""The graph of a loader, drawn as a tree of text."""

from __future__ import annotations

import contextlib
import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from torch.utils.data import ConcatDataset, Subset

from penstock._arguments import Shown, brief, called, cut, shown_details
from penstock._fetch.fetch import Fetch
from penstock._nodes.batcher import Batcher
from penstock._nodes.grouper import Grouper
from penstock._nodes.index_node import items_in
from penstock._nodes.key_grouper import KeyGrouper
from penstock._nodes.sampler_wrapper import SamplerWrapper
from penstock._random.buckets import Buckets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock._nodes.node import Node

_MOST_PARTS: Final = 8
_DEEPEST: Final = 8


@final
@dataclass(frozen=True, slots=True)
class Box:
    """A node, or a dataset that a node reads, as strings.

    Attributes:
        name: The class.
        details: Its settings.
        items: Items that a node delivers per epoch on this rank, with their unit; empty if unknown, or for a dataset.
        parts: The datasets that it reads or consists of, each with its name there.
    """

    name: str
    details: dict[str, str]
    items: str
    parts: tuple[tuple[str, Box], ...] = ()


@final
class Graph:
    """A snapshot of a loader's graph: ``print(loader.graph)`` draws a tree, from the loader down to the source of its
    items.

    Each node is shown with its settings and the number of items that it delivers per epoch on this rank. Notebooks
    display it. Nothing is loaded or started for it.

    Args:
        title: One line about the loader.
        root: The last node.
        epoch: The epoch whose items are counted.
    """

    def __init__(self, title: str, root: Node[Any], epoch: int) -> None:
        self._title = title
        self._boxes = list(_boxes(root, epoch))  # from the source to the root

    def __repr__(self) -> str:
        return cut(f"<penstock graph: {' -> '.join(box.name for box in self._boxes)}>", 200)

    def __str__(self) -> str:
        lines = [(self._title, "")]
        for depth, box in enumerate(reversed(self._boxes)):
            indent = "   " * depth
            lines.append((f"{indent}└─ {called(box.name, box.details)}", box.items))
            is_first = depth == len(self._boxes) - 1
            lines += [(f"{indent}   {line}", "") for line in _lines_of_parts(box, is_last=is_first)]
        width = min(100, max((len(line) for line, items in lines if items), default=0))
        return "\n".join(f"{line:{width}}  {items}".rstrip() for line, items in lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _boxes(root: Node[Any], epoch: int) -> Iterator[Box]:
    unit = "samples"
    for node in reversed(list(root.chain())):
        if isinstance(node, Batcher | KeyGrouper) or (isinstance(node, SamplerWrapper) and node.batches):
            unit = "batches"
        elif isinstance(node, Grouper):
            unit = "batches" if isinstance(node.groups, Buckets) else "packs"
        items: int | None = None
        with contextlib.suppress(Exception):  # from a user's node, or a graph without a known rank
            items = items_in(node, epoch)
        shown = shown_details(node)
        parts: tuple[tuple[str, Box], ...] = ()
        fetch = vars(node).get("map_fn")
        if isinstance(fetch, Fetch):
            del shown["map_fn"]
            shown |= {word: value for word, value in shown_details(fetch).items() if word != "dataset"}
            with contextlib.suppress(Exception):  # a dataset may override `__class__`
                parts = (("dataset", _dataset_box(fetch.dataset, 0)),)
        yield Box(
            cut(type(node).__name__, 60),
            shown,
            "" if not isinstance(items, int) else f"{items:,} {unit} an epoch",
            parts,
        )


def _dataset_box(dataset: Any, depth: int) -> Box:
    """A dataset and its parts.

    Looks only into classes that are known to have parts, and reads the length only of those.
    """
    name = cut(type(dataset).__name__, 60)
    if depth == _DEEPEST:
        return Box(name, {}, "")
    known = isinstance(dataset, Subset | ConcatDataset | Shown)
    inside = vars(dataset) if known else {}
    several = list(inside.get("datasets", []))
    names = inside.get("names", range(len(several)))
    parts = [
        (cut(str(called_), 40), _dataset_box(one, depth + 1))
        for called_, one in zip(names, several[:_MOST_PARTS], strict=False)
    ]
    if len(several) > _MOST_PARTS:
        parts.append(("…", Box(f"{len(several) - _MOST_PARTS} more", {}, "")))
    details = shown_details(dataset) if isinstance(dataset, Shown) else {}
    if "dataset" in inside:
        parts.append(("of", _dataset_box(inside["dataset"], depth + 1)))
        details.pop("dataset", None)
    if type(dataset) in (Subset, list, tuple, ConcatDataset):
        details["samples"] = brief(len(dataset))
    return Box(name, details, "", tuple(parts))


def _lines_of_parts(box: Box, *, is_last: bool) -> Iterator[str]:
    for number, (name, part) in enumerate(box.parts):
        ends = is_last and number == len(box.parts) - 1
        yield f"{'└' if ends else '├'}─ {name}: {called(part.name, part.details)}"
        for line in _lines_of_parts(part, is_last=True):
            yield f"{' ' if ends else '│'}  {line}"
