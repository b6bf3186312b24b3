"""Bookmarks: facts about shards that are read forward, learned by reading them, so that a later seek need not read them again.

A fact says how many outputs the steps make of one shard, in one pass or in every pass. Facts never change and need no order, so every process appends
those that it learns to a file of its own, without a word to the others, and whoever seeks reads the union of all files. One that is missing costs time
only. A false one would mislead a seek silently; therefore

- the folder is named after a hash of the *binding*: all that decides what the steps make of a shard. A fact also names the shard's content by its key;
- each line ends with a checksum that starts from that hash, see `FactLines`. Any other line is ignored, wherever it stands;
- two facts that contradict each other are both kept, so that every reader of the files sees the contradiction, and trusts neither.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from penstock._errors import StateMismatch
from penstock._streams.facts import Contradiction, Fact, FactLines, Facts
from penstock._streams.own_files import open_own, refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock._streams.shard_keys import ShardKeys

_logger = logging.getLogger("penstock")

FORMAT: Final = 1
LONGEST: Final = 2**20
"""Bytes of the longest line that is written or read."""
LARGEST: Final = 2**30
"""Bytes of the largest file that is read: ten million facts."""
MOST_DAMAGED: Final = 1000
"""Damaged lines of a file until the rest of it is left for the next time: there may be millions, of a byte each."""
PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""Troubles of a disk that say nothing about the choice of the folder."""


