"""Facts about shards: what was recorded for each, whether it is consistent, and how it is written.

Pure: uses no file and no thread.
"""

from __future__ import annotations

import json
import zlib
from typing import Final, NamedTuple, final

AT_MOST: Final = 2**63


class Fact(NamedTuple):
    """How many outputs the steps make of a shard in one pass, or up to an error that ``cut`` it short; ``pass_`` is
    None if it holds for every pass.
    """

    shard: int
    pass_: int | None
    outputs: int
    cut: bool = False


class Contradiction(NamedTuple):
    """Two facts, one of which is false; ``relied_on`` tells whether the older one was handed out."""

    before: Fact
    now: Fact
    relied_on: bool


@final
class Facts:
    """A set of facts that only grows.

    Attributes:
        doubted: Shards whose facts contradict each other. No fact about them is trusted.
    """

    def __init__(self) -> None:
        self.doubted: set[int] = set()
        # by shard and pass; if one holds for every pass, it is the only one of its shard
        self._known: dict[int, dict[int | None, int]] = {}
        self._relied_on: set[tuple[int, int | None]] = set()

    def get(self, shard: int, pass_: int, *, rely: bool = True) -> int | None:
        """The outputs of ``shard`` in a pass; None if unknown.

        ``rely``: the caller relies on the answer from now on.
        """
        known = self._known.get(shard, {})
        about = None if None in known else pass_
        if rely and about in known:
            self._relied_on.add((shard, about))
        return known.get(about)

    def add(self, fact: Fact) -> bool | Contradiction:
        """Add a fact; returns whether it is new, or what it contradicts."""
        shard, pass_, outputs, _ = fact
        known = {} if shard in self.doubted else self._known.setdefault(shard, {})
        about = [*known] if pass_ is None else [one for one in (None, pass_) if one in known]
        relied_on = [one for one in about if (shard, one) in self._relied_on]
        for before in (*relied_on, *about):
            if known[before] != outputs:
                self.doubted.add(shard)
                del self._known[shard]
                return Contradiction(Fact(shard, before, known[before]), fact, before in relied_on)
        if shard in self.doubted or None in known or pass_ in known:
            return False
        if pass_ is None:
            known.clear()
            self._relied_on |= {(shard, None)} if relied_on else set()
        known[pass_] = outputs
        return True


@final
class FactLines:
    """Facts as lines of JSON that end with a CRC-32 (ISO 3309) seeded with the hash of the binding, so that no other
    line is ever taken for a fact.

    What holds for one pass holds for one ``seed`` of the order only.
    """

    def __init__(self, binding_hash: str, seed: int) -> None:
        self._begin = zlib.crc32(binding_hash.encode())
        self._seed = seed

    def line(self, key: str, fact: Fact) -> bytes:
        """The line for a fact and the ``key`` of the content that it applies to."""
        said = {"shard": fact.shard, "key": key, "pass": fact.pass_, "outputs": fact.outputs}
        said |= {} if fact.pass_ is None else {"seed": self._seed, "cut": fact.cut}
        return self._checked(json.dumps(said, separators=(",", ":"))[:-1].encode())

    def parsed(self, line: bytes) -> tuple[str, Fact] | None:
        """The key and the fact in a line; None for a fact of another seed.

        Raises:
            ValueError: The line is damaged.
        """
        said, comma, _ = line.rpartition(b',"check":')
        if not comma or line != self._checked(said):
            raise ValueError
        try:
            found = json.loads(said.decode() + "}")
            shard, key, pass_, outputs = (found[name] for name in ("shard", "key", "pass", "outputs"))
        except (LookupError, TypeError, RecursionError):
            raise ValueError from None
        if not all(
            type(number) is int and 0 <= number < AT_MOST for number in (shard, outputs, 0 if pass_ is None else pass_)
        ):
            raise ValueError
        if type(key) is not str:
            raise ValueError
        if pass_ is not None and found.get("seed") != self._seed:
            return None
        return key, Fact(shard, pass_, outputs, pass_ is not None and found.get("cut") is True)

    def _checked(self, said: bytes) -> bytes:
        return said + b',"check":%d}\n' % zlib.crc32(said, self._begin)
