"""Bookmarks: a union of facts, read from files that anybody may have damaged. Missing ones cost time; a wrong one must
never be believed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import threading
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forks import ended, forked
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._errors import StateMismatch
from penstock._streams import bookmarks
from penstock._streams.bookmarks import Bookmarks, default_folder
from penstock._streams.facts import Contradiction, Fact, FactLines, Facts
from penstock._streams.shard_keys import ShardKeys

KEYS = [f"data/{shard}.tar 1000 {shard}" for shard in range(8)]
BINDING = {"steps": ["filter"], "seed": 7}
HASH = "3e9591af1218dfe02691910ec099a8bd"
"""Of this binding."""


def marks(
    folder: Path | None, binding: dict[str, Any] = BINDING, keys: list[str] = KEYS, seed: int = 0, skips: bool = False
) -> Bookmarks:
    return Bookmarks(folder, binding, keys, seed, skips)


def told(one: Bookmarks, passes: int = 4) -> dict[tuple[int, int], int]:
    """All that ``one`` says."""
    said = {(shard, pass_): one.outputs(shard, pass_) for shard in range(len(KEYS)) for pass_ in range(passes)}
    return {place: outputs for place, outputs in said.items() if outputs is not None}


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.jsonl"))


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    """A file with the fact that shard 0 has 10 outputs in every pass, and one that shard 1 has 11 in pass 2."""
    with_facts = marks(tmp_path)
    with_facts.add(0, 0, 10, every_pass=True)
    with_facts.add(1, 2, 11, every_pass=False)
    (file,) = files(tmp_path)
    return file


# Facts.


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.none() | st.integers(0, 2), st.integers(0, 1) | st.just(5)).map(
            lambda words: Fact(*words)
        ),
        max_size=12,
    )
)
def test_facts_say_what_all_that_was_added_agrees_on(added: list[Fact]) -> None:
    """Seen to fail: a fact for every pass that was not compared with those of single passes."""
    facts = Facts()
    for fact in added:
        facts.add(fact)
    for shard in range(3):
        about = [fact for fact in added if fact.shard == shard]
        agreed = not any(
            one.outputs != other.outputs
            for one in about
            for other in about
            if None in (one.pass_, other.pass_) or one.pass_ == other.pass_
        )
        assert (shard in facts.doubted) is not agreed
        for pass_ in range(3):
            known = {fact.outputs for fact in about if fact.pass_ in (None, pass_)}
            assert facts.get(shard, pass_) == (known.pop() if agreed and known else None)


def test_a_fact_for_every_pass_contradicts_the_one_that_was_relied_on() -> None:
    """Seen to fail: the first pass that differs was reported, on which nobody had relied."""
    facts = Facts()
    for pass_ in range(3):
        facts.add(Fact(0, pass_, 5))
    facts.get(0, 2)
    assert facts.add(Fact(0, None, 6)) == Contradiction(Fact(0, 2, 5), Fact(0, None, 6), True)


# Files.


def test_bookmarks_are_shared_by_files_and_outlive_a_run(tmp_path: Path) -> None:
    one, other = marks(tmp_path), marks(tmp_path)
    assert other.outputs(0, 0) is None
    one.add(0, 0, 10, every_pass=True)
    one.add(1, 2, 11, every_pass=False)
    other.add(2, 0, 0, every_pass=True)
    assert other.outputs(0, 0) is None  # nothing is read until it is asked to
    other.refresh()
    assert told(other) == {
        **{(0, pass_): 10 for pass_ in range(4)},
        (1, 2): 11,
        **{(2, pass_): 0 for pass_ in range(4)},
    }
    assert told(other) == told(marks(tmp_path))
    assert len(files(tmp_path)) == 2


def test_bookmarks_write_what_is_news_and_only_then_make_a_file(tmp_path: Path, one_file: Path) -> None:
    """Seen to fail: `add` that had not read the files before, so that each run wrote everything once more."""
    later = marks(tmp_path)
    later.add(0, 3, 10, every_pass=True)
    later.add(0, 3, 10, every_pass=False)
    later.add(1, 2, 11, every_pass=False)
    assert files(tmp_path) == [one_file]
    later.add(1, 3, 12, every_pass=False)
    later.add(1, 3, 12, every_pass=False)
    assert [len(file.read_bytes().splitlines()) for file in files(tmp_path) if file != one_file] == [1]


def test_bookmarks_of_another_binding_or_another_content_are_not_seen(tmp_path: Path, one_file: Path) -> None:
    assert told(marks(tmp_path, {"steps": ["filter"], "seed": 8})) == {}
    assert told(marks(tmp_path, {"seed": 7, "steps": ["filter"]})) == told(marks(tmp_path))
    changed = ["data/0.tar 1000 99", *KEYS[1:]]
    assert told(marks(tmp_path, keys=changed)) == {(1, 2): 11}
    assert told(marks(tmp_path, keys=[*KEYS[:1], *"1234567"])) == {(0, pass_): 10 for pass_ in range(4)}
    again = marks(tmp_path, keys=changed)
    again.add(0, 0, 12, every_pass=True)  # no contradiction: the content is another one
    assert again.outputs(0, 0) == 12


def test_a_shard_that_was_changed_since_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new run is right; a run that goes on from an old state may not be. Seen to fail: ignored in silence."""
    Bookmarks(tmp_path, {}, ["a of 5 bytes", "b of 5 bytes"], 0).add(0, 0, 5, every_pass=True)
    again = Bookmarks(tmp_path, {}, ["a of 7 bytes", "b of 5 bytes"], 0)
    assert [again.outputs(shard, 0) for shard in (1, 0, 0)] == [None] * 3
    (record,) = caplog.records
    assert (
        "shard 0 was 'a of 5 bytes' when its bookmarks were written, and is 'a of 7 bytes' now" in record.getMessage()
    )


