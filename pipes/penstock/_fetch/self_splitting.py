"""Detect iterables that give each rank its own share, from their attributes.

Imports none of the libraries in question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSIDE = ("dataset", "source_datapipe", "source", "source_nodes", "iterable", "sampler", "batch_sampler")
"""Attributes in which datasets, data pipes, samplers and torchdata's nodes hold their source."""


def splits_itself(iterable: Any) -> str | None:
    """Explain why ``iterable``, or an object inside it, is known to split itself by rank.

    None if there is no sign of it.
    """
    for one in wrapped(iterable):
        name = type(one).__name__
        if any(
            getattr(how, size, None) == 1
            for how in (one, getattr(one, "_distributed", None))
            for size in ("world_size", "num_replicas")
        ):
            continue  # it was told that there is one rank only
        if getattr(one, "_distributed", None) is not None:
            return f"{name} was split by split_dataset_by_node"
        if (splitter := _nodesplitter(one)) is not None:
            return f"{name} has the stage {splitter}"
        for kind in type(one).__mro__:
            if kind.__name__.endswith("StreamingDataset") and kind.__module__.partition(".")[0] in (
                "streaming",
                "litdata",
                "lightning",
            ):
                return f"{name} is a {kind.__name__} of {kind.__module__.partition('.')[0]}"
        for attribute in ("rank", "num_replicas", "world_size"):
            if hasattr(one, attribute):
                return f"{name} has the attribute {attribute!r}"
    return None


def wrapped(iterable: Any) -> Iterator[Any]:
    """``iterable`` and the objects it wraps, outermost first, each once."""
    found: dict[int, Any] = {}
    waiting = [iterable]
    while waiting:
        one = waiting.pop()
        if id(one) in found:
            continue
        found[id(one)] = one
        yield one
        inside = [vars(one).get(name) for name in _INSIDE] if hasattr(one, "__dict__") else []
        for value in inside:
            waiting += value.values() if isinstance(value, dict) else [] if value is None else [value]


def _nodesplitter(pipeline: Any) -> str | None:
    """The name of the webdataset stage that splits by rank; None if there is none."""
    given = getattr(pipeline, "nodesplitter", getattr(getattr(pipeline, "args", None), "nodesplitter", None))
    if callable(given) and _named(given) != "single_node_only":
        return _named(given)
    stages = getattr(pipeline, "pipeline", None)
    for stage in stages if isinstance(stages, list) else []:
        if _named(stage) == "split_by_node":
            return "split_by_node"
        if (inner := _nodesplitter(stage)) is not None:
            return inner
    return None


def _named(stage: Any) -> str:
    """The name of a stage's function, which may be wrapped in a partial."""
    function = getattr(stage, "func", getattr(stage, "f", stage))
    return str(getattr(function, "__name__", type(function).__name__))
