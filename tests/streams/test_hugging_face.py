"""Hugging Face: datasets read by index as they are; streams of known lengths, with the samples that iterating over them
gives."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from format_laws import every_way, read

import datasets
import penstock
from penstock import Loader, Mix
from penstock.formats import hf
from penstock.testing import plain

N = 26
JOINED = "(Take|VerticallyConcatenatedMultiSources)ExamplesIterable"
"""Before version 5, joined streams are refused themselves."""


def by_index():
    return datasets.Dataset.from_dict(
        {"id": list(range(N)), "text": [f"text {i}" for i in range(N)], "tokens": [[i] * (i % 4) for i in range(N)]}
    )


def stream(shards=5):
    return by_index().to_iterable_dataset(num_shards=shards)


def tenfold(row):
    return {"ten": 10 * row["id"]}


def numbered(row, number):
    return {"number": number}


def upper(batch):
    return {"id": batch["id"], "text": [text.upper() for text in batch["text"]]}


class TestByIndex:
    @every_way
    def test_as_it_is(self, way):
        data = hf(by_index())
        expected = penstock.orders.ShuffledOrder(N, 7).indices(0, np.arange(N)).tolist()
        assert read(data, shuffle=True, seed=7, **way) == [[by_index()[index] for index in expected]]

    def test_with_a_format_or_a_transform(self):
        data = hf(by_index().with_format("torch", columns=["id"]))
        with Loader.from_dataset(data, batch_size=N) as loader:
            assert torch.equal(next(iter(loader))["id"], torch.arange(N))
        data = hf(by_index().with_format("numpy", columns=["tokens"]))
        assert plain(read(data)) == [plain(list(data))]
        assert read(hf(by_index().with_transform(upper))) == [[{"id": i, "text": f"TEXT {i}"} for i in range(N)]]


class TestStreams:
    def test_the_samples_of_hugging_face(self):
        """Seen to fail: shards numbered from the back."""
        data = hf(stream())
        assert len(data) == N
        assert repr(read(data)) == repr([list(stream())]) == repr([list(by_index())])
        assert [data[index] for index in (25, 3, 3, 11)] == [by_index()[index] for index in (25, 3, 3, 11)]

    @pytest.mark.parametrize(
        "change",
        [
            lambda ds: ds.map(tenfold),
            lambda ds: ds.select_columns("id"),
            lambda ds: ds.rename_column("id", "number").remove_columns("text"),
            lambda ds: ds.cast_column("id", datasets.Value("int16")),
            lambda ds: ds.with_format("numpy"),
            lambda ds: ds.with_format("torch"),
            lambda ds: ds.map(tenfold).select_columns(["ten"]).with_format("numpy"),
        ],
        ids=["map", "select", "rename", "cast", "numpy", "torch", "several"],
    )
    def test_steps_that_keep_the_count(self, change):
        """From the beginning of each shard, and from its middle."""
        data, expected = hf(change(stream())), plain(list(change(stream())))
        assert plain(read(data)) == [expected]
        assert plain([data[index] for index in (25, 3, 14)]) == [expected[index] for index in (25, 3, 14)]

    def test_a_mix_with_one_read_by_index(self):
        mix = Mix({"a": hf(stream()), "b": hf(by_index())}, {"a": 1, "b": 1}, epoch_size=2 * N, tag="of")
        (epoch,) = read(mix, shuffle=True)
        assert sorted((row["of"], row["id"]) for row in epoch) == sorted(itertools.product("ab", range(N)))

    def test_parquet_files_with_counts(self, tmp_path):
        for number in range(3):
            pq.write_table(
                pa.table({"id": range(10 * number, 10 * number + 4 + number)}),
                tmp_path / f"{number}.parquet",
                row_group_size=3,
            )
        ds = datasets.load_dataset(
            "parquet",
            data_files=str(tmp_path / "*.parquet"),
            split="train",
            streaming=True,
            cache_dir=str(tmp_path / "cache"),
        )
        assert read(hf(ds, counts=[4, 5, 6])) == [list(ds)]
        with pytest.raises(
            ValueError, match=r"the number of samples in each of the 3 shards is unknown\. Pass counts="
        ):
            hf(ds)

    @pytest.mark.skipif(
        not hasattr(datasets.config, "SAVE_ORIGINAL_SHARD_LENGTHS"), reason="older versions never say them"
    )
    def test_lengths_that_the_dataset_says(self, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "SAVE_ORIGINAL_SHARD_LENGTHS", True)
        for number in range(3):
            (tmp_path / f"{number}.jsonl").write_text(
                "".join(f'{{"id": {10 * number + k}}}\n' for k in range(2 + number))
            )
        builder = datasets.load_dataset_builder(
            "json", data_files=str(tmp_path / "*.jsonl"), cache_dir=str(tmp_path / "cache")
        )
        builder.download_and_prepare()
        ds = builder.as_streaming_dataset("train")
        assert read(hf(ds)) == [[{"id": i} for i in (0, 1, 10, 11, 12, 20, 21, 22, 23)]]

    def test_a_filter_whose_results_were_counted(self):
        ds = stream().filter(lambda row: row["id"] % 2 == 0)
        counts = [len(list(ds.shard(5, shard))) for shard in range(5)]
        assert read(hf(ds, counts)) == [list(ds)]

    @pytest.mark.parametrize(
        "change",
        [
            lambda ds: ds.take(7),
            lambda ds: ds.skip(20),
            lambda ds: ds.batch(4),
            lambda ds: ds.map(numbered, with_indices=True),
            lambda ds: ds.repeat(2),
            lambda ds: datasets.interleave_datasets([ds, stream(1).map(tenfold)]),
            lambda ds: datasets.concatenate_datasets([ds.take(3), ds.skip(23)]),
        ],
        ids=["take", "skip", "batch", "indices", "repeat", "interleave", "concatenated"],
    )
    def test_any_step_over_a_single_shard(self, change):
        """Fails if a stream is not sharded anew each time it is opened: readers then share the state of an interleaved
        one."""
        expected = list(change(stream(1)))
        shards = change(stream(1)).num_shards
        counts = [len(list(change(stream(1)).shard(shards, shard))) for shard in range(shards)]
        data = hf(change(stream(1)), counts)
        assert read(data) == [expected]
        assert [data[index] for index in reversed(range(len(expected)))] == expected[::-1]


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("change", "step"),
        [
            (lambda ds: ds.take(7), "TakeExamplesIterable"),
            (lambda ds: ds.skip(20).map(tenfold), "SkipExamplesIterable"),
            (lambda ds: ds.repeat(2), "RepeatExamplesIterable"),
            (lambda ds: ds.batch(4), "MappedExamplesIterable"),
            (lambda ds: ds.map(upper, batched=True), "MappedExamplesIterable"),
            (lambda ds: ds.add_column("number", list(range(N))), "MappedExamplesIterable"),
            (lambda ds: ds.filter(lambda row, index: index % 2, with_indices=True), "FilteredExamplesIterable"),
            (lambda ds: datasets.interleave_datasets([ds, ds]), "CyclingMultiSourcesExamplesIterable"),
            (
                lambda ds: datasets.interleave_datasets([ds, ds], [0.5, 0.5], seed=1),
                "RandomlyCyclingMultiSourcesExamplesIterable",
            ),
            (lambda ds: datasets.concatenate_datasets([ds, ds.take(7)]), JOINED),
            (
                lambda ds: datasets.interleave_datasets([stream(1), datasets.concatenate_datasets([ds.take(7), ds])]),
                JOINED,
            ),
        ],
    )
    def test_steps_that_look_beyond_a_sample(self, change, step):
        """Fails if shards are read one by one that make up other samples than the stream: take(7) gave two from each of
        five shards."""
        for words in ({"counts": [2] * change(stream()).num_shards}, {"epoch_size": 10}, {}):
            with pytest.raises(
                ValueError,
                match=f"the step {step} looks beyond one sample.* Or pass the stream itself to Loader.from_dataset",
            ):
                hf(change(stream()), **words)
        with Loader.from_dataset(change(stream()), batch_size=1, collate_fn=lambda rows: rows[0]) as loader:
            assert list(loader) == list(change(stream()))

    @pytest.mark.parametrize(
        ("change", "step"),
        [
            (lambda ds: ds.filter(bool), "FilteredExamplesIterable"),
            (lambda ds: ds.filter(bool).select_columns("id"), "FilteredExamplesIterable"),
            (lambda ds: datasets.concatenate_datasets([ds]).filter(bool), "FilteredExamplesIterable"),
        ],
    )
    def test_steps_that_may_change_the_count(self, change, step):
        with pytest.raises(
            ValueError, match=f"the number of samples in each of the .* shards is unknown after the step {step}"
        ):
            hf(change(stream()))

    @pytest.mark.parametrize("counts", [None, [6, 5, 5, 5, 5, 6, 5, 5, 5, 5]])
    def test_joined_streams(self, counts):
        """Fails if they are sharded side by side, as by datasets 4, and the shards are not the stream in its order."""
        joined = datasets.concatenate_datasets([stream(), stream()])
        if counts is None or joined.num_shards != 10:
            with pytest.raises(ValueError, match=r"the step VerticallyConcatenatedMultiSourcesExamplesIterable"):
                hf(joined, counts)
        else:
            assert read(hf(joined, counts)) == [list(joined)]

    def test_a_shuffled_stream(self):
        with pytest.raises(
            ValueError,
            match=(
                r"this stream was shuffled.* Pass the stream without \.shuffle\(\), and pass shuffle=True to the loader"
            ),
        ):
            hf(stream().shuffle(seed=1).map(tenfold))
        with pytest.raises(ValueError, match="this stream was shuffled"):
            hf(datasets.concatenate_datasets([stream(), stream().shuffle(seed=1)]), [3] * 10)

    def test_counts_that_do_not_fit(self):
        """How many records a shard has, is seen when it ends."""
        counts = [len(list(stream().shard(5, shard))) for shard in range(5)]
        with pytest.raises(ValueError, match="should have 5 records, but it ended after 4"):
            read(hf(stream().filter(lambda row: row["id"] != 7), counts))
        for wrong in ([1, 2], [], [1] * 6):
            with pytest.raises(ValueError, match=rf"{len(wrong)} counts for 5 shards"):
                hf(stream(), wrong)

    def test_anything_else(self):
        with pytest.raises(
            TypeError, match=r"a DatasetDict with the splits 'train'\. Choose one: hf\(dataset\['train'\]\)"
        ):
            hf(datasets.DatasetDict(train=by_index()))
        for what in ("fineweb", None, [1, 2]):
            with pytest.raises(TypeError, match="hf takes a datasets.Dataset or a datasets.IterableDataset, not a "):
                hf(what)
