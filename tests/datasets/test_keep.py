"""keep: a subset chosen by looking at every sample once."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from penstock import Loader, Mix, SlidingOrder, keep

WAYS = [
    pytest.param({}, id="inline"),
    pytest.param({"num_workers": 2, "method": "thread"}, id="threads"),
    pytest.param({"num_workers": 2}, id="processes"),
]


class Squares:
    """Counts how often it is asked."""

    def __init__(self, n=700):
        self.n = n
        self.loads = 0

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.loads += 1
        return index**2

    def order(self, *, shuffle, seed):
        return SlidingOrder(self.n, 5, seed)


class Together(Squares):
    def __getitems__(self, indices):
        assert all(type(index) is int for index in indices)
        return [index**2 for index in indices]


def ends_in_one(sample):
    return sample % 10 == 1


KEPT = [n for n in range(700) if n**2 % 10 == 1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dataset", [Squares, Together])
def test_keeps_the_samples_for_which_the_predicate_holds_in_their_order(dataset, way, monkeypatch):
    """On every rank. Seen red without rank=0, world_size=1 (each rank then judges its share), and with the dataset's own order."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    kept = keep(dataset(), ends_in_one, **way)
    assert list(kept.indices) == KEPT
    assert type(kept) is Subset
    with Loader.from_dataset(kept, 50, rank=0, world_size=1) as loader:
        assert torch.cat(list(loader)).tolist() == [n**2 for n in KEPT]
    assert list(pickle.loads(pickle.dumps(kept)).indices) == KEPT


def test_takes_8_bytes_a_sample():
    assert len(pickle.dumps(keep(range(10_000), lambda sample: True).indices)) < 80_200


def test_of_arrays_is_still_gathered():
    data = TensorDataset(torch.arange(20.0))
    with Loader.from_dataset(keep(data, lambda sample: sample[0] > 15), 3) as loader:
        assert [batch[0].tolist() for batch in loader] == [[16, 17, 18], [19]]


@pytest.mark.parametrize("true", [True, np.True_, torch.tensor(True), np.array(True)])
def test_a_predicate_may_return_any_kind_of_bool(true):
    assert len(keep(range(3), lambda sample: true)) == 3


class TestTheFile:
    def test_is_read_instead_of_the_samples(self, tmp_path):
        for path in (tmp_path / "kept", str(tmp_path / "kept")):
            data = Squares()
            assert list(keep(data, ends_in_one, cache=path).indices) == KEPT
            assert data.loads == (0 if isinstance(path, str) else 700)

    def test_of_another_dataset_or_predicate_is_refused(self, tmp_path):
        class Versioned(Squares):
            def settings(self):
                return {"version": 2}

        class Printed(Squares):
            _fingerprint = "abc"

        path = tmp_path / "kept"
        keep(Squares(), ends_in_one, cache=path)
        for dataset, predicate, said in (
            (Squares(701), ends_in_one, "length was 700 and is 701"),
            (Squares(), lambda sample: True, "kept by was '.*ends_in_one' and is '.*test_keep"),
            (range(700), ends_in_one, "dataset was '.*Squares' and is 'builtins.range'"),
            (Versioned(), ends_in_one, "settings was None and is {'version': 2}"),
            (Printed(), ends_in_one, "fingerprint was None and is 'abc'"),
        ):
            with pytest.raises(ValueError, match=said):
                keep(dataset, predicate, cache=path)

    def test_says_what_it_is(self, tmp_path):
        keep(Squares(), ends_in_one, cache=tmp_path / "kept")
        head = json.loads((tmp_path / "kept").read_bytes().split(b"\n")[0])
        assert head["count"] == len(KEPT)
        assert head["of"]["kept by"].endswith("ends_in_one")

    def test_is_not_written_if_a_sample_fails(self, tmp_path):
        with pytest.raises(ZeroDivisionError) as info:
            keep(range(5), lambda sample: 1 / (sample - 3) > 0, cache=tmp_path / "kept")
        assert any("dataset index 3" in note for note in info.value.__notes__)
        assert list(tmp_path.iterdir()) == []


def test_what_makes_no_sense_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    class EpochAware(Squares):
        def set_epoch(self, epoch):
            pass

    for dataset, predicate, error, said in (
        (range(9), lambda sample: False, ValueError, "<lambda> keeps none of the 9 samples of range"),
        ([], ends_in_one, ValueError, "ends_in_one keeps none of the 0 samples of list"),
        (range(9), lambda sample: sample % 2, TypeError, "<lambda> must return True or False, but returned 0"),
        (range(9), 5, TypeError, "predicate must be a function of one sample, and 5 cannot be called"),
        (Stream(), ends_in_one, TypeError, "Stream cannot be filtered by keep"),
        (Mix({"a": Squares()}, {"a": 1}), ends_in_one, ValueError, "keeping samples of a Mix would lose its weights"),
        (ConcatDataset([EpochAware()]), ends_in_one, ValueError, "ConcatDataset has a set_epoch"),
    ):
        with pytest.raises(error, match=said):
            keep(dataset, predicate)