def test_sources_of_a_mix_may_share_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Seen to fail: a warning that the shard of one source was changed into that of the other; and that in a worker
    that had read only one of them."""
    web, code = (ShardKeys([f"{source}/0"], by_fsspec=False) for source in ("web", "code"))
    Bookmarks(tmp_path / "marks", {}, web, 0).add(0, 0, 5, every_pass=True)
    assert [Bookmarks(tmp_path / "marks", {}, keys, 0).outputs(0, 0) for keys in (code, web)] == [None, 5]
    assert caplog.records == []


def test_what_holds_for_one_pass_holds_for_one_seed(tmp_path: Path, one_file: Path) -> None:
    """Seen to fail: without the seed in the line."""
    assert told(marks(tmp_path, seed=1)) == {(0, pass_): 10 for pass_ in range(4)}
    marks(tmp_path, seed=1).add(1, 2, 12, every_pass=False)
    assert [marks(tmp_path, seed=seed).outputs(1, 2) for seed in range(3)] == [11, 12, None]


def test_a_pass_that_contradicts_all_passes_is_seen(tmp_path: Path, one_file: Path) -> None:
    """Seen to fail: the counts of one pass and those of every pass were kept apart, and a search believed the
    latter."""
    one = marks(tmp_path)
    assert one.outputs(0, 0) == 10
    with pytest.raises(StateMismatch, match=r"gave 10 outputs before and 9 now \(pass 3\)"):
        one.add(0, 3, 9, every_pass=False)


def test_where_an_error_cut_a_shard_short_counts_only_for_who_skips(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And whatever the file is by then, if it has the name. Seen to fail: a cut that was bound to the content; one that
    contradicted the whole shard."""
    cut, whole = (marks(tmp_path, keys=["a"], skips=skips) for skips in (True, False))
    cut.add(0, 1, 4, every_pass=False, cut=True)
    assert (cut.outputs(0, 1), cut.outputs(0, 2), caplog.records) == (4, None, [])  # the lane that was cut has said so
    whole.add(0, 1, 9, every_pass=True)
    assert [marks(tmp_path, keys=["a"], skips=skips).outputs(0, 1) for skips in (False, True)] == [9, 4]
    (record,) = caplog.records
    assert "a gives 4 outputs in pass 1, because on_error=" in record.getMessage()
    keys = ShardKeys([str(tmp_path / "file")], by_fsspec=False)
    (tmp_path / "file").write_text("x")
    Bookmarks(tmp_path / "marks", {}, keys, 0, skips=True).add(0, 0, 3, every_pass=False, cut=True)
    (tmp_path / "file").write_text("mended")
    again = ShardKeys([str(tmp_path / "file")], by_fsspec=False)
    assert Bookmarks(tmp_path / "marks", {}, again, 0, skips=True).outputs(0, 0) == 3


def test_a_file_in_the_folder_of_another_binding_is_ignored(tmp_path: Path, one_file: Path) -> None:
    """Seen to fail: a checksum that does not start from the binding."""
    other = marks(tmp_path, {"steps": []})
    other.add(7, 0, 1, every_pass=True)
    (folder,) = {file.parent for file in files(tmp_path)} - {one_file.parent}
    (folder / one_file.name).write_bytes(one_file.read_bytes())
    assert told(marks(tmp_path, {"steps": []})) == {(7, pass_): 1 for pass_ in range(4)}


