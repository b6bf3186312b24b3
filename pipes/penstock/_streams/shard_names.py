"""The names of shards in states and for their checksum."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

from penstock._files.files import Stamp
from penstock._files.paths import address, checksum, compression, is_remote, query, telling


def named(shard: Any) -> Any:
    """The name of a shard, as JSON. Paths without their folders, so that data may be moved."""
    if isinstance(shard, str | os.PathLike):
        return os.path.basename(os.fspath(shard))
    if isinstance(shard, Sequence) and not isinstance(shard, bytes | Stamp):
        return [named(part) for part in shard]
    return shard if isinstance(shard, int) else None


def names_of(shards: Sequence[Any]) -> str:
    """A checksum of the names of ``shards``, in order.

    Files with the same name are distinguished by the part of their folders that differs.

    A file may be compressed later, so the compression suffix is omitted from its name.
    """
    if not all(isinstance(shard, str | os.PathLike) for shard in shards):
        return checksum([named(shard) for shard in shards])
    paths = [os.fsdecode(shard) for shard in shards]
    parts, names = [_parts(path) for path in paths], telling(paths)
    for part, path in zip(parts, paths, strict=True):
        stem, suffix = os.path.splitext(part[-1])
        if compression(part[-1]):
            part[-1] = f"{stem}.tar" if suffix.lower() == ".tgz" else stem
        part[-1] += query(path, names)
    found = [part[-1] for part in parts]
    if len(set(found)) < len(found):
        columns = zip(*(part[:-1] for part in parts), strict=False)
        common = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))
        found = ["/".join(part[common:]) for part in parts]
    return checksum(found)


def _parts(path: str) -> list[str]:
    """The folders of a file and its name; an archive is a folder."""
    if not is_remote(path):
        return os.path.abspath(path).split("/")
    *inner, outer = address(path, ()).split("::")
    return "/".join([outer, *filter(is_remote, reversed(inner))]).split("/")
