"""A folder of copies: bounded, shared by processes, and right whenever one of them dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from forks import ended, forked

from penstock._arguments import nbytes_of
from penstock._files import copies as module
from penstock._files.copies import CacheFolder, file_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def writes(number: int, count: list[int] | None = None) -> Callable[[str], None]:
    def copy(path: str) -> None:
        Path(path).write_bytes(content(number))
        if count is not None:
            count.append(number)

    return copy


def read(
    cache: CacheFolder, number: int, *, version: str = "1", copy: Callable[[str], None] | None = None
) -> bytes | None:
    opened = cache.opened(f"s3://data/{number}.tar", SIZE, version, copy or writes(number))
    if opened is None:
        return None
    with opened:
        return opened.read()


def names(cache: CacheFolder) -> list[str]:
    return sorted(name for name in os.listdir(cache.folder) if name != "penstock.lock" and not name.endswith(".notes"))


def test_a_file_is_fetched_once_and_another_version_is_another_file(tmp_path: Path) -> None:
    """Seen to fail: a name without the version."""
    cache, fetched = CacheFolder(str(tmp_path / "new"), 10 * SIZE), []
    for _ in range(3):
        assert read(cache, 1, copy=writes(1, fetched)) == content(1)
    # another process, or a later run
    assert read(CacheFolder(cache.folder, SIZE), 1, copy=writes(2, fetched)) == content(1)
    assert read(cache, 1, version="2", copy=writes(3, fetched)) == content(3)
    assert fetched == [1, 3]
    assert len(names(cache)) == 2
    assert all(name.endswith("-1.tar") for name in names(cache))


def test_the_bound_holds_and_what_does_not_fit_is_left_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies of this data set are not removed for one another. Said once. Seen to fail: without the size of what is
    being fetched."""
    cache = CacheFolder(str(tmp_path), 2 * SIZE + 500, (file_hash(f"s3://data/{number}.tar") for number in range(5)))
    assert [read(cache, number) for number in range(5)] == [content(0), content(1), None, None, None]
    assert [read(cache, number) for number in range(2)] == [content(0), content(1)]
    assert len(caplog.messages) == 1
    assert "has no room for more than 2,500 bytes" in caplog.messages[0]
    inner: list[Any] = []

    def copy(path: str) -> None:
        # meanwhile, in another process
        inner.append(read(CacheFolder(cache.folder, 3 * SIZE + 500), 3, copy=writes(3)))
        Path(path).write_bytes(content(2))

    assert read(CacheFolder(cache.folder, 3 * SIZE + 500), 2, copy=copy) == content(2)
    assert inner != [content(2)]
    assert sum(os.path.getsize(tmp_path / name) for name in names(cache)) <= 3 * SIZE + 500


def test_a_finished_copy_gets_its_name_while_nobody_lists_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing may miss a file that is renamed meanwhile, under both names, and the bound was exceeded by it. Seen to
    fail: renamed without the lock."""
    cache, replace, renamed = CacheFolder(str(tmp_path), 2 * SIZE), os.replace, []

    def watched(part: str, path: str) -> None:
        with open(tmp_path / "penstock.lock", "rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        replace(part, path)
        renamed.append(path)

    monkeypatch.setattr(os, "replace", watched)
    assert read(cache, 1) == content(1)
    assert len(renamed) == 1


def test_copies_of_other_data_go_first_and_never_one_that_is_read(tmp_path: Path) -> None:
    """Those used last long ago first. Seen to fail: by name; without the shared lock of a reader."""
    old, new = (
        CacheFolder(str(tmp_path), 3 * SIZE),
        CacheFolder(str(tmp_path), 3 * SIZE, [file_hash("s3://data/1.tar"), file_hash("s3://data/2.tar")]),
    )
    lately, before, long_ago = sorted((7, 8, 9), key=lambda number: file_hash(f"s3://data/{number}.tar"))
    for number in (lately, before, long_ago):
        read(old, number)
    with old.opened(f"s3://data/{long_ago}.tar", SIZE, "1", writes(0)) as reads:  # type: ignore[union-attr]
        for at, number in enumerate((long_ago, before, lately)):
            os.utime(next(tmp_path.glob(f"*-{number}.tar")), (at, at))
        assert read(new, 1) == content(1)
        assert {name[-5:-4] for name in names(new)} == {str(lately), str(long_ago), "1"}
        assert reads.read() == content(long_ago)
    assert read(new, 2) == content(2)
    assert {name[-5:-4] for name in names(new)} == {str(lately), "1", "2"}


def test_who_waited_for_a_lock_whose_file_is_gone_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or two would fetch at the same time. Seen to fail: without looking whether it is linked."""
    cache, real = CacheFolder(str(tmp_path), SIZE), fcntl.flock

    def waits(fd: int, how: int) -> None:
        monkeypatch.undo()
        (lock,) = tmp_path.glob("penstock-*.lock")
        lock.unlink()  # by who had it, and has failed
        real(fd, how)

    def copy(path: str) -> None:
        (lock,) = tmp_path.glob("penstock-*.lock")
        with lock.open() as other, pytest.raises(BlockingIOError):
            real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        writes(1)(path)

    monkeypatch.setattr(fcntl, "flock", waits)
    assert read(cache, 1, copy=copy) == content(1)


