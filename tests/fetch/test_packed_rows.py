"""Packs with fields of other sizes than their tokens: what a row and a batch of them look like, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from media import AXES, DECLARED, Documents
from ways import every_way

from penstock import Loader, Mix, Pack, Packs, StateMismatch, Stream, pad
from penstock.nodes import Fetch

PICTURES = {"pixel_values": 0, "image_grid_thw": 0}


class Made:
    """A dataset of the documents that ``make(index)`` returns."""

    def __init__(self, make: Any, n: int = 2) -> None:
        self.make = make
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def document(index: int, patches: int = 0, **more: Any) -> dict[str, Any]:
    return {"tokens": np.arange(3) + 10 * index, "pixels": np.full((patches, 2), index, np.float32), **more}


def loader(dataset: Any, packs: Packs | None = None, **words: Any) -> Loader[Any]:
    groups = packs or Packs([3] * len(dataset), 8, along={"pixels": 0})
    return Loader.from_dataset(dataset, **{"batch_size": 1, "groups": groups, **words})


def read(dataset: Any, packs: Packs | None = None, **words: Any) -> list[Any]:
    with loader(dataset, packs, **words) as batches:
        return list(batches)


class TestARow:
    def test_has_the_parts_of_its_documents_in_their_order_and_says_whose_they_are(self):
        """And, as one batch, counts through all rows. Seen to fail: offsets that begin anew in each row."""
        data = Made(lambda index: document(index, [2, 0, 1][index]), 3)
        (batch,) = read(data, Packs([3] * 3, 8, along={"pixels": 0}, cu_seqlens=True), batch_size=2)
        assert {name: value.tolist() if name != "max_seqlen" else value for name, value in batch.items()} == {
            "tokens": [[0, 1, 2, 10, 11, 12, 0, 0], [20, 21, 22, 0, 0, 0, 0, 0]],
            "pixels": [[0, 0], [0, 0], [2, 2]],
            "max_seqlen": 5,
            "position_ids": [[0, 1, 2, 0, 1, 2, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0]],
            "segment_ids": [[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]],
            "documents": [0, 1, 2],
            "pixels_offsets": [0, 2, 2, 3],
            "cu_seqlens": [0, 3, 6, 8, 11, 16],
        }
        assert (batch["cu_seqlens"].dtype, batch["pixels_offsets"].dtype, type(batch["max_seqlen"])) == (
            torch.int32,
            torch.int64,
            int,
        )

    def test_that_is_full_has_no_padding_among_its_borders(self):
        (batch,) = read(Made(lambda index: np.arange(4)), Packs([4, 4], 8, cu_seqlens=True))
        assert (batch["cu_seqlens"].tolist(), batch["max_seqlen"], "documents" in batch) == ([0, 4, 8], 4, True)

    @pytest.mark.parametrize("tensors", [False, True])
    def test_without_pictures_has_empty_ones_of_the_right_shape(self, tensors):
        """Whether samples have empty ones, or leave the fields out because an example is declared."""
        for leaves_out, along in ((False, AXES), (True, DECLARED)):
            if tensors and leaves_out:
                along = {name: torch.from_numpy(one) for name, one in DECLARED.items()}
            data = Documents([3, 2], [[], []], [0, 0], tensors=tensors, leaves_out=leaves_out)
            for collate_fn, kind in (
                (None, torch.Tensor),
                (lambda rows: rows[0], torch.Tensor if tensors else np.ndarray),
            ):
                (row,) = read(data, Packs([3, 2], 8, along=along), collate_fn=collate_fn)
                for name, one in DECLARED.items():
                    assert type(row[name]) is kind
                    assert (tuple(row[name].shape), str(row[name].dtype).removeprefix("torch.")) == (
                        one.shape,
                        str(one.dtype),
                    )
                    assert row[f"{name}_offsets"].tolist() == [0, 0, 0]

    def test_is_a_dict_for_a_collate_function_of_the_users_and_without_batches(self):
        data = Documents([3, 2], [[1], []], [0, 2])
        packs = Packs([3, 2], 8, along=AXES, cu_seqlens=True)
        ((row,),) = read(data, packs, collate_fn=list)
        (alone,) = read(data, packs, batch_size=None)
        (batch,) = read(data, packs)
        assert isinstance(row, dict)
        assert {type(value) for value in row.values()} == {np.ndarray, int}
        for name, value in alone.items():
            if name != "max_seqlen":
                assert torch.equal(value if value.dim() == batch[name].dim() else value[None], batch[name])
        assert [*row] == [*alone] == [*batch]

    @every_way
    def test_is_the_same_from_every_worker(self, way):
        """And from a dataset that loads many at once, with the default written out. Seen to fail: torch's own function,
        which cannot stack such rows."""

        class Together(Documents):
            def __getitems__(self, indices):
                return list(map(self.__getitem__, indices))

        data = Together([3, 2, 5, 1], [[1], [], [2, 1], []], [0, 2, 0, 1])
        way = {**way, "collate_fn": torch.utils.data.default_collate}
        batches = read(data, Packs(data.lengths, 6, along=AXES, cu_seqlens=True), batch_size=2, **way)
        here = read(data, Packs(data.lengths, 6, along=AXES, cu_seqlens=True), batch_size=2)
        assert len(batches) == len(here) == 1
        for name, value in here[0].items():
            assert value == batches[0][name] if name == "max_seqlen" else torch.equal(value, batches[0][name])


class TestPositionsOfTheSamples:
    @pytest.mark.parametrize("kind", [np.asarray, torch.tensor, list])
    @pytest.mark.parametrize("rows", [0, 1, 3, 4])
    def test_win(self, rows, kind):
        """Of one row, or of several as in M-RoPE. They are padded with 0. Seen to fail: ours in their place; padding
        with the token's value."""
        own = [[5, 7, 9], [11, 11, 12]]

        def make(index):
            positions = [[place + row for place in own[index]] for row in range(rows)] if rows else own[index]
            return {"tokens": kind([1, 2, 3]), "position_ids": kind(positions)}

        words = {"pad": 50} if rows != 3 else {"pad": {"tokens": 50, "position_ids": 9}}
        (batch,) = read(Made(make), Packs([3, 3], 8, **words))
        want = [
            [*(place + row for one in own for place in one), *[9 if rows == 3 else 0] * 2] for row in range(rows or 1)
        ]
        assert batch["position_ids"].tolist() == [want if rows else want[0]]
        assert batch["tokens"].tolist() == [[1, 2, 3, 1, 2, 3, 50, 50]]
        assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]

    def test_are_cut_with_the_document(self):
        make = Made(lambda index: {"tokens": np.arange(5), "position_ids": np.arange(5) + np.array([[0], [20]])}, 1)
        (batch,) = read(make, Packs([5], 3), batch_size=2)
        assert batch["position_ids"].tolist() == [[[0, 1, 2], [20, 21, 22]], [[3, 4, 0], [23, 24, 0]]]

    def test_must_be_one_for_each_token(self):
        make = Made(lambda index: {"tokens": np.arange(3), "position_ids": np.zeros((4, 3, 1), int)})
        with pytest.raises(ValueError, match="the field 'position_ids' of sequence 0 has 4 places"):
            read(make, Packs([3, 3], 8))
        make = Made(lambda index: {"tokens": np.arange(3), "position_ids": np.zeros((3, 2), int)})
        with pytest.raises(ValueError, match="the field 'position_ids' of sequence 0 has 2 places"):
            read(make, Packs([3, 3], 8))