@pytest.mark.parametrize("key", ["a/ü \udc80\n\"'\\", "", "x" * 10_000])
def test_any_text_is_a_key(tmp_path: Path, key: str) -> None:
    marks(tmp_path, keys=[key]).add(0, 0, 3, every_pass=True)
    assert marks(tmp_path, keys=[key]).outputs(0, 5) == 3


def test_a_key_that_is_too_long_for_a_file_is_kept_in_memory(tmp_path: Path) -> None:
    one = marks(tmp_path, keys=["x" * bookmarks.LONGEST])
    one.add(0, 0, 3, every_pass=True)
    assert one.outputs(0, 0) == 3
    assert marks(tmp_path, keys=["x" * bookmarks.LONGEST]).outputs(0, 0) is None


# Damage.


def checked(said: bytes) -> bytes:
    return said + b',"check":%d}\n' % zlib.crc32(said, zlib.crc32(HASH.encode()))


def line(**changed: Any) -> bytes:
    """A line that is as it should be, checksum included, but for what it says."""
    said = {"shard": 3, "key": KEYS[3], "pass": None, "outputs": 9, "seed": 0, **changed}
    return checked(json.dumps(said, separators=(",", ":"))[:-1].encode())


HOSTILE = [
    pytest.param(
        checked(b'{"shard":' + b"3" * 5000 + b',"key":"","pass":null,"outputs":9'), id="a shard beyond all bounds"
    ),
    pytest.param(line(shard=8), id="no such shard"),
    pytest.param(line(shard=-5), id="a shard counted from the end"),
    pytest.param(line(shard=3.0), id="a shard that is a float"),
    pytest.param(line(shard=True, key=KEYS[1]), id="a shard that is a bool"),
    pytest.param(line(key=KEYS[2]), id="the key of another shard"),
    pytest.param(line(key=None), id="no key"),
    pytest.param(line(key=[KEYS[3]]), id="a key in a list"),
    pytest.param(line(outputs=-1), id="outputs below 0"),
    pytest.param(line(outputs=2**63), id="outputs beyond 64 bits"),
    pytest.param(line(outputs=1e3), id="outputs that are a float"),
    pytest.param(line(outputs=None), id="no outputs"),
    pytest.param(line(**{"pass": -1}), id="a pass below 0"),
    pytest.param(line(**{"pass": "0"}), id="a pass that is a text"),
    pytest.param(line(**{"pass": 2**64}), id="a pass beyond 64 bits"),
    pytest.param(line().replace(b'"outputs":9', b'"outputs":8'), id="another number under the checksum"),
    pytest.param(line().replace(b'"check":', b'"check": '), id="a space before the checksum"),
    pytest.param(line().replace(b'"check":', b'"check":+'), id="a sign before the checksum"),
    pytest.param(line()[:-1] + b"\r\n", id="the line end of another system"),
    pytest.param(line()[:-1], id="torn just before its end"),
    pytest.param(line()[:-10] + b"\n", id="torn, and a line end"),
    pytest.param(line()[:-10] + line(shard=4, key=KEYS[4]), id="torn, and gone on with another"),
    pytest.param(b" " + line(), id="a space before it"),
    pytest.param(checked(b"[3,null,9"), id="a list"),
    pytest.param(checked(b""), id="nothing but a checksum"),
    pytest.param(checked(b"[" * 100_000), id="nested too deep"),
    pytest.param(b"\0" * 5000 + b"\n", id="zeros, as after a power failure"),
    pytest.param(bytes(range(256)) * 3 + b"\n", id="all bytes"),
    pytest.param(b"\n\n\n", id="empty lines"),
    pytest.param(b"x" * (2 * bookmarks.LONGEST + 5) + b"\n", id="a line without end"),
]