def default_folder() -> Path:
    """The folder of bookmarks in the user's cache, by the XDG Base Directory Specification: ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the specification says to ignore such
        cache = os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        cache = os.devnull  # nobody knows a home: nothing can be written below this, and nothing lands in the current folder
    return Path(cache) / "penstock" / "bookmarks"


@final
class Bookmarks:
    """Facts about the shards of one dataset under one set of steps, shared with other processes and later runs by files. Thread-safe.

    The files are read when the first fact is asked for or added, and again by `refresh`. Nothing stays open between two calls. A fork goes on with what
    its parent knew, and writes a file of its own.

    Args:
        folder: Where to keep the files; None: nowhere, so that the facts last as long as this object. A folder in which nothing can be written costs only time if
            it is the `default_folder`, and is an error if it was named.
        binding: JSON that decides what the steps make of a shard. Facts under another binding are not seen.
        keys: For each shard, a text that tells its content from any other, such as name, size and time. Facts about another content are ignored. Looked up
            only for a shard that is asked about, or written of, because it may take a request to a server.

    Raises:
        OSError: The folder was named, and nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, binding: dict[str, Any], keys: ShardKeys | Sequence[str]) -> None:
        bound = json.dumps({"format": FORMAT, "binding": binding}, sort_keys=True)
        binding_hash = hashlib.sha256(bound.encode()).hexdigest()[:32]
        self._lines = FactLines(binding_hash)
        self._root = None if folder is None else os.path.abspath(folder)
        self._folder = None if self._root is None else os.path.join(self._root, binding_hash)
        self._is_named = self._root is not None and self._root != os.path.abspath(default_folder())
        self._arguments = (self._root, binding, keys)
        self._keys = keys
        self._facts = Facts()
        self._settled: set[int] = set()  # shards whose facts, as far as they were read, are in `_facts`
        self._unsettled: dict[int, list[tuple[str, Fact]]] = {}  # of other shards: what was read, with the key that it is true of
        self._read_up_to: dict[str, int] | None = None  # bytes of each file; None: nothing was read so far
        self._writes = self._folder is not None
        self._warned: set[str] = set()
        if self._is_named:
            self._check_folder()
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the facts; held while files are read, and never while one is written
        node = re.sub(r"[^\w.-]", "_", platform.node(), flags=re.ASCII)[:64]
        self._file = f"{node}-{self._pid}-{secrets.token_hex(4)}.jsonl"

    def outputs(self, shard: int, pass_: int, *, rely: bool = True) -> int | None:
        """How many outputs ``shard`` has in a pass; None if nobody knows. If the caller relies on it, a contradiction is an error from now on."""
        if shard not in self._settled:
            self._settle(shard)
        with self._locked():
            return self._facts.get(shard, pass_, rely=rely)

    def add(self, shard: int, pass_: int, outputs: int, *, every_pass: bool) -> None:
        """Add what was found by reading ``shard`` to its end. Idempotent.

        Args:
            shard: Its number.
            pass_: The pass in which it was read.
            outputs: How many outputs it had.
            every_pass: Whether it has as many in every pass.

        Raises:
            StateMismatch: `outputs` has said something else.
            OSError: The folder was named, and nothing can be written there.
        """
        fact = Fact(int(shard), None if every_pass else int(pass_), int(outputs))
        self._settle(fact.shard)
        with self._locked():
            news = self._facts.add(fact)
        # Without the lock, because a disk may take long; this process knows the fact already.
        if isinstance(news, Contradiction):
            self._write([news.before, fact])  # both, because the file that has the first may be deleted
            self._report(news)
        elif news:
            self._write([fact])

    def refresh(self) -> None:
        """Read what other processes have written since the files were read last.

        Raises:
            StateMismatch: It contradicts what `outputs` has said.
        """
        with self._locked(read=False):
            found = self._read()
        self._report(*found)

    def __reduce__(self) -> Any:
        return Bookmarks, self._arguments

    def _locked(self, *, read: bool = True) -> threading.Lock:
        """The lock; the files have been read once by the time that it is returned, if ``read``."""
        if self._pid != os.getpid():
            self._start()  # another thread may have held the lock at the moment of the fork
        if read and self._read_up_to is None:  # of two threads that find it so, the second reads nothing new
            self.refresh()
        return self._lock

    def _settle(self, shard: int) -> None:
        """Believe what was read about a shard, where it is about the content that the shard has now."""
        with self._locked():
            if shard not in self._unsettled:
                self._settled.add(shard)
                return
        # Without the lock, because it may ask a server. Of threads that do so together, the first adds the facts.
        key = self._keys[shard]
        with self._locked():
            read = self._unsettled.pop(shard, [])
            # By `map`: Ctrl-C at a loop's jump in here could leave the lock held (python/cpython#130279).
            found = list(map(self._facts.add, (fact for about, fact in read if about == key)))
            self._settled.add(shard)
        if read and not found:
            self._warn_once(
                "another content",
                f"shard {shard} was {read[-1][0]!r} when its bookmarks were made, and is {key!r} now: it was changed, moved, or copied without its time, or an older penstock made them. That matters "
                f"only to a run that goes on from a state saved before: where the data are others, it does not get the items that it would have got.",
            )
        self._report(*(one for one in found if isinstance(one, Contradiction)))

    # Files. The format is described above.

    def _read(self) -> list[Contradiction]:
        """Read the new lines of all files; what they contradict."""
        found: list[Contradiction] = []
        read_up_to = {} if self._read_up_to is None else self._read_up_to
        for name in self._files():
            damaged, at, place = 0, read_up_to.get(name, 0), os.path.join(self._folder or "", name)
            try:
                status = os.stat(place)
                if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:  # others may never end
                    raise OSError(f"{place} is no regular file of at most {LARGEST} bytes")
                with open(place, "rb") as file:
                    file.seek(at)
                    for line in iter(functools.partial(file.readline, LONGEST), b""):
                        if not line.endswith(b"\n") and len(line) < LONGEST:
                            break  # somebody may still be writing it
                        at += len(line)  # also where it is damaged: files only grow, so it stays so
                        try:
                            key, fact = self._lines.parsed(line)
                        except ValueError:
                            damaged += 1
                            if damaged == MOST_DAMAGED:
                                break
                            continue
                        # Its key is compared when somebody asks for the shard (`_settle`): to look at a hundred
                        # thousand files, far away, before the first item would take hours.
                        if fact.shard not in self._settled:
                            self._unsettled.setdefault(fact.shard, []).append((key, fact))
                        elif key == self._keys[fact.shard] and isinstance(news := self._facts.add(fact), Contradiction):
                            found.append(news)
            except OSError as exc:
                self._warn_once(name, f"{exc}. These bookmarks are left out, which costs only time.")
            if damaged:
                self._warn_once(name, f"{damaged} lines of {place} are damaged, and left out. That costs only time.")
            read_up_to[name] = at
        self._read_up_to = read_up_to
        return found

    def _files(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._folder) if name.endswith(".jsonl")) if self._folder is not None else []
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
                # One `write` for each line, at the end (O_APPEND) of a file of this process alone: lines of threads or
                # processes never mix, and a reader may miss only the end of the last one.
                for fact in facts:
                    line = self._lines.line(self._keys[fact.shard], fact)
                    if len(line) <= LONGEST and os.write(fd, line) < len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._folder)
            finally:
                os.close(fd)
        except OSError as exc:
            self._writes = False  # behind a line that was cut short, the next one would be damaged too
            if self._is_named and exc.errno not in PASSING:
                raise self._refusal(exc) from exc
            self._warn_once("", f"{exc}. Bookmarks are not kept in {self._root} from now on, so a resume may take longer.")

    def _check_folder(self) -> None:
        """Refuse a named folder in which nothing can be written, before hours were spent on reading."""
        place = self._folder or ""
        while not os.path.lexists(place) and place != os.path.dirname(place):
            place = os.path.dirname(place)
        if not os.path.isdir(place):
            raise self._refusal(NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place))
        if not os.access(place, os.W_OK | os.X_OK):
            raise self._refusal(PermissionError(errno.EACCES, os.strerror(errno.EACCES), place))

    def _refusal(self, exc: OSError) -> OSError:
        return type(exc)(
            exc.errno,
            f"{exc.strerror}, so bookmarks={self._root!r} cannot be kept. Name a folder that can be written, or None to keep them in memory",
            exc.filename,
        )

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _logger.warning("%s", text)

    def _report(self, *contradictions: Contradiction) -> None:
        """Log contradictions.

        Raises:
            StateMismatch: Somebody has relied on one of the facts.
        """
        for one in sorted(contradictions, key=lambda one: one.relied_on):
            said = (
                f"shard {one.now.shard} ({self._keys[one.now.shard]:.200}) gave {one.before.outputs} outputs before{_in_pass(one.before)} and "
                f"{one.now.outputs} now{_in_pass(one.now)}: the data or the code has changed, or a step is not deterministic."
            )
            if one.relied_on:
                raise StateMismatch(
                    f"{said} The first number was relied on to find a place in the data, so samples may have been lost or repeated since. Make the steps "
                    f"deterministic (random numbers from penstock.sample().rng), and give a step whose code has changed another version=. Then load the "
                    f"last checkpoint again: it will read this shard, and trust neither number."
                )
            _logger.warning("%s Its bookmarks are not used any more; looking for a place behind it reads it again.", said)


