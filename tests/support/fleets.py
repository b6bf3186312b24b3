"""Fleets of ranks in one process: loaders that go on from each other's states, on other numbers of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock import Loader


def endless(loader: Loader[Any], rows: Callable[[Any], list[Any]] = list) -> Iterator[list[Any]]:
    """The rows of each batch, epoch after epoch."""
    while True:
        for batch in loader:
            yield rows(batch)


def chain(
    build: Callable[..., Loader[Any]],
    links: Iterable[tuple[int, int, int]],
    rows: Callable[[Any], list[Any]] = list,
    *,
    whole: bool = False,
) -> list[Any]:
    """The global sequence of a chain, in which each link goes on from what one of the ranks before has saved; all ranks
    must save the same.

    Of each link: the ranks, the batch size and the steps. ``whole``: batches are dealt, and not rows.
    """
    state, sequence = None, []
    for k, (world_size, batch_size, steps) in enumerate(links):
        ranks = [build(batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
        for one in ranks:
            if state is not None:
                one.load_state_dict(state)
        streams = [endless(one, rows) for one in ranks]
        for _ in range(steps):
            hands = [next(stream) for stream in streams]
            sequence += hands if whole else [row for place in zip(*hands, strict=True) for row in place]
            states = [one.state_dict() for one in ranks]
            assert states == [states[0]] * world_size
        state = states[k % world_size]
        for one in ranks:
            one.close()
    return sequence