def test_what_is_left_of_a_fetch_is_removed_while_its_lock_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who waits for the lock gets it, begins to fetch, and loses its file. Seen to fail: removed when the lock was
    given back."""
    cache = CacheFolder(str(tmp_path), 2 * SIZE)
    read(cache, 1)
    (copy,) = names(cache)
    key = copy.rpartition("-")[0]
    for left in (".lock", f".{SIZE}.01234567.part"):
        (tmp_path / f"{key}{left}").write_bytes(content(0))
    held, real = [], os.unlink

    def removes(path: str) -> None:
        name = os.path.basename(path)
        if name.startswith(f"{key}.") and (tmp_path / f"{key}.lock").exists():
            with (tmp_path / f"{key}.lock").open() as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append(name)
        real(path)

    monkeypatch.setattr(os, "unlink", removes)
    assert read(cache, 2) == content(2)
    assert held
    assert len(names(cache)) == 2


def test_a_lock_that_was_gone_and_is_there_again_is_another_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the removal somebody makes it and begins to fetch: whoever looks next would take that part
    for a leftover. Seen to fail: removed by its name."""
    cache = CacheFolder(str(tmp_path), 5 * SIZE)
    read(cache, 1)
    (copy,) = names(cache)
    left = tmp_path / f"{copy.rpartition('-')[0]}.lock"
    left.touch()
    real, seen = os.open, []

    def opens(path: str, flags: int, *mode: int) -> int:
        if path == str(left) and not flags & os.O_CREAT:
            seen.append(path)  # as if it had been removed a moment ago, and made again a moment later
            raise FileNotFoundError(path)
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", opens)
    assert read(cache, 2) == content(2)
    assert seen
    assert left.exists()


@pytest.mark.parametrize(
    "name", ["train_7.0.part", "a.lock", "b.12.01234567.part", "\N{SNOWMAN}" * 80, "c.notes", os.fsdecode(b"\xff.tar")]
)
def test_files_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Seen to fail: names that ended as those of locks and parts were taken for such, and one that is not UTF-8 raised
    a UnicodeEncodeError."""
    cache, fetched = CacheFolder(str(tmp_path), SIZE), []
    for version in "1121":
        found = cache.opened(f"s3://data/{name}", SIZE, version, writes(1, fetched))
        assert found is not None
        found.close()
        assert sum(path.stat().st_size for path in tmp_path.glob("penstock-1-*-*-*")) == SIZE
    assert len(fetched) == 3


def test_a_library_that_writes_on_after_an_interrupt_spoils_no_copy(tmp_path: Path) -> None:
    """As a coroutine of fsspec does, in a thread of its own. Seen to fail: with parts of one name."""
    cache, places = CacheFolder(str(tmp_path), 10 * SIZE), []

    def interrupted(path: str) -> None:
        places.append(path)
        raise KeyboardInterrupt

    def copy(path: str) -> None:
        Path(path).write_bytes(content(1)[:500])
        Path(places[0]).write_bytes(b"")  # the other one begins only now
        with open(path, "ab") as file:
            file.write(content(1)[500:])

    with pytest.raises(KeyboardInterrupt):
        read(cache, 1, copy=interrupted)
    assert read(cache, 1, copy=copy) == content(1)


def test_a_copy_that_is_removed_before_its_lock_is_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever opens it by its name finds nothing there. Seen to fail: with what is open, but has no name any
    more."""
    cache, real = CacheFolder(str(tmp_path), SIZE), fcntl.flock
    assert read(cache, 1) == content(1)

    def removes(fd: int, how: int) -> None:
        if how == fcntl.LOCK_SH:
            monkeypatch.undo()
            next(tmp_path.glob("*-1.tar")).unlink()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", removes)
    with cache.opened("s3://data/1.tar", SIZE, "1", writes(1)) as copy:  # type: ignore[union-attr]
        assert Path(copy.name).read_bytes() == content(1)


