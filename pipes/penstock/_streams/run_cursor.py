"""The position of a run over a shard: which record is being worked on, and what ``penstock.sample()`` returns
meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from penstock._fetch.held import EndOfWalk
from penstock._fetch.sample import Cursor, Sample, current
from penstock._random.lane_order import PASSES
from penstock._random.permutation import SLID, philox_words
from penstock._random.sample_rng import epoch_word
from penstock._random.splitmix import GAMMA, mixed

if TYPE_CHECKING:
    from penstock._random.permutation import UInt64s


@final
class PassFacts:
    """What the records of a run know about it.

    Attributes:
        seed: Seed of the shard: a hash of the seed and the shard's number.
        shard: The shard, as the user gave it.
        pass_: The pass over the shards, counted from 0 whenever there are more of them.
        drew_randomness: Whether a step may have used ``pass_`` or ``seed``.
    """

    __slots__ = ("drew_randomness", "pass_", "seed", "shard")

    def __init__(self, seed: int, pass_: int, number: int, shard: Any) -> None:
        era, self.pass_ = divmod(pass_, PASSES)
        self.seed = mixed(epoch_word(seed, number + era * PASSES) + 5 * GAMMA) >> 1
        self.shard = shard
        self.drew_randomness = False


@final
class RecordSample(Sample):  # type: ignore[misc]  # final for users
    """A record, as a `Sample`: its seed is that of the shard, its epoch is the pass, and its position and index are the
    record's number in the shard.
    """

    def __init__(self, facts: PassFacts, number: int, source: str | None) -> None:
        self._facts = facts
        self.position = self.index = number
        self.source = source
        self.shard = facts.shard

    @property
    def seed(self) -> int:  # type: ignore[override]  # the random generators read it as well
        """The seed of the shard."""
        self._facts.drew_randomness = True
        return self._facts.seed

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The pass over the shards, counted from 0."""
        self._facts.drew_randomness = True
        return self._facts.pass_


@final
class RecordId:
    """The identity of a record; it travels with the record through `Shuffle` and `Pack`, so that its random numbers
    continue where they were.

    Attributes:
        number: Number of the record in its shard.
        made: Its sample, once it was requested.
    """

    __slots__ = ("made", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.made: RecordSample | None = None


@final
class RunCursor(Cursor, EndOfWalk):
    """Points to the record that the steps of a run are working on.

    Attributes:
        facts: See `PassFacts`.
        at: The record.
        place: Number of the last yielded item among those of its step, including those that a `Filter` dropped.
        reading_drew: Whether reading a record for the next output drew from the global generators, as far as reading
            was watched.
        records: How many records were read.
        exhausted: Whether the last record was read.
        listed: The ids of the `Shuffle` steps listed directly in ``steps``.
        shuffles: How many `Shuffle` steps have begun.
        watched: Whether to watch reading.
    """

    __slots__ = ("at", "exhausted", "facts", "listed", "place", "reading_drew", "records", "shuffles", "watched")

    def __init__(self, facts: PassFacts, listed: frozenset[int]) -> None:
        self.facts = facts
        self.at = RecordId(0)
        self.place = 0
        self.records = 0
        self.exhausted = False
        self.watched = self.reading_drew = False
        self.listed = listed
        self.shuffles = 0
        self.epoch, self._source = facts.pass_, None

    def sample(self) -> Sample:
        tag = self.at
        if tag.made is None:
            tag.made = RecordSample(self.facts, tag.number, self._source)
        return tag.made

    def made(self) -> Sample | None:
        return self.at.made

    def shuffle_keys(self) -> UInt64s:
        """Two random words for the next `Shuffle`."""
        self.shuffles += 1
        return philox_words(self.facts.seed, self.facts.pass_ % 2**63, SLID, 2 * self.shuffles)[-2:]


def running() -> RunCursor | None:
    """The cursor of the run that this code is part of; None outside a run."""
    cursor = current.get()
    return cursor if isinstance(cursor, RunCursor) else None
