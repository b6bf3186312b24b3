"""The cover of pairs that tests with several parameters use."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import pairwise


@pytest.mark.parametrize(("sizes", "at_most"), [((4, 4, 2), 16), ((3, 2, 2), 6), ((3,) * 6, 20), ((2, 3), 6)])
def test_every_pair_comes_in_fewer_cases(sizes: tuple[int, ...], at_most: int) -> None:
    """Seen to fail: a cover that ends one combination early."""
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    cases = pairwise(*axes)
    met = {pair for case in cases for pair in combinations(case, 2)}
    assert met == {pair for one, other in combinations(axes, 2) for pair in product(one, other)}
    assert len(cases) <= at_most
    assert cases == pairwise(*axes)
