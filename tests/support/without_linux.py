"""A Linux that looks like macOS to Python code, as far as that goes: a program that replays the corpus there, inline,
in threads and in worker processes.

It has none of what CPython has on Linux and not on macOS, and neither ``/proc`` nor ``/dev/shm``. What macOS does
otherwise under the same name is not imitated: its sockets, its signals, its memory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import warnings
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

MISSING: dict[Any, str] = {
    os: (
        "copy_file_range eventfd eventfd_read eventfd_write fdatasync getrandom getresgid getresuid getxattr listxattr "
        "memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate removexattr sched_getaffinity sched_getparam "
        "sched_getscheduler sched_param sched_rr_get_interval sched_setaffinity sched_setparam sched_setscheduler "
        "setns setresgid setresuid setxattr splice timerfd_create unshare O_DIRECT O_LARGEFILE O_NOATIME O_PATH "
        "O_RSYNC O_TMPFILE PIDFD_NONBLOCK P_PIDFD SCHED_BATCH SCHED_IDLE SCHED_RESET_ON_FORK"
    ),
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT",
    select: "epoll EPOLLIN POLLRDHUP",
    socket: (
        "MSG_CMSG_CLOEXEC MSG_CONFIRM MSG_MORE MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED AF_NETLINK AF_PACKET"
    ),
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
    fcntl: "F_ADD_SEALS F_GETLEASE F_GETPIPE_SZ F_GETSIG F_NOTIFY F_SETLEASE F_SETPIPE_SZ F_SETSIG",
    resource: "RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RUSAGE_THREAD prlimit",
}
"""What the documentation of CPython's modules says is available on Linux and not on macOS, of what a data loader could
want."""


def hide() -> None:
    """For the rest of this process."""
    # reads a file that is named after the platform, as the next ones do when they are imported
    sysconfig.get_config_vars()
    for name in ("urllib.request", "torchdata.nodes"):
        import_module(name)
    sys.platform = "darwin"
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    for module, names in MISSING.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.addaudithook(_refuse)
    for name in ("access", "lstat", "readlink", "stat", "statvfs"):
        setattr(os, name, _seeing(getattr(os, name)))  # no event tells of these
    sysconf, control = os.sysconf, fcntl.fcntl

    def has_no_free_pages(name: Any) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return sysconf(name)

    def locks_otherwise(fd: Any, command: int, *argument: Any) -> Any:
        """MacOS has locks of open files under the names of Linux, and expects another structure."""
        assert command not in (fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW, fcntl.F_OFD_GETLK)
        return control(fd, command, *argument)

    os.sysconf, fcntl.fcntl = has_no_free_pages, locks_otherwise  # type: ignore[assignment]
    multiprocessing.set_start_method("spawn", force=True)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir", "os.chdir") and arguments:
        _check(arguments[0])


def _check(path: Any) -> None:
    if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(("/proc", "/dev/shm", "/sys/")):
        _absent(path)


def _absent(path: Any) -> NoReturn:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))


def _seeing(call: Any) -> Any:
    def on_macos(path: Any, *rest: Any, **words: Any) -> Any:
        _check(path)
        return call(path, *rest, **words)

    return on_macos


hide()  # in worker processes too, which import this file before anything of penstock's


STOP, ON = 7, 36
"""Which of the corpus's stops to resume from, and how many tokens to compare from there."""


def main(folder: Path, spawns: str) -> None:
    """Compare every kind with the reference, and with itself when it resumes: inline, in threads, and a few in
    processes of each start method.

    Unless ``spawns`` is "all", which takes half a minute more, only what shares a file and its locks is resumed in a
    spawned process, and in one.
    """
    import corpus
    import pytest

    import penstock

    warnings.simplefilter("ignore")
    with pytest.raises(ValueError, match="Give a path"):
        penstock.Cached([1])
    kinds = {**corpus.KINDS, **corpus.files(folder)}
    kinds["cached"] = corpus.own(
        lambda: penstock.Cached([10 * k for k in range(corpus.N)], folder / "cache"), shuffle=True
    )
    saved, ran = corpus.load(), dict.fromkeys(["inline", "thread", "auto", "fork", "spawn"], 0)
    for name, kind in kinds.items():
        with kind() as loader:
            reference, states = corpus.follow(loader)
        assert " ".join(corpus.digests(reference)) == saved[name][""]["digests"][0], name
        for way, words in ways(name, spawns == "all").items():
            with kind(**words) as loader:
                loader.load_state_dict({"penstock": states[STOP]})
                assert list(islice(corpus.walk(loader), ON)) == reference[corpus.STOPS[STOP] :][:ON], (name, way)
            ran[way] += 1
    print(json.dumps(ran))


def ways(name: str, spawn_all: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"inline": {}}
    if name == "shuffled, out of order" and not spawn_all:
        return {}  # its worker is spawned, and has given what the reference has
    if name not in ("draws", "resident", "shuffled, out of order"):  # global generators; none wanted; one of its own
        found["thread"] = {"num_workers": 2, "method": "thread"}
    if name == "shuffled":
        found["auto"] = {"num_workers": "auto", "method": "thread"}
    if name in ("draws", "shards", "cached", "tokens"):
        found["fork"] = {"num_workers": 2, "multiprocessing_context": "fork"}
        if spawn_all or name == "cached":
            found["spawn"] = {"num_workers": 2 if spawn_all else 1, "multiprocessing_context": "spawn"}
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
