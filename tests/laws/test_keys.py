"""The laws of `Buckets` with keys, at the loader: all ranks have the same key in each round, and over any chain of
numbers of ranks each sample comes once in a pass."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
import torch
from fleets import endless
from hypothesis import given, settings
from hypothesis import strategies as st
from key_model import KeyModel
from torch.utils.data import Dataset

import penstock
from penstock import Buckets, Ledger, Loader, Mix
from penstock.orders import ShuffledOrder
from penstock.testing import assert_resumes_everywhere

N = 60
KEYS = [(64, 64 + 32 * (index * index % 7 % 3)) for index in range(N)]
SHORTS = ["carry", "pad", "drop"]


class Images(Dataset[Any]):
    """A sample of epoch e is ``1000 * e + index``, with a random number beside it. Those of different keys cannot be
    collated."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = penstock.sample()
        width, height = KEYS[index]
        return torch.full((width // 32, height // 32, 2), 1000 * sample.epoch + index) + torch.tensor(
            [0, sample.rng.integers(1, 1000)]
        )


def loader(short: Any = "carry", size: Any = 3, block: int | None = None, **words: Any) -> Loader[Any]:
    buckets = Buckets(keys=KEYS, batch_size=size, short=short, block=block)
    return Loader.from_dataset(**{"dataset": Images(), "groups": buckets, "shuffle": True, "seed": 4, **words})


def rows(batch: torch.Tensor) -> list[tuple[int, int]]:
    """The number of each sample, and what it has drawn."""
    return [(first, second - first) for first, second in batch[:, 0, 0].tolist()]


def key_of(batch: torch.Tensor) -> tuple[int, int]:
    return batch.shape[1] * 32, batch.shape[2] * 32


ENGINES = {"inline": {}, "threads": {"num_workers": 2, "method": "thread"}, "processes": {"num_workers": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("short", "engine"), [*product(SHORTS, ["inline"]), ("carry", "threads"), ("pad", "processes")]
)
def test_each_resumes_everywhere(short: str, engine: str) -> None:
    """Seen to fail: with a state after an even number of rounds."""
    size, steps = (20, 9) if engine == "processes" else (7, 24)
    assert_resumes_everywhere(lambda: loader(short, size, **ENGINES[engine]), steps=steps)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    data=st.data(), short=st.sampled_from(SHORTS), block=st.sampled_from([None, 25]), size=st.sampled_from([1, 2, 4])
)
def test_any_chain_of_ranks_deals_what_a_walk_along_the_order_deals(
    data: Any, short: str, block: int | None, size: int
) -> None:
    """Each link goes on from what one of the ranks before has saved; all ranks save the same. Seen to fail: without the
    rounds that other numbers of ranks took."""
    sizes, state, at = dict.fromkeys(KEYS, size), None, -1
    models: list[KeyModel] = []
    for ranks, steps in data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=2, max_size=5)):
        fleet = [loader(short, size, block, rank=rank, world_size=ranks) for rank in range(ranks)]
        for one in fleet:
            if state is not None:
                one.load_state_dict(state)
        streams = [endless(one, lambda batch: [batch]) for one in fleet]
        for _ in range(steps):
            batches = [batch for stream in streams for batch in next(stream)]
            (key,) = {key_of(batch) for batch in batches}
            epoch = fleet[0].epoch
            if epoch != at:
                at, order = epoch, ShuffledOrder(N, 4).indices(epoch, np.arange(N)).tolist()
                begins = range(0, N, block or N)
                models = [KeyModel(order[begin : begin + (block or N)], KEYS, sizes, short) for begin in begins]
                taken = 0
            while not (left := models[taken].rounds(ranks)):
                taken += 1
            model = models[taken]
            expected, offsets = left[0]
            hands = model.hands(expected, offsets, ranks)
            assert key == expected
            assert [[number for number, _ in rows(batch)] for batch in batches] == [
                [1000 * epoch + model.order[offset] for offset, _ in hand] for hand in hands
            ]
            assert [one.last.positions.tolist() for one in fleet] == [
                [taken * (block or N) + offset + N * before for offset, before in hand] for hand in hands
            ]
            model.done.update(offsets)
            # a block that is done stays so, also where other ranks could take what it leaves out
            taken += len(left) == 1
            states = [one.state_dict() for one in fleet]
            assert states == [states[0]] * ranks
        state = states[-1]
        assert len(state["penstock"]) < 500
        for one in fleet:
            one.close()


