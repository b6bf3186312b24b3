"""Any chain of world sizes and batch sizes continues one global sequence.

Here each rank is a graph in a single process, so that many chains can be tried. test_distributed has real ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dealing import TAILS, dealt
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.nodes import Batcher, Cycler, EndOfEpoch, Sampler, Sharder
from penstock.orders import ShuffledOrder

LINKS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6)), min_size=2, max_size=5)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 40), links=LINKS, tail=st.sampled_from(TAILS))
def test_nothing_is_lost_doubled_or_moved_by_any_chain(n: int, links: list[tuple[int, int, int]], tail: Any) -> None:
    """A link is a world size, a batch size, and a number of steps; the state is another rank's each time.

    Every step delivers the positions that follow the previous ones, up to the end of the epoch, and then those of the
    padding. Only the last round with "drop" is left out. Seen to fail when the state was taken in mid-round, when
    "drop" left its remainder standing, and when the padding began at the epoch's end.
    """
    state, epoch, due = None, 0, 0
    for k, (world_size, batch_size, steps) in enumerate(links):
        if not dealt(n, world_size, tail):
            continue
        ranks = [
            Batcher(Sharder(Cycler(Sampler(ShuffledOrder(n, 3))), rank, world_size, tail=tail), batch_size)
            for rank in range(world_size)
        ]
        for node in ranks:
            node.reset(state)
        for _ in range(steps):
            items = [next(node) for node in ranks]
            batches = [item for item in items if not isinstance(item, EndOfEpoch)]
            expected = dealt(n, world_size, tail, due)[: world_size * batch_size]
            if not batches:
                assert items == [EndOfEpoch(epoch)] * world_size
                assert expected == []
                epoch, due = epoch + 1, 0
                continue
            assert len(batches) == min(world_size, len(expected))
            assert {batch.epoch for batch in batches} == {epoch}
            assert np.sort(np.concatenate([batch.positions for batch in batches])).tolist() == sorted(expected)
            for batch in batches:
                assert batch.plain() == ShuffledOrder(n, 3).indices(epoch, batch.positions % n).tolist()
            due = min(due + len(expected), n)
            if not dealt(n, world_size, tail, due):
                due = n  # what is left over was skipped, because the epoch is over after its last batch
            if len(batches) < world_size:
                break  # some ranks have read their mark; there is no common state before the others have too
        states = [node.get_state() for node in ranks]
        if tail != "exact":
            assert states == [states[0]] * world_size
        state = states[0 if tail == "exact" else k % world_size]