def test_a_folder_has_this_name_and_a_file_these_lines(tmp_path: Path, one_file: Path) -> None:
    """So other versions read them, and the lines below have nothing wrong but what they say. Seen to fail: a checksum
    that starts from 0."""
    assert one_file.parent == tmp_path / HASH
    for_every_pass, for_one = (
        b'{"shard":0,"key":"data/0.tar 1000 0","pass":null,"outputs":10,"check":3794898774}\n',
        b'{"shard":1,"key":"data/1.tar 1000 1","pass":2,"outputs":11,"seed":0,"cut":false,"check":3469046470}\n',
    )
    assert one_file.read_bytes() == for_every_pass + for_one
    assert checked(for_one.partition(b',"check":')[0]) == for_one


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_line_that_is_not_quite_right_is_ignored_wherever_it_stands(
    tmp_path: Path, one_file: Path, hostile: bytes
) -> None:
    """Seen to fail: without the checksum, without the bounds, with ``isinstance(…, int)``, and with the file read as
    text."""
    good = one_file.read_bytes()
    expected = told(marks(tmp_path))
    one_file.write_bytes(good + hostile)
    assert told(marks(tmp_path)) == expected
    if hostile.endswith(b"\n"):
        one_file.write_bytes(hostile + good)
        assert told(marks(tmp_path)) == expected


def test_a_byte_that_was_overwritten_never_makes_another_fact() -> None:
    """Each byte of a line, by each byte that might make sense there. Seen to fail: without the checksum."""
    reader, good = FactLines(HASH, 0), line(**{"pass": 2})
    assert reader.parsed(good) == (KEYS[3], Fact(3, 2, 9))
    for at, byte in itertools.product(range(len(good)), b'0123456789-+.enull,:{}[]" \\\n\0\xff'):
        for damaged in (good[:at] + bytes([byte]) + good[at + 1 :], good[:at] + bytes([byte]) + good[at:]):
            with contextlib.suppress(ValueError):
                assert reader.parsed(damaged) == (KEYS[3], Fact(3, 2, 9))


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(tmp_path: Path, one_file: Path) -> None:
    """Seen to fail: a place in the file behind a line that was not complete."""
    good, more = one_file.read_bytes(), line()
    one_file.write_bytes(good + more[:20])
    reader = marks(tmp_path)
    assert reader.outputs(3, 0) is None
    one_file.write_bytes(good + more)
    reader.refresh()
    assert reader.outputs(3, 0) == 9