@pytest.mark.parametrize("links", [[(4, 2), (3, 99)], [(1, 5), (4, 1), (2, 2), (3, 99)], [(2, 99)]])
def test_with_carry_the_union_of_all_lives_is_the_pass(links: list[tuple[int, int]]) -> None:
    """Every key has enough samples. Seen to fail: with a last round of a key that takes one sample."""
    state, seen = None, Counter[int]()
    for ranks, steps in links:
        for rank in range(ranks):
            with loader(size=2, rank=rank, world_size=ranks) as one:
                if state is not None:
                    one.load_state_dict(state)
                seen.update(number for batch in islice(one, steps) for number, _ in rows(batch))
                after = one.state_dict()
        state = after
    assert seen == Counter(range(N))


@pytest.mark.slow
def test_purity() -> None:
    """The samples of a round, what they draw and their order do not depend on workers; `load` and `locate` give any
    batch again, also one with repeated samples."""
    kinds = {}
    for name, words in ENGINES.items():
        with (
            loader("pad", 4, rank=1, world_size=3, **words) as one,
            loader("pad", 4, rank=0, world_size=2, **words) as other,
        ):
            kinds[name] = []
            for batch in one:
                assert one.last is not None
                assert torch.equal(other.load(one.last), batch)
                assert other.locate(one.last).indices == [number % 1000 for number, _ in rows(batch)]
                kinds[name].append(rows(batch))
    assert kinds["inline"] == kinds["threads"] == kinds["processes"]
    drawn = [row for batch in kinds["inline"] for row in batch]
    assert len(set(drawn)) == len(drawn), "a sample that is repeated draws other numbers"


def test_the_length_is_that_of_this_number_of_ranks() -> None:
    """Also what is left. Seen to fail: with the number of all ranks' batches."""
    for short in SHORTS:
        for ranks in (1, 3):
            with loader(short, rank=0, world_size=ranks) as one:
                length = len(one)
                remaining = [one.remaining for _ in one]
                assert remaining == list(range(length))[::-1]
                assert f"{length} batches an epoch" in str(one.graph)
    with loader(block=25) as one, pytest.raises(TypeError, match="no length"):
        len(one)


def test_a_schedule_of_a_mix_is_kept() -> None:
    """A round comes where its last sample stands, so no round is held up and none comes early. Seen to fail: with
    rounds in the order of their first samples."""
    mix = Mix({"a": range(100), "b": range(1000, 1100)}, [(0, {"a": 1}), (40, {"a": 1, "b": 1})], epoch_size=80)
    buckets = Buckets(keys=np.arange(200) % 3, batch_size=2)
    for ranks in (1, 2):
        fleet = [
            Loader.from_dataset(mix, shuffle=True, groups=buckets, rank=rank, world_size=ranks) for rank in range(ranks)
        ]
        lasts, seen = [], []
        for batches in zip(*fleet, strict=True):
            positions = np.concatenate([one.last.positions for one in fleet])
            lasts.append(positions.max())
            seen += list(zip(positions.tolist(), torch.cat(batches).tolist(), strict=True))
        assert lasts == sorted(lasts)
        assert sorted(position for position, _ in seen) == list(range(80))
        assert min(position for position, value in seen if value >= 1000) >= 40


def test_a_ledger_deals_them() -> None:
    with loader(infinite=True) as one, Ledger(one, max_open=12) as ledger:
        for at, _ in islice(ledger, 30):
            ledger.done(at)


def test_a_state_of_other_keys_or_sizes_is_refused() -> None:
    with loader() as one:
        next(iter(one))
        state = one.state_dict()
    assert json.loads(state["penstock"])["state"]["source"] == {"epoch": 0, "block": 0, "rounds": [[1, 1]]}
    for words, what in (
        ({"size": 4}, "batch_size was 3 and is 4"),
        ({"short": "pad"}, "short was 'carry' and is 'pad'"),
        ({"groups": Buckets(keys=KEYS[::-1], batch_size=3)}, "keys was"),
    ):
        with loader(**words) as other, pytest.raises(penstock.StateMismatch, match=what):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"groups": Buckets(keys=KEYS[:9])}, "there are 9 keys, but Images has 60 samples. Pass one key for each"),
        ({"batch_size": 8}, "each bucket is a batch. Leave them out here; Buckets has batch_size and short instead"),
        ({"drop_last": True}, "exclude each other: each bucket is a batch"),
        (
            {"tail": "drop"},
            (
                "tail='drop' is for short rounds, and Buckets with keys have none: their short='carry' decides. Leave "
                "tail out"
            ),
        ),
        ({"sampler": range(3), "shuffle": False}, "a sampler and groups exclude each other"),
    ],
)
def test_what_excludes_keys_is_refused(words: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        loader(**words)
