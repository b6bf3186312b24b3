"""Resident data: the same batches as without it, gathered; refusals that state sizes; random numbers by position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import penstock
from penstock import BatchRng, Loader, Resident
from penstock._memory.tree import leaves
from penstock._random import batch_rng
from penstock._random.batch_rng import _signed
from penstock._random.sample_rng import epoch_word
from penstock._random.splitmix import GAMMA, mixed

N, B = 23, 4


class Samples(Dataset):
    """One field of every kind that can be held; counts its reads."""

    def __init__(self, n: int = N) -> None:
        self.n, self.read = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict:
        self.read += 1
        return {
            "image": np.full((3, 2), index, np.uint8),
            "pair": (torch.tensor([index, -index], dtype=torch.bfloat16), float(index)),
            "label": index,
            "flag": index % 2 == 0,
        }


def resident(dataset: object = None, **options: object) -> Resident:
    return Resident(Samples() if dataset is None else dataset, **options)


def loader(dataset: object, **options: object) -> Loader:
    return Loader.from_dataset(dataset, **{"batch_size": B, "shuffle": True, "seed": 7, **options})


def assert_same(one: object, other: object) -> None:
    assert type(one) is type(other)
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("ranks", [None, (0, 2), (1, 2)])
@pytest.mark.parametrize("how", [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 2}])
def test_batches_are_the_ordinary_loaders(how, ranks):
    """Value for value over three epochs, on each of two ranks, and the states too. Seen to fail: rows stored in reverse
    order."""
    ranked = {} if ranks is None else {"rank": ranks[0], "world_size": ranks[1]}
    with loader(resident(**how), **ranked) as held, loader(Samples(), **ranked) as ordinary:
        for _ in range(3):
            for one, other in zip(held, ordinary, strict=True):
                assert_same(one, other)
                assert held.state_dict() == ordinary.state_dict()


def test_each_rank_holds_the_whole_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun. Seen to fail: each rank loaded its share only, and the other rows were whatever memory held."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    rows = torch.arange(100, 700).reshape(100, 6)
    assert Resident(TensorDataset(rows)).fields[0].equal(rows)


def test_the_transform_is_applied_once():
    seen = []

    def doubled(sample: dict) -> torch.Tensor:
        seen.append(sample["label"])
        return torch.tensor(sample["label"] * 2)

    rows = resident(transform=doubled)
    with loader(rows, shuffle=False) as held:
        for _ in range(2):
            assert torch.cat(list(held)).tolist() == [2 * k for k in range(N)]
    assert seen == [0, *range(N)]  # the first one is compared


def test_one_row_and_out_of_bounds():
    rows = resident()
    assert rows[3]["label"] == rows[3 - N]["label"] == 3
    for index in (N, -N - 1):
        with pytest.raises(IndexError, match="out of bounds for 23 samples"):
            rows[index]
    with loader(rows, shuffle=False, sampler=[0, -1, 2, 5, 99]) as held:
        batches = iter(held)
        assert next(batches)["label"].tolist() == [0, N - 1, 2, 5]
        with pytest.raises(IndexError, match="99"):
            next(batches)


def test_too_large_is_refused_before_it_is_loaded_and_sizes_are_told():
    """Seen to fail: the check after the last batch, when everything was read."""
    dataset = Samples(10_000)
    with pytest.raises(ValueError, match=r"10000 samples of 27 bytes each take 0\.3 MB, more than max_bytes=1000"):
        resident(dataset, max_bytes=1000)
    assert dataset.read <= 65
    with pytest.raises(ValueError, match=r"take .* GB, more than 90 % of the .* GB free on cpu"):
        resident(range(2**50))


class Ragged(Samples):
    def __init__(self, odd: int) -> None:
        super().__init__(200)
        self.odd = odd

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3 if index < self.odd else 4)


@pytest.mark.parametrize("odd", [70, 128])  # within a batch that is read at once, and between two batches
def test_ragged_samples_are_refused_with_the_remedy(odd):
    with pytest.raises(ValueError, match=r"samples (64 to 127|128 to 191) differ in shape.*pad, crop.*Cached"):
        resident(Ragged(odd))


def test_what_cannot_be_held_is_refused():
    with pytest.raises(ValueError, match=r"also contains a (str|list) .*Convert it to a number"):
        resident([{"x": 1, "name": "a"}] * 3)
    with pytest.raises(ValueError, match="no tensor"):
        resident([{}] * 3)
    with pytest.raises(ValueError, match="This machine has: cpu"):
        resident(device="cuda:97")

    class Changing(Samples):
        def set_epoch(self, epoch: int) -> None:
            pass

    with pytest.raises(ValueError, match="has set_epoch"):
        resident(Changing())
    with pytest.raises(ValueError, match="needs no workers"):
        loader(resident(), num_workers=2)


def test_what_would_be_frozen_is_refused_or_told(caplog):
    """Seen to fail: `_Transformed` watching the dataset but not the transform."""
    with pytest.raises(
        ValueError, match=r"sample 0 of Samples drew from penstock.sample\(\).*Put the random part into augment"
    ):
        resident(transform=lambda one: one["image"] + penstock.sample().rng.random())
    assert caplog.text == ""
    resident(transform=lambda one: one["image"] + np.random.random())
    assert (
        caplog.text.count("sample 0 of Samples drew from the global random numbers")
        == caplog.text.count("drew from")
        == 1
    )


def test_an_error_of_the_dataset_comes_as_it_is():
    class Failing(Samples):
        def __getitem__(self, index: int) -> int:
            if index == 20:
                raise LookupError("no such file")
            return index

    with pytest.raises(LookupError, match="no such file") as raised:
        resident(Failing())
    assert "dataset index 20" in raised.value.__notes__[0]


def noisy(batch: dict, draws: BatchRng) -> dict:
    return {**batch, "noise": draws.uniform(2), "shift": draws.integers(-3, 4), "normal": draws.normal()}


def test_augmentation_is_the_same_on_any_number_of_ranks_and_after_a_resume():
    """Seen to fail: the place in the batch used instead of the position."""

    def by_label(**options: object) -> dict[int, tuple]:
        with loader(resident(augment=noisy), tail="exact", **options) as held:
            return {
                (epoch, int(label)): tuple(
                    float(value) for key in ("noise", "shift", "normal") for value in batch[key][row].flatten()
                )
                for epoch in range(2)
                for batch in held
                for row, label in enumerate(batch["label"])
            }

    alone = by_label()
    assert len(alone) == len(set(alone.values())) == 2 * N
    assert by_label(batch_size=3) == alone
    assert {**by_label(rank=0, world_size=2), **by_label(rank=1, world_size=2, batch_size=2)} == alone
    rows = resident(augment=noisy)
    with loader(rows) as one, loader(rows) as other:
        batches = iter(one)
        next(batches)
        other.load_state_dict(one.state_dict())
        for a, b in zip(batches, other, strict=True):
            assert_same(a, b)


def test_batch_rng():
    """Bounds, moments and independence of shape; golden values, because runs must be repeatable for years."""
    positions = torch.arange(100_000)
    rng = BatchRng(3, 1, positions)
    uniform, whole, normal = rng.uniform(), rng.integers(-2, 3), rng.normal(2)
    assert 0 <= uniform.min() < 0.001
    assert 0.999 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.005
    assert set(whole.tolist()) == {-2, -1, 0, 1, 2}
    assert torch.bincount(whole + 2).min() > 19_400
    assert normal.shape == (100_000, 2)
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    assert (
        abs(torch.corrcoef(torch.stack([uniform, whole.float(), normal[:, 0], normal[:, 1]])).fill_diagonal_(0)).max()
        < 0.02
    )
    together, apart = BatchRng(3, 1, positions[:5]), BatchRng(3, 1, positions[:5])
    assert torch.equal(together.uniform(2, 3).flatten(1), torch.cat([apart.uniform(1) for _ in range(6)], dim=1))
    assert torch.equal(BatchRng(3, 1, positions[7:8]).uniform(), uniform[7:8])
    assert BatchRng(1, 2, torch.arange(3)).integers(0, 1000, 2).tolist() == GOLDEN
    for low, high in ((0, 0), (3, 2), (0, 2**31 + 1)):
        with pytest.raises(ValueError, match="high must be above low"):
            rng.integers(low, high)


GOLDEN = [[575, 959], [211, 342], [5, 219]]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (3, 1), (2**63 - 1, 2**40)])
def test_batch_rng_is_the_documented_generator(seed, epoch):
    """Compared with whole numbers of Python. Seen to fail: with a word drawn twice, and without the sign of a word."""
    positions = [*range(20), 2**62, 2**63 - 1]

    def words(number):
        """Word ``number`` of each sample, counted from 1."""
        return [mixed(mixed((position ^ epoch_word(seed, epoch)) + GAMMA) + number * GAMMA) for position in positions]

    rng = BatchRng(seed, epoch, torch.tensor(positions))
    uniform, whole, normal = rng.uniform(2), rng.integers(-5, 2**31 - 5), rng.normal()
    assert uniform.tolist() == [
        [(one >> 40) / 2**24, (other >> 40) / 2**24] for one, other in zip(words(1), words(2), strict=True)
    ]
    assert whole.tolist() == [(word >> 2) % 2**31 - 5 for word in words(3)]
    radii = [math.sqrt(-2 * math.log(((word >> 11) + 1) / 2**53)) for word in words(4)]
    expected = [
        radius * math.cos(2 * math.pi * (word >> 11) / 2**53) for radius, word in zip(radii, words(5), strict=True)
    ]
    assert normal.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert rng.integers(7, 8, 1, 2).tolist() == [[[7, 7]]] * len(positions)
    assert rng.details() == {"samples": len(positions), "device": torch.device("cpu")}
    with pytest.raises(ValueError, match=r"^integers\(2, 2\): high must be above low"):
        rng.integers(2, 2)


def test_a_word_of_zeros_and_words_with_a_sign(monkeypatch):
    """Seen to fail: an infinite normal number; words that do not fit 64 bits."""
    rng = BatchRng(0, 0, torch.arange(2))
    monkeypatch.setattr(batch_rng, "mixed", torch.zeros_like)
    assert rng.normal().tolist() == pytest.approx([math.sqrt(2 * 53 * math.log(2))] * 2)
    assert [_signed(word) for word in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 2**63 - 1, -(2**63), -1]
