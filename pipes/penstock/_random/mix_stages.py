"""The exact arithmetic of a weighted mix: how many items of each source come before a given block.

Uses integers, at any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import torch

from penstock._arguments import whole_number

Weights = Mapping[str, Any]

BLOCK: Final = 1024
"""Items in a block, unless a weight is so small that a block might contain no item of its source."""
MOST: Final = 2**20
"""The most items in a block."""


class Stage:
    """One set of weights, in force from ``start`` on.

    A block has M items. Before block b there are ``C_s(b) = floor(b M W_s) - floor(b M W_(s-1))`` items of source s,
    where W are the cumulative shares. These add up to b M, and each stays within 1 of its exact share, however long the
    mix runs.

    Args:
        start: The first run of the stage, counted from the start of the mix.
        shares: The share of each source, in the order of the names; they add up to 1.

    Attributes:
        block: M.
    """

    def __init__(self, start: int, shares: Sequence[Fraction]) -> None:
        self.start = start
        self.shares = shares
        least = min(share for share in shares if share)
        self.block = max(BLOCK, 1 << (math.ceil(1 / least) - 1).bit_length())
        self._whole = math.lcm(*(share.denominator for share in shares))
        ends = [0]
        for share in shares:
            ends.append(ends[-1] + share.numerator * (self._whole // share.denominator))
        self._ends = ends

    def before(self, block: int) -> list[int]:
        """How many items of each source come before ``block``, counted from the start of the stage."""
        items = block * self.block
        return [after - at for at, after in pairwise(items * end // self._whole for end in self._ends)]


def stages_of(weights: Weights | Sequence[tuple[int, Weights]], names: Sequence[str], run: int) -> list[Stage]:
    """Check the user's weights: one set, or several, each with the item at which it starts.

    Raises:
        ValueError: A name is not a source; a weight is negative, not a number or too small; all weights are 0; no stage
            names a source; or the starts do not ascend from 0 or are not multiples of ``run``.
    """
    given: Any = [(0, weights)] if isinstance(weights, Mapping) else weights
    if not isinstance(given, Sequence) or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in given):
        raise ValueError(f"weights must be a dict, or a list of pairs of a start and a dict, not {weights!r:.80}.")
    starts = [_start(start, run) for start, _ in given]
    if starts[:1] != [0] or any(following <= start for start, following in pairwise(starts)):
        raise ValueError(
            f"the stages start at the items {starts}. The first stage must start at 0, and each later one after the "
            f"one before it."
        )
    stages = [Stage(start // run, _shares(of, names, start)) for start, (_, of) in zip(starts, given, strict=True)]
    for name in names:
        if not any(name in of for _, of in given):
            raise ValueError(
                f"the source {name!r} has no weight{' in any stage' * (len(stages) > 1)}. Give it one, which may be 0 "
                f"until `reweight`, or remove the source."
            )
    return stages


def stage_at(start: int, weights: Weights, names: Sequence[str], run: int) -> Stage:
    """One more stage. Raises what `stages_of` does."""
    return Stage(_start(start, run) // run, _shares(weights, names, start))


def as_json(weights: Weights) -> Weights:
    """``weights`` as JSON that means exactly the same."""
    if not isinstance(weights, Mapping):
        return weights
    return {
        name: weight if type(weight) in (int, float) else str(_exact(weight, name, ""))
        for name, weight in weights.items()
    }


def _start(start: Any, run: int) -> int:
    number = whole_number("start", start, 0, remedy="A stage starts at an item, counted from the start of training.")
    if number % run:
        raise ValueError(
            f"a stage starts at item {number}, which is not a multiple of run={run}. Make it {number // run * run}."
        )
    return number


def _shares(weights: Weights, names: Sequence[str], start: int) -> list[Fraction]:
    """The weights as exact shares. 0.7 means 7/10, although no float is exactly that."""
    where = f" of the stage at {start}" if start else ""
    if not isinstance(weights, Mapping):
        raise ValueError(
            f"the weights{where} are a {type(weights).__name__}. Pass a dict with a weight for each source, such as "
            f"{{{names[0]!r}: 1.0}}."
        )
    if unknown := sorted(map(repr, weights.keys() - set(names))):
        raise ValueError(
            f"there are weights{where} for {', '.join(unknown)}, but the sources are {', '.join(map(repr, names))}."
        )
    exact = {name: _exact(weight, name, where) for name, weight in weights.items()}
    total = sum(exact.values(), Fraction(0))
    if not total:
        raise ValueError(
            f"all weights{where} are 0, so nothing can be drawn. Give at least one source a weight above 0."
        )
    shares = [exact.get(name, Fraction(0)) / total for name in names]
    for name, share in zip(names, shares, strict=True):
        if 0 < share < Fraction(1, MOST):
            raise ValueError(
                f"the weight of {name!r}{where} is {weights[name]!r}, which is 1 item in "
                f"{float(min(1 / share, Fraction(10**308))):.3g}. The smallest share is 1 in {MOST}. Remove the "
                f"source, or join it with a similar one."
            )
    return shares


def _exact(weight: Any, name: str, where: str) -> Fraction:
    try:
        exact = Fraction(str(weight.item() if isinstance(weight, torch.Tensor) else weight))
    except (ArithmeticError, ValueError, RuntimeError):
        exact = Fraction(-1)
    if exact < 0:
        raise ValueError(
            f"the weight of {name!r}{where} is {weight!r}. A weight must be a finite number that is not negative."
        )
    return exact
