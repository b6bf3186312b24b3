"""Packed samples: the sequences whole and in order, what marks their borders, their own random numbers, and clear words
for what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from ways import every_way

import penstock
from penstock import Loader, Packs
from penstock._fetch.packing import PackIndex, PackView
from penstock._random.sample_rng import numpy_generator

LENGTHS = [3, 12, 0, 5, 7, 2, 9, 1, 4]


def pack(*members):
    """Of (index, whole, start, length)."""
    indices, wholes, starts, lengths = map(list, zip(*members, strict=True))
    return PackIndex(indices, None, wholes, starts, lengths)


class Sequences(Dataset):
    """Sequence i is i, i + 0.01, i + 0.02, …; in hundredths."""

    def __init__(self, kind: Any = np.asarray, lengths: Any = LENGTHS) -> None:
        self.kind = kind
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return self.kind([100 * index + place for place in range(self.lengths[index])])


class Together(Sequences):
    """Loads many at once."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [Sequences.__getitem__(self, index) for index in indices]


class Random(Sequences):
    """A sequence of random numbers: its own, and of the global generators."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        own, n = penstock.sample(), self.lengths[index]
        return {
            "own": own.rng.random(n),
            "torch": torch.rand(n).numpy(),
            "position": np.full(n, own.position),
            "index": np.full(n, own.index),
        }


class TestAPack:
    @pytest.mark.parametrize("kind", [np.asarray, torch.tensor, list], ids=["array", "tensor", "list"])
    def test_lays_sequences_and_pieces_one_after_another(self, kind):
        """Seen red with position_ids that count on from sequence to sequence."""
        packed = PackView(Sequences(kind), 12, -1)[pack((3, 5, 0, 5), (2, 0, 0, 0), (1, 12, 10, 2), (0, 3, 0, 3))]
        assert {type(value) for value in packed.values()} == {torch.Tensor if kind is torch.tensor else np.ndarray}
        assert {name: value.tolist() for name, value in packed.items()} == {
            "tokens": [300, 301, 302, 303, 304, 110, 111, 0, 1, 2, -1, -1],
            "position_ids": [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 0, 0],
            "segment_ids": [1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0],
        }

    def test_has_every_field_of_its_sequences_cut_alike(self):
        class Fields(Sequences):
            def __getitem__(self, index):
                numbers = super().__getitem__(index)
                return {
                    "tokens": numbers.astype(np.uint16),
                    "features": torch.tensor(numbers)[:, None] * torch.ones(2),
                    "labels": numbers + 1,
                }

        packed = PackView(Fields(), 5, {"labels": -100})[pack((0, 3, 1, 2), (7, 1, 0, 1))]
        assert packed["tokens"].dtype == np.uint16
        assert packed["tokens"].tolist() == [1, 2, 700, 0, 0]
        assert packed["features"].dtype == torch.float32
        assert packed["features"].tolist() == [[1, 1], [2, 2], [700, 700], [0, 0], [0, 0]]
        assert packed["labels"].tolist() == [2, 3, 701, -100, -100]
        assert isinstance(packed["segment_ids"], torch.Tensor)


class Wrong(Sequences):
    def __init__(self, sequence: Any) -> None:
        super().__init__()
        self.sequence = sequence

    def __getitem__(self, index: int) -> Any:
        return self.sequence(index)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("sequence", "said"),
        [
            (lambda i: [0] * 4, r"lengths\[0\] is 3, but the field 'tokens' of sequence 0 has 4 places"),
            (
                lambda i: {"x": [0] * 3, "label": [7]},
                r"the field 'label' of sequence 0 has 1 places. Correct the lengths; or, .* drop it",
            ),
            (lambda i: {"x": [0] * 3, "id": 7}, r"the field 'id' of a sequence to pack must be an array, .* not 7"),
            (lambda i: ["a", "b", "c"], "the field 'tokens' of a sequence to pack must be an array, .* not array"),
            (
                lambda i: np.arange(3).astype("datetime64[s]"),
                "the field 'tokens' of a sequence to pack must be an array",
            ),
            (lambda i: "abc", "the field 'tokens' of a sequence to pack must be an array, .* not 'abc'"),
            (lambda i: [[1], [1, 2], [3]], "inhomogeneous|must be an array"),
            (lambda i: {"x": [0] * 3, "segment_ids": [0] * 3}, "the field 'segment_ids', which packing adds itself"),
            (lambda i: {}, "a sequence has no fields"),
            (
                lambda i: np.zeros(3, [np.int64, np.int32][i == 7]) if i != 7 else np.zeros(1, np.int32),
                "the field 'tokens' is ndarray of int32, .* here, but ndarray of int64",
            ),
            (
                lambda i: {"a" if i == 0 else "b": [0] * LENGTHS[i]},
                r"has the fields \['b'\], but those before it in the pack have \['a'\]",
            ),
        ],
    )
    def test_names_the_field_and_the_sequence(self, sequence, said):
        with pytest.raises(ValueError, match=said) as info:
            PackView(Wrong(sequence), 5)[pack((0, 3, 0, 3), (7, 1, 0, 1))]
        assert f"in a pack, at dataset index {7 if 'before' in str(info.value) else 0}" in info.value.__notes__

    @pytest.mark.parametrize(
        ("pad", "said"),
        [("0", "pad='0' must be a number"), ({"tokens": None}, "must be a number"), ([0], "must be a number")],
    )
    def test_padding_that_is_no_number(self, pad, said):
        with pytest.raises(ValueError, match=said):
            PackView(Sequences(), 5, pad)

    @pytest.mark.parametrize(
        ("pad", "kind", "said"),
        [
            (-100, lambda x: np.asarray(x, np.uint16), "pad=-100 does not fit the field 'tokens', which is uint16"),
            (
                300,
                lambda x: torch.tensor(x, dtype=torch.uint8),
                "pad=300 does not fit the field 'tokens', which is torch.uint8",
            ),
            (0.5, np.asarray, "pad=0.5 does not fit the field 'tokens', which is int64"),
            (float("nan"), np.asarray, "pad=nan does not fit"),
            (-1, lambda x: np.asarray(x) > 0, "pad=-1 does not fit the field 'tokens', which is bool"),
            (-1, lambda x: torch.tensor(x) > 0, "pad=-1 does not fit the field 'tokens', which is torch.bool"),
            ({"label": 1}, np.asarray, r"pad has a value for 'label', but the sequences have the fields \['tokens'\]"),
        ],
    )
    def test_padding_that_does_not_fit(self, pad, kind, said):
        with pytest.raises(ValueError, match=said):
            PackView(Sequences(kind), 5, pad)[pack((0, 3, 0, 3))]

    def test_what_getitems_returns_if_it_is_no_list_of_samples(self):
        class Batch(Sequences):
            def __getitems__(self, indices):
                return np.zeros((len(indices), 3))

        class Few(Sequences):
            def __getitems__(self, indices):
                return [[0] * 3]

        for dataset, came in ((Batch(), "a whole batch, a ndarray"), (Few(), "1 samples")):
            with pytest.raises((TypeError, ValueError), match=f"__getitems__ returned {came}"):
                PackView(dataset, 5).__getitems__([pack((0, 3, 0, 3), (7, 1, 0, 1))])


def loaded(dataset, packs=None, epochs=1, **words):
    words = {"batch_size": 2, "shuffle": True, "seed": 5, **words}
    with Loader.from_dataset(dataset, groups=packs or Packs(LENGTHS, 10), **words) as loader:
        return [[{name: value.tolist() for name, value in batch.items()} for batch in loader] for _ in range(epochs)]


def flat(batches, name):
    return np.array([value for batch in batches for row in batch[name] for value in row])


class TestALoaderOfPacks:
    @pytest.mark.filterwarnings("ignore:.* from the global random numbers in worker threads")  # "torch" does
    @every_way
    def test_gives_each_sequence_random_numbers_of_its_position_in_the_order(self, way):
        """The same for all pieces of a sequence, so they fit together. Seen red with members that draw from the pack's
        generator."""
        dataset, order = Random(), penstock.orders.ShuffledOrder(len(LENGTHS), 5)
        for epoch, batches in enumerate(loaded(dataset, epochs=2, **way)):
            real = flat(batches, "segment_ids") > 0
            own, positions, indices = (flat(batches, name)[real] for name in ("own", "position", "index"))
            assert order.indices(epoch, positions).tolist() == indices.tolist()
            for position in {*positions.tolist()}:
                assert {*own[positions == position]} <= {*numpy_generator(5, epoch, position).random(12)}
            assert len({*own}) == sum(LENGTHS)

    def test_seeds_the_global_generators_for_each_sequence(self):
        """Two pieces of sequence 1, which are in two packs, are cut from one sequence. Seen red without the seeding of
        members."""
        drawn = []
        for packs in (Packs(LENGTHS, 10), Packs(LENGTHS, 40)):
            (batches,) = loaded(Random(), packs, seed_global_rngs="always")
            real, index, numbers = (flat(batches, name) for name in ("segment_ids", "index", "torch"))
            drawn.append([{*numbers[(real > 0) & (index == one)]} for one in range(len(LENGTHS))])
            assert len(set().union(*drawn[-1])) == sum(LENGTHS)
        assert drawn[0] == drawn[1]

    @every_way
    @pytest.mark.parametrize("dataset", [Sequences, Together])
    def test_transforms_each_sequence_before_it_is_cut(self, dataset, way):
        def negated(sequence):
            return {"x": -1 - sequence, "drawn": np.full(len(sequence), penstock.sample().position)}

        empty = penstock.orders.ShuffledOrder(9, 5).indices(0, np.arange(9)).tolist().index(2)
        for batches in loaded(dataset(), epochs=2, transform=negated, **way):
            places = [-1 - token for token in flat(batches, "x") if token < 0]
            assert sorted(places) == [
                100 * index + place for index, length in enumerate(LENGTHS) for place in range(length)
            ]
        assert {*flat(loaded(dataset(), transform=negated, **way)[0], "drawn")} == set(range(9)) - {empty}

    def test_counts_packs_in_a_batch_and_in_its_length(self):
        with Loader.from_dataset(Sequences(), 2, groups=Packs(LENGTHS, 10, count=True), drop_last=True) as loader:
            assert len(loader) == 2
            assert [len(batch["tokens"]) for batch in loader] == [2, 2]
        with Loader.from_dataset(Sequences(), None, groups=Packs(LENGTHS, 10)) as loader:
            assert [batch["tokens"].shape for batch in loader] == [(10,)] * 5
            with pytest.raises(TypeError, match="has no length"):
                len(loader)

    def test_leaves_out_a_pack_with_a_bad_sequence_if_asked_to(self):
        class Bad(Sequences):
            def __getitem__(self, index):
                if index == 6:
                    raise OSError("disk")
                return super().__getitem__(index)

        with Loader.from_dataset(Bad(), 5, groups=Packs(LENGTHS, 10), on_error="skip") as loader:
            (batch,) = loader
            assert len(batch["tokens"]) == 4
            assert "dataset index [6, 7] packed (epoch 0, position" in loader.statistics().nodes[-1].failures.last
        with (
            Loader.from_dataset(Bad(), 5, groups=Packs(LENGTHS, 10)) as loader,
            pytest.raises(OSError, match="disk") as info,
        ):
            next(iter(loader))
        assert "in a pack, at dataset index 6" in info.value.__notes__


class TestWhatFromDatasetRefuses:
    @pytest.mark.parametrize(
        ("words", "error", "said"),
        [
            ({"groups": [1, 2]}, TypeError, r"groups=\[1, 2\] must be penstock.Packs"),
            ({"groups": Packs([1, 2], 10)}, ValueError, "there are 2 lengths, but Sequences has 9 samples"),
            ({"sampler": [0, 1]}, ValueError, "a sampler and groups exclude each other"),
            ({"batch_sampler": [[0, 1]]}, ValueError, "a sampler and groups exclude each other"),
            ({"tail": "pad"}, ValueError, "tail='pad' repeats items of an epoch"),
            (
                {"groups": penstock.Buckets(LENGTHS, 20), "batch_size": 4},
                ValueError,
                "Buckets and batch_size=4, drop_last=False exclude",
            ),
            (
                {"groups": penstock.Buckets(LENGTHS, 20), "drop_last": True},
                ValueError,
                "Buckets and batch_size=1, drop_last=True exclude",
            ),
            ({"groups": penstock.Buckets(LENGTHS, 20), "batch_size": None}, ValueError, "Buckets and batch_size=None"),
            ({"split": "within"}, ValueError, "split='within' splits each batch"),
            (
                {"dataset": penstock.nodes.IterableSource(range(9))},
                ValueError,
                "groups needs a dataset that is read by index",
            ),
            ({"transform": 5}, TypeError, "transform must be a function"),
        ],
    )
    def test_a(self, words, error, said):
        with pytest.raises(error, match=said):
            Loader.from_dataset(**{"dataset": Sequences(), "groups": Packs(LENGTHS, 10), **words})


def test_a_loader_of_buckets_gives_whole_batches_to_collate():
    with Loader.from_dataset(
        Sequences(list), groups=penstock.Buckets(LENGTHS, 20), collate_fn=list, shuffle=True, seed=1
    ) as loader:
        assert loader.batch_size is None
        batches = list(loader)
    assert sorted(map(len, (sequence for batch in batches for sequence in batch))) == sorted(LENGTHS)
    assert max(max(map(len, batch)) * len(batch) for batch in batches) <= 20
