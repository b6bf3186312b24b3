"""Token files: every sequence equals its slice of the concatenated files, byte for byte, whoever reads it; and what is
wrong with a file is said."""

from __future__ import annotations

import gc
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from format_laws import open_files
from pairwise import pairwise
from torch.utils.data import ConcatDataset, DataLoader, Subset
from ways import WAYS

from penstock import Loader, Mix
from penstock.formats import _tokens as module
from penstock.formats import tokens


def write(folder, sizes, dtype="uint16", suffix=".bin", seed=0, below=1000):
    """Files of random tokens, and all of their tokens in a row."""
    generator = np.random.default_rng(seed)
    paths, arrays = [], []
    for number, size in enumerate(sizes):
        arrays.append(generator.integers(0, below, size).astype(dtype))
        paths.append(folder / f"{seed}-{number:03}{suffix}")
        if suffix == ".npy":
            np.save(paths[-1], arrays[-1])
        else:
            arrays[-1].astype(np.dtype(dtype).newbyteorder("<")).tofile(paths[-1])
    return paths, np.concatenate(arrays).astype(np.int64)


SIZES = {
    "one file": [100],
    "several": [40, 1, 0, 33, 8, 61],
    "one long": [3, 900, 2],
    "smaller than a sequence": [3] * 40,
    "empty ends": [0, 50, 0],
}


@pytest.mark.parametrize(
    ("sizes", "overlap", "form"),
    pairwise(
        SIZES,
        [0, 1, 9],
        [
            ("uint16", ".bin"),
            ("uint16", ".npy"),
            ("uint8", ".bin"),
            ("int32", ".npy"),
            ("uint32", ".tokens"),
            ("int64", ".bin"),
        ],
    )[::2],
)
def test_each_sequence_is_its_slice_of_the_files(tmp_path, sizes, overlap, form):
    """One by one, by negative index, and gathered in any order. Seen to fail: `_inspected` with a header of 0 for
    ``.npy``; `TokenFiles.read` passing over a file."""
    dtype, suffix = form
    paths, expected = write(
        tmp_path,
        SIZES[sizes],
        dtype,
        suffix,
        below=200 if dtype == "uint8" else 60_000 if dtype == "uint16" else 100_000,
    )
    data = tokens(paths, 7, dtype=dtype, overlap=overlap)
    assert len(data) == (len(expected) - overlap) // 7
    slices = [torch.from_numpy(expected[7 * i : 7 * i + 7 + overlap]) for i in range(len(data))]
    for index, row in enumerate(slices):
        for at in (index, index - len(data)):
            assert list(data[at]) == ["tokens"]
            assert data[at]["tokens"].dtype == torch.int64
            assert data[at]["tokens"].equal(row)
    order = np.random.default_rng(1).permutation(2 * len(data)) - len(data)
    with Loader.from_dataset(data, batch_size=5, sampler=order.tolist()) as loader:
        batches = [batch["tokens"] for batch in loader]
    assert torch.cat(batches).equal(torch.stack([slices[index] for index in order]))
    for outside in (len(data), -len(data) - 1):
        with pytest.raises(IndexError, match=f"index {outside} is out of bounds for a dataset of {len(data)} samples"):
            data[outside]


@pytest.mark.parametrize("way", WAYS)
def test_batches_are_dataloaders(tmp_path, way):
    """In a mix of a subset and a concatenation, too; no sample is made."""
    parts = [tokens(write(tmp_path, [50, 20, 90], seed=seed)[0], 6, overlap=1, end_of_document=3) for seed in range(3)]
    data = ConcatDataset([Subset(parts[0], range(20, 3, -2)), ConcatDataset(parts[1:])])
    order = np.random.default_rng(1).permutation(len(data)).tolist()
    theirs = list(DataLoader(data, batch_size=7, sampler=order))
    with Loader.from_dataset(data, batch_size=7, sampler=order, **way) as loader:
        ours = list(loader)
    assert [list(batch) for batch in ours] == [["tokens", "position_ids", "segment_ids"]] * len(theirs)
    assert all(one[name].equal(two[name]) for one, two in zip(ours, theirs, strict=True) for name in two)


# Documents.


