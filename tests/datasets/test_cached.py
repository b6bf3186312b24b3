"""A cache returns what the dataset returned, loads each sample once for everybody, and survives the death of any
process that fills it."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from forks import ended, forked
from resumable import Resumable
from torch.utils.data import ConcatDataset, Subset

import penstock
from penstock import Cached, ClosedError, Loader
from penstock._datasets import cache_files

if TYPE_CHECKING:
    from collections.abc import Callable

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="memory without a name, and locks of an opened file, are Linux's"
)
N = 12


class Counted:
    """Sample i is an array of i + 1 rows of ``1000 * version + i``; each call, from any process, appends a line to a
    file."""

    def __init__(self, log: Path, n: int = N, *, version: int = 0, columns: int = 3) -> None:
        self.log = log
        self.n = n
        self.version = version
        self.columns = columns

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        note(self.log, index)
        return self.right(index)

    def right(self, index: int) -> dict[str, Any]:
        return {"rows": np.full((index + 1, self.columns), 1000 * self.version + index, np.int32), "index": index}

    def calls(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


class Gathered(Counted):
    """Reads many samples at once."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        note(self.log, *indices)
        return [self.right(index) for index in indices]


class Even(Counted):
    """Samples of one shape."""

    def right(self, index: int) -> dict[str, Any]:
        return {"rows": np.full((2, self.columns), index), "index": index}


class One:
    """A dataset of one sample."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample
        self.called = 0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        self.called += 1
        return self.sample() if callable(self.sample) else self.sample


class Point(NamedTuple):
    x: Any
    y: Any


Pair = collections.namedtuple("Pair", ["left", "right"])


def note(log: Path, *indices: int) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, "".join(f"{index}\n" for index in indices).encode())
    os.close(fd)


def same(one: Any, other: Any) -> bool:
    """Equal in type, dtype, shape and bits, except that all Python nans are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        bits = [
            tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one.resolve_conj(), other.resolve_conj())
        ]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


