"""Copies of remote files that the formats read: the same records, fetched once, whatever fits."""

from __future__ import annotations

import io
import os
from contextlib import closing
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from mds_files import INT, described, index_of
from megatron_files import index
from pairwise import mostly_soak
from small_files import RECORDS, arrow, jsonl, mds, numbers, parquet, tar

import penstock
from penstock import Loader, formats
from penstock.__main__ import main
from penstock._files.cache_notes import Notes
from penstock._files.copies import CacheFolder
from penstock._files.paths import Reach
from penstock._streams.from_copies import FromCopies

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = 6


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that were fetched, or opened where they are; ``memory://`` is empty before and after."""
    asked: list[str] = []
    real = memory.MemoryFileSystem.open

    def watched(self: Any, path: str, mode: str = "rb", *rest: Any, **words: Any) -> Any:
        if mode == "rb":
            asked.append(path.rpartition("/")[2])
        return real(self, path, mode, *rest, **words)

    monkeypatch.setattr(memory.MemoryFileSystem, "open", watched)  # fetching a file opens it, too
    yield asked
    memory.MemoryFileSystem.store.clear()


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "tar", "parquet", "mds"])
@pytest.mark.parametrize("how", ["known", "stream"])
def test_copies_are_read_in_place_of_the_files(kind: str, how: str, tmp_path: Path, fetches: list[str]) -> None:
    """Parquet's footers are remembered from the first time. Seen to fail: a name without the file; `opened` without the
    copy."""
    words: dict[str, Any] = {"epoch_size": 100, "bookmarks": False} if how == "stream" else {}
    make = {"jsonl": jsonl, "jsonl.gz": jsonl, "tar": tar, "parquet": parquet, "mds": mds}[kind]
    store = fsspec.filesystem("memory")
    for file in range(FILES):
        with fsspec.open(f"memory://data/{file}.{kind}", "wb", compression="infer") as out:
            out.write(make(file))
        if how == "known" and kind not in ("parquet", "mds"):
            assert main(["index", f"memory://data/{file}.{kind}", "--index", str(tmp_path)]) == 0
            words["index"] = str(tmp_path)
    size = sum(store.info(f"data/{file}.{kind}")["size"] for file in range(FILES))
    if kind == "mds":
        store.pipe(
            "data/index.json", index_of([described(f"{file}.mds", INT, mds(file), RECORDS) for file in range(FILES)])
        )

    def read(**more: Any) -> list[Any]:
        fetches.clear()
        data = getattr(formats, kind.partition(".")[0])(
            "memory://data" if kind == "mds" else f"memory://data/*.{kind}", **words, **more
        )
        if kind == "mds":
            fetches.remove("index.json")  # read once, when the dataset is built
        with closing(data), Loader.from_dataset(data, batch_size=7, shuffle=True, seed=3, collate_fn=list) as loader:
            return [batch for _ in range(2) for batch in loader]

    expected = read()
    cached = {"cache_dir": tmp_path / "cache", "max_cache_size": size}
    assert read(**cached) == expected
    assert sorted(fetches) == [f"{file}.{kind}" for file in range(FILES)]
    assert read(**cached) == expected
    assert fetches == []
    assert read(cache_dir=tmp_path / "small", max_cache_size=size // 3) == expected
    assert sum(path.stat().st_size for path in (tmp_path / "small").glob(f"*.{kind}")) <= size // 3
    assert (
        Notes(str(next((tmp_path / "small").glob("*.notes")))).counts().fetches
    )  # what is there now may have been given up for what was on its way
    assert read(cache_dir=tmp_path / "none", max_cache_size="1B") == expected


def test_token_files_are_read_from_their_copies_or_by_ranges(tmp_path: Path, fetches: list[str]) -> None:
    """A bound below the data is no error: what has no copy is read where it is. Seen to fail: ranges that begin at the
    front of the file."""
    store, arrays = (
        fsspec.filesystem("memory"),
        [np.arange(1000 * file, 1000 * file + 100, dtype="<u2") for file in range(FILES)],
    )
    store.pipe("data/0.npy", npy(arrays[0]))
    for file in range(1, FILES):
        store.pipe(f"data/{file}.bin", arrays[file].tobytes())
    paths = [f"memory://data/{file}.{'bin' if file else 'npy'}" for file in range(FILES)]
    everything = np.concatenate(arrays)
    for size in ("1MB", 500, 1):
        data = formats.tokens(paths, 40, overlap=1, cache_dir=tmp_path / str(size), max_cache_size=size)
        with Loader.from_dataset(data, batch_size=4, shuffle=True, seed=3) as loader:
            for _ in range(2):
                found = sorted(row.tolist() for batch in loader for row in batch["tokens"])
                assert found == [
                    everything[start : start + 41].tolist() for start in range(0, len(everything) - 40, 40)
                ]
        assert bool(Notes(str(next((tmp_path / str(size)).glob("*.notes")))).counts().misses) == (size != "1MB")
        data.close()
    store.pipe("data/1.bin", arrays[0].tobytes())
    with closing(formats.tokens(paths, 40, cache_dir=tmp_path / "1", max_cache_size=1)) as data:
        store.pipe("data/1.bin", arrays[1][:50].tobytes())
        with pytest.raises(
            ValueError, match=r"1\.bin has changed since it was first checked: it had 200 bytes and now has 100"
        ):
            data[3]


@pytest.mark.parametrize("kind", ["tokens", "bin", "jsonl"])
def test_what_is_read_where_it_is_is_not_read_in_two_versions(kind: str, tmp_path: Path, fetches: list[str]) -> None:
    """There is no room for its copy, and it is replaced within the minute by one of equal size. Seen to fail: by what
    its store said lately."""
    store, path = fsspec.filesystem("memory"), f"memory://data/0.{kind}"
    contents = [np.full(100, version, "<u2").tobytes() if kind != "jsonl" else jsonl(version) for version in (1, 2)]
    store.pipe(f"data/0.{kind}", contents[0])
    if kind == "tokens":
        data: Any = formats.tokens(path, 10, cache_dir=tmp_path / "cache", max_cache_size=1)
    elif kind == "bin":
        store.pipe("data/0.idx", index([10] * 10, range(11)))
        data = formats.megatron_documents(path, cache_dir=tmp_path / "cache", max_cache_size=1)
    else:
        assert main(["index", path, "--index", str(tmp_path)]) == 0
        data = formats.jsonl(path, index=tmp_path, cache_dir=tmp_path / "cache", max_cache_size=1)
    with closing(data), Loader.from_dataset(data, batch_size=5, shuffle=True, collate_fn=list) as loader:
        assert len(list(loader)) > 1
        store.pipe(f"data/0.{kind}", contents[1])
        with pytest.raises(ValueError, match=r"has changed since it was"):
            list(loader)


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_arrow_files_need_room_for_all(tmp_path: Path, fetches: list[str]) -> None:
    """Each is fetched once, though it is opened for each of its record batches. Seen to fail: without the
    comparison."""
    store = fsspec.filesystem("memory")
    for file in range(FILES):
        store.pipe(f"data/{file}.arrow", arrow(file))
    size = sum(store.info(f"data/{file}.arrow")["size"] for file in range(FILES))
    with pytest.raises(
        ValueError, match=f"max_cache_size={size - 1:,} bytes, but the 6 Arrow files take {size:,}, and all of them"
    ):
        formats.arrow("memory://data/*.arrow", cache_dir=tmp_path / "small", max_cache_size=size - 1)
    for _ in range(2):
        data = formats.arrow("memory://data/*.arrow", cache_dir=tmp_path / "cache", max_cache_size=size)
        with closing(data), Loader.from_dataset(data, batch_size=8, shuffle=True, seed=3) as loader:
            found = [value for batch in loader for value in batch["i"].tolist()]
        assert sorted(found) == [100 * file + n for file in range(FILES) for n in range(RECORDS)]
    assert sorted(fetches) == [f"{file}.arrow" for file in range(FILES)]


def test_an_index_is_kept_with_its_file(tmp_path: Path, fetches: list[str]) -> None:
    for file in range(FILES):
        fsspec.filesystem("memory").pipe(f"data/{file}.jsonl", jsonl(file))
        assert main(["index", f"memory://data/{file}.jsonl", "--index", str(tmp_path)]) == 0
        fsspec.filesystem("memory").pipe(f"data/{file}.jsonl.index", (tmp_path / f"{file}.jsonl.index").read_bytes())
    for _ in range(2):
        fetches.clear()
        with closing(formats.jsonl("memory://data/*.jsonl", cache_dir=tmp_path, max_cache_size="1MB")) as data:
            assert [data[index]["i"] for index in range(len(data))] == [
                100 * file + n for file in range(FILES) for n in range(RECORDS)
            ]
    assert fetches == []


class Numbers:
    def __init__(self, path: str) -> None:
        self.found = list(numbers(path))

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, at: int) -> int:
        return self.found[at]