def test_what_never_ends_is_no_bookmark(
    tmp_path: Path, one_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen to fail: the pipe was opened, which waits for a writer; /dev/zero and a file without a bound would be read
    forever."""
    monkeypatch.setattr(bookmarks, "LARGEST", one_file.stat().st_size)
    os.mkfifo(one_file.with_name("0.jsonl"))
    one_file.with_name("1.jsonl").symlink_to("/dev/zero")
    one_file.with_name("2.jsonl").write_bytes(one_file.read_bytes() + b"x")
    assert told(marks(tmp_path))[1, 2] == 11
    for name in ("0", "1", "2"):
        assert f"{name}.jsonl is not a regular file of at most" in caplog.text


def test_a_file_of_damage_is_left_for_the_next_time(
    tmp_path: Path, one_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: 16 MiB of newlines took 21 s to read, and a file may have 1 GiB."""
    monkeypatch.setattr(bookmarks, "MOST_DAMAGED", 3)
    one_file.write_bytes(b"\n" * 4 + one_file.read_bytes())
    reader = marks(tmp_path)
    assert told(reader) == {}
    reader.refresh()
    assert told(reader)[1, 2] == 11


# Contradictions.


def test_a_contradiction_of_what_a_seek_relied_on_names_the_shard_and_both_counts(
    tmp_path: Path, one_file: Path
) -> None:
    one = marks(tmp_path)
    assert one.outputs(1, 2) == 11
    with pytest.raises(
        StateMismatch, match=r"shard 1 \(data/1.tar 1000 1\) gave 11 outputs before \(pass 2\) and 12 now \(pass 2\)"
    ):
        one.add(1, 2, 12, every_pass=False)
    one.add(1, 2, 12, every_pass=False)  # said once: nobody relies on it any more
    assert one.outputs(1, 2) is None
    assert one.outputs(0, 0) == 10


def test_a_contradiction_that_nobody_relied_on_is_logged_and_the_shard_is_not_trusted_any_more(
    tmp_path: Path, one_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen to fail: only the new number written, and the file with the old one deleted."""
    one = marks(tmp_path)
    one.add(0, 1, 12, every_pass=False)
    assert "gave 10 outputs before and 12 now (pass 1)" in caplog.records[0].message
    assert told(one) == {(1, 2): 11}
    assert told(marks(tmp_path)) == {(1, 2): 11}
    one_file.unlink()
    assert told(marks(tmp_path)) == {}


def test_a_contradiction_that_another_process_found_is_an_error_here_too(tmp_path: Path, one_file: Path) -> None:
    """Seen to fail: a refresh that only logs."""
    one, other = marks(tmp_path), marks(tmp_path)
    assert one.outputs(0, 0) == 10
    other.add(0, 1, 12, every_pass=True)
    with pytest.raises(StateMismatch, match="gave 10 outputs before and 12 now"):
        one.refresh()
    one.refresh()
    assert one.outputs(0, 0) is None


# Folders that refuse.


@pytest.fixture
def in_the_way(tmp_path: Path) -> Path:
    """A folder that cannot be made, also not by root: a file stands where its parent should be."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "folder"


def test_a_named_folder_that_cannot_be_written_is_refused_when_built(in_the_way: Path) -> None:
    with pytest.raises(
        NotADirectoryError, match=r"bookmarks='.*folder' cannot be used. Pass a writable folder, or None"
    ):
        marks(in_the_way)


def test_the_default_folder_need_not_be_writable(
    in_the_way: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen to fail: the default folder taken for one that was named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    one = marks(default_folder())
    assert one.outputs(0, 0) is None
    one.add(0, 0, 10, every_pass=True)
    one.add(1, 0, 11, every_pass=True)
    one.refresh()
    assert (one.outputs(0, 0), one.outputs(1, 0)) == (10, 11)
    assert len(caplog.records) == 1
    assert "a resume may take longer" in caplog.records[0].message


def test_a_full_disk_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen to fail: the next line appended to the one that was cut short."""
    one, write = marks(tmp_path), os.write
    one.add(0, 0, 10, every_pass=True)
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    one.add(1, 0, 11, every_pass=True)
    monkeypatch.undo()
    (file,) = files(tmp_path)
    before = file.read_bytes()
    one.add(2, 0, 12, every_pass=True)
    assert file.read_bytes() == before
    assert [one.outputs(shard, 0) for shard in range(3)] == [10, 11, 12]
    assert ["No space left" in record.message for record in caplog.records] == [True]
    assert told(marks(tmp_path)) == {(0, pass_): 10 for pass_ in range(4)}


def test_the_default_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, folder in ((str(tmp_path / "cache"), "cache"), ("", ".cache"), ("relative", ".cache"), (None, ".cache")):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if value is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_folder() == tmp_path / folder / "penstock" / "bookmarks"


# Threads and processes.


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = marks(Path("here"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pickle.loads(pickle.dumps(one)).add(0, 0, 10, every_pass=True)
    assert one.outputs(0, 0) == 10
    assert [file.parts[len(tmp_path.parts)] for file in files(tmp_path)] == ["here"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_goes_on_with_what_its_parent_knew_and_writes_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: the parent's lock, which another thread held at the moment of the fork; and the parent's file."""
    one = marks(tmp_path)
    one.add(0, 0, 10, every_pass=True)
    asked, done, listdir = threading.Event(), threading.Event(), os.listdir

    def listed(folder: str) -> list[str]:
        if threading.current_thread() is holder:
            asked.set()
            done.wait()
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", listed)
    holder = threading.Thread(target=one.refresh)
    holder.start()
    asked.wait()

    def in_the_child() -> None:
        one.add(1, 0, 11, every_pass=True)
        assert (one.outputs(0, 0), one.outputs(1, 0)) == (10, 11)

    try:
        assert ended(forked(in_the_child)) == [0]
    finally:
        done.set()
        holder.join()
    assert len(files(tmp_path)) == 2
    one.refresh()
    assert one.outputs(1, 0) == 11


def test_processes_that_append_at_once_lose_nothing_also_if_one_is_killed(tmp_path: Path) -> None:
    """Four write at once, and one of them is killed while it does."""
    go, start = os.pipe()

    def adds(me: int) -> None:
        one = marks(tmp_path, keys=["key"] * 3000)
        os.read(go, 1)
        for shard in range(3000):
            if shard % 4 in (me, (me + 1) % 4):  # each shard by two processes
                one.add(shard, 0, 7 * shard, every_pass=bool(shard % 2))
        if me == 0:
            signal.pause()  # killed here, or before

    writers = [forked(partial(adds, me)) for me in range(4)]
    try:
        os.write(start, bytes(4))
        while len(found := files(tmp_path)) < 4 or sum(file.stat().st_size for file in found) < 20_000:
            time.sleep(0.001)
    finally:
        os.kill(writers[0], signal.SIGKILL)
        codes = ended(*writers)
        os.close(go)
        os.close(start)
    assert codes == [-signal.SIGKILL, 0, 0, 0]
    one = marks(tmp_path, keys=["key"] * 3000)
    assert [one.outputs(shard, 0) for shard in range(3000)] == [7 * shard for shard in range(3000)]
    assert len(files(tmp_path)) == 4