class TestArguments:
    @pytest.mark.parametrize(
        ("along", "said"),
        [
            (["pixels"], r"along=\['pixels'\] must be a dict of one axis per field"),
            (
                {"pixels": -1},
                (
                    r"along\['pixels'\]=-1 must be a whole number of at least 0. It is the axis along which the field "
                    r"is concatenated, or"
                ),
            ),
            ({"pixels": 0.0}, r"along\['pixels'\]=0.0, a float, must be a whole number"),
            (
                {"pixels": np.zeros((2, 3))},
                r"along\['pixels'\] has the shape \(2, 3\), but .* must be empty along one axis, such as torch.empty",
            ),
            ({"pixels": torch.zeros(0, 0)}, r"along\['pixels'\] has the shape \(0, 0\)"),
            ({"position_ids": 0}, "along names 'position_ids', which packing adds itself"),
            ({"x": 0, "x_offsets": 0}, "along names 'x_offsets', which packing adds itself"),
            ({"documents": 0}, "along names 'documents', which packing adds itself"),
        ],
    )
    def test_that_name_no_media(self, along, said):
        with pytest.raises(ValueError, match=said):
            loader(Made(document), Packs([3, 3], 8, along=along))
        with pytest.raises(ValueError, match=said):
            Pack(8, along=along)

    @pytest.mark.parametrize(
        ("also", "said"),
        [
            (
                {"images": [1, 0, 2]},
                r"also\['images'\]=\[1, 0, 2\] must be a tuple of the counts by index and the limit",
            ),
            ({"images": ([1, 0, 2], 0)}, r"the limit of also\['images'\]=0 must be a whole number of at least 1"),
            (
                {"images": ([1, 0], 4)},
                r"also\['images'\] has 2 counts, but there are 3 lengths. Pass one count for each length",
            ),
            ({"images": ([1, -1, 2], 4)}, r"also\['images'\]\[1\] is -1, but a length must be a whole number from 0"),
            ({"images": ([1, float("nan"), 2], 4)}, r"also\['images'\]\[1\] is nan"),
            ({"images": ([1, 0.5, 2], 4)}, r"also\['images'\]\[1\] is 0.5"),
            (
                {"images": ([1, 0, 5], 4)},
                r"also\['images'\] counts 5 at index 2, but a pack is limited to 4. Raise the limit",
            ),
            (
                {"images": ([1, 3, 0], 4)},
                (
                    r"also\['images'\] counts 3 at index 1, but a sequence that takes .* is never cut, and the length "
                    r"there is above the capacity of 8. Raise"
                ),
            ),
            (
                {"images": ([1, 0, 0, 2], 4)},
                r"counts 2 at index 3, but the length there is 0, and such a sequence is left out",
            ),
            (
                {"images": ({"a": [1, 0, 2]}, 4)},
                r"also\['images'\] has \{'a': 3\} counts, but there are 3 lengths. .* both by source or neither",
            ),
        ],
    )
    def test_that_are_no_budget(self, also, said):
        """Seen to fail: pictures without a token were left out in silence."""
        lengths = [3, 9, 3] if "index 3" not in said else [3, 9, 3, 0]
        with pytest.raises(ValueError, match=said):
            Packs(lengths, 8, also=also)

    @pytest.mark.parametrize("oversize", ["split", "truncate", "error"])
    def test_that_would_cut_a_document_with_pictures(self, oversize):
        """If they are counted, it is known before the first batch. Seen to fail: without that check."""
        with pytest.raises(
            ValueError,
            match="counts 1 at index 1, but a sequence that takes some of a budget is never cut",
        ):
            Packs([3, 9], 8, also={"images": ([1, 1], 4)}, oversize=oversize)
        Packs([3, 9], 8, also={"images": ([1, 0], 4)})

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ({"length": int, "along": {"x": 0}}, "with length= a row is the list of its records. Drop one of them"),
            ({"length": int, "cu_seqlens": True}, "with length= a row is the list of its records. Drop one of them"),
            (
                {"crop": True, "along": {"x": 0}},
                (
                    "crop=True cuts sequences, but those with something in along= or also= must stay whole. Drop one "
                    "of them"
                ),
            ),
            ({"crop": True, "also": {"x": (len, 3)}}, "crop=True cuts sequences"),
            (
                {"also": {"x": ([1, 2], 3)}},
                r"also\['x'\]=\(\[1, 2\], 3\) must be a tuple of a function of one record and the limit",
            ),
            ({"also": {"x": (len, 0)}}, r"the limit of also\['x'\]=0 must be"),
        ],
    )
    def test_of_the_step_that_exclude_each_other(self, words, said):
        with pytest.raises(ValueError, match=said):
            Pack(8, **words)