@pytest.fixture(params=[pytest.param("memory", marks=linux), "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "cache" if request.param == "folder" else None


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "calls")


# What a cache returns.

SAMPLES = {
    "plain": [
        None,
        True,
        False,
        0,
        -1,
        2**200,
        1.5,
        -0.0,
        float("inf"),
        float("nan"),
        1e-320,
        3 - 0.0j,
        "",
        "a\0ü\ud800",
        b"",
        b"\0\xff",
    ],
    "containers": {"a": [], "b": (), "c": {}, 1: ((1,), [2]), None: {"": None}, 2.5: [[]], False: 0},
    "named": [Point(1, [torch.ones(2)]), Pair(Point(None, 2), b"x")],
    "tensors": [
        *(
            torch.tensor([[float("nan"), -0.0], [float("inf"), 1]], dtype=getattr(torch, name))
            for name in ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
        ),
        *(
            torch.tensor([0, 1, 100], dtype=getattr(torch, name))
            for name in ["bool", "uint8", "int8", "uint16", "int16", "int32", "uint64", "int64"]
        ),
        torch.tensor([0.5, -1, 448]).to(torch.float8_e4m3fn),
    ],
    "shapes": [
        torch.tensor(7),
        torch.tensor(True),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.bfloat16),
        torch.ones(1, 1, 1),
    ],
    "strides": [
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1)[::2],
        torch.tensor(1.0).expand(3, 3),
        torch.ones(4, dtype=torch.cfloat).conj(),
    ],
    "arrays": [
        np.arange(6).reshape(2, 3).astype(dtype)
        for dtype in ["?", "b", "B", "<i2", ">i4", "u8", "f2", "f4", ">f8", "g", "F", "D", "m8[s]", "M8[ns]"]
    ],
    "texts": [
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array([b"ab"], "V2"),
        np.array("x"),
        np.empty(0, "U3"),
    ],
    "array shapes": [
        np.array(7.0),
        np.empty((0, 3)),
        np.arange(12).reshape(3, 4).T[::2],
        np.asfortranarray(np.ones((2, 3))),
    ],
    "scalars": [
        np.float64(1.5),
        np.float32("nan"),
        np.int8(-3),
        np.bool_(True),
        np.complex64(1j),
        np.datetime64("2020-01-01"),
        np.uint64(2**63),
    ],
    "scalar texts": [np.str_("a\0"), np.str_(""), np.bytes_(b"a\0"), np.bytes_(b"")],
    "long": list(range(1000)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_comes_back_bit_by_bit(name: str, place: Path | None) -> None:
    """Seen to fail: NumPy scalars written as the Python numbers that they inherit from; bfloat16 converted through
    float32."""
    dataset = One(SAMPLES[name])
    cached = Cached(dataset, place)
    assert same(cached[0], SAMPLES[name])  # while it is filled
    assert same(cached[0], SAMPLES[name])
    if place is not None:
        assert same(Cached(dataset, place)[0], SAMPLES[name])
    assert dataset.called == 1


class Mine(dict):
    pass


class Tagged(torch.Tensor):
    pass


def attributed() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.tag = "x"  # type: ignore[attr-defined]
    return tensor


def local_named() -> Any:
    return collections.namedtuple("Local", ["x"])(1)


def endless() -> Any:
    inside: list[Any] = []
    inside.append(inside)
    return inside


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"a": [object()]}, r"\['a'\]\[0\] is of type builtins.object"),
        (Mine(), " is of type tests.datasets.test_cached.Mine"),
        ({(1, 2): 3}, r" has the key \(1, 2\), of type tuple"),
        ((torch.ones(2, requires_grad=True),), r"\[0\] requires grad"),
        (lambda: torch.eye(2).to_sparse(), "has the layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), r"is on meta \(return its \.cpu\(\)\)"),
        (torch.ones(2).as_subclass(Tagged), "is of type tests.datasets.test_cached.Tagged"),
        (torch.nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
        (attributed, "has custom attributes"),
        (np.array([{}, None]), "has the dtype object"),
        (np.zeros(2, [("x", "f4"), ("y", "i4")]), "has the dtype"),
        (np.ma.masked_array([1]), "numpy.ma.*MaskedArray"),
        (local_named, "is of type tests.datasets.test_cached.Local"),
        ({1, 2}, "is of type builtins.set"),
        (endless, "cannot be described in JSON"),
        ([10**5000], "cannot be described in JSON"),
    ],
)
def test_whatever_else_is_refused_with_the_remedy(sample: Any, words: str, place: Path | None) -> None:
    """Seen to fail: subclasses of dict and of Tensor accepted, which came back as plain ones."""
    cached = Cached(One(sample), place)
    with pytest.raises(
        TypeError,
        match=(
            rf"sample 0 of tests\.datasets\.test_cached\.One cannot be cached: sample.*{words}.*Cache the data before"
        ),
    ):
        cached[0]
    assert cached.filled == 0


def test_a_sample_in_hand_is_ones_own(place: Path | None) -> None:
    """Changing it changes neither the cache nor the dataset. Seen to fail: a kept sample returned again; the dataset's
    own object returned."""
    own = {"tensor": torch.zeros(1000)[::2], "array": np.zeros(1000), "list": [0]}
    cached = Cached(One(own), place)
    for _ in range(3):
        sample = cached[0]
        assert not sample["tensor"].any()
        assert not sample["array"].any()
        assert sample["list"] == [0]
        assert sample["tensor"].is_contiguous()
        sample["tensor"] += 1
        sample["array"] += 1
        sample["list"].append(1)
        del sample["list"]
    assert same(own, {"tensor": torch.zeros(500), "array": np.zeros(1000), "list": [0]})


def test_indices_are_a_lists(place: Path | None, counted: Counted) -> None:
    """Seen to fail: negative indices looked up unchanged."""
    cached = Cached(counted, place)
    assert len(cached) == N
    for index in (-1, -N, 0, N - 1, np.int64(2), torch.tensor(3)):
        for _ in range(2):
            assert cached[index]["index"] == range(N)[index]
    for index in (N, -N - 1):
        with pytest.raises(
            IndexError, match=f"index {index} is out of range: tests.datasets.test_cached.Counted has 12 samples"
        ):
            cached[index]
    with pytest.raises(TypeError):
        cached["a"]
    assert sorted(counted.calls()) == [0, 2, 3, N - 1]
    assert cached.filled == 4


