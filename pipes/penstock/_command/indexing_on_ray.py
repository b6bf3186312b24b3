"""``python -m penstock index --ray``: the files are read wherever the cluster has room, and the indices are written here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from penstock._command.index_one import Outcome, looked_at, offsets_in, written
from penstock._files.paths import is_remote
from penstock._workers.ray_actors import connected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np

    from penstock._files.files import Stamp

_AHEAD: Final = 2
"""Files in flight per CPU of the cluster, so that no CPU waits for this process."""


def _there(path: str, now: Stamp) -> np.ndarray | Outcome:
    import ray

    found = offsets_in(path, now)
    return found._replace(error=f"on node {ray.util.get_node_ip_address()}: {found.error}") if isinstance(found, Outcome) else found


def outcomes(todo: Mapping[str, str]) -> Iterator[Outcome]:
    """The result for each file, as it completes. Ray retries a task whose machine is lost; a file whose version differs on that machine is refused.

    Args:
        todo: The index path for each file.
    """
    ray = connected()
    read = ray.remote(_there)
    on_its_way: dict[Any, tuple[str, str, Stamp]] = {}

    def done() -> Iterator[Outcome]:
        for ref in ray.wait(list(on_its_way))[0]:
            path, place, now = on_its_way.pop(ref)
            try:
                offsets = ray.get(ref)
            except ray.exceptions.RayError as exc:
                offsets = Outcome(path, error=f"Ray could not read it: {' '.join(str(exc).split())}")
            yield written(path, place, now, offsets)

    for path, place in todo.items():
        found = looked_at(path, place)
        if isinstance(found, Outcome):
            yield found
            continue
        on_its_way[read.remote(path if is_remote(path) else os.path.abspath(path), found)] = path, place, found
        while len(on_its_way) >= _AHEAD * max(1, ray.cluster_resources().get("CPU", 1)):
            yield from done()
    while on_its_way:
        yield from done()