class TestWhatIsRefusedOnLoading:
    @pytest.mark.parametrize(
        ("make", "words", "said"),
        [
            (
                lambda i: {"tokens": np.arange(3)},
                {},
                r"sequence 0 has no field 'pixels', so its type .* pass such an empty one as along\['pixels'\]",
            ),
            (lambda i: document(i, pixels=[]), {}, "sequence 0 has no field 'pixels'"),
            (lambda i: document(i, pixels=None), {}, "sequence 0 has no field 'pixels'"),
            (
                lambda i: document(i, pixels="png"),
                {},
                "the field 'pixels' of a sequence to pack must be an array, a tensor",
            ),
            (
                lambda i: document(i, pixels=np.zeros((1, 2 + i))),
                {},
                (
                    r"the field 'pixels' of sequence 1 is ndarray of float64, shape \(…, 3\), which differs from "
                    r"ndarray of float64, shape \(…, 2\), in along= or before it in the pack"
                ),
            ),
            (
                lambda i: document(i, pixels=np.zeros((1, 2), [np.int8, np.int16][i])),
                {},
                "the field 'pixels' of sequence 1 is ndarray of int16",
            ),
            (
                lambda i: document(i, pixels=torch.zeros(1, 2)),
                {"along": {"pixels": np.empty((0, 2))}},
                "sequence 0 is Tensor of torch.float32, .* from ndarray of float64, .* in along=",
            ),
            (
                lambda i: document(i, pixels=np.zeros(2)),
                {"along": {"pixels": 1}},
                (
                    r"the field .pixels. of sequence 0 is ndarray of float64, shape \(2\), which differs from one with "
                    r"an axis 1, as in along="
                ),
            ),
            (
                lambda i: document(i, 2),
                {"also": {"pixels": ([2, 1], 9)}},
                (
                    r"also\['pixels'\] counts 1 for sequence 1, but the field 'pixels' of sequence 1 has the size 2 "
                    r"along axis 0. Correct the counts"
                ),
            ),
            (lambda i: document(i, 2), {"lengths": [3, 2]}, r"lengths\[1\] is 2, but the field 'tokens'"),
            (
                lambda i: document(i, 1, grid=np.zeros((1, 3))),
                {},
                r"the field 'grid' of sequence 0 has 1 places. .* name it in along=",
            ),
            (lambda i: document(i, documents=np.arange(3)), {}, "the field 'documents', which packing adds itself"),
            (
                lambda i: document(i, pixels_offsets=np.arange(3)),
                {},
                "the field 'pixels_offsets', which packing adds itself",
            ),
            (lambda i: np.arange(3), {}, "sequence 0 has no field 'pixels'"),
        ],
    )
    def test_names_the_sample(self, make, words, said):
        """Seen to fail: the counts compared with the number of dimensions."""
        words = {"lengths": [3, 3], "capacity": 8, "along": {"pixels": 0}, **words}
        with pytest.raises(ValueError, match=said) as info:
            read(Made(make), Packs(**words))
        assert any("in a pack, at dataset index" in note for note in info.value.__notes__)

    @pytest.mark.parametrize(
        ("record", "step", "said"),
        [
            (
                document(0),
                Pack(8, also={"images": (lambda record: 5, 4)}),
                "a record takes 5 of 'images', but a row is limited to 4",
            ),
            (
                document(0),
                Pack(8, also={"images": (lambda record: 0.5, 4)}),
                r"also\['images'\]\(record\)=0.5, a float, must be a whole number",
            ),
            (document(0), Pack(8, also={"images": (lambda record: -1, 4)}), r"also\['images'\]\(record\)=-1"),
            (
                np.arange(9),
                Pack(8, also={"images": (lambda record: 1, 4)}),
                "has length 9, but the capacity is 8, and a record that takes some of a budget .* is never cut",
            ),
            (
                document(0, 1, tokens=[]),
                Pack(8, along={"pixels": 0}),
                "no place for a token, but something in along= or also=",
            ),
            (
                np.arange(0),
                Pack(8, also={"images": (lambda record: 1, 4)}),
                "no place for a token, but something in along= or also=",
            ),
            (
                document(0, 2),
                Pack(8, along={"pixels": 0}, also={"pixels": (lambda record: 1, 4)}),
                r"also\['pixels'\] counts 1 for sequence 0, but .* the size 2",
            ),
        ],
    )
    def test_by_the_step(self, record, step, said):
        with pytest.raises(ValueError, match=said):
            list(step(iter([record])))

    @pytest.mark.parametrize("way", ["split", "truncate", "step"])
    def test_a_document_with_pictures_is_never_cut(self, way):
        """But one without is. Seen to fail: its pieces, each with all pictures."""
        for patches in (0, 1):
            data = Made(lambda index, patches=patches: document(index, patches), 1)
            if way == "step":
                rows = lambda data=data: list(Pack(2, along={"pixels": 0})(iter([data[0]])))  # noqa: E731
            else:
                rows = lambda data=data: read(data, Packs([3], 2, along={"pixels": 0}, oversize=way))  # noqa: E731
            if patches:
                said = (
                    "sequence 0 is longer than the capacity of 2, but has a field 'pixels': .* never cut. Raise the "
                    "capacity, or drop that sequence, for example with"
                )
                with pytest.raises(ValueError, match=said):
                    rows()
            else:
                assert len(rows()) == (1 if way == "truncate" else 2)


