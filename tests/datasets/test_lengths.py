"""lengths: an integer for each sample, computed in parallel and kept in a file, like what `filtered` keeps."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from ways import every_way

from penstock import Loader, Mix, Packs, filtered, lengths
from penstock.orders import SequentialOrder


class Documents:
    def __init__(self, n=700):
        self.n = n
        self.loads = 0

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.loads += 1
        return np.arange(index % 7)


def size(sample, more=0):
    return len(sample) + more


def as_tensor(sample):
    return torch.tensor(-len(sample))


SIZES = [index % 7 for index in range(700)]


@every_way
def test_are_those_of_each_sample_by_index(way, monkeypatch):
    """On every rank. Seen to fail: each rank's share alone."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    way = {key: value for key, value in way.items() if key != "multiprocessing_context"}
    found = lengths(Documents(), size, **way)
    assert (found.tolist(), found.dtype, found.flags.writeable) == (SIZES, np.int64, False)
    assert lengths(Documents(3), as_tensor).tolist() == [0, -1, -2]
    assert lengths([], size).tolist() == []
    with Loader.from_dataset(Documents(), groups=Packs(found, 12), rank=0, world_size=1) as loader:
        assert sum(int((batch["segment_ids"] > 0).sum()) for batch in loader) == sum(SIZES)


def test_are_kept_in_a_file_of_that_dataset_and_function(tmp_path):
    """Seen to fail: the samples loaded again; another function's lengths returned."""
    data, path = Documents(), tmp_path / "lengths"
    for loads in (701, 701):  # the first one is compared
        assert lengths(data, size, path).tolist() == SIZES
        assert data.loads == loads
    assert len(filtered(data, is_long)) == 200
    for dataset, function, said in (
        (Documents(701), size, "length was 700 and is 701"),
        (data, as_tensor, "measured by was .*size' and is .*as_tensor'"),
        (data, partial(size, more=1), "function was '.*' and is '.*'. Delete it"),
    ):
        with pytest.raises(ValueError, match=said):
            lengths(dataset, function, path)
    with pytest.raises(ValueError, match="kept by was None and is .*; measured by was .*size' and is None"):
        filtered(data, is_long, cache=path)
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    with pytest.raises(ValueError, match="its checksum is wrong"):
        lengths(data, size, path)


def is_long(sample):
    return len(sample) > 4


def test_what_makes_no_sense_is_refused(tmp_path):
    for dataset, function, error, said in (
        (Documents(9), 5, TypeError, "function must be a function of one sample, but 5 is not callable"),
        (Documents(9), lambda sample: 1.5, TypeError, "<lambda> must return an integer of 64 bits, but returned 1.5"),
        (Documents(9), lambda sample: True, TypeError, "must return an integer of 64 bits, but returned True"),
        (
            Documents(9),
            lambda sample: 2**63,
            TypeError,
            "must return an integer of 64 bits, but returned 9223372036854775808",
        ),
        (
            Mix({"a": Documents(9)}, {"a": 1}),
            size,
            ValueError,
            r"a Mix is measured by source: pass \{name: lengths\(source, function\)",
        ),
    ):
        with pytest.raises(error, match=said):
            lengths(dataset, function)
    with pytest.raises(ValueError, match="<lambda> cannot be pickled .* Use a module-level function"):
        lengths(Documents(9), lambda sample: 1, tmp_path / "lengths")
    assert not list(tmp_path.iterdir())


class TestBySource:
    def packs(self, **of):
        return Packs(of, 8)

    def mix(self):
        return Mix({"web": [np.full(3, 1)] * 2, "code": [np.full(5, 2)] * 3}, {"web": 1, "code": 1}, epoch_size=4)

    def test_they_are_those_of_the_mix_by_name(self):
        """In whatever order they are given. Seen to fail: the order of the dict in place of that of the names."""
        mix = self.mix()
        measured = {
            name: lengths(source, size) for name, source in (("web", mix.datasets[1]), ("code", mix.datasets[0]))
        }
        also = {"images": ({"web": [1, 0], "code": [0, 2, 1]}, 2)}
        packs = Packs(measured, 8, also=also)
        assert packs.lengths.tolist() == [5, 5, 5, 3, 3]
        assert packs.also["images"][0].tolist() == [0, 2, 1, 1, 0]
        with Loader.from_dataset(mix, groups=packs, batch_size=1, order=SequentialOrder(5)) as loader:
            assert sum(int((batch["segment_ids"] > 0).sum()) for batch in loader) == 21

    def test_a_name_or_a_length_that_is_wrong_is_refused(self):
        """Before the first batch. Seen to fail: names that only sort alike."""
        for packs, dataset, said in (
            (
                self.packs(web=[3, 3], text=[5] * 3),
                self.mix(),
                r"missing are \['code'\], unknown are \['text'\], and of another number are \{\}",
            ),
            (
                self.packs(web=[3, 3]),
                self.mix(),
                r"Mix has \{'code': 3, 'web': 2\}: missing are \['code'\], unknown are \[\]",
            ),
            (
                self.packs(web=[3] * 2, code=[5] * 2),
                self.mix(),
                r"missing are \[\], unknown are \[\], and of another number are \{'code': 2\}",
            ),
            (self.packs(web=[3, 3]), [np.full(3, 1)] * 2, "lengths is a dict by source, but list has no sources"),
        ):
            with pytest.raises(ValueError, match=said):
                Loader.from_dataset(dataset, groups=packs)
        for given, said in (
            ({"a": [1, -1]}, r"lengths\['a'\]\[1\] is -1"),
            ({"a": {"b": [1]}}, r"lengths\['a'\] have shape"),
        ):
            with pytest.raises(ValueError, match=said):
                Packs(given, 8)
        images = {"images": ({"web": [1], "code": [0, 2, 1]}, 2)}
        with pytest.raises(
            ValueError, match=r"also\['images'\] has \{'code': 3, 'web': 1\} counts, but .* both by source or neither"
        ):
            Packs({"web": [3, 3], "code": [5] * 3}, 8, also=images)
