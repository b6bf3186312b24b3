"""ShareStates: states of a dataset that is read forward, as facts that can be checked.

They save time when a share is read again, and nothing else.

A mark says: after n items of a share, the dataset was in this state, and the items with these checksums came next. So a
state that leaves something out (a shuffle buffer, a half-filled pack) is found false when it is used, and the share is
read from its beginning. What shows only behind these items is not found, such as a generator of the dataset that is not
in the state and draws once per file.

A worker's marks are one small file, replaced as a whole by whichever process reads the worker. The last writer wins,
and what is lost costs only time.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
from itertools import pairwise
from typing import Any, Final, NamedTuple, final

import torch

from penstock._errors import StateError, is_own_error
from penstock._fetch.encoding import encoded
from penstock._files.own_files import write_own

KEPT: Final = 12
"""Marks of a worker: the newest, and ever sparser older ones."""
LARGEST: Final = 2**22
"""Characters of the largest state that is kept, as JSON."""


class Mark(NamedTuple):
    """A fact about a share; see the top of this file. ``drew``: whether the first n items drew; ``state`` is JSON."""

    pass_: int
    n: int
    drew: bool
    state: str
    sums: list[str]


@final
class ShareStates:
    """The marks of all workers of a dataset.

    Args:
        folder: Where their files are.
        binding: JSON that identifies the dataset and its workers.

    Attributes:
        used: Whether they are, in this process: until a state proves wrong.
        proved: Whether a state has led to the right items in this process.
    """

    def __init__(self, folder: str, binding: Any) -> None:
        bound = hashlib.sha256(json.dumps(binding, sort_keys=True).encode()).hexdigest()[:32]
        self._folder = os.path.join(folder, bound)
        self.used, self.proved = True, False

    def before(self, worker: int, pass_: int, n: int) -> list[Mark]:
        """The marks of a share up to item ``n``, the nearest one first."""
        return (
            [mark for mark in reversed(self._read(worker)) if mark.pass_ == pass_ and mark.n <= n] if self.used else []
        )

    def add(self, worker: int, mark: Mark) -> None:
        """Keep ``mark``.

        Raises:
            OSError: It cannot be written.
        """
        marks = sorted({one[:2]: one for one in [*self._read(worker), mark]}.values())
        while len(marks) > KEPT:
            del marks[_least_useful(marks)]
        lines = [json.dumps(mark) for mark in marks]
        write_own(self._path(worker), *(f"{_sum(line.encode())} {line}\n".encode() for line in lines))

    def _read(self, worker: int) -> list[Mark]:
        try:
            with open(self._path(worker), encoding="utf-8", errors="replace") as file:
                lines = [line.rstrip("\n").partition(" ") for line in file]
        except OSError:
            return []
        return [Mark(*json.loads(line)) for check, _, line in lines if check == _sum(line.encode())]

    def _path(self, worker: int) -> str:
        return os.path.join(self._folder, f"worker-{worker}.jsonl")


def checksum_of_item(item: Any) -> str:
    """A checksum of the content of ``item``; if that cannot be read, the name of its type, which says little, as do
    equal items.
    """
    for content in (_as_json, _pickled):
        try:
            return _sum(content(item))
        except Exception as exc:
            if not is_own_error(exc):
                raise
    return type(item).__qualname__


def _as_json(item: Any) -> bytes:
    return json.dumps(encoded(item, "item")).encode()


def _pickled(item: Any) -> bytes:
    """Of a picture, or a class of the user's."""
    pickler = _ByContent(file := io.BytesIO())
    pickler.fast = True  # an object that occurs twice is written twice, as are equal ones
    pickler.dump(item)
    return file.getvalue()


class _ByContent(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        """What stands for a tensor, whose own pickle has its address in memory, and for a set, which has another order
        in each process.
        """
        if isinstance(obj, set | frozenset):
            return _as_json(obj)
        if isinstance(obj, torch.Tensor):
            with contextlib.suppress(StateError, RuntimeError):  # a nested or sparse one consists of others
                plain = obj.as_subclass(torch.Tensor)
                return _as_json(plain.int_repr() if plain.is_quantized else plain)
        return None


def _least_useful(marks: list[Mark]) -> int:
    """Which of ``marks``, in order, to drop: one of an earlier pass, or that with the smallest gap around it for its
    distance from the last one.
    """
    if marks[0].pass_ != marks[-1].pass_:
        return 0
    gaps = [(right.n - left.n) / (marks[-1].n - middle.n) for (left, middle), (_, right) in pairwise(pairwise(marks))]
    return 1 + gaps.index(min(gaps))


def _sum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