@pytest.mark.parametrize(
    ("sample", "mended"),
    [
        (torch.ones(2, requires_grad=True), torch.Tensor.detach),
        (torch.ones(2).to_sparse(), torch.Tensor.to_dense),
    ],
    ids=["grad", "sparse"],
)
def test_a_tensor_of_an_uncommon_kind_is_refused_with_what_to_call_on_it(
    sample: Any, mended: Callable[[Any], Any]
) -> None:
    """Fails if the only remedy is another place for the cache. And the remedy works."""
    with pytest.raises(TypeError, match=rf"return its \.{mended.__name__}\(\)\)\. Cache the data before"):
        Cached(One(sample))[0]
    assert Cached(One(mended(sample)))[0].tolist() == [1, 1]


# Filling: each sample once, by any process.


class Together(Counted):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        note(self.log, 100 + len(indices))
        return [self[index] for index in indices]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fill_loads_many_at_once_and_is_silent_where_nothing_is_missing(
    num_workers: int, tmp_path: Path, caplog: Any
) -> None:
    """Fails if `fill` does not call ``__getitems__``, or if a full cache warns of an epoch without a batch."""
    cached = Cached(Together(tmp_path / "calls"))
    for _ in range(2):
        cached.fill(num_workers=num_workers)
        assert cached.filled == N
    assert sorted(cached.dataset.calls()) == [*range(N), 100 + N]
    assert "no batch" not in caplog.text


@pytest.mark.parametrize(
    "way",
    [
        {"num_workers": 2, "method": "process", "multiprocessing_context": "fork"},
        {"num_workers": 2, "method": "thread"},
        {"num_workers": 0},
        pytest.param(
            {"num_workers": 2, "method": "process", "multiprocessing_context": "spawn"}, marks=pytest.mark.soak
        ),
    ],
    ids=lambda way: way.get("multiprocessing_context") or way.get("method") or "inline",
)
def test_the_second_epoch_of_a_loader_calls_nothing(way: dict[str, Any], place: Path | None, tmp_path: Path) -> None:
    """Seen to fail: the index not written; with spawned workers, descriptors pickled as plain numbers."""
    dataset = Even(tmp_path / "calls", 40)
    cached = Cached(dataset, place)
    with Loader.from_dataset(cached, batch_size=4, shuffle=True, **way) as loader:
        for _ in range(3):
            seen = {int(row): rows for batch in loader for row, rows in zip(batch["index"], batch["rows"], strict=True)}
            assert all(torch.equal(seen[index], torch.full((2, 3), index)) for index in range(40))
    assert sorted(dataset.calls()) == list(range(40))
    assert cached.filled == 40
    assert same(cached[7], dataset.right(7))
    assert len(dataset.calls()) == 40


def fill(cached: Cached) -> None:
    for index in range(len(cached)):
        cached[index]