def borders(row, starts):
    """Position and segment of each token, one by one; ``starts`` are places in the row."""
    positions, segments = [], []
    for place in range(len(row)):
        begins = place == 0 or place in starts
        positions.append(0 if begins else positions[-1] + 1)
        segments.append(1 if place == 0 else segments[-1] + begins)
    return positions, segments


@pytest.mark.parametrize("overlap", [0, 1])
def test_documents_that_end_with_a_token(tmp_path, overlap):
    """Seen to fail: a document starting with the token that ends the one before; segments counted through the batch."""
    paths, expected = write(tmp_path, [40, 1, 33, 60], below=5)
    data = tokens(paths, 11, end_of_document=3, overlap=overlap)
    with Loader.from_dataset(data, batch_size=4) as loader:
        rows = [
            {name: field[k] for name, field in batch.items()} for batch in loader for k in range(len(batch["tokens"]))
        ]
    assert len(rows) == len(data) == (134 - overlap) // 11
    for index, row in enumerate(rows):
        whole = expected[11 * index : 11 * index + 11 + overlap].tolist()
        positions, segments = borders(whole, {place + 1 for place, token in enumerate(whole) if token == 3})
        assert row["tokens"].tolist() == whole
        assert row["position_ids"].tolist() == positions
        assert row["segment_ids"].tolist() == segments
        assert all(data[index][name].equal(row[name]) for name in row)
        assert all(field.dtype == torch.int64 for field in row.values())


def test_documents_by_their_starts(tmp_path):
    """Also empty ones, one at the very end, and none in a sequence. Seen to fail: `_documents` searching from the right
    (a document that starts with the sequence)."""
    paths, expected = write(tmp_path, [40, 1, 33, 60])
    starts = [0, 3, 3, 10, 22, 23, 40, 41, 41, 41, 80, 99, 133, 134]
    data = tokens(paths, 11, documents=starts, overlap=2)
    with Loader.from_dataset(data, batch_size=5) as loader:
        rows = [
            {name: field[k] for name, field in batch.items()} for batch in loader for k in range(len(batch["tokens"]))
        ]
    for index, row in enumerate(rows):
        positions, segments = borders(range(13), {start - 11 * index for start in starts})
        assert row["position_ids"].tolist() == positions
        assert row["segment_ids"].tolist() == segments
        assert row["tokens"].tolist() == expected[11 * index : 11 * index + 13].tolist()


# Files: opened when needed, few at a time, closed with the dataset.


def test_it_opens_nothing_before_it_is_read_and_closes_with_the_dataset(tmp_path):
    paths, _ = write(tmp_path, [100, 100])
    data = tokens(paths, 10)
    assert len(open_files(tmp_path)) == 0
    data[0]
    data[1]
    assert len(open_files(tmp_path)) == 1
    data[19]
    assert len(open_files(tmp_path)) == 2
    data.close()
    assert len(open_files(tmp_path)) == 0
    data.close()
    data[19]
    assert len(open_files(tmp_path)) == 1
    del data
    gc.collect()
    assert len(open_files(tmp_path)) == 0


def test_a_copy_is_small_and_opens_its_own_files(tmp_path):
    """Seen to fail: `TokenFiles.__getstate__` returning ``vars(self)`` (the copy closes the files of the first)."""
    paths, expected = write(tmp_path, [100_000, 10])
    data = tokens(paths, 10)
    data[0]
    pickled = pickle.dumps(data)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)
    assert len(open_files(tmp_path)) == 1
    assert copy[3]["tokens"].tolist() == expected[30:40].tolist()
    assert len(open_files(tmp_path)) == 2
    del copy
    assert data[4]["tokens"].tolist() == expected[40:50].tolist()


def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    """For all datasets together. Seen to fail: no ``popleft``."""
    monkeypatch.setattr(module, "MOST_OPEN", 3)
    first, second = (tokens(write(tmp_path, [10] * 20, seed=seed)[0], 5) for seed in range(2))
    for index in range(40):
        first[index]
        second[index]
        assert len(open_files(tmp_path)) <= 3


def test_a_file_that_is_closed_while_it_is_read(tmp_path, monkeypatch):
    """As another thread may do, which then opens another file under the same number. Seen to fail: `TokenFiles.read`
    not holding the descriptor that it reads from."""
    paths, expected = write(tmp_path, [50] * 2)
    data, preadv, opened = tokens(paths, 5), os.preadv, []

    def closing(descriptor, buffers, offset):
        data.close()
        opened.append(os.open(paths[1], os.O_RDONLY))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", closing)
    assert data[3]["tokens"].tolist() == expected[15:20].tolist()
    for descriptor in opened:
        os.close(descriptor)


