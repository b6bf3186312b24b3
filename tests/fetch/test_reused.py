"""OwnMemory: what an iterable yields in memory that it fills again is copied; anything else is left alone."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from tensors import make

from penstock._fetch.reused import FIRST, OwnMemory

N = 12


def buffers(turns: int, kind: str) -> list[Any]:
    made: dict[str, Any] = {
        "array": lambda: np.zeros(3, np.int64),
        "tensor": lambda: torch.zeros(3, dtype=torch.int64),
        "bytes": lambda: bytearray(3),
    }
    return [made[kind]() for _ in range(turns)]


def filled(buffer: Any, number: int) -> Any:
    buffer[:] = bytes([number] * 3) if isinstance(buffer, bytearray) else number
    return buffer


SHAPES = {
    "itself": lambda buffer, number, box: buffer,
    "a view": lambda buffer, number, box: buffer[: 1 + number % 2] if not isinstance(buffer, bytearray) else buffer,
    "in a new dict": lambda buffer, number, box: {"new": np.full(2, number), "x": buffer},
    "in the same list": lambda buffer, number, box: box.__setitem__(slice(None), [buffer]) or box,
    "in a tuple": lambda buffer, number, box: (number, [buffer]),
    "in an ordered dict": lambda buffer, number, box: OrderedDict(x=buffer),
}


def through(own: OwnMemory, item: Any) -> Any:
    """As its callers do."""
    return own(item) if own.watches else item


def first(item: Any) -> int:
    while not isinstance(item, np.ndarray | torch.Tensor | bytearray | int):
        item = [*item.values()][-1] if isinstance(item, dict) else item[-1]
    return int(item if isinstance(item, int) else item[0])


@pytest.mark.parametrize("turns", [1, 2, FIRST - 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["array", "tensor", "bytes"])
def test_memory_that_is_filled_again_is_copied(kind, shape, turns):
    """All items are held until the end. Seen to fail without copies of the first ones, and with a look at only one
    item before."""
    own, box, turning = OwnMemory(), [], buffers(turns, kind)
    items = [through(own, SHAPES[shape](filled(turning[n % turns], n), n, box)) for n in range(N)]
    assert [first(item) for item in items] == list(range(N))


def test_a_container_that_is_filled_again_is_copied():
    """Seen to fail with a look at arrays only."""
    own, one = OwnMemory(), {}
    items = []
    for number in range(N):
        one["number"] = number
        items.append(through(own, one))
    assert [item["number"] for item in items] == list(range(N))


def test_items_of_their_own_are_passed_on():
    """Although each is dropped, so that the next one may get its memory. Seen to fail when the first items were not
    held: all were copied."""
    own = OwnMemory()
    for number in range(FIRST):
        assert own.watches
        assert first(own({"x": np.full(1000, number)})) == number
    assert not own.watches


def test_of_an_item_only_what_is_filled_again_is_copied():
    """Seen to fail with copies of all of it."""
    own, constant = OwnMemory(), np.zeros(3)
    for number in range(N):
        new = np.full(3, number)
        found = through(own, {"constant": constant, "new": new})
        if number >= FIRST:
            assert found["new"] is new
            assert found["constant"] is not constant


class Odd(dict):
    def __copy__(self):
        raise TypeError("no copies")


@pytest.mark.parametrize(
    "item",
    [
        None,
        3,
        "text",
        (),
        deque([1]),
        make("sparse"),
        torch.zeros(2, requires_grad=True),
        make("meta"),
        make("nested"),
        np.array([object()]),
        np.zeros(0),
        Odd(x=1),
    ],
)
def test_no_item_is_too_odd(item):
    own = OwnMemory()
    for _ in range(N):
        assert type(through(own, item)) is type(item)
