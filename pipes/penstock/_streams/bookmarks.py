"""Bookmarks: facts about shards that are read forward, learned by reading them, so that a later seek need not reread
them.

A fact records how many outputs the steps make of one shard, in one pass or in every pass. Facts never change and need
no order, so every process appends those that it learns to its own file, without communication, and a reader that seeks
takes the union of all files. A missing fact costs only time. A false one would silently mislead a seek; therefore

- the folder is named after a hash of the *binding*: everything that determines what the steps make of a shard. A fact
  also names the shard's content by its key;
- each line ends with a checksum that starts from that hash, see `FactLines`. Any other line is ignored, wherever it is;
- two facts that contradict each other are both kept, so that every reader of the files sees the contradiction and
  trusts neither.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

from penstock._errors import Once, StateMismatch
from penstock._files.own_files import open_own, refusal
from penstock._streams.facts import Contradiction, Fact, FactLines, Facts
from penstock._streams.shard_keys import ShardKeys

_logger = logging.getLogger("penstock")

FORMAT: Final = 1
LONGEST: Final = 2**20
"""Bytes of the longest line that is read or written."""
LARGEST: Final = 2**30
"""Bytes of the largest file that is read; enough for ten million facts."""
MOST_DAMAGED: Final = 1000
"""After this many damaged lines, the rest of a file is left for the next time: there may be millions, of one byte
each.
"""
PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""Disk errors that do not mean that the folder was a bad choice."""