def numbers_from(path: str, start: int) -> Iterator[int]:
    yield from islice(numbers(path), start, None)


OPENS = [numbers, Numbers, numbers_from]


@pytest.mark.parametrize(
    ("how", "size", "open"),
    mostly_soak(
        product(["counted", "stream"], ["1MB", 300, 1], OPENS),
        [
            *product(["counted", "stream"], ["1MB"], OPENS),
            *zip(["counted", "stream"] * 3, [300, 300, 300, 1, 1, 1], OPENS * 2, strict=True),
        ],
    ),
)
def test_a_format_of_the_user_reads_copies_too(
    open: Any, size: Any, how: str, tmp_path: Path, fetches: list[str]
) -> None:
    """And where there is no room, its own way. A state goes from one to the other."""
    for file in range(FILES):
        fsspec.filesystem("memory").pipe(f"data/{file}.jsonl", jsonl(file))
    paths = [f"memory://data/{file}.jsonl" for file in range(FILES)]
    words: dict[str, Any] = (
        {"epoch_size": 100, "bookmarks": False} if how == "stream" else {"counts": [RECORDS] * FILES}
    )

    def read(epochs: int, state: Any = None, **more: Any) -> tuple[list[list[int]], Any]:
        with (
            closing((penstock.Stream if how == "stream" else penstock.Shards)(paths, open, **words, **more)) as data,
            Loader.from_dataset(data, batch_size=7, shuffle=True, seed=3) as loader,
        ):
            if state is not None:
                loader.load_state_dict(state)
            return [batch.tolist() for _ in range(epochs) for batch in loader], loader.state_dict()

    expected, _ = read(3)
    cache = {"cache_dir": tmp_path, "max_cache_size": size}
    found, state = read(1, **cache)
    found += read(1, state)[0]
    assert found + read(1, read(2)[1], **cache)[0] == expected
    assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) <= {"1MB": 2**20}.get(size, size)
    if size == "1MB":
        fetches.clear()
        assert read(3, **cache)[0] == expected
        assert fetches == []


