"""Copies of shards on an HTTP server: whole requests, connections that break off, versions, and URLs that differ only
in their query."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from http_files import HttpFiles

from penstock import Loader, StateMismatch, formats
from penstock._files import transfer
from penstock._files.files import stamp
from penstock._files.index_file import write_index
from penstock._files.paths import address, expanded
from penstock._streams.shard_names import names_of

if TYPE_CHECKING:
    from collections.abc import Callable

aiohttp: Any = pytest.importorskip("aiohttp")
fsspec: Any = pytest.importorskip("fsspec")


@pytest.fixture(scope="module", autouse=True)
def _its_thread() -> None:
    """That of fsspec, which lives as long as the program."""
    pytest.importorskip("fsspec.asyn").get_loop()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that this thread would have slept before its next request."""
    slept: list[float] = []
    real, me = time.sleep, threading.current_thread()
    monkeypatch.setattr(
        time, "sleep", lambda seconds: slept.append(seconds) if threading.current_thread() is me else real(seconds)
    )
    return slept


LINES = 20_000
BODY = b"".join(b'{"id": %6d}\n' % number for number in range(LINES))


def read(url: str, cache: Path | None, **words: Any) -> list[int]:
    """The records of one file: 20,000 of 15 bytes."""
    copies = {} if cache is None else {"cache_dir": cache, "max_cache_size": "1GB", "ahead": 0}
    with Loader.from_dataset(formats.jsonl(url, counts=[LINES], **copies, **words), batch_size=LINES) as loader:
        (batch,) = loader
    found: list[int] = batch["id"].tolist()
    return found


@pytest.mark.parametrize("kind", ["ranges", "no ranges", "no versions"])
def test_a_connection_that_breaks_off_is_asked_for_the_rest(kind: str, tmp_path: Path, pauses: list[float]) -> None:
    """For each byte once, if the server knows ranges and versions; else for the whole again. Seen to fail: the copy
    failed as a whole."""
    with HttpFiles(ranges=kind != "no ranges", versions=kind != "no versions").running() as server:
        server.files["/a.jsonl"] = BODY
        server.cut = lambda number, body: len(body) // 2 if number < 3 else None
        assert read(f"{server.url}/a.jsonl", tmp_path) == list(range(LINES))
        begins = [begin for _, begin in server.asked]
        assert len(begins) == 4
        assert pauses == ([0.5] * 3 if kind == "ranges" else [0.5, 1.0, 2.0])
        if kind == "ranges":
            assert begins[0] == 0 < begins[1] <= len(BODY) // 2 < begins[2] < begins[3]
        else:
            assert begins == [0] * 4
        assert read(f"{server.url}/a.jsonl", tmp_path) == list(range(LINES))
        assert len(server.asked) == 4, "the copy is read"