def _in_pass(fact: Fact) -> str:
    return "" if fact.pass_ is None else f" (pass {fact.pass_})"


_STAYS_CUT: Final = (
    '%s gives %d outputs in pass %d, because on_error="skip" has left out the rest of it before: a run that goes on needs the same sequence. A new run reads it '
    "to its end with other bookmarks=, or another seed."
)


@final
class KnownOutputs:
    """How many outputs shards have, as far as anybody has read them: in every pass, in one pass, and where an error has cut one short, whatever becomes of the file later.

    Each kind has `Bookmarks` of its own. What holds for one pass holds under one ``seed`` only; ``skips``: errors cut shards short.
    """

    def __init__(self, folder: Any, binding: dict[str, Any], seed: int, keys: ShardKeys, *, skips: bool) -> None:
        # Bound to the name alone, because a run that goes on must leave out the rest of a file even if it was mended.
        self._names = keys.names() if skips else []
        self._keys = keys
        self._always = Bookmarks(folder, binding, keys)
        self._passes = Bookmarks(folder, {**binding, "seed": seed}, keys)
        self._cut = Bookmarks(folder, {**binding, "seed": seed, "cut": True}, self._names) if skips else None
        self._all = [facts for facts in (self._cut, self._always, self._passes) if facts is not None]  # the first that knows is right
        self._said: set[int] = set()

    def outputs(self, shard: int, pass_: int, *, rely: bool = True) -> int | None:
        """The number of outputs; None if unknown. If somebody relies on it, a contradiction is an error from now on, and otherwise a warning."""
        self._keys[shard]  # looks at the file before it is opened, so that what is read is never taken for a later version
        for facts in self._all:
            if (outputs := facts.outputs(shard, pass_, rely=rely)) is not None:
                if facts is self._cut and shard not in self._said:
                    self._said.add(shard)
                    _logger.warning(_STAYS_CUT, self._names[shard], outputs, pass_)
                return outputs
        return None

    def refresh(self) -> None:
        """Learn what other processes have found since."""
        for facts in self._all:
            facts.refresh()

    def add(self, shard: int, pass_: int, outputs: int, *, every_pass: bool, cut: bool) -> None:
        """A shard was read to its end, or up to an error if it is ``cut``. ``every_pass``: it has as many outputs in any other pass."""
        if cut:
            self._said.add(shard)  # whoever has found it has said so
        facts = self._cut if cut and self._cut is not None else self._always if every_pass else self._passes
        facts.add(shard, pass_, outputs, every_pass=every_pass)