@pytest.mark.parametrize("open", [numbers, Numbers])
def test_a_copy_stays_until_what_reads_it_is_closed(open: Any, tmp_path: Path) -> None:
    """Seen to fail: closed when the user's ``open`` has returned; not closed with what was opened."""
    (tmp_path / "0.jsonl").write_bytes(jsonl(0))
    (path,) = Reach(None, tmp_path / "cache", len(jsonl(0))).of([str(tmp_path / "0.jsonl")])
    other = CacheFolder(str(tmp_path / "cache"), len(jsonl(0)))

    def taken() -> bool:
        copy = other.opened("s3://data/other", 10, "1", lambda to: Path(to).write_bytes(bytes(10)) and None)
        return copy is not None and copy.close() is None

    records = FromCopies(open)(path)
    assert not taken()
    assert list(records) == [*range(RECORDS)]
    records.close()
    assert taken()


def test_a_file_that_has_changed_is_fetched_anew(tmp_path: Path, fetches: list[str]) -> None:
    """In the next run, though it has as many bytes."""
    found = []
    for at in (1, 2):
        fsspec.filesystem("memory").pipe("data/0.jsonl", f'{{"i": {at}}}\n'.encode())
        with closing(
            formats.jsonl("memory://data/0.jsonl", counts=[1], cache_dir=tmp_path, max_cache_size="1MB")
        ) as data:
            found.append(data[0])
    assert found == [{"i": 1}, {"i": 2}]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"cache_dir": "."}, "is inside cache_dir="),
        ({"cache_dir": "s3://b/c"}, "is not a folder on a local disk"),
        ({"cache_dir": ""}, "is not a folder on a local disk"),
        ({"max_cache_size": None}, "cache_dir and max_cache_size go together"),
        ({"shards": 3}, "keeps copies of files, so shards must be a list of paths, not 3"),
    ],
)
def test_what_can_have_no_copies(
    words: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("0.jsonl").write_bytes(jsonl(0))
    with pytest.raises((ValueError, TypeError), match=why):
        penstock.Shards(
            **{
                "shards": ["0.jsonl"],
                "open": numbers,
                "counts": [RECORDS],
                "cache_dir": "cache",
                "max_cache_size": 1,
                **words,
            }
        )


@pytest.mark.parametrize(
    ("paths", "cache"),
    [
        ("file://{}/data/**/*.jsonl", "data/copies"),
        ("local://{}/data/copies/0.jsonl", "data/copies"),
        ("simplecache::file://{}/data/copies/0.jsonl", "data/copies"),
        ("zip://0.jsonl::{}/data/copies/0.zip", "data"),
        ("{}/data/**/*.jsonl", "link/copies"),
        ("{}/link/**/*.jsonl", "data/copies"),
        ("file://{}/link/**/*.jsonl", "copies"),
    ],
)
def test_copies_are_never_read_as_data(paths: str, cache: str, tmp_path: Path) -> None:
    """However the folder and the files are spelled. Seen red: the second run read each record twice, in silence."""
    for name, of in (("link", "data"), ("copies", "data/copies")):
        (tmp_path / of).mkdir(parents=True)
        (tmp_path / name).symlink_to(tmp_path / of)
    for name in ("data/0.jsonl", "data/copies/0.jsonl"):
        (tmp_path / name).write_bytes(jsonl(0))
    with pytest.raises(ValueError, match=r"/0\.(jsonl|zip) is inside cache_dir='.*', so copies would be read as data"):
        formats.jsonl(paths.format(tmp_path), epoch_size=9, cache_dir=tmp_path / cache, max_cache_size="1MB")


def test_files_beside_a_folder_of_copies_have_copies(tmp_path: Path) -> None:
    """Whose name begins as theirs, or that is in a folder of theirs."""
    (tmp_path / "data2").mkdir()
    (tmp_path / "data2" / "0.jsonl").write_bytes(jsonl(0))
    for paths in (f"{tmp_path}/data2/*.jsonl", f"file://{tmp_path}/data2/0.jsonl"):
        for cache in ("data", "data2/copies"):
            words = {"cache_dir": tmp_path / cache, "max_cache_size": "1MB"}
            with closing(formats.jsonl(paths, counts=[RECORDS], **words)) as data:  # type: ignore[arg-type]
                assert data[1] == {"i": 1}
                assert data.copy_statistics().fetches == 1


@pytest.mark.parametrize("cached", [True, False])
def test_a_path_that_is_not_utf_8(cached: bool, tmp_path: Path) -> None:
    """Of the files and of the folder of copies. Seen red: a UnicodeEncodeError, for Parquet also without copies."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/d\xff")
    os.mkdir(folder)
    words = {"cache_dir": f"{folder}/copies", "max_cache_size": "1MB"} if cached else {}
    for kind, made in (("parquet", parquet), ("arrow", arrow), ("jsonl", jsonl)):
        path = os.fsdecode(os.fsencode(folder) + b"/\xfe." + kind.encode())
        Path(path).write_bytes(made(0))
        counts = {"counts": [RECORDS]} if kind == "jsonl" else {}
        with closing(getattr(formats, kind)(path, **counts, **words)) as data:
            assert [data[number]["i"] for number in range(3)] == [0, 1, 2]


def test_each_file_is_fetched_once_for_all_processes_of_a_host(tmp_path: Path) -> None:
    """Two ranks with two workers each, which also fetch ahead; what they did is in the statistics. Seen to fail:
    without the lock of a copy."""
    for number in range(24):
        (tmp_path / f"{number:02}.jsonl").write_bytes(jsonl(number))
    words = {"counts": [RECORDS] * 24, "lanes": 8, "cache_dir": tmp_path / "cache", "max_cache_size": "1MB"}
    datasets = [formats.jsonl(str(tmp_path / "*.jsonl"), **words) for _ in range(2)]  # type: ignore[arg-type]
    loaders = [
        Loader.from_dataset(
            dataset, batch_size=5, shuffle=True, seed=3, rank=rank, world_size=2, num_workers=2, method="process"
        )
        for rank, dataset in enumerate(datasets)
    ]
    with loaders[0], loaders[1]:
        found = [
            value
            for _ in range(2)
            for pair in zip(*loaders, strict=True)
            for batch in pair
            for value in batch["i"].tolist()
        ]
        copies = loaders[0].statistics().copies
        assert "copies: " in loaders[0].report()
    assert sorted(found) == sorted(2 * [100 * file + n for file in range(24) for n in range(RECORDS)])
    assert copies is not None
    assert copies.fetches == 24
    assert copies.fetched_bytes == sum(len(jsonl(number)) for number in range(24))
    assert copies.hits >= 24
    assert copies.misses == 0