def default_folder() -> Path:
    """The folder for bookmarks in the user's cache, following the XDG Base Directory Specification:
    ``$XDG_CACHE_HOME``, or else ``~/.cache``.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the specification says to ignore relative paths
        cache = os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        # there is no home directory: nothing can be written below this, and nothing ends up in the current folder
        cache = os.devnull
    return Path(cache) / "penstock" / "bookmarks"


@final
class Bookmarks:
    """Facts about the shards of one dataset under one set of steps, shared through files with other processes and later
    runs. Thread-safe.

    The files are read when the first fact is requested or added, and again by `refresh`. Nothing stays open between two
    calls. A forked process continues with its parent's facts and writes its own file.

    A count is known for every pass, for one pass, or up to where an error cut the shard short, whatever happens to the
    file later.

    Args:
        folder: Folder for the files; None: no files, so the facts last as long as this object. If nothing can be
            written there, that costs only time for the `default_folder`, and is an error for a folder that was passed
            explicitly.
        binding: JSON that determines what the steps make of a shard. Facts under another binding are not visible.
        keys: For each shard, a string that distinguishes its content from any other, such as name, size and time. Facts
            about other content are ignored. Looked up only for shards that are requested or recorded, because a lookup
            may take a request to a server.
        seed: The seed of the order. What holds for one pass holds for one seed only.
        skips: Errors cut shards short. Otherwise only shards that were read to their end count.

    Raises:
        OSError: Nothing can be written to an explicitly passed folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        binding: dict[str, Any],
        keys: ShardKeys | Sequence[str],
        seed: int,
        skips: bool = False,
    ) -> None:
        bound = json.dumps({"format": FORMAT, "binding": binding}, sort_keys=True)
        binding_hash = hashlib.sha256(bound.encode()).hexdigest()[:32]
        self._lines = FactLines(binding_hash, seed)
        self._root = None if folder is None else os.path.abspath(folder)
        self._folder = None if self._root is None else os.path.join(self._root, binding_hash)
        self._is_named = self._root is not None and self._root != os.path.abspath(default_folder())
        self._arguments = (self._root, binding, keys, seed, skips)
        self._keys = keys
        self._facts = Facts()
        self._cuts = Facts()
        self._skips = skips
        self._settled: set[int] = set()  # shards whose facts, as far as they were read, are in `_facts` and `_cuts`
        # of other shards: what was read, with the content key it applies to
        self._unsettled: dict[int, list[tuple[str, Fact]]] = {}
        self._read_up_to: dict[str, int] | None = None  # bytes of each file; None: nothing was read yet
        self._writes = self._folder is not None
        self._once = Once()
        if self._is_named:
            self._check_folder()
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the facts; held while files are read, but never while one is written
        node = re.sub(r"[^\w.-]", "_", platform.node(), flags=re.ASCII)[:64]
        self._file = f"{node}-{self._pid}-{secrets.token_hex(4)}.jsonl"

    def outputs(self, shard: int, pass_: int, *, rely: bool = True) -> int | None:
        """How many outputs ``shard`` has in a pass; None if unknown.

        If the caller relies on the answer, a later contradiction is an error.
        """
        # looks at the file before it is opened, so that its contents are never attributed to a later version
        key = self._keys[shard]
        if shard not in self._settled:
            self._settle(shard, key)
        with self._locked():
            cut = self._cuts.get(shard, pass_, rely=rely)
            if cut is None:
                return self._facts.get(shard, pass_, rely=rely)
        self._warn_once(
            f"cut {shard}",
            f'{self._name(shard)} gives {cut} outputs in pass {pass_}, because on_error="skip" skipped the rest of it '
            f"before, and a resumed run needs the same sequence. A new run reads it to its end with other bookmarks=, "
            f"or with another seed.",
        )
        return cut

    def add(self, shard: int, pass_: int, outputs: int, *, every_pass: bool, cut: bool = False) -> None:
        """Add a result of reading ``shard`` to its end, or to an error. Idempotent.

        Args:
            shard: Its number.
            pass_: The pass in which it was read.
            outputs: How many outputs it had.
            every_pass: Whether it has this many in every pass.
            cut: Whether an error cut it short.

        Raises:
            StateMismatch: `outputs` has returned another number.
            OSError: Nothing can be written to an explicitly passed folder.
        """
        fact = Fact(int(shard), None if every_pass and not cut else int(pass_), int(outputs), cut)
        if cut:
            self._once(f"cut {shard}")  # the lane that found this has already logged it
        self._settle(fact.shard, self._keys[fact.shard])
        with self._locked():
            news = self._add(fact)
        # Without the lock, because a disk may be slow; this process has the fact already.
        if isinstance(news, Contradiction):
            self._write([news.before, fact])  # both, because the file that holds the first may be deleted
            self._report(news)
        elif news:
            self._write([fact])

    def refresh(self) -> None:
        """Read what other processes have written since the last read.

        Raises:
            StateMismatch: It contradicts an earlier answer of `outputs`.
        """
        with self._locked(read=False):
            found = self._read()
        self._report(*found)

    def __reduce__(self) -> Any:
        return Bookmarks, self._arguments

    def _locked(self, *, read: bool = True) -> threading.Lock:
        """The lock. If ``read``, the files have been read at least once when it is returned."""
        if self._pid != os.getpid():
            self._start()  # another thread may have held the lock at the moment of the fork
        if read and self._read_up_to is None:  # if two threads get here, the second one reads nothing new
            self.refresh()
        return self._lock

    def _add(self, fact: Fact) -> bool | Contradiction:
        return (self._cuts if fact.cut else self._facts).add(fact)

    def _name(self, shard: int) -> str:
        return self._keys[shard] if isinstance(self._keys, Sequence) else self._keys.name(shard)

    def _key(self, fact: Fact) -> str:
        """What a fact is about: a content; or the name alone, because a resumed run must skip the rest of a file even
        if the file was repaired.
        """
        return self._name(fact.shard) if fact.cut else self._keys[fact.shard]

    def _settle(self, shard: int, key: str) -> None:
        """Accept the facts read about a shard that apply to its current content, which has this ``key``."""
        with self._locked():
            read = self._unsettled.pop(shard, [])
            # By `map`: Ctrl-C at a loop's jump in here could leave the lock held (python/cpython#130279).
            found = list(
                map(self._add, (fact for about, fact in read if about == (self._name(shard) if fact.cut else key)))
            )
            self._settled.add(shard)
        others = [about for about, fact in read if not fact.cut]
        if others and key not in others and not self._are_anothers(shard, {*others}):
            self._warn_once(
                "another content",
                f"shard {shard} was {others[-1]!r} when its bookmarks were written, and is {key!r} now: it was "
                f"changed, moved, or copied without its modification time. This matters only to a run that resumes "
                f"from a saved state: if the data differ, it does not get the items that it would have got.",
            )
        self._report(*(one for one in found if isinstance(one, Contradiction)))

    def _are_anothers(self, shard: int, keys: set[str]) -> bool:
        """Whether ``keys`` are those of another dataset of this process, such as another source of a mix, which may not
        have been read here yet.
        """
        for other in list(ShardKeys.instances):
            with contextlib.suppress(IndexError, OSError):
                if other.name(shard) != self._name(shard):
                    keys -= {other[shard], other.name(shard)}
        return not keys

    # Files, in the format described above.

    def _read(self) -> list[Contradiction]:
        """Read the new lines of all files; returns the contradictions found."""
        found: list[Contradiction] = []
        read_up_to = {} if self._read_up_to is None else self._read_up_to
        for name in self._files():
            damaged, at, path = 0, read_up_to.get(name, 0), os.path.join(self._folder or "", name)
            try:
                status = os.stat(path)
                if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:  # anything else may never end
                    raise OSError(f"{path} is not a regular file of at most {LARGEST} bytes")
                with open(path, "rb") as file:
                    file.seek(at)
                    for line in iter(functools.partial(file.readline, LONGEST), b""):
                        if not line.endswith(b"\n") and len(line) < LONGEST:
                            break  # another process may still be writing it
                        at += len(line)  # even if it is damaged: files only grow, so it will not be repaired
                        try:
                            parsed = self._lines.parsed(line)
                        except ValueError:
                            damaged += 1
                            if damaged == MOST_DAMAGED:
                                break
                            continue
                        if parsed is None or (parsed[1].cut and not self._skips):
                            continue
                        key, fact = parsed
                        # Its key is compared when the shard is requested (`_settle`): checking a hundred thousand
                        # remote files before the first item would take hours.
                        if fact.shard not in self._settled:
                            self._unsettled.setdefault(fact.shard, []).append((key, fact))
                        elif key == self._key(fact) and isinstance(news := self._add(fact), Contradiction):
                            found.append(news)
            except OSError as exc:
                self._warn_once(name, f"{exc}. These bookmarks are ignored, which costs only time.")
            if damaged:
                self._warn_once(name, f"{damaged} lines of {path} are damaged and ignored. That costs only time.")
            read_up_to[name] = at
        self._read_up_to = read_up_to
        return found

    def _files(self) -> list[str]:
        try:
            return (
                sorted(name for name in os.listdir(self._folder) if name.endswith(".jsonl"))
                if self._folder is not None
                else []
            )
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as exc:
            self._writes &= self._is_named
            self._warn_once("", f"{exc}. No bookmarks are read from there, which costs only time.")
            return []

    def _write(self, facts: list[Fact]) -> None:
        if not self._writes or self._folder is None:
            return
        try:
            os.makedirs(self._folder, exist_ok=True)
            if os.path.islink(self._folder):
                raise refusal(self._folder)
            fd = open_own(os.path.join(self._folder, self._file), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                # One `write` per line, at the end (O_APPEND) of a file that only this process writes: lines of
                # different threads or processes never mix, and a reader can miss only the end of the last line.
                for fact in facts:
                    line = self._lines.line(self._key(fact), fact)
                    if len(line) <= LONGEST and os.write(fd, line) < len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._folder)
            finally:
                os.close(fd)
        except OSError as exc:
            self._writes = False  # a line after a truncated one would be damaged as well
            if self._is_named and exc.errno not in PASSING:
                raise self._refusal(exc) from exc
            self._warn_once("", f"{exc}. No more bookmarks are written to {self._root}, so a resume may take longer.")

    def _check_folder(self) -> None:
        """Refuse an explicitly passed folder that is not writable, before hours are spent on reading."""
        path = self._folder or ""
        while not os.path.lexists(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
        if not os.path.isdir(path):
            raise self._refusal(NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path))
        if not os.access(path, os.W_OK | os.X_OK):
            raise self._refusal(PermissionError(errno.EACCES, os.strerror(errno.EACCES), path))

    def _refusal(self, exc: OSError) -> OSError:
        return type(exc)(
            exc.errno,
            f"{exc.strerror}, so bookmarks={self._root!r} cannot be used. Pass a writable folder, or None to keep "
            f"bookmarks in memory",
            exc.filename,
        )

    def _warn_once(self, what: str, text: str) -> None:
        if self._once(what):
            _logger.warning("%s", text)

    def _report(self, *contradictions: Contradiction) -> None:
        """Log contradictions.

        Raises:
            StateMismatch: The old value of one of the facts was relied on.
        """
        for one in sorted(contradictions, key=lambda one: one.relied_on):
            said = (
                f"shard {one.now.shard} ({self._keys[one.now.shard]:.200}) gave {one.before.outputs} outputs "
                f"before{_in_pass(one.before)} and {one.now.outputs} now{_in_pass(one.now)}: the data or the code has "
                f"changed, or a step is not deterministic."
            )
            if one.relied_on:
                raise StateMismatch(
                    f"{said} The first number was used to find a position in the data, so samples may have been lost "
                    f"or repeated since. Make the steps deterministic (random numbers from penstock.sample().rng), and "
                    f"give any step whose code has changed a new version=. Then load the last checkpoint again: it "
                    f"will read this shard again and trust neither number."
                )
            _logger.warning(
                "%s Its bookmarks are no longer used; finding a position after it requires reading it again.", said
            )


def _in_pass(fact: Fact) -> str:
    return "" if fact.pass_ is None else f" (pass {fact.pass_})"
