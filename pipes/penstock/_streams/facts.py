"""Facts about shards: what was said of each, and whether it agrees. Pure: knows no file and no thread."""

from __future__ import annotations

from typing import NamedTuple, final


class Fact(NamedTuple):
    """How many outputs the steps make of a shard, in one pass; ``pass_`` is None if that holds for every pass."""

    shard: int
    pass_: int | None
    outputs: int


class Contradiction(NamedTuple):
    """Two facts of which one is false; ``relied_on`` says whether the older one was handed out."""

    before: Fact
    now: Fact
    relied_on: bool


@final
class Facts:
    """A set of facts that only grows.

    Attributes:
        doubted: Shards whose facts contradict each other. Nothing that is said about them is believed.
    """

    def __init__(self) -> None:
        self.doubted: set[int] = set()
        self._always: dict[int, int] = {}
        self._passes: dict[int, dict[int, int]] = {}  # of shards that are not in `_always`
        self._relied_on: set[int | tuple[int, int]] = set()  # shards, or shards in one pass

    def get(self, shard: int, pass_: int, *, rely: bool = True) -> int | None:
        """The outputs of ``shard`` in a pass; None if nobody knows. ``rely``: from now on somebody relies on the answer."""
        outputs = self._always.get(shard)
        about: int | tuple[int, int] = shard
        if outputs is None:
            outputs, about = self._passes.get(shard, {}).get(pass_), (shard, pass_)
        if rely and outputs is not None:
            self._relied_on.add(about)
        return outputs

    def add(self, fact: Fact) -> bool | Contradiction:
        """Take in a fact; whether it is news, or what it contradicts."""
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
