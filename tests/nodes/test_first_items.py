"""By what another process can tell whether its iterable begins with the same items. Record k has k in every field that
differs."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock._fetch.first_items import MOST, FirstItems, reads_alike


@dataclass
class Record:
    text: str
    tags: frozenset[str]


@dataclass(slots=True)
class Slotted:
    inside: Any


class Named(NamedTuple):
    inside: Any


class Picture:
    """One of PIL, as far as it matters: the content is not among its attributes."""

    def __init__(self, k: int, tile: tuple[int, ...] = ()) -> None:
        self.size, self.tile, self.read = (4, 4), tile, lambda: bytes([k]) * 16

    def tobytes(self) -> bytes:
        return self.read()


class Opaque:
    __slots__ = ()


class Broken:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ValueError("no")


KINDS: dict[str, Any] = {
    "a number": lambda k: k,
    "an array of one number": lambda k: np.array(k),
    "tokens": lambda k: torch.arange(k, k + 5),
    "a list of tokens": lambda k: [k, 1, 2],
    "a dict": lambda k: {"x": torch.ones(3), "y": {"id": k}},
    "an object": lambda k: Record(f"{k}", frozenset({"a", "b"})),
    "a set": lambda k: {f"{k}", "a", "b"},
    "a picture of PIL": Picture,
    "slots": Slotted,
    "a UUID": lambda k: uuid.UUID(int=k),
    "half precision": lambda k: torch.full((3,), k, dtype=torch.bfloat16),
    "beside what nobody can compare": lambda k: (Opaque(), lambda: None, k, Broken()),
}


def marks(items: Any, *, ended: bool = True) -> tuple[int, ...]:
    first = FirstItems()
    for item in items:
        first.add([item], ended=False)
    first.add([], ended=ended)
    return first.marks


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_items_agree_and_others_do_not(kind: str) -> None:
    """However they come. Seen to fail: pictures and floats that never counted, or not beside a constant; contents of
    PIL, and items without ``__dict__``."""
    make = KINDS[kind]
    whole = FirstItems()
    whole.add([make(k) for k in range(20)], ended=False)
    assert whole.marks
    assert whole.marks == marks(map(make, range(MOST)), ended=False) == marks(map(make, range(20)))
    assert not {*whole.marks} & {*marks(map(make, range(1, 20, 2)))}


def test_one_field_that_agrees_is_enough() -> None:
    """Of any kind, beside paths, times and pictures of a rank. Seen to fail with one checksum of everything, and when a
    path hid floats and pictures."""
    rng = np.random.default_rng()
    for equal in (lambda k: k % 5, float, lambda k: np.full((2, 2), k)):
        ranks = (
            marks(
                {"picture": rng.random((3, 3)), "path": f"/{rank}/{k}", "at": 100 * rank + k, "equal": equal(k)}
                for k in range(8)
            )
            for rank in range(2)
        )
        assert {*next(ranks)} & {*next(ranks)}


@pytest.mark.parametrize(
    "items",
    [
        [],
        [7],
        [Picture(k, tile=(1,)) for k in range(8)],
        [f"<Thing at 0x{k}>" for k in range(8)],
        [Opaque() for _ in range(8)],
        [Broken() for _ in range(8)],
        [{"text": "the same"}] * 8,
    ],
    ids=["none", "one", "pictures that are not decoded", "addresses", "opaque", "broken", "constant"],
)
def test_items_that_say_nothing_have_no_marks(items: list[Any]) -> None:
    """Seen to fail: a class that all first items have was compared; pictures were decoded; texts with addresses were
    compared."""
    assert marks(items) == ()


def test_there_are_no_marks_before_there_are_enough_items() -> None:
    """Ranks may read blocks of other sizes. Seen to fail when each block had marks."""
    assert marks(range(MOST - 1), ended=False) == ()
    assert marks(range(MOST - 1), ended=True) == marks(range(MOST - 1)) != marks(range(MOST))


@pytest.mark.parametrize(
    "wrap",
    [Slotted, Named, lambda one: Record(one, frozenset), lambda one: {"x": (one,)}],
    ids=["slots", "named", "object", "dict"],
)
def test_values_read_alike_unless_their_text_has_an_order_or_an_address(wrap: Any) -> None:
    """Seen to fail: only numbers and texts were compared, and when nobody looked inside."""
    for one in (torch.tensor(3), np.arange(3), slice(3), PurePosixPath("a"), uuid.UUID(int=3), None, Slotted([3.0])):
        assert reads_alike(one), one
    for one in (frozenset("ab"), {"a", "b"}, Opaque(), lambda: None):
        assert not reads_alike(one), one
    assert not reads_alike(wrap({"a", "b"}))
    assert not reads_alike(wrap(Opaque()))