def test_a_connection_without_progress_is_an_error(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried four times. Seen to fail: it waited for the client's limit of 300 s on the whole."""
    monkeypatch.setattr(transfer, "NO_PROGRESS_S", 0.2)
    with HttpFiles().running() as server:
        server.files["/a.jsonl"] = BODY

        stuck = threading.Event()
        server.before = lambda number: stuck.wait()
        with pytest.raises(TimeoutError):
            read(f"{server.url}/a.jsonl", tmp_path)
        stuck.set()
        assert [begin for _, begin in server.asked] == [0] * 4
    assert pauses == [0.5, 1.0, 2.0]


def test_a_connection_that_never_gets_further_is_an_error(tmp_path: Path, pauses: list[float]) -> None:
    """Also where each request begins anew. Seen to fail: it began again for ever, because each time some bytes came."""
    with HttpFiles(versions=False).running() as server:
        server.files["/a.jsonl"] = BODY
        server.cut = lambda number, body: len(body) // 2 if number < 60 else None
        with pytest.raises(aiohttp.ClientPayloadError):
            read(f"{server.url}/a.jsonl", tmp_path)
        assert len(server.asked) < 60


@pytest.mark.parametrize("versions", [True, False])
@pytest.mark.parametrize(
    ("over", "size", "error"),
    [(True, 10**6, "is no longer wanted"), (False, 1000, "returned at least .* instead of 1000")],
)
def test_a_copy_that_must_end_is_not_asked_for_again(
    versions: bool, over: bool, size: int, error: str, tmp_path: Path, pauses: list[float]
) -> None:
    """Seen to fail: each part was followed by a pause and another request, to the end of the file; if it was too long
    and had no version, for ever."""
    with HttpFiles().running() as server:
        server.files["/a.jsonl"] = BODY
        server.cut = lambda number, body: None if number < 20 else 0
        callback = transfer.transfer_callback("a.jsonl", size, lambda: over)
        header = {"X-Version": "1"} if versions else {}
        with pytest.raises(OSError, match=error):
            transfer.copy_over_http(
                fsspec.filesystem("http"), f"{server.url}/a.jsonl", str(tmp_path / "copy"), callback, header
            )
        assert len(server.asked) == 1
    assert pauses == []


def test_a_copy_may_take_as_long_as_it_makes_progress(tmp_path: Path) -> None:
    """Longer than the client's limit on a whole request, which is 300 s and here 1 ms. Seen to fail: it was ended by
    that."""
    client = {"timeout": aiohttp.ClientTimeout(total=0.001)}
    with HttpFiles().running() as server:
        server.files["/a.jsonl"] = BODY
        server.before = lambda number: threading.Event().wait(0.1)
        filesystem = fsspec.filesystem("http", client_kwargs=client, skip_instance_cache=True)
        callback = transfer.transfer_callback("a.jsonl", len(BODY), lambda: False)
        transfer.copy_over_http(filesystem, f"{server.url}/a.jsonl", str(tmp_path / "copy"), callback, {})
        assert len(server.asked) == 1
    assert (tmp_path / "copy").read_bytes() == BODY


def test_a_copy_is_named_after_the_version_on_the_server(tmp_path: Path) -> None:
    """Also under an index that was made on a disk, before the upload. Seen to fail: a replaced object of equal size was
    read from the old copy for ever."""
    local = tmp_path / "a.jsonl"
    local.write_bytes(BODY[:300])
    write_index(f"{local}.index", "jsonl", stamp(str(local)), np.arange(0, 301, 15))
    with HttpFiles().running() as server:
        server.files |= {"/a.jsonl": BODY[:300], "/a.jsonl.index": Path(f"{local}.index").read_bytes()}

        def ids(**words: Any) -> list[int]:
            with Loader.from_dataset(formats.jsonl(f"{server.url}/a.jsonl", **words), batch_size=20) as loader:
                return [one for batch in loader for one in batch["id"].tolist()]

        copies = {"cache_dir": tmp_path / "cache", "max_cache_size": "1MB"}
        assert ids(**copies) == ids() == list(range(20))
        server.files["/a.jsonl"] = BODY[1500:1800]
        assert ids(**copies) == ids() == list(range(100, 120))


def script(server: HttpFiles, name: str, numbers: list[int]) -> list[str]:
    """The URLs of shards that one script serves: 40 bytes each, with five records that end in the shard's number."""
    for number in numbers:
        text = "".join(json.dumps({"id": 10 * place + number}) + "\n" for place in range(2))
        server.files[f"/get?{name}={number}.jsonl"] = text.ljust(39).encode() + b"\n"
    return [f"{server.url}/get?{name}={number}.jsonl" for number in numbers]


def test_shards_that_differ_only_in_the_query_are_different_shards(tmp_path: Path) -> None:
    """In the cache, in bookmarks and in states. Seen to fail: three shards came from one copy, and another data set's
    state loaded."""
    with HttpFiles(versions=False, queries=True).running() as server:
        urls = script(server, "file", [1, 2, 3])
        copies = {"cache_dir": tmp_path / "cache", "max_cache_size": "1MB"}
        with Loader.from_dataset(formats.jsonl(urls, counts=[2] * 3, **copies), batch_size=6) as loader:
            assert next(iter(loader))["id"].tolist() == [1, 11, 2, 12, 3, 13]

        def run(urls: list[str], state: Any = None) -> tuple[list[int], Any]:
            data = formats.jsonl(urls, epoch_size=6, lanes=1, bookmarks=tmp_path / "bookmarks")
            with Loader.from_dataset(data, batch_size=1) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                found = []
                for batch in loader:
                    found += batch["id"].tolist()
                    state = state or loader.state_dict()
                return found, state

        seen, state = run(urls)
        assert seen == [1, 11, 2, 12, 3, 13]
        assert run(urls, state)[0] == seen[1:]
        with pytest.raises(StateMismatch, match="shard_names"):
            run(urls[::-1], state)
        assert run(urls[::-1])[0] == [3, 13, 2, 12, 1, 11]


SIGNED = {
    "S3": lambda k, day: (
        f"https://b.s3.amazonaws.com/{k}.tar?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date={day}"
        f"&X-Amz-Expires=60&X-Amz-Signature={day}{k}"
    ),
    "S3, version 2": lambda k, day: (
        f"https://b.s3.amazonaws.com/{k}.tar?AWSAccessKeyId=A&Expires={day}&Signature={day}{k}%3D"
    ),
    "GCS": lambda k, day: (
        f"https://storage.googleapis.com/b/{k}.tar?X-Goog-Algorithm=GOOG4&X-Goog-Date={day}&X-Goog-Signature={day}{k}"
    ),
    "Azure": lambda k, day: (
        f"https://a.blob.core.windows.net/c/{k}.tar?sv=2025-01-01&se={day}&sr=b&sp=r&sig={day}{k}%3D"
    ),
    "CloudFront": lambda k, day: f"https://d.cloudfront.net/{k}.tar?Expires={day}&Signature={day}{k}&Key-Pair-Id=K",
    "one token for all": lambda k, day: f"https://example.org/{k}.tar?token={day}",
}


@pytest.mark.parametrize("signed", SIGNED.values(), ids=SIGNED)
def test_urls_that_are_signed_again_are_the_same_shards(signed: Callable[[int, int], str]) -> None:
    """Seen to fail where every parameter counts. A token of an unknown kind costs a fetch in the cache, which one shard
    cannot tell from a name."""
    monday, tuesday = ([signed(k, day) for k in range(3)] for day in (1, 2))
    assert names_of(monday) == names_of(tuesday) != names_of(tuesday[::-1])
    if "token" not in monday[0]:
        assert list(map(address, monday)) == list(map(address, tuesday)) == [url.partition("?")[0] for url in monday]


def test_a_version_in_the_query_counts() -> None:
    first, second = (
        [f"https://b.s3.amazonaws.com/a.tar?versionId={version}&X-Amz-Signature={version}"] for version in (1, 2)
    )
    assert names_of(first) != names_of(second)
    assert address(first[0]) == "https://b.s3.amazonaws.com/a.tar?versionId=1"
    # no pattern
    assert expanded("s3://b/{a,b}.tar?versionId=1") == ["s3://b/a.tar?versionId=1", "s3://b/b.tar?versionId=1"]
    assert address("s3://b/a.tar?versionId=1") == "s3://b/a.tar?versionId=1"


def test_names_without_a_scheme_of_their_own_keep_short_parameters() -> None:
    """Azure's short names are a signature only beside ``sig``."""
    assert address("https://example.org/a?sp=1&st=2") == "https://example.org/a?sp=1&st=2"