def test_memory_does_not_grow_with_the_files(tmp_path):
    """10^9 sequences, in two sparse files."""
    for number in range(2):
        with open(tmp_path / f"{number}.bin", "wb") as file:
            file.truncate(4 * 10**12 + 200)
    data = tokens(tmp_path / "*.bin", 4000)
    assert len(data) == 10**9
    with open(tmp_path / "1.bin", "r+b") as file:
        file.seek(-200, os.SEEK_END)
        file.write(b"\1\1")
    assert len(pickle.dumps(data)) < 2000
    assert sorted(data[10**9 - 1]["tokens"].unique().tolist()) == [0]
    assert data[5 * 10**8]["tokens"].tolist() == [0] * 4000
    with Loader.from_dataset(data, batch_size=4, shuffle=True) as loader:
        assert next(iter(loader))["tokens"].shape == (4, 4000)


@pytest.mark.soak
def test_a_program_that_ends_with_files_open_says_nothing(tmp_path):
    """Seen to fail: `_Descriptor.__del__` reaching for ``os`` when the module is gone."""
    paths, _ = write(tmp_path, [100])
    script = (
        f"from penstock.formats._tokens import tokens; data = tokens({str(paths[0])!r}, 10); kept = [data]; "
        f"kept.append(kept); print(len(data[3]['tokens']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=400, check=True)
    assert (done.stdout, done.stderr) == ("10\n", "")


# What is wrong is said.


@pytest.mark.parametrize(
    ("how", "error", "why"),
    [
        (
            lambda path: os.truncate(path, 190),
            ValueError,
            " is shorter now than the 200 bytes it had when the dataset was built. Build the dataset",
        ),
        (lambda path: os.truncate(path, 210), ValueError, " is longer now than the 200 bytes"),
        (os.unlink, FileNotFoundError, ""),
    ],
    ids=["shorter", "longer", "gone"],
)
def test_a_file_that_has_changed_since(tmp_path, how, error, why):
    paths, _ = write(tmp_path, [100, 100])
    data = tokens(paths, 10)
    how(paths[1])
    data[9]
    with pytest.raises(error, match=f"001.bin{why}"):
        data[10]
    assert len(open_files(tmp_path)) == 1


def test_an_error_of_a_batch_names_its_source_in_a_mix(tmp_path):
    """Seen to fail: only the samples that are loaded one by one named it."""
    paths, _ = write(tmp_path, [100])
    mix = Mix({"code": tokens(paths, 10), "web": tokens(paths, 10)}, {"code": 1, "web": 1})
    os.truncate(paths[0], 20)
    with (
        Loader.from_dataset(mix, batch_size=4, shuffle=True) as loader,
        pytest.raises(ValueError, match="is shorter now") as caught,
    ):
        next(iter(loader))
    assert any(re.search("in the source '(code|web)' of a mix", note) for note in caught.value.__notes__)


def test_a_file_that_becomes_shorter_while_it_is_open(tmp_path):
    """It raises in every kind of worker, where a file that is mapped would kill the process. Seen to fail:
    `TokenFiles.read` without its check."""
    paths, _ = write(tmp_path, [100])
    data = tokens(paths, 10)
    data[9]
    os.truncate(paths[0], 190)
    with pytest.raises(ValueError, match=r"000.bin is shorter now than the 200 bytes"):
        data[9]
    data[8]


def test_a_file_that_grows_while_it_is_open(tmp_path):
    """A sequence that goes on in the next file does not read what has been added to the first."""
    paths, expected = write(tmp_path, [15, 15])
    data = tokens(paths, 10)
    data[1]
    with open(paths[0], "ab") as file:
        file.write(bytes(20))
    assert data[1]["tokens"].tolist() == expected[10:20].tolist()


def hundred(path):
    np.arange(100, dtype="uint16").tofile(path)


BAD = {
    "not whole": (
        lambda path: path.write_bytes(b"123"),
        {},
        "has 3 bytes of tokens, which is not a multiple of the size of uint16 .*Check dtype",
    ),
    "empty": (
        lambda path: path.write_bytes(b""),
        {},
        (
            r"holds 0 tokens of uint16, but one sequence takes 10 \(sequence_length=10, overlap=0\). Reduce "
            r"sequence_length"
        ),
    ),
    "short": (
        lambda path: np.arange(10, dtype="uint16").tofile(path),
        {"overlap": 1},
        "holds 10 tokens of uint16, but one sequence takes 11",
    ),
    "float": (
        lambda path: path.write_bytes(b"12"),
        {"dtype": "float32"},
        "dtype='float32' is not a little-endian integer type that fits into int64",
    ),
    "uint64": (
        lambda path: path.write_bytes(b"12"),
        {"dtype": "uint64"},
        "dtype='uint64' is not a little-endian integer type that fits into int64",
    ),
    "big-endian dtype": (
        lambda path: path.write_bytes(b"12"),
        {"dtype": ">u2"},
        r"dtype='>u2' is not a little-endian integer type .* array.astype\('<u2'\)",
    ),
    "no dtype": (
        lambda path: path.write_bytes(b"12"),
        {"dtype": "tokens"},
        "dtype='tokens' is not a little-endian integer type",
    ),
    "other dtype": (
        lambda path: save(path, np.arange(30, dtype="uint32")),
        {},
        r"holds an array of uint32 of shape \(30,\) instead of a 1-D array of uint16",
    ),
    "big-endian": (lambda path: save(path, np.arange(30, dtype=">u2")), {}, "holds an array of >u2 of shape"),
    "two dimensions": (
        lambda path: save(path, np.zeros((3, 9), "uint16")),
        {},
        r"of shape \(3, 9\) instead of a 1-D array .* flatten it",
    ),
    "cut off": (lambda path: cut(path), {}, "has 58 bytes"),
    "length": (
        lambda path: path.write_bytes(b"12"),
        {"sequence_length": 0},
        "sequence_length=0 must be a whole number of at least 1",
    ),
    "overlap": (
        lambda path: path.write_bytes(b"12"),
        {"overlap": -1},
        "overlap=-1 must be a whole number of at least 0",
    ),
    "token": (
        lambda path: path.write_bytes(b"12"),
        {"end_of_document": 70_000},
        "end_of_document=70000 must be a whole number below 65536. The files hold uint16",
    ),
    "descending": (
        hundred,
        {"documents": [0, 30, 20]},
        (
            r"documents must ascend from 0 to 100, .* begin with \[0, 30, 20\] and end with \[0, 30, 20\]. Pass the "
            r"document starts"
        ),
    ),
    "behind the end": (hundred, {"documents": [0, 50, 101]}, "documents must ascend from 0 to 100"),
    "before the start": (hundred, {"documents": [-1, 50]}, "documents must ascend from 0 to 100"),
    "no integers": (
        hundred,
        {"documents": [0.5, 1.5]},
        "documents must be a 1-D array of integers, not an array of float64 of shape",
    ),
    "no row": (hundred, {"documents": [[0, 1], [2, 3]]}, r"not an array of int64 of shape \(2, 2\)"),
    "both": (
        lambda path: path.write_bytes(b"12"),
        {"end_of_document": 1, "documents": [0]},
        "end_of_document and documents exclude each other",
    ),
    "another dtype of llm.c": (
        lambda path: llm_c(path, 100, 20240801, "uint32"),
        {},
        r"has the header of llm.c, by which its tokens take 4 bytes, .* Pass dtype='uint32'",
    ),
    "llm.c, cut off": (
        lambda path: (llm_c(path, 100), os.truncate(path, 1100)),
        {},
        "or not the length that its header states",
    ),
    "header beyond the end": (hundred, {"header_bytes": 300}, "has -100 bytes of tokens"),
    "a zip archive": (
        lambda path: path.write_bytes(b"PK\x03\x04" + bytes(200)),
        {},
        r"does not hold raw integers \(it is a zip archive.*\)\. If it does, pass header_bytes=0",
    ),
    "Megatron's index": (
        lambda path: path.write_bytes(b"MMIDIDX\0\0" + bytes(201)),
        {},
        "it is the index of a Megatron dataset",
    ),
    "wider tokens": (
        lambda path: np.arange(100, dtype="uint32").tofile(path),
        {},
        "every second token is 0, .* Pass dtype='uint32'",
    ),
    "narrower tokens": (
        lambda path: np.arange(256, 456, dtype="uint16").tofile(path),
        {"dtype": "int32"},
        "most of the first tokens are above 16,777,216, .* than int32. Pass dtype='uint16'",
    ),
}


def llm_c(path, n, magic=20240520, dtype="uint16"):
    """As llm.c and modded-nanogpt write them."""
    head = np.zeros(256, "<i4")
    head[:3] = magic, 1, n
    path.write_bytes(head.tobytes() + np.arange(1000, 1000 + n, dtype=dtype).tobytes())


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_the_header_of_llm_c_is_no_data(tmp_path, magic, dtype):
    """Seen to fail: 512 tokens of each file were its header."""
    for number in range(2):
        llm_c(tmp_path / f"{number}.bin", 100, magic, dtype)
    data = tokens(tmp_path / "*.bin", 50, dtype=dtype)
    assert [data[k]["tokens"][0].item() for k in range(len(data))] == [1000, 1050, 1000, 1050]


@pytest.mark.parametrize("nbytes", [0, 6, 1024])
def test_bytes_before_the_tokens_are_passed_over(tmp_path, nbytes):
    """Whatever they are; with 0, also those of llm.c are tokens."""
    data = np.arange(2000, 2600, dtype="uint16")
    data.tofile(tmp_path / "one.bin")
    assert (
        tokens(tmp_path / "one.bin", 20, header_bytes=nbytes)[0]["tokens"].tolist() == data[nbytes // 2 :][:20].tolist()
    )
    llm_c(tmp_path / "two.bin", 100)
    first = tokens(tmp_path / "two.bin", 20, header_bytes=nbytes)[0]["tokens"][0].item()
    assert first == {0: 20240520 % 2**16, 6: 0, 1024: 1000}[nbytes]


@pytest.mark.parametrize("beside", ["x.ds.index", "x.ds.metadata", "x.idx"])
def test_what_lies_beside_tokens_is_none(tmp_path, beside):
    """Seen to fail: datatrove's offsets of documents were tokens."""
    for name in ("x.ds", beside):
        np.arange(100, dtype="uint16").tofile(tmp_path / name)
    with pytest.raises(
        ValueError, match=f"{beside} lies beside a file of tokens, and holds none. Pass a pattern that matches"
    ):
        tokens(tmp_path / "x.*", 10)


def save(path, array):
    with open(path, "wb") as file:
        np.save(file, array)


def cut(path):
    save(path, np.arange(30, dtype="uint16"))
    os.truncate(path, path.stat().st_size - 2)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused_when_it_is_built(tmp_path, name):
    """Seen to fail: each check left out."""
    make, words, message = BAD[name]
    path = tmp_path / ("one.npy" if name in ("other dtype", "big-endian", "two dimensions", "cut off") else "one.bin")
    make(path)
    with pytest.raises(ValueError, match=message):
        tokens(path, **{"sequence_length": 10, **words})


@pytest.mark.parametrize(
    ("paths", "error", "why"),
    [
        ("nowhere.bin", FileNotFoundError, "nowhere.bin"),
        ("nowhere*.bin", FileNotFoundError, r"nowhere\*.bin"),
        ([], FileNotFoundError, r"paths=\[\] matches no file"),
        (
            "s3://b/one.bin",
            ValueError,
            (
                "one.bin cannot be read in place, because it is remote. Download it, or pass cache_dir= and "
                "max_cache_size=."
            ),
        ),
        ("one.bin.gz", ValueError, "one.bin.gz cannot be read in place, because it is compressed. Decompress it."),
        ("one.npy.zst", ValueError, "one.npy.zst cannot be read in place, because it is compressed. Decompress it."),
    ],
)
def test_a_file_that_is_not_there_or_cannot_be_read_in_place(paths, error, why):
    with pytest.raises(error, match=why):
        tokens(paths, 10)


def test_raw_numbers_under_the_name_of_an_array(tmp_path):
    """As some write them, with ``numpy.memmap``."""
    np.arange(1000, 1040, dtype="uint16").tofile(tmp_path / "one.npy")
    assert tokens(tmp_path / "one.npy", 20)[1]["tokens"].tolist() == [*range(1020, 1040)]
