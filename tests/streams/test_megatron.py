"""Megatron's ``.bin`` and ``.idx``: the sequences are those of the ``.bin``, the documents those of the ``.idx``, and
what is wrong with either is said."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from contextlib import closing
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from format_laws import every_way, open_files, read
from megatron_files import index, write
from pairwise import mostly_soak

from penstock import Buckets, Loader, Mix, Packs, pad
from penstock.formats import megatron, megatron_documents, tokens
from penstock.testing import assert_resumes_everywhere


def some(count, seed=0, below=1000):
    """Documents of up to three sequences, some of them empty."""
    generator = np.random.default_rng(seed)
    return [
        [generator.integers(0, below, size).tolist() for size in generator.integers(0, 9, generator.integers(0, 4))]
        for _ in range(count)
    ]


def joined(document):
    return [token for sequence in document for token in sequence]


@pytest.fixture
def folder(tmp_path):
    """Three files; their documents are `DOCUMENTS`."""
    for number, part in enumerate(PARTS):
        write(tmp_path / f"part_{number}", part)
    return tmp_path


PARTS = [some(12, 0), [[[], []]], [*some(9, 1), []]]
DOCUMENTS = [joined(document) for part in PARTS for document in part]
STARTS = np.cumsum([0, *map(len, DOCUMENTS)])


def test_documents_are_their_sequences_one_after_another(folder):
    """One by one and in batches. Seen to fail: lengths of sequences in place of documents; a border between two files
    that counts as a document; an empty document at the end that was read."""
    with closing(megatron_documents(folder / "part_*")) as data:
        assert data.lengths.tolist() == [len(document) for document in DOCUMENTS]
        assert data.lengths.dtype == np.int64
        assert [data[i]["tokens"].tolist() for i in range(len(data))] == DOCUMENTS
        assert [data[i - len(data)]["tokens"].tolist() for i in range(len(data))] == DOCUMENTS
        assert list(data[0]) == ["tokens"]
        assert {data[i]["tokens"].dtype for i in range(len(data))} == {torch.int64}
        for outside in (len(data), -len(data) - 1):
            with pytest.raises(IndexError, match=f"index {outside} is out of bounds for {len(data)} documents"):
                data[outside]


def test_sequences_are_those_of_the_tokens_with_their_documents(folder):
    """Seen to fail: the borders of each file counted from its own start."""
    with (
        closing(megatron(folder / "part_*", 7, overlap=1)) as data,
        closing(tokens(folder / "part_*.bin", 7, overlap=1, documents=STARTS)) as expected,
    ):
        assert len(data) == len(expected) == (STARTS[-1] - 1) // 7
        assert data.shard_names == expected.shard_names == megatron_documents(folder / "part_*").shard_names
        for one, two in [(data[i], expected[i]) for i in range(len(data))]:
            assert list(one) == ["tokens", "position_ids", "segment_ids"]
            assert all(one[name].equal(two[name]) for name in two)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_the_index_says_what_the_tokens_are(tmp_path, dtype):
    """Seen to fail: a width of 2 bytes for all."""
    most = int(np.iinfo(dtype).max)
    write(tmp_path / "one", [[[1, most], [0]], [[most - 1]]], dtype)
    with closing(megatron_documents(tmp_path / "one")) as data:
        assert [data[i]["tokens"].tolist() for i in range(2)] == [[1, most, 0], [most - 1]]


@pytest.mark.parametrize(
    "prefix",
    [
        "part_{0..2}",
        "part_*",
        "part_{0..2}.bin",
        "part_*.idx",
        ["part_0.idx", "part_[12]"],
        ["part_0", "part_1.bin", "part_2"],
    ],
)
def test_a_prefix_is_a_path_of_either_file_or_a_pattern(folder, prefix):
    """In the order of a list. Seen to fail: ``.bin`` added to a path that ends in it."""
    many = [prefix] if isinstance(prefix, str) else prefix
    with closing(megatron_documents([folder / one for one in many])) as data:
        assert [data[i]["tokens"].tolist() for i in range(len(data))] == DOCUMENTS
    with closing(megatron_documents([str(folder / one) for one in ("part_2", "part_0")])) as data:
        assert data.lengths.tolist() == [len(joined(document)) for part in (2, 0) for document in PARTS[part]]


# The laws.

WHAT = ["sequences", "documents", "packs", "mix"]
THREADS, RANK = {"num_workers": 2, "method": "thread"}, {"rank": 2, "world_size": 3}


@every_way
def test_packs_and_buckets_have_every_token_once(folder, way):
    """Seen to fail: `Documents.__getitem__` without its modulo, or with lengths that begin at the second document."""
    data = megatron_documents(folder / "part_*")
    expected = sorted(token for document in DOCUMENTS for token in document)
    packs = Packs(data.lengths, 16, block=8, pad=-1)
    rows = [row["tokens"].tolist() for row in read(data, groups=packs, shuffle=True, seed=1, collate_fn=list, **way)[0]]
    assert sorted(token for row in rows for token in row if token >= 0) == expected
    with Loader.from_dataset(
        data, groups=Buckets(data.lengths, 60), collate_fn=pad({"tokens": -1}), shuffle=True, **way
    ) as loader:
        assert (
            sorted(token for batch in loader for token in batch["tokens"].flatten().tolist() if token >= 0) == expected
        )


@pytest.mark.parametrize(
    ("what", "options"),
    [
        *product(WHAT, [{}]),
        *mostly_soak(product(WHAT, [THREADS]), [("sequences", THREADS), ("packs", THREADS)]),
        *mostly_soak(product(WHAT, [RANK]), [("documents", RANK), ("mix", RANK)]),
        pytest.param("mix", {"num_workers": 2, "method": "process"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_resumes_everywhere(folder, what, options):
    """Seen to fail: `Documents` that reads on where the last one ended."""

    def loader():
        words = {"batch_size": 3 if "rank" in options else 8, "shuffle": True, "seed": 5, **options}
        if what in ("documents", "packs"):
            data = megatron_documents(folder / "part_*")
            words |= {"groups": Packs(data.lengths, 16, block=8)} if what == "packs" else {"collate_fn": list}
        else:
            data = megatron(folder / "part_*", 5)
        if what == "mix":
            data = Mix({"a": data, "b": megatron(folder / "part_2", 5)}, {"a": 0.7, "b": 0.3}, epoch_size=24)
        return Loader.from_dataset(data, **words)

    assert_resumes_everywhere(loader, steps=8 if what == "mix" else 12)


def test_ranks_share_the_documents(folder):
    """Each of 3 ranks reads a third, together all, none twice."""
    found = [
        read(megatron_documents(folder / "part_*"), shuffle=True, seed=2, rank=rank, world_size=3)[0]
        for rank in range(3)
    ]
    assert sorted(sample["tokens"].tolist() for rank in found for sample in rank) == sorted(DOCUMENTS)


def sparse(prefix, documents):
    """10^9 tokens of uint16."""
    lengths = np.full(documents, 10**9 // documents)
    prefix.with_suffix(".idx").write_bytes(index(lengths, np.arange(documents + 1)))
    with open(prefix.with_suffix(".bin"), "wb") as file:
        file.truncate(2 * 10**9)
        file.seek(-4, os.SEEK_END)
        file.write(b"\7\0\7\0")


def test_a_state_does_not_grow_with_the_data(tmp_path):
    """Nor what is read of a million documents. Seen to fail: a document read from the start of its file."""
    sparse(tmp_path / "large", 10**6)
    sequences, data = megatron(tmp_path / "large", 4000), megatron_documents(tmp_path / "large")
    assert (len(sequences), len(data)) == (250_000, 10**6)
    assert sequences[249_999]["segment_ids"][-1] == 4
    assert data[len(data) - 1]["tokens"][-3:].tolist() == [0, 7, 7]
    with Loader.from_dataset(data, batch_size=2, shuffle=True, seed=1) as loader:
        batches = [batch["tokens"] for batch, _ in zip(loader, range(5), strict=False)]
        state = loader.state_dict()
    assert len(json.dumps(state)) < 1000
    with Loader.from_dataset(data, batch_size=2, shuffle=True, seed=1) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader))["tokens"].shape == batches[0].shape


def test_files_are_opened_when_they_are_read_and_closed_at_the_end(folder):
    for data in (megatron(folder / "part_*", 5), megatron_documents(folder / "part_*")):
        assert open_files(folder) == []
        data[0]
        assert len(open_files(folder)) == 1
        with closing(pickle.loads(pickle.dumps(data))) as copy:
            assert str(copy[1]) == str(data[1])
            assert len(open_files(folder)) == 2
        data.close()
        assert open_files(folder) == []


# What is wrong is said.


def bad(lengths=(3, 4), documents=(0, 1, 2), dtype="uint16", *, add=b"", cut=0, data=None, **other):
    """An index and a ``.bin``, with something wrong."""
    said = index(lengths, documents, dtype, **other)
    return said[: len(said) - cut] + add, bytes(sum(lengths) * np.dtype(dtype).itemsize) if data is None else data


BAD = {
    "legacy": (
        bad(magic=b"TNTIDX\0\0\1"),
        r"begins with b'TNTIDX.*Write its documents again with IndexedDatasetBuilder",
    ),
    "other": (
        bad(magic=b"something"),
        r"one.idx is not an index of an IndexedDataset, because it begins with b'something'",
    ),
    "version": (bad(version=2), "one.idx has version 2 and uint16, but must have version 1"),
    "float64": (bad(dtype="float64"), "one.idx has version 1 and float64, but must have version 1 and integers"),
    "type": (bad(code=9), "one.idx has version 1 and the unknown token type 9"),
    "empty": ((b"", b""), "one.idx is damaged .* it has 0 bytes, but its header alone takes 34"),
    "in the magic": ((b"MMID", b""), "it has 4 bytes, but its header alone takes 34"),
    "cut": (bad(cut=1), "one.idx is damaged .* 2 sequences and 3 document boundaries take 82 bytes, but it has 81"),
    "too long": (bad(add=b"123"), "take 82 bytes, but it has 85"),
    "modes": (
        bad(modes=[0, 1]),
        r"one.idx is multimodal: .* IndexedDataset\(prefix, multimodal=True\) .* or write the sequences of one mode",
    ),
    "huge": (bad(sequences=2**64 - 1, borders=2**63), "sequences and 9223372036854775808 document boundaries take"),
    "negative": (bad([3, -1, 5], [0, 3], data=bytes(14)), "one.idx is damaged .* sequence 1 has -1 tokens"),
    "gap": (bad(pointers=[0, 8]), "sequence 1 begins at byte 8, but those before it take 6 bytes without a gap"),
    "overlap": (bad(pointers=[0, 4]), "sequence 1 begins at byte 4, but those before it take 6"),
    "first border": (bad(documents=[1, 1, 2]), r"should ascend from 0 to 2, .* but they begin with \[1, 1, 2\]"),
    "last border": (bad(documents=[0, 1]), r"end with \[0, 1\]; did its writer call end_document\?"),
    "past the end": (bad(documents=[0, 2, 3]), r"end with \[0, 2, 3\]"),
    "descending": (bad([1] * 3, [0, 2, 1, 3]), r"should ascend from 0 to 3"),
    "no borders": (bad(documents=[]), r"they begin with \[\]"),
    "short data": (
        bad(data=bytes(13)),
        (
            "one.bin has 13 bytes, but according to .*one.idx it should have 14: 7 tokens of uint16. One of them is "
            "another version"
        ),
    ),
    "long data": (bad(data=bytes(16)), "one.bin has 16 bytes, but according to .*one.idx it should have 14"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_right_is_refused_when_it_is_built(tmp_path, name):
    """Seen to fail: each check left out."""
    (said, data), message = BAD[name]
    (tmp_path / "one.idx").write_bytes(said)
    (tmp_path / "one.bin").write_bytes(data)
    for way in (megatron_documents, lambda prefix: megatron(prefix, 1)):
        with pytest.raises(ValueError, match=message):
            way(tmp_path / "one")


def test_arguments_that_make_no_sense(folder):
    write(folder / "wide", [[[1, 2]]], "int32")
    for words, message in (
        ({"sequence_length": 0}, "sequence_length=0 must be a whole number of at least 1"),
        ({"overlap": -1}, "overlap=-1 must be a whole number of at least 0"),
        (
            {"sequence_length": 10**6},
            rf"part_0.bin and 2 more hold {STARTS[-1]} tokens of uint16, but one sequence takes 1000000",
        ),
        (
            {"prefixes": [folder / "part_0", folder / "wide"]},
            r"part_0.idx holds uint16 and .*wide.idx holds int32, .* ConcatDataset or Mix",
        ),
        ({"prefixes": "s3://bucket/one"}, "s3://bucket/one.bin cannot be read in place, because it is remote"),
    ):
        with pytest.raises(ValueError, match=message):
            megatron(**{"prefixes": folder / "part_*", "sequence_length": 5, **words})
    (folder / "part_1.idx").unlink()
    for prefix, message in (
        (folder / "part_*", "part_1.idx"),
        (folder / "nowhere", "nowhere.idx"),
        (folder / "no*", r"no\*.bin"),
        ([], r"prefixes=\[\] matches no file"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            megatron_documents(prefix)


@pytest.mark.parametrize(
    ("how", "error", "why"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 2), ValueError, " is shorter now"),
        (lambda path: os.truncate(path, path.stat().st_size + 2), ValueError, " is longer now"),
        (os.unlink, FileNotFoundError, ""),
        (lambda path: os.utime(path, ns=(0, path.stat().st_mtime_ns + 1)), ValueError, ".* it was written to"),
    ],
    ids=["shorter", "longer", "gone", "written anew"],
)
@pytest.mark.parametrize("way", [lambda paths: megatron(paths, 5), megatron_documents], ids=["sequences", "documents"])
def test_a_file_that_has_changed_since_is_an_error_that_names_it(folder, way, how, error, why):
    """Also to one of equal size, because the documents are those of the index that was read. Seen to fail: only sizes
    compared."""
    with closing(way(folder / "part_*")) as data:
        how(folder / "part_2.bin")
        data[0]
        with pytest.raises(error, match=f"part_2.bin{why}"):
            [data[number] for number in range(len(data))]


def test_a_file_that_becomes_shorter_while_it_is_open(folder):
    """Seen to fail: the rest of a document left as it was in memory."""
    with closing(megatron_documents(folder / "part_0")) as data:
        data[0]
        os.truncate(folder / "part_0.bin", 2 * int(data.lengths.sum()) - 2)
        with pytest.raises(ValueError, match="part_0.bin is shorter now"):
            data[int(np.flatnonzero(data.lengths)[-1])]


def test_a_state_of_other_documents_is_refused(folder):
    """By the names of the files, and with packs by their lengths."""

    def loader():
        data = megatron_documents(folder / "part_*")
        return Loader.from_dataset(data, batch_size=2, groups=Packs(data.lengths, 16, block=8))

    with loader() as one:
        state = one.state_dict()
    first = PARTS[0][::-1]
    write(folder / "part_0", first)
    with loader() as one, pytest.raises(ValueError, match="lengths"):
        one.load_state_dict(state)


# Beside megatron.core.


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint8"])
def test_it_equals_the_dataset_of_megatron_core(tmp_path, dtype):
    """What its builder writes is read here, what `write` writes is read there, and both are byte for byte the same
    (0.16.1)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of what else is not installed
        theirs = pytest.importorskip(
            "megatron.core.datasets.indexed_dataset",
            reason="megatron-core is not installed: pip install --no-deps megatron-core",
        )
    documents = [document for document in some(30, 3, below=250) if document]
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=getattr(np, dtype))
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    write(tmp_path / "ours", documents, dtype)
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
    for prefix in ("ours", "theirs"):
        expected = theirs.IndexedDataset(str(tmp_path / prefix), multimodal=False)
        rows, borders = (
            [expected[number].tolist() for number in range(len(expected))],
            expected.document_indices.tolist(),
        )
        type(expected.index).__getitem__.cache_clear()  # or the file stays open
        with closing(megatron_documents(tmp_path / prefix)) as data:
            assert len(data) == len(borders) - 1 == len(documents)
            assert [data[i]["tokens"].tolist() for i in range(len(data))] == [
                joined(rows[begin:end]) for begin, end in pairwise(borders)
            ]
        with closing(megatron(tmp_path / prefix, 5)) as sequences:
            assert (
                joined([sequences[i]["tokens"].tolist() for i in range(len(sequences))])
                == joined(rows)[: 5 * len(sequences)]
            )