@contextlib.contextmanager
def living_on() -> Iterator[Callable[[], None]]:
    """What forks a process that lives until the end."""
    children: list[int] = []
    held, end = os.pipe()

    def wait() -> None:
        os.close(end)
        os.read(held, 1)

    yield lambda: children.append(forked(wait))
    os.close(held)
    os.close(end)
    assert ended(*children) == [0] * len(children)


def test_a_process_that_is_forked_does_not_keep_what_is_closed_here(tmp_path: Path) -> None:
    """Its room is free. Seen to fail: a copy that is closed without giving its lock back."""
    cache = CacheFolder(str(tmp_path), SIZE)
    with living_on() as fork:
        with cache.opened("s3://data/1.tar", SIZE, "1", writes(1)):  # type: ignore[union-attr]
            fork()
        assert read(cache, 2) == content(2)


def test_a_process_that_is_forked_while_a_lock_is_held_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives on, and nobody waits for it. Seen to fail: by closing the file only."""
    cache = CacheFolder(str(tmp_path), SIZE)
    with living_on() as fork:

        def copy(path: str) -> None:
            fork()
            writes(1)(path)

        def listed(folder: str) -> Any:  # to sum the sizes, under the lock of the folder
            monkeypatch.undo()
            fork()
            return os.scandir(folder)

        assert read(cache, 1, copy=copy) == content(1)
        monkeypatch.setattr(os, "scandir", listed)
        assert read(cache, 2) == content(2)
        assert read(cache, 1) == content(1)


def test_a_worker_on_another_machine_makes_the_folder_there(tmp_path: Path) -> None:
    sent = pickle.dumps(CacheFolder(str(tmp_path / "cache"), SIZE))
    shutil.rmtree(tmp_path / "cache")
    assert read(pickle.loads(sent), 1) == content(1)


def test_only_its_own_files_are_ever_removed(tmp_path: Path) -> None:
    for name in ("important.tar", "penstock-1-notes.txt", "x.part"):
        (tmp_path / name).write_bytes(content(0))
    cache = CacheFolder(str(tmp_path), SIZE)
    read(cache, 1)
    read(cache, 2)
    assert {"important.tar", "penstock-1-notes.txt", "x.part"} <= {*names(cache)}


@pytest.mark.parametrize("what", [SIZE - 1, SIZE + 1, ConnectionResetError("reset"), KeyboardInterrupt()])
def test_a_fetch_that_fails_leaves_nothing(what: Any, tmp_path: Path) -> None:
    """Seen to fail: without comparing the length."""
    cache = CacheFolder(str(tmp_path), 10 * SIZE)

    def copy(path: str) -> None:
        Path(path).write_bytes(bytes(what if isinstance(what, int) else 5))
        if not isinstance(what, int):
            raise what

    with pytest.raises(OSError if isinstance(what, int) else type(what)):
        read(cache, 1, copy=copy)
    assert names(cache) == []
    assert read(cache, 1) == content(1)


def test_a_full_disk_and_a_folder_that_cannot_be_written_to_are_as_if_there_were_no_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheFolder(str(tmp_path), 10 * SIZE)

    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    assert read(cache, 1, copy=full) is None
    assert names(cache) == []
    assert read(cache, 2) == content(2)

    def refuses(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", path)
        return real(path, flags, *mode)

    real = os.open
    monkeypatch.setattr(module.os, "open", refuses)  # this may run as root, whom no mode stops
    assert read(cache, 2) == content(2)
    assert read(cache, 3) is None
    monkeypatch.undo()
    assert ["full disk" in line for line in caplog.messages] == [True, False]
    assert "is not writable" in caplog.messages[1]


READ_ONLY = """
import logging, sys
from penstock._files.copies import CacheFolder
logging.basicConfig(format="%(message)s")
cache = CacheFolder(sys.argv[1], 10_000)
for number in (1, 2):
    opened = cache.opened(f"s3://data/{number}.tar", 1000, "1", lambda path: open(path, "wb").close())
    print(number, opened and opened.read(1))
