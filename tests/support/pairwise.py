"""Fewer cases for tests with several parameters, where what fails depends on one value, or on two together."""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def pairwise(*axes: Any) -> list[tuple[Any, ...]]:
    """Combinations of one value from each axis, such that any two values of different axes come together in at least
    one.

    Greedy (each time the first combination that covers most new pairs) and so the same in every run. For axes of 13, 8
    and 2 values these are 104 of the 208 combinations; for six axes of three, 15 to 20 of 729.
    """
    values = [list(axis) for axis in axes]
    left = {
        (i, a, j, b)
        for i, j in combinations(range(len(values)), 2)
        for a in range(len(values[i]))
        for b in range(len(values[j]))
    }
    candidates = {places: _pairs(places) for places in product(*(range(len(axis)) for axis in values))}
    chosen = []
    while left:
        best = max(candidates, key=lambda places: len(candidates[places] & left))
        left -= candidates.pop(best)
        chosen.append(tuple(axis[place] for axis, place in zip(values, best, strict=True)))
    return chosen


def _pairs(places: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(places), 2)}


def engines(names: Iterable[str]) -> list[Any]:
    """Each of the names inline, and once more: in threads, and every third one in processes; of these, two of three in
    the soak."""
    names = list(names)
    others = [
        ("process" if k % 3 == 0 else "thread", [pytest.mark.soak] if k % 9 in (3, 6) else [])
        for k in range(len(names))
    ]
    return [
        *product(names, ["inline"]),
        *(pytest.param(name, other, marks=marks) for name, (other, marks) in zip(names, others, strict=True)),
    ]


def by_turns(values: Iterable[Any], ways: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each of the values with the first way, and with one of the other ways in turn."""
    first, *others = ways
    return [(value, way) for k, value in enumerate(values) for way in (first, others[k % len(others)])]


def mostly_soak(cases: Iterable[tuple[Any, ...]], often: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: those of ``often`` on every change, the other cases in the soak."""
    cases, often = list(cases), list(often)
    assert all(case in cases for case in often), "no such case"
    return [case if case in often else pytest.param(*case, marks=pytest.mark.soak) for case in cases]
