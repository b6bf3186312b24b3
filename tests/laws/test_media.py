"""Packs with media: each document once and whole, with its own pictures and positions, within every budget; the same on
any number of ranks and workers, and after a resume at any step on another number of ranks. `pieces_of` looks at every
value of every batch."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from media import AXES, DECLARED, DOCUMENT, Documents, drawn, pieces_of

from penstock import Loader, Pack, Packs, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from media import Piece

SEED = 7
PROCESSES = {"num_workers": 2, "multiprocessing_context": "fork"}


class Case(NamedTuple):
    """What is packed, and how."""

    data: Documents
    capacity: int
    along: dict[str, Any]
    budgets: dict[str, int]
    oversize: Any
    cu_seqlens: bool

    @classmethod
    def of(cls, seed: int) -> Case:
        """One of many, drawn at random."""
        rng = np.random.default_rng(seed)
        capacity, tensors, declared = int(rng.integers(3, 40)), bool(rng.integers(2)), bool(rng.integers(2))
        names = [name for name in AXES if rng.random() < 0.6]
        words: dict[str, Any] = {"rows": [None, 0, 3][rng.integers(3)], "tensors": tensors, "media": names}
        data = drawn(rng, int(rng.integers(1, 40)), capacity, leaves_out=declared and rng.random() < 0.7, **words)
        along = {
            name: (torch.from_numpy(DECLARED[name]) if tensors else DECLARED[name]) if declared else AXES[name]
            for name in names
        }
        budgets = {
            name: max(1, *counts) + int(rng.integers(0, 4))
            for name, counts in data.counts.items()
            if rng.random() < 0.6
        }
        fits = max(data.lengths) <= capacity
        oversize = str(rng.choice(["split", "truncate", "error"] if fits else ["split", "truncate"]))
        return cls(data, capacity, along, budgets, oversize, bool(rng.integers(2)) or not names)

    def pieces(self) -> list[Piece]:
        """What all packs of an epoch must hold."""
        whole = [(index, length) for index, length in enumerate(self.data.lengths) if length]
        starts = {index: range(0, length if self.oversize == "split" else 1, self.capacity) for index, length in whole}
        return [
            (index, start, min(self.capacity, length - start)) for index, length in whole for start in starts[index]
        ]

    def check_budgets(self, rows: Sequence[Sequence[Piece]]) -> None:
        for name, limit in self.budgets.items():
            assert max((sum(self.data.counts[name][index] for index, _, _ in row) for row in rows), default=0) <= limit

    def packs(self, **words: Any) -> Packs:
        also = {name: (self.data.counts[name], limit) for name, limit in self.budgets.items()}
        form: Any = {
            "along": self.along,
            "also": also,
            "cu_seqlens": self.cu_seqlens,
            "oversize": self.oversize,
            "pad": {"tokens": -1},
        }
        return Packs(self.data.lengths, self.capacity, **{"block": 16, **form, **words})

    def step(self, **words: Any) -> Pack:
        also = {name: (partial(takes, self.data.counts[name]), limit) for name, limit in self.budgets.items()}
        form: Any = {
            "along": self.along,
            "also": also,
            "cu_seqlens": self.cu_seqlens,
            "oversize": self.oversize,
            "pad": -1,
        }
        return Pack(self.capacity, **{**form, **words})


def takes(counts: list[int], record: dict[str, Any]) -> int:
    """What a document takes of a budget; nothing, if it is empty."""
    tokens = record["tokens"]
    return counts[int(tokens[0]) // DOCUMENT] if len(tokens) else 0


Found = list[tuple[int, tuple[int, ...], list[list["Piece"]]]]


def read(loaders: list[Loader[Any]], case: Case, steps: int, numbers: Any = int) -> tuple[Found, list[str]]:
    """That many steps of all ranks: the epoch, the positions and the documents of each batch; and the state after each
    step, which is the same on all ranks."""
    found, states = [], [json.dumps(loaders[0].state_dict())]
    readers: list[Any] = [iter(loader) for loader in loaders]
    for _ in range(steps):
        for number, loader in enumerate(loaders):
            if (batch := next(readers[number], None)) is None:
                readers[number] = iter(loader)
                batch = next(readers[number])
            assert loader.last is not None
            epoch = 0 if numbers is not int else loader.last.epoch
            rows = pieces_of(batch, case.data, case.capacity, epoch, numbers)
            case.check_budgets(rows)
            if numbers is int:
                assert loader.last.indices == rows
            assert isinstance(loader.last.position, tuple)
            found.append((loader.last.epoch, loader.last.position, rows))
        (state,) = {json.dumps(loader.state_dict()) for loader in loaders}
        states.append(state)
    return found, states


def by_position(found: Found) -> dict[tuple[int, int], list[Piece]]:
    """The documents of each row; every row came once."""
    rows = [
        ((epoch, position), row)
        for epoch, positions, batch in found
        for position, row in zip(positions, batch, strict=True)
    ]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def check_packs(seed: int, **way: Any) -> None:
    """All that must hold for one case, with workers or without."""
    rng, case = np.random.default_rng(seed + 10**6), Case.of(seed)

    def loaders(ranks: int, batch: int, *, count: bool = False, **words: Any) -> list[Loader[Any]]:
        words = {"batch_size": batch, "shuffle": True, "seed": SEED, **words}
        return [
            Loader.from_dataset(case.data, groups=case.packs(count=count), rank=rank, world_size=ranks, **words)
            for rank in range(ranks)
        ]

    expected: dict[tuple[int, int], list[Piece]] = {}
    (one,) = loaders(1, 3, count=True)
    for epoch in range(2):
        assert len(one) == sum(1 for _ in loaders(1, 3)[0]) or epoch
        for batch in one:
            rows = pieces_of(batch, case.data, case.capacity, epoch)
            case.check_budgets(rows)
            assert one.last is not None
            placed = zip(one.last.position, rows, strict=True)  # type: ignore[arg-type]
            expected |= {(epoch, position): row for position, row in placed}
        mine = sorted(piece for (of, _), row in expected.items() if of == epoch for piece in row)
        assert mine == case.pieces()
    if not expected:
        return
    packs = min(sum(epoch == of for of, _ in expected) for epoch in range(2))
    first, second, batch = (int(number) for number in rng.integers(1, 4, 3))
    steps = packs // (first * batch)  # of one epoch at least
    before = loaders(first, batch, **way)
    found, states = read(before, case, steps)
    for loader in before:
        loader.close()
    assert {at: expected[at] for at in by_position(found)} == by_position(found)
    stop = int(rng.integers(0, steps + 1))
    rest = (packs - stop * first * batch) // (second * batch)
    after = loaders(second, batch, **way)
    for loader in after:
        loader.load_state_dict(json.loads(states[stop]))
    resumed, _ = read(after, case, rest)
    for loader in after:
        loader.close()
    rows = by_position(found[: stop * first] + resumed)
    assert sorted(rows) == [(0, position) for position in range(len(rows))]
    assert all(expected[at] == row for at, row in rows.items())


@pytest.mark.parametrize("seed", range(16))
def test_packs_hold_every_document_whole_within_all_budgets_on_any_ranks_and_resumed_anywhere(seed: int) -> None:
    """Seen to fail: a budget exceeded, offsets off by one, the parts of one document with another, packs of another
    order after a resume."""
    check_packs(seed)


@pytest.mark.parametrize("seed", range(100, 103))
def test_so_do_worker_processes(seed: int) -> None:
    check_packs(seed, **PROCESSES)


# The step.


class Shard:
    """The documents of a shard, by its number."""

    def __init__(self, data: Documents, shards: int) -> None:
        self.data = data
        self.size = -(-len(data) // shards)

    def __call__(self, shard: int) -> Any:
        for index in range(shard * self.size, min((shard + 1) * self.size, len(self.data))):
            yield self.data.made(index)

    def number(self, index: int) -> int:
        """Of a document in its shard."""
        return index % self.size


def check_step(seed: int, **way: Any) -> None:
    """All that must hold for the step over a stream of one case."""
    rng, case = np.random.default_rng(seed + 10**6), Case.of(seed)
    if not any(case.data.lengths):
        return
    shards, window = int(rng.integers(1, 4)), int(rng.integers(1, 20))
    shard = Shard(case.data, shards)
    shards = -(-len(case.data) // shard.size)
    held: list[list[Piece]] = []
    for number in range(shards):
        # outside a shard, the documents are numbered as they come
        rows: Any = list(case.step(window=window)(shard(number)))
        for batch in Loader.from_dataset(rows, batch_size=2):
            held += pieces_of(batch, case.data, case.capacity, 0, shard.number)
    case.check_budgets(held)
    assert sorted(piece for row in held for piece in row) == case.pieces()

    lanes = int(rng.integers(1, shards + 1))

    def loaders(ranks: int, batch: int) -> list[Loader[Any]]:
        words: Any = {"batch_size": batch, "shuffle": True, "seed": SEED, "world_size": ranks, **way}
        return [
            Loader.from_dataset(
                Stream(shards, shard, steps=[case.step(window=window)], epoch_size=10**6, lanes=lanes, bookmarks=False),
                rank=rank,
                **words,
            )
            for rank in range(ranks)
        ]

    first, second, batch = (int(number) for number in rng.integers(1, 4, 3))
    steps = max(1, 2 * len(held) // (first * batch))  # two passes, about
    (one,) = loaders(1, 1)
    expected = by_position(read([one], case, steps * first * batch + 2 * second * batch, shard.number)[0])
    before, after = loaders(first, batch), loaders(second, batch)
    found, states = read(before, case, steps, shard.number)
    stop = int(rng.integers(0, steps + 1))
    for loader in after:
        loader.load_state_dict(json.loads(states[stop]))
    resumed, _ = read(after, case, 2, shard.number)
    for loader in (one, *before, *after):
        loader.close()
    for rows, begin in ((by_position(found), 0), (by_position(resumed), stop * first * batch)):
        assert sorted(rows) == [(0, position) for position in range(begin, begin + len(rows))]
        assert {at: expected[at] for at in rows} == rows


@pytest.mark.parametrize("seed", range(200, 212))
def test_the_step_does_the_same_over_a_stream(seed: int) -> None:
    """Seen to fail: a picture that is cut with its document, and rows that exceed a budget by the last document."""
    check_step(seed)


@pytest.mark.parametrize("seed", [300])
def test_so_does_the_step_in_worker_processes(seed: int) -> None:
    check_step(seed, **PROCESSES)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("rows", [None, 0, 3])
def test_the_step_and_packs_make_rows_of_one_form(rows: int | None, tensors: bool) -> None:
    """The same fields in the same order, of the same types and shapes. Seen to fail: with offsets in int32 in one of
    them."""
    data = Documents([3, 2, 4], [[2], [], [1, 3]], [0, 2, 0], rows=rows, tensors=tensors)
    words: Any = {"along": AXES, "cu_seqlens": True}
    (step,) = Pack(12, pad=-1, **words)(iter([data.made(index) for index in range(3)]))
    with Loader.from_dataset(
        data, batch_size=1, collate_fn=list, groups=Packs(data.lengths, 12, pad=-1, **words)
    ) as loader:
        ((pack,),) = loader
    assert [*step] == [*pack]
    for name, value in step.items():
        assert type(value) is type(pack[name])
        if name != "max_seqlen":
            assert (value.dtype, value.shape, value.tolist()) == (
                pack[name].dtype,
                pack[name].shape,
                pack[name].tolist(),
            )
    assert step["max_seqlen"] == pack["max_seqlen"] == 4