"""


@pytest.mark.slow
def test_a_filled_folder_on_a_read_only_mount_gives_what_it_has(tmp_path: Path) -> None:
    """A real mount, where this user may make one. Seen to fail: it was refused, although it had the copy."""
    read(CacheFolder(str(tmp_path), 10 * SIZE), 1)
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$0" -c "$2" "$1"'
    command = ["unshare", "-rm", "sh", "-c", mount, sys.executable, str(tmp_path), READ_ONLY]
    if subprocess.run([*command[:4], 'mount --bind "$0" "$0"', str(tmp_path)], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"1 {content(1)[:1]!r}\n2 None\n"
    assert "is on a read-only file system, so only the copies that it already has are used" in done.stderr
    assert "is not writable, so files without a copy are read from their source" in done.stderr


def deleted(folder: Path) -> None:
    shutil.rmtree(folder)


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def its_lock_a_folder(folder: Path) -> None:
    (folder / "penstock.lock").unlink()
    (folder / "penstock.lock").mkdir()


def its_lock_a_link(folder: Path) -> None:
    (folder / "penstock.lock").unlink()
    (folder / "penstock.lock").symlink_to(folder)


@pytest.mark.parametrize("becomes", [deleted, moved, a_file, its_lock_a_folder, its_lock_a_link])
def test_trouble_with_the_folder_is_no_fault_of_the_data(
    becomes: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two reads, and while one is being fetched. It is said once. Seen to fail: later shards raised, and
    ``on_error="skip"`` dropped them."""
    cache = CacheFolder(str(tmp_path / "cache"), 10 * SIZE)
    assert read(cache, 1) == content(1)

    def copy(path: str) -> None:
        becomes(tmp_path / "cache")
        writes(2)(path)

    assert read(cache, 2, copy=copy) in (None, content(2))
    assert [read(cache, number) for number in (3, 4)] in ([None, None], [content(3), content(4)])
    assert 1 <= len({*caplog.messages}) == len(caplog.messages) <= 2
    missing = FileNotFoundError(errno.ENOENT, "No such file", "s3://data/5.tar")

    def fails(path: str) -> None:
        raise missing

    if becomes in (deleted, moved):  # the folder was made again
        assert read(cache, 3, copy=fails) == content(3)
        with pytest.raises(FileNotFoundError) as raised:
            read(cache, 5, copy=fails)
        assert raised.value is missing


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [a_pipe, a_socket, a_link_to_a_device])
def test_what_is_no_file_is_never_waited_for(
    put: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of a copy, of a lock or of the notes. Seen red: opening a pipe waited for its writer, for ever."""
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    cache = CacheFolder("c", SIZE, (file_hash(f"s3://data/{number}.tar") for number in range(2)))
    assert read(cache, 1) == content(1)
    copy, notes = Path("c", names(cache)[0]), next(Path("c").glob("*.notes"))
    for path in (notes, copy):
        path.unlink()
        put(path)
    assert cache.statistics().hits == 0
    assert read(cache, 1) is None
    assert len(caplog.messages) == 1
    assert (
        "is in trouble: there is a link, a pipe or a device where penstock keeps one of its own" in caplog.messages[0]
    )
    assert caplog.messages[0].endswith(f": {tmp_path / copy}.")
    copy.unlink()
    assert read(cache, 1) == content(1), "the remedy"

    copy.unlink()
    put(copy.with_name("penstock-1-0123456789abcdef-0123456789abcdef.lock"))
    assert read(cache, 1) is None, "what may be a fetch of another process cannot be counted"
    with pytest.raises(OSError, match=r"0123456789abcdef\.lock"):
        cache.clear()
    for path in (Path("c", name) for name in names(cache)):
        path.unlink()
    Path("c/penstock.lock").unlink()
    put(Path("c/penstock.lock"))
    assert read(cache, 1) is None
    with pytest.raises(ValueError, match="cannot be used: there is a link, a pipe or a device where penstock keeps"):
        CacheFolder("c", SIZE)


@pytest.mark.parametrize("becomes", [a_file, its_lock_a_folder])
def test_a_folder_that_cannot_be_used_is_refused(becomes: Callable[[Path], None], tmp_path: Path) -> None:
    cache = CacheFolder(str(tmp_path / "cache"), SIZE)
    becomes(tmp_path / "cache")
    with pytest.raises(
        ValueError,
        match=r"cache_dir='.*cache' cannot be used: .*\. Use a folder on a local disk in which this user may write",
    ):
        CacheFolder(cache.folder, SIZE)


def test_a_lock_is_waited_for_as_long_as_its_file_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And 30 s longer; then the source is read, and the log says who holds it. Seen to fail: every other job waited for
    a stopped one, for ever."""
    clock, held = [0.0], contextlib.ExitStack()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    holder, cache = CacheFolder(str(tmp_path), 10 * SIZE), CacheFolder(str(tmp_path), 10 * SIZE)

    def fetching(path: str) -> None:
        """The other job: it gets a byte in 20 s, until it is stopped at 100 s."""

        def sleep(seconds: float) -> None:
            clock[0] += 20
            if clock[0] <= 100:
                with open(path, "ab") as part:
                    part.write(b"1")

        monkeypatch.setattr(module.time, "sleep", sleep)
        assert read(cache, 1, copy=writes(9)) is None
        assert 120 < clock[0] <= 160
        assert [
            line for line in caplog.messages if f"process {os.getpid()} on " in line and "no progress for 30 s" in line
        ] == caplog.messages
        waited = clock[0]
        assert read(cache, 1, copy=writes(9)) is None, "not waited for again"
        assert clock[0] == waited
        writes(1)(path)

    with held:
        assert read(holder, 1, copy=fetching) == content(1)
    assert read(cache, 1, copy=writes(9)) == content(1)
    assert len(caplog.messages) == 1


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ValueError, match=r"cache_dir='.*' is on a file system without locks .* on a local disk"):
        CacheFolder(str(tmp_path), SIZE)