class TestBatches:
    def test_of_packs_and_other_samples_are_refused(self):
        """Also if the pack is not the first. Seen to fail: the pictures left out of the batch without a word."""
        (pack,) = Pack(8, along={"pixels": 0})(iter([document(0, 1)]))
        (plain,) = Pack(8)(iter([np.arange(3)]))
        (other,) = Pack(8, along={"pixels": 0}, cu_seqlens=True)(iter([document(0, 1)]))
        for rows in ([pack, plain], [plain, pack], [pack, other], [pack, {**pack}], [pack, 3]):
            with pytest.raises(
                (ValueError, TypeError), match="make no batch with other samples, or with packs of other fields"
            ):
                Fetch(rows)([0, 1])

    def test_are_not_padded(self):
        """Seen to fail: borders padded with 0, as if they had begun again."""
        with pytest.raises(TypeError, match="packs with along= or cu_seqlens= are not padded: leave collate_fn out"):
            read(Made(lambda index: np.arange(3)), Packs([3, 3], 8, cu_seqlens=True), collate_fn=pad(0))

    def test_keep_fields_that_a_step_or_a_transform_adds_and_the_tag_of_a_mix(self):
        def labelled(row):
            row["labels"] = row["tokens"] + 1
            return row

        def stream(begin):
            def records(shard):
                return iter([document(begin + index, index) for index in range(4)])

            return Stream(2, records, steps=[Pack(8, along={"pixels": 0})], epoch_size=1, bookmarks=False)

        mix = Mix({"a": stream(0), "b": stream(50)}, {"a": 1, "b": 1}, epoch_size=8, tag="source")
        for batch in read(mix, groups=None, batch_size=4, transform=labelled):
            assert (batch["labels"] == batch["tokens"] + 1).all()
            assert len(batch["source"]) == 4
            firsts = [
                int(row[segments == number][0])
                for row, segments in zip(batch["tokens"], batch["segment_ids"], strict=True)
                for number in range(1, segments.max() + 1)
            ]
            parts = batch["pixels"].tensor_split(batch["pixels_offsets"][1:-1])
            assert [part[:, 0].tolist() for part in parts] == [[first // 10] * (first // 10 % 50) for first in firsts]

    def test_survive_pickle_and_a_copy(self):
        (row,) = Pack(8, along={"pixels": 0}, cu_seqlens=True)(iter([document(0, 1)]))
        for other in (pickle.loads(pickle.dumps(row)), row | {}):
            assert type(row)(dict.fromkeys(row, 1)).keys() == row.keys()  # as Accelerate and Lightning make a copy
            batch = Fetch([row, other])([0, 1])
            assert batch["cu_seqlens"].tolist() == [0, 3, 8, 11, 16]


class TestAState:
    def test_of_other_budgets_is_refused(self):
        """By what they are, and by what they count. Seen to fail: without them in the settings."""

        def packs(counts, limit=4):
            return Packs([3] * 6, 8, also={"images": (counts, limit)} if counts else None)

        data = Made(lambda index: np.arange(3), 6)
        with loader(data, packs([1] * 6)) as one:
            next(iter(one))
            state = one.state_dict()
        loader(data, packs([1] * 6)).load_state_dict(state)
        for other in (packs([1] * 5 + [2]), packs([1] * 6, 5), packs(None)):
            with pytest.raises(StateMismatch, match="also"):
                loader(data, other).load_state_dict(state)

    def test_of_a_step_with_other_media_or_budgets_is_refused(self):
        """Also if a function holds something else."""

        def build(**words):
            def records(shard):
                return iter([document(index, index % 2) for index in range(8)])

            return Loader.from_dataset(
                Stream(2, records, steps=[Pack(8, **words)], epoch_size=4, bookmarks=False), batch_size=1
            )

        def counting(most):
            return {"along": {"pixels": 0}, "also": {"images": (lambda record: min(most, len(record["pixels"])), 4)}}

        with build(**counting(2)) as one:
            next(iter(one))
            state = one.state_dict()
        build(**counting(2)).load_state_dict(state)
        for words in (
            counting(1),
            {"along": {"pixels": 0}},
            {**counting(2), "cu_seqlens": True},
            {"along": {"pixels": np.empty((0, 2), np.float32)}},
        ):
            with pytest.raises(StateMismatch):
                build(**words).load_state_dict(state)