@linux
def test_memory_goes_along_to_a_process_of_multiprocessings(tmp_path: Path) -> None:
    dataset = Counted(tmp_path / "calls")
    cached = Cached(dataset)
    process = multiprocessing.get_context("spawn").Process(target=fill, args=(cached,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert cached.filled == N
    assert len(dataset.calls()) == N
    process.close()


@linux
def test_memory_cannot_be_pickled_for_just_anyone(counted: Counted) -> None:
    with pytest.raises(TypeError, match="Give a path"):
        pickle.dumps(Cached(counted))


def test_a_folder_can_be_pickled(tmp_path: Path, counted: Counted) -> None:
    cached = Cached(counted, tmp_path / "cache", fingerprint={"a": 1})
    again = pickle.loads(pickle.dumps(cached))
    cached[1]
    assert same(again[1], counted.right(1))
    assert counted.calls() == [1]
    cached.close()
    with pytest.raises(ClosedError):
        pickle.loads(pickle.dumps(cached))[1]


@linux
@pytest.mark.parametrize("kind", [Counted, Gathered])
def test_no_sample_is_loaded_twice_however_many_ask(kind: type[Counted], place: Path | None, tmp_path: Path) -> None:
    """Three processes of two threads each.

    Seen to fail: without the lock, with a per-process lock (``lockf``), and without a second read under the lock. Seen
    to hang: a thread that held claims waited for others.
    """
    dataset = kind(tmp_path / "calls", 150, columns=100)
    cached = Cached(dataset, place)
    begin, start = os.pipe()

    def read_all(number: int) -> None:
        for at in range(0, len(cached), 5):
            indices = list(range(at, at + 5))[:: -1 if number and kind is Gathered else 1]
            samples = cached.__getitems__(indices) if kind is Gathered else [cached[index] for index in indices]
            assert all(same(one, dataset.right(index)) for one, index in zip(samples, indices, strict=True))

    def process() -> None:
        os.close(start)
        os.read(begin, 1)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(read_all, range(2)))

    children = [forked(process) for _ in range(3)]
    os.close(start)  # end-of-file: all begin at once
    os.close(begin)
    assert ended(*children) == [0, 0, 0]
    assert cached.filled == 150
    assert sorted(dataset.calls()) == list(range(150))


def test_many_are_gathered_at_once(place: Path | None, tmp_path: Path) -> None:
    """Also repeated and negative indices. Seen to fail: one object returned for both."""
    dataset = Gathered(tmp_path / "calls")
    cached = Cached(dataset, place)
    cached[3]
    got = cached.__getitems__([1, 3, -1, 1])
    assert all(same(one, dataset.right(index)) for one, index in zip(got, [1, 3, N - 1, 1], strict=True))
    assert got[0] is not got[3]
    got[0]["rows"][:] = 9
    assert same(got[3], dataset.right(1))
    assert sorted(dataset.calls()) == [1, 3, N - 1]


def test_a_loader_gathers_where_the_dataset_does(tmp_path: Path) -> None:
    """Seen to fail when the cache had no ``__getitems__``."""
    asked = []

    class Noting(Gathered):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            asked.append(indices)
            return super().__getitems__(indices)

    dataset = Noting(tmp_path / "calls")
    with Loader.from_dataset(
        Cached(dataset, tmp_path / "cache"), batch_size=4, collate_fn=list, seed_global_rngs=False
    ) as loader:
        for _ in range(2):
            assert all(same(one, dataset.right(index)) for index, one in enumerate(itertools.chain(*loader)))
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert not hasattr(Cached(Counted(tmp_path / "none"), tmp_path / "other"), "__getitems__")


def test_a_batch_that_is_no_list_of_samples_is_refused(tmp_path: Path) -> None:
    class Stacked(Gathered):
        def __getitems__(self, indices: list[int]) -> Any:
            return np.array(indices)

    with pytest.raises(
        TypeError,
        match=(
            "Stacked.__getitems__ returned a whole batch, a ndarray. Return a list of samples, or remove __getitems__"
        ),
    ):
        Cached(Stacked(tmp_path / "calls"), tmp_path / "cache").__getitems__([1, 2])


def test_a_sample_that_failed_is_not_there(place: Path | None) -> None:
    errors = iter([OSError("the disk hums"), KeyboardInterrupt()])

    def sample() -> int:
        for error in errors:
            raise error
        return 7

    cached = Cached(One(sample), place)
    with pytest.raises(OSError, match="the disk hums"):
        cached[0]
    with pytest.raises(KeyboardInterrupt):
        cached[0]
    assert cached.filled == 0
    assert [cached[0], cached[0]] == [7, 7]


@linux
def test_a_process_forked_meanwhile_holds_nobody_up(place: Path | None) -> None:
    """The child has a copy of the claim's open file. Seen to hang: a claim that was only closed."""
    hold, release = os.pipe()
    children: list[int] = []

    def child() -> None:
        os.close(release)
        os.read(hold, 1)

    def sample() -> int:
        if not children:
            children.append(forked(child))
            raise OSError("once")
        return 7

    cached = Cached(One(sample), place)
    with pytest.raises(OSError, match="once"):
        cached[0]
    assert cached[0] == 7
    os.close(release)
    os.close(hold)
    assert ended(*children) == [0]


# Which dataset a folder belongs to.


def test_another_datasets_cache_is_refused(tmp_path: Path, counted: Counted) -> None:
    """And what is there is kept for the next run. Seen to fail: the fingerprint, or the length, left out."""
    fill(Cached(counted, tmp_path / "a" / "cache", fingerprint=("crop", 2)))
    assert Cached(counted, tmp_path / "a" / "cache", fingerprint=["crop", 2]).filled == N
    for dataset, fingerprint, words in (
        (counted, ["crop", 3], r'fingerprint ["crop", 3]'),
        (counted, None, "fingerprint null"),
        (Counted(counted.log, 13), ["crop", 2], "length 13"),
        (Gathered(counted.log), ["crop", 2], 'dataset "tests.datasets.test_cached.Gathered"'),
    ):
        with pytest.raises(
            ValueError,
            match=r'is the cache of dataset "tests.datasets.test_cached.Counted", length 12, fingerprint \["crop", 2\]',
        ) as raised:
            Cached(dataset, tmp_path / "a" / "cache", fingerprint=fingerprint)
        assert words in str(raised.value).split("but this is")[1]
        assert "Give each dataset" in str(raised.value)


def test_the_main_script_has_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a spawned process the module is `__mp_main__`. Seen to fail: that name used unchanged."""
    monkeypatch.setattr(One, "__module__", "__mp_main__")
    Cached(One(1), tmp_path / "cache").close()
    monkeypatch.setattr(One, "__module__", "__main__")
    Cached(One(1), tmp_path / "cache").close()


def test_a_folder_that_was_replaced_is_another_cache(tmp_path: Path, counted: Counted) -> None:
    """An old job continues with the old files. Seen to fail: files opened by name, which put samples of version 1 into
    the cache of version 2."""
    old = Cached(counted, tmp_path / "cache", fingerprint=0)
    old[0]
    shutil.rmtree(tmp_path / "cache")
    newer = Counted(counted.log, version=1)
    new = Cached(newer, tmp_path / "cache", fingerprint=1)
    for index in range(N):
        assert same(old[index], counted.right(index))
    assert new.filled == 0
    for cached, dataset in ((new, newer), (new, newer), (old, counted)):
        assert all(same(cached[index], dataset.right(index)) for index in range(N))


class Told(Counted):
    def set_epoch(self, epoch: int) -> None:
        pass


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    [
        (
            Told(Path()),
            {},
            ValueError,
            "Told has set_epoch.*let a dataset that changes with the epoch read from the cache",
        ),
        (Subset(ConcatDataset([Told(Path())]), [0]), {}, ValueError, "Told has set_epoch"),
        (type("Endless", (Resumable,), {"__len__": lambda self: 1})(1), {}, TypeError, "Endless does not qualify"),
        (iter([1]), {}, TypeError, "read by index"),
        (Counted(Path(), 0), {}, ValueError, "Counted is empty"),
        (Counted(Path()), {"fingerprint": {1, 2}}, TypeError, r"fingerprint=\{1, 2\} is not JSON"),
    ],
)
def test_what_cannot_be_cached_is_refused_when_built(
    dataset: Any, options: Any, error: Any, words: str, tmp_path: Path
) -> None:
    """Seen to fail: a dataset with set_epoch accepted."""
    with pytest.raises(error, match=words):
        Cached(dataset, tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", ["rng", "torch_generator"])
def test_a_sample_that_draws_for_this_epoch_is_refused(kind: str, tmp_path: Path) -> None:
    """Seen to fail: without the check."""

    class Noisy(One):
        def __getitem__(self, index: int) -> int:
            getattr(penstock.sample(), kind)
            return 1

    cached = Cached(Noisy(1), tmp_path / "cache")
    with (
        Loader.from_dataset(cached) as loader,
        pytest.raises(ValueError, match=r"sample 0 of .*Noisy drew from penstock.sample\(\)"),
    ):
        list(loader)
    assert cached.filled == 0


@pytest.mark.parametrize(
    ("draw", "place"), [(random.random, None), (np.random.random, "cache"), (lambda: torch.rand(1), "cache")]
)
def test_global_random_numbers_that_a_cache_freezes_are_told_of_once(
    draw: Any, place: Any, tmp_path: Path, caplog: Any
) -> None:
    """Inline. Samples that draw nothing, and reads of cached samples, cause no warning. Seen to fail: without the
    second snapshot."""

    class Sometimes(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index >= 8:
                draw()
            return index

    cached = Cached(Sometimes(range(20)), place and tmp_path / place)
    with Loader.from_dataset(cached, batch_size=4) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        random.random(), np.random.random(), torch.rand(1)  # the caller's own draws
        assert next(batches).tolist() == [4, 5, 6, 7]
        assert caplog.text == ""
        assert [batch.tolist() for batch in batches] == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
        list(loader)
    assert caplog.text.count("drew from the global random numbers") == 1
    assert "sample 8 of" in caplog.text


# Damage: never a wrong sample.


def filled_folder(folder: Path, dataset: Counted) -> None:
    cached = Cached(dataset, folder)
    fill(cached)
    cached.close()
    dataset.log.unlink()


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("penstock.json", lambda data: data[:-5], "penstock.json cannot be read"),
        *(
            ("penstock.json", lambda data, text=text: text, "penstock.json cannot be read")
            for text in (b"", b"[1]", b"{}", b"\xff\xfe")
        ),
        ("penstock.json", lambda data: data.replace(b'"1, ', b'"2, '), r'format "2, '),
        ("penstock.json", None, "penstock.json is missing"),
        ("penstock.index", lambda data: data[:-1], "penstock.index has 95 bytes instead of 96"),
        ("penstock.index", lambda data: data + b"\0", "penstock.index has 97 bytes instead of 96"),
        ("penstock.index", None, "penstock.index is missing"),
        ("penstock.data", None, "penstock.data is missing"),
    ],
)
def test_a_damaged_folder_is_refused(name: str, damage: Any, words: str, tmp_path: Path, counted: Counted) -> None:
    """Seen to fail: an index of any size accepted; data without a JSON taken for an empty cache."""
    filled_folder(tmp_path, counted)
    file = tmp_path / name
    file.write_bytes(damage(file.read_bytes())) if damage is not None else file.unlink()
    with pytest.raises(ValueError, match=words) as raised:
        Cached(counted, tmp_path)
    assert "elete" in str(raised.value)


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["penstock.index", "penstock.data", "penstock.json"])
def test_whatever_byte_is_flipped_no_sample_is_wrong(
    name: str, step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged sample is loaded again, with a warning. Seen to fail: without the CRC, and with a CRC over the arrays
    only."""
    dataset = Counted(tmp_path / "calls", 3)
    filled_folder(tmp_path / "sound", dataset)
    sound = (tmp_path / "sound" / name).read_bytes()
    for at, flip in itertools.product(range(0, len(sound), step), (1, 0x80, 0xFF)):
        folder = shutil.copytree(tmp_path / "sound", tmp_path / "damaged")
        (folder / name).write_bytes(sound[:at] + bytes([sound[at] ^ flip]) + sound[at + 1 :])
        caplog.clear()
        try:
            cached = Cached(dataset, folder)
        except ValueError:
            assert name == "penstock.json"
        else:
            for _ in range(2):
                assert all(same(cached[index], dataset.right(index)) for index in range(3))
            assert len(dataset.calls()) == len(caplog.records) == (name != "penstock.json")
            cached.close()
        dataset.log.unlink(missing_ok=True)
        shutil.rmtree(folder)


@pytest.mark.parametrize("entry", [1, 24, 25, 2**64 - 1, "another's"])
def test_whatever_the_index_says_no_sample_is_wrong(entry: Any, tmp_path: Path, counted: Counted) -> None:
    """Seen to fail: without the number in the footer (another sample was read); reading before the start of the
    data."""
    filled_folder(tmp_path / "cache", counted)
    index = tmp_path / "cache" / "penstock.index"
    entries = index.read_bytes()
    index.write_bytes(entries[:16] + (entries[:8] if entry == "another's" else struct.pack("=Q", entry)) + entries[24:])
    cached = Cached(counted, tmp_path / "cache")
    assert all(same(cached[index], counted.right(index)) for index in [*range(N), *range(N)])
    assert counted.calls() == [2]


@pytest.mark.parametrize("left", [0, 1, 100, 400])
def test_what_is_cut_off_is_loaded_again(
    left: int, tmp_path: Path, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    """After a power failure the index may be on disk, but not all of the data. Seen to fail: without the check of the
    length."""
    filled_folder(tmp_path / "cache", counted)
    os.truncate(tmp_path / "cache" / "penstock.data", left)
    caplog.set_level(logging.WARNING, "penstock")
    for _ in range(2):
        cached = Cached(counted, tmp_path / "cache")
        assert all(same(cached[index], counted.right(index)) for index in range(N))
    assert len(counted.calls()) == len(caplog.records) < N + 1
    assert "was damaged and was loaded again" in caplog.text


# Killed processes.


def kill_self(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half(write: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    def written(fd: int, data: bytes) -> int:
        if len(data) < 10_000:
            return write(fd, data)
        write(fd, data[: len(data) // 2])
        kill_self()
        return 0

    return written


@linux
@pytest.mark.parametrize("when", ["half", "before", "after"])
def test_killed_while_a_sample_is_written(when: str, place: Path | None, tmp_path: Path) -> None:
    """Seen to fail when the index was written first."""
    dataset = Even(tmp_path / "calls", 3, columns=5000)
    cached = Cached(dataset, place)
    cached[0]

    def work() -> None:
        if when == "half":
            os.write = half(os.write)  # type: ignore[assignment]
        elif when == "before":
            os.lseek = kill_self  # type: ignore[assignment]
        else:
            cache_files._release = kill_self  # type: ignore[assignment]
        cached[1]

    assert ended(forked(work)) == [-signal.SIGKILL]
    assert cached.filled == 1 + (when == "after")
    for _ in range(2):
        assert all(same(cached[index], dataset.right(index)) for index in range(3))
    assert sorted(dataset.calls()) == ([0, 1, 2] if when == "after" else [0, 1, 1, 2])


@linux
@pytest.mark.parametrize("where", ["open", "fsync", "replace", "replaced"])
def test_killed_while_the_folder_is_made(where: str, tmp_path: Path, counted: Counted) -> None:
    """Seen to fail: the JSON written first, and the index after it."""

    def work() -> None:
        name = where.removesuffix("d")
        real = getattr(os, name)
        setattr(os, name, (lambda *args: (real(*args), kill_self())) if where in ("open", "replaced") else kill_self)
        Cached(counted, tmp_path / "cache")

    assert ended(forked(work)) == [-signal.SIGKILL]
    cached = Cached(counted, tmp_path / "cache")
    fill(cached)
    assert same(cached[1], counted.right(1))
    assert sorted(os.listdir(tmp_path / "cache")) == ["penstock.data", "penstock.index", "penstock.json"]


@linux
def test_memory_leaves_nothing_behind_a_kill(tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: a named temporary file."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def work() -> None:
        cached = Cached(counted)
        fill(cached)
        kill_self()

    assert ended(forked(work)) == [-signal.SIGKILL]
    assert os.listdir(tmp_path / "tmp") == []  # nor in /dev/shm, which a fixture checks after every test


# Closing.


def held() -> list[str]:
    """Descriptors and mappings of caches in this process."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(f"/proc/self/fd/{fd}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [text for text in files + maps if "penstock." in text or "memfd:penstock" in text]


@linux
@pytest.mark.parametrize("how", ["close", "garbage"])
def test_nothing_is_held_in_the_end(how: str, place: Path | None, counted: Counted) -> None:
    """Seen to fail: without `Files.__del__`."""
    gc.collect()
    before = len(held())
    cached = Cached(counted, place)
    fill(cached)
    sample = cached[1]
    assert len(held()) > before
    if how == "close":
        cached.close()
        cached.close()
        for use in (lambda: cached[1], lambda: cached.filled):
            with pytest.raises(ClosedError, match="was closed"):
                use()
    else:
        del cached
    assert len(held()) == before
    assert same(sample, counted.right(1))


# No room.

FULL = """
import errno, resource, sys
import numpy as np
from penstock import Cached

class Data:
    def __len__(self):
        return 50
    def __getitem__(self, index):
        return np.full(25_000, index, np.int32)

resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
cached = Cached(Data(), sys.argv[1])
held = 0
try:
    for held in range(50):
        cached[held]
except OSError as error:
    assert error.errno == errno.EFBIG, error
    print(error)
assert 5 < held == cached.filled < 10, (held, cached.filled)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for _ in range(2):
    for index in range(50):
        assert (cached[index] == index).all()
assert cached.filled == 50
"""


@linux
@pytest.mark.slow
def test_no_room_is_an_error_that_says_so_and_the_cache_stays_usable(tmp_path: Path, run_program: Any) -> None:
    """A limit on file sizes stands in for a full disk. Seen to fail: a short write taken for a complete one."""
    (tmp_path / "full.py").write_text(FULL)
    said = run_program(tmp_path / "full.py", tmp_path / "cache")
    assert f"could not be written to the cache in {tmp_path / 'cache'} (" in said
    assert "it needs 100054 bytes, but" in said
    assert "are free. Make room" in said