def test_a_copy_that_was_removed_or_cut_is_fetched_again(tmp_path: Path) -> None:
    """Also while it is read: what is open stays readable."""
    cache = CacheFolder(str(tmp_path), 10 * SIZE)
    with cache.opened("s3://data/1.tar", SIZE, "1", writes(1)) as reads:  # type: ignore[union-attr]
        (path,) = tmp_path.glob("*.tar")
        path.unlink()
        assert read(cache, 1) == content(1)
        assert reads.read() == content(1)
    os.truncate(path, 10)
    assert read(cache, 1) == content(1)


def test_many_processes_fetch_each_file_once(tmp_path: Path) -> None:
    """Four at the same time. Seen to fail: without the lock of a copy."""
    cache = CacheFolder(str(tmp_path / "cache"), 100 * SIZE)
    log = tmp_path / "log"
    log.touch()

    def copy(number: int) -> Callable[[str], None]:
        def copied(path: str) -> None:
            with log.open("a") as file:
                file.write(f"{number}\n")
            writes(number)(path)

        return copied

    def read_all() -> None:
        assert all(read(cache, number, copy=copy(number)) == content(number) for number in range(24))

    assert ended(*[forked(read_all) for _ in range(4)]) == [0] * 4
    assert sorted(map(int, log.read_text().split())) == list(range(24))
    assert len(names(cache)) == 24


def test_a_process_that_is_killed_at_any_point_leaves_nothing_that_is_read_as_data(tmp_path: Path) -> None:
    """At each call into the system that the fetch makes. Seen to fail: writing to the copy's own name; a part without
    an owner that counts forever."""

    def work() -> None:
        dies_at(at)
        read(cache, 1)

    at, died = 0, True
    while died:
        cache = CacheFolder(str(tmp_path / str(at)), 2 * SIZE)
        died = ended(forked(work)) == [-signal.SIGKILL]
        for number in (1, 2):  # the bound has room for two
            assert read(cache, number) == content(number), at
        assert len(names(cache)) == 2, (at, names(cache))
        at += 1
    assert at > 8


def dies_at(number: int) -> None:
    """This process is killed before that one of its calls of ``os`` and ``fcntl``."""
    left = [number]

    def watched(function: Any) -> Any:
        def called(*arguments: Any, **words: Any) -> Any:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return function(*arguments, **words)

        return called

    for name in ("open", "replace", "unlink", "fstat", "fsync", "stat", "scandir", "close"):
        setattr(os, name, watched(getattr(os, name)))
    fcntl.flock = watched(fcntl.flock)


def test_sizes() -> None:
    for said, nbytes in ((5, 5), ("5B", 5), ("1.5kB", 1500), ("200GB", 200 * 10**9), ("64 MiB", 2**26)):
        assert nbytes_of("max_cache_size", said) == nbytes
    for said in (0, -1, "5", "many", "5 gb", 1.5, None):
        with pytest.raises((ValueError, TypeError), match="max_cache_size"):
            nbytes_of("max_cache_size", said)  # type: ignore[arg-type]
