"""Packed: a dataset of packs that never change, with a length; and the file that keeps them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from torch.utils.data import IterableDataset

import penstock
from penstock import Loader, Mix, Packed, Packs

N = 50
LENGTHS = np.random.default_rng(1).lognormal(2, 1, N).astype(np.int64)
assert LENGTHS.min() == 0
assert LENGTHS.max() > 30
WAYS = [
    pytest.param({}, id="inline"),
    pytest.param({"num_workers": 2, "method": "thread"}, id="threads"),
    pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, id="spawned", marks=pytest.mark.soak),
]


class Sequences:
    def __init__(self, lengths=LENGTHS):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"tokens": 1000 * index + np.arange(self.lengths[index]), "drawn": penstock.sample().rng.random(self.lengths[index])}


class Together(Sequences):
    def __getitem__(self, index):
        raise AssertionError("one by one")

    def __getitems__(self, indices):
        return [{"tokens": 1000 * index + np.arange(self.lengths[index])} for index in indices]


class EpochAware(Sequences):
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return np.full(self.lengths[index], self.epoch)


def packed(dataset=None, lengths=LENGTHS, capacity=30, **words):
    return Packed(dataset or Sequences(), lengths, capacity, **{"block": 16, "pad": -1, **words})


def tokens_in(batches):
    return sorted(token for batch in batches for row in batch["tokens"] for token in row.tolist() if token >= 0)


EVERY = [1000 * index + place for index, length in enumerate(LENGTHS) for place in range(length)]


@pytest.mark.parametrize("way", [*WAYS, pytest.param({"num_workers": 1, "multiprocessing_context": "fork"}, id="forked")])
@pytest.mark.parametrize("dataset", [Sequences, Together])
def test_holds_every_place_once_whatever_loads_it(dataset, way, tmp_path):
    """Seen red with members that forget which piece they are."""
    cached = dataset is Together
    packs = packed(dataset(), cache=tmp_path / "packs" if cached else None)
    with Loader.from_dataset(packs, 2, shuffle=True, seed=3, **way) as loader:
        for _ in range(2):
            assert tokens_in(loader) == EVERY
    truncated = packed(oversize="truncate")
    with Loader.from_dataset(truncated, 2) as loader:
        assert tokens_in(loader) == [token for token in EVERY if token % 1000 < 30]


def test_packs_are_those_of_the_blocks_in_storage_order():
    packs, again = packed(), packed()
    assert (
        len(packs)
        == len(again)
        == sum(len(Packs(LENGTHS, 30).plan(np.arange(begin, min(begin + 16, N))).splits) - 1 for begin in range(0, N, 16))
    )
    assert str(packs._pack(3)) == str(again._pack(3))
    assert packs._pack(-1) == packs._pack(len(packs) - 1)
    for wrong in (len(packs), -len(packs) - 1):
        with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for {len(packs)} packs"):
            packs[wrong]


def test_fill_and_memory():
    """8 bytes a sequence, and one number a pack."""
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(5.8, 1.16, 8192)).astype(np.int64)
    packs = Packed(range(8192), lengths, 4096)
    assert lengths.sum() / (4096 * len(packs)) > 0.99
    assert packs._members.nbytes + packs._ends.nbytes < 8 * 8192 * 1.25


def test_tells_the_dataset_its_epoch_but_only_one_that_has_it():
    with Loader.from_dataset(packed(EpochAware()), 2) as loader:
        for epoch in range(2):
            assert {token for batch in loader for row in batch["tokens"].tolist() for token in row} == {-1, epoch}
    with pytest.raises(ValueError, match="EpochAware.set_epoch would be called while other threads"):
        Loader.from_dataset(packed(EpochAware()), 2, num_workers=2, method="thread")


class TestTheFile:
    def test_is_read_again_and_not_planned(self, tmp_path, monkeypatch):
        expected = [packed()._pack(index) for index in range(len(packed()))]
        packed(cache=tmp_path / "folder" / "packs")
        monkeypatch.setattr(Packs, "plan", lambda *_: pytest.fail("planned again"))
        packs = packed(cache=tmp_path / "folder" / "packs")
        sent = pickle.dumps(packs)
        assert len(sent) < 16 * N + 2000
        assert [pickle.loads(sent)._pack(index) for index in range(len(packs))] == expected
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["packs"]

    def test_of_other_packs_is_refused(self, tmp_path):
        path = tmp_path / "packs"
        packed(cache=path)
        for words, said in (
            ({"capacity": 31}, "capacity was 30 and is 31"),
            ({"block": 8}, "block was 16 and is 8"),
            ({"oversize": "truncate"}, "oversize was 'split' and is 'truncate'"),
            ({"lengths": LENGTHS + 1}, "lengths was '[0-9a-f]*' and is"),
        ):
            with pytest.raises(ValueError, match=f"packs was computed from something else: {said}.*Delete it"):
                packed(cache=path, **words)

    @pytest.mark.parametrize(
        ("damage", "said"),
        [
            (lambda data: data[:-8], r"has \d+ bytes, not \d+: it is damaged"),
            (lambda data: data + b"12345678", r"has \d+ bytes, not \d+: it is damaged"),
            (lambda data: data[:-3] + b"abc", "its checksum is wrong"),
            (lambda data: b"", "is not a file of penstock's"),
            (lambda data: b"hello\n", "is not a file of penstock's"),
            (lambda data: b"[1]\n", "is not a file of penstock's"),
            (lambda data: b"\xff\xfe", "is not a file of penstock's"),
        ],
    )
    def test_damaged_is_refused(self, damage, said, tmp_path):
        path = tmp_path / "packs"
        packed(cache=path)
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ValueError, match=said):
            packed(cache=path)

    def test_is_not_left_half_written(self, tmp_path, monkeypatch):
        monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        with pytest.raises(OSError, match="no room"):
            packed(cache=tmp_path / "packs")
        assert list(tmp_path.iterdir()) == []


def test_refuses_what_it_cannot_pack():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    for dataset, error, said in (
        (Stream(), TypeError, "Stream cannot be packed, because it cannot be read by index"),
        (iter([]), TypeError, "cannot be packed"),
        (Mix({"a": Sequences()}, {"a": 1}), ValueError, "packing a Mix would lose its weights"),
        (Sequences(LENGTHS[:9]), ValueError, "there are 50 lengths, and Sequences has 9 samples"),
    ):
        with pytest.raises(error, match=said):
            packed(dataset)
    with pytest.raises(ValueError, match=r"item \d+ has the length \d+, but the capacity is 30"):
        packed(oversize="error")
    with pytest.raises(ValueError, match="a sequence of 8388608 places would be cut into 8388608 pieces. Raise the capacity"):
        Packed([0], [2**23], 1)


def test_leaves_empty_sequences_out():
    """Seen red with packs of nothing, which cannot be loaded."""
    lengths = [0, 3, 0, 0, 2, 0]
    packs = Packed(Together(lengths), lengths, 3, block=1)
    assert [pack["tokens"][pack["segment_ids"] > 0].tolist() for pack in packs.__getitems__([*range(len(packs))])] == [
        [1000, 1001, 1002],
        [4000, 4001],
    ]
    assert len(Packed(Sequences([0, 0]), [0, 0], 3)) == 0
