"""Facts about shards: what was recorded for each, whether it is consistent, and how it is written. Pure: uses no file and no thread."""

from __future__ import annotations

import json
import zlib
from typing import Final, NamedTuple, final

AT_MOST: Final = 2**63


class Fact(NamedTuple):
    """How many outputs the steps make of a shard in one pass; ``pass_`` is None if it holds for every pass."""

    shard: int
    pass_: int | None
    outputs: int


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
        self._always: dict[int, int] = {}
        self._passes: dict[int, dict[int, int]] = {}  # of shards that are not in `_always`
        self._relied_on: set[int | tuple[int, int]] = set()  # shards, or shards in one pass

    def get(self, shard: int, pass_: int, *, rely: bool = True) -> int | None:
        """The outputs of ``shard`` in a pass; None if unknown. ``rely``: the caller relies on the answer from now on."""
        outputs = self._always.get(shard)
        about: int | tuple[int, int] = shard
        if outputs is None:
            outputs, about = self._passes.get(shard, {}).get(pass_), (shard, pass_)
        if rely and outputs is not None:
            self._relied_on.add(about)
        return outputs

    def add(self, fact: Fact) -> bool | Contradiction:
        """Add a fact; returns whether it is new, or what it contradicts."""
        shard, pass_, outputs = fact
        if shard in self.doubted:
            return False
        always = self._always.get(shard)
        if always is not None:
            return outputs != always and self._doubt(Fact(shard, None, always), fact)
        passes = self._passes.get(shard, {})
        if pass_ is None:
            relied_on = [one for one in passes if (shard, one) in self._relied_on]
            for one in (*relied_on, *passes):
                if passes[one] != outputs:
                    return self._doubt(Fact(shard, one, passes[one]), fact)
            if relied_on:
                self._relied_on.add(shard)
            self._passes.pop(shard, None)
            self._always[shard] = outputs
        elif pass_ in passes:
            return outputs != passes[pass_] and self._doubt(Fact(shard, pass_, passes[pass_]), fact)
        else:
            self._passes.setdefault(shard, {})[pass_] = outputs
        return True

    def _doubt(self, before: Fact, now: Fact) -> Contradiction:
        shard = before.shard
        self.doubted.add(shard)
        self._always.pop(shard, None)
        self._passes.pop(shard, None)
        return Contradiction(before, now, (shard if before.pass_ is None else (shard, before.pass_)) in self._relied_on)


@final
class FactLines:
    """Facts as lines of JSON that end with a CRC-32 (ISO 3309) seeded with the hash of the binding, so that no other line is ever taken for a fact."""

    def __init__(self, binding_hash: str) -> None:
        self._seed = zlib.crc32(binding_hash.encode())

    def line(self, key: str, fact: Fact) -> bytes:
        """The line for a fact and the ``key`` of the content that it applies to."""
        said = {"shard": fact.shard, "key": key, "pass": fact.pass_, "outputs": fact.outputs}
        return self._checked(json.dumps(said, separators=(",", ":"))[:-1].encode())

    def parsed(self, line: bytes) -> tuple[str, Fact]:
        """The key and the fact in a line.

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
        if not all(type(number) is int and 0 <= number < AT_MOST for number in (shard, outputs, 0 if pass_ is None else pass_)):
            raise ValueError
        if type(key) is not str:
            raise ValueError
        return key, Fact(shard, pass_, outputs)

    def _checked(self, said: bytes) -> bytes:
        return said + b',"check":%d}\n' % zlib.crc32(said, self._seed)
