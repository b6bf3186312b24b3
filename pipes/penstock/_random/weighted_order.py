"""WeightedOrder: draws with replacement, by weights that may follow the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from penstock._arguments import checksum
from penstock._errors import StateMismatch
from penstock._random.changing import Changing
from penstock._random.orders import Forgotten, PlainOrder, check_positions, checked_length, checked_seed
from penstock._random.permutation import WEIGHTED, philox_words, splitmix64_stream

if TYPE_CHECKING:
    from penstock._random.permutation import Int64s


@final
class WeightedOrder(PlainOrder, Changing):
    """Draws with replacement: every position independently holds index i with probability
    ``weights[i] / sum(weights)``.

    Position p of an epoch is the p-th word of a SplitMix64 stream, which has random access because its state is a
    counter. Two keys from Philox under (seed, epoch) select the stream. The word is inverted through the cumulative
    weights: O(log(len(weights))).

    The weights may follow the model: `update` them between two epochs, on every rank alike. Their checksum is in the
    state, and is compared between ranks at the first batch after a start or a load.

    Args:
        weights: One per item of the dataset, shape ``(n,)``: finite, not negative, not all zero. Kept at 8 bytes each.
        num_samples: Length of an epoch, from 0 to 2**56.
        seed: From 0 to 2**63 - 1.
    """

    __module__ = "penstock.orders"

    why_ranks_differ = "The weights differ: call its update with the same weights on every rank."
    compared = ("weights",)

    def __init__(self, weights: npt.ArrayLike, num_samples: int, seed: int = 0) -> None:
        self._n = checked_length(num_samples, "num_samples")
        self._seed = checked_seed(seed)
        self._said = {"order": "weighted", "length": self._n, "seed": self._seed}
        self._used: tuple[_Weights, ...] = (_Weights.of(0, weights),)  # those of this epoch, and those before
        self._next: _Weights | None = None
        self._begun = self._changed = False
        self.marks = self.note
        self._expected: str | None = None  # the checksum that a loaded state wants at the next start of an epoch
        self._replaced: tuple[Any, ...] | None = None  # by the latest `adopt`, which may be taken back

    @property
    def weights(self) -> int:
        """The number of weights."""
        return len(self._latest.bounds)

    @property
    def _latest(self) -> _Weights:
        return self._next or self._used[0]

    def update(self, weights: npt.ArrayLike) -> None:
        """Draw by other weights from the next epoch on that begins. What was loaded ahead of it is loaded again.

        After a load in the middle of an epoch, that epoch is finished first, with its own weights: build the order with
        them.

        Args:
            weights: As many as before.

        Raises:
            ValueError: They are invalid.
        """
        found = _Weights.of(0, weights)
        if len(found.bounds) != self.weights:
            raise ValueError(
                f"there are {len(found.bounds)} weights, but the order was built with {self.weights}. Pass one weight "
                f"for each sample."
            )
        self._expected = self._replaced = None
        if self._begun:
            self._next = found
        else:
            self._used = (found,)

    def begins(self, epoch: int, position: int) -> None:
        """The loop asks for the first sample of ``epoch``, or of its rest.

        Raises:
            StateMismatch: A state was loaded whose run has other weights here.
        """
        self._begun, self._replaced = True, None
        if position:
            return
        if self._next is not None:
            self._used = (self._next._replace(since=epoch), *[one for one in self._used if one.since < epoch][:1])
            self._next, self._changed = None, True
        wanted, self._expected = self._expected, None
        if wanted not in (None, self._used[0].digest):
            self._expected = wanted
            raise StateMismatch(
                f"the run that saved this state draws epoch {epoch} by the weights with the checksum {wanted}, but "
                f"those of this order have {self._used[0].digest}. Build the order with those weights, or call its "
                f"update."
            )

    def changes(self) -> dict[str, Any]:
        """See `Changing.changes`."""
        now = self._used[0]
        return {"weights": [[now.since, now.digest, self._latest.digest]]} if self._changed or self._next else {}

    def adopt(self, changes: dict[str, Any]) -> None:
        """See `Changing.adopt`."""
        if changes.keys() - {"weights"}:
            raise ValueError("a WeightedOrder has weights to change, and nothing else.")
        ((since, digest, expected),) = changes.get("weights", [(0, None, None)])
        before = self.changes(), (self._used, self._next, self._expected, self._changed)
        if self._replaced is not None and self._replaced[0] == changes:
            self._used, self._next, self._expected, self._changed = self._replaced[1]
            return
        latest, following = self._latest, None
        known = [
            used for used in self._used if used.since == since and digest in (None, used.digest) and used.bounds.size
        ]
        if known:
            used = *known, *(earlier for earlier in self._used if earlier.since < since)
        elif digest in (None, latest.digest):
            used = (latest._replace(since=since),)
        else:
            # `resume_at` knows which of the two the run goes on with
            used, following = (_Weights(since, digest, _UNKNOWN), latest._replace(since=0)), latest
        self._used, self._next, self._expected, self._changed = used, following, expected, digest is not None
        self._replaced = before

    def resume_at(self, epoch: int, position: int, sample: int) -> None:
        """See `Changing.resume_at`."""
        self._begun = self._begun or sample > 0
        if not self._used[0].bounds.size and sample < self._used[0].since * self._n:  # a commit, behind the loop
            self._used, self._next = self._used[1:], None
        elif not self._used[0].bounds.size:
            self._used = self._used[:1]

    @property
    def state(self) -> Any:
        """See `Changing.state`."""
        return self._used[0].bounds

    def note(self, *, again: bool = False) -> tuple[int, ...]:
        """See `PlainOrder.marks`."""
        return (int(self._used[0].digest, 16),)

    def choices(self) -> dict[str, Any]:
        """See `Changing.choices`."""
        return {"next weights": self._latest.digest}

    def settings(self) -> dict[str, Any]:
        """See `Order.settings`."""
        return {**self._said, "weights": self._used[0].digest}

    def settings_at(self, epoch: int, position: int) -> dict[str, Any]:
        """See `ScheduledOrder.settings_at`. At the start of an epoch, `update` may come yet, so `begins` compares."""
        here = None if (self._changed or self._next) and position in (0, self._n) else self._of(epoch)
        return {"weights": here and (here if here.bounds.size else self._latest).digest}

    def _of(self, epoch: int) -> _Weights | None:
        """The weights of ``epoch``; None if they were replaced."""
        return next((weights for weights in self._used if weights.since <= epoch), None)

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """See `Order.indices`."""
        check_positions(positions, self._n)
        if (weights := self._of(epoch)) is None or not weights.bounds.size:
            raise Forgotten(
                f"epoch {epoch} was drawn by other weights, which update() has replaced, so nobody knows its samples."
            )
        bounds = weights.bounds
        words = splitmix64_stream(positions.astype(np.uint64), *philox_words(self._seed, epoch, WEIGHTED, 2))
        uniform = (words >> np.uint64(11)) * 2.0**-53  # [0, 1): the upper 53 bits, which a double holds exactly
        # The largest uniform number times the total still rounds to less than the total, so there is always a bound
        # above it.
        drawn: Int64s = np.searchsorted(bounds, uniform * bounds[-1], side="right").astype(np.int64, copy=False)
        return drawn

    def details(self) -> dict[str, Any]:
        return {"weights": self.weights, "num_samples": self._n, "seed": self._seed}


class _Weights(NamedTuple):
    since: int  # the first epoch that they are for
    digest: str
    bounds: npt.NDArray[np.float64]  # `_UNKNOWN`: of a run whose state was loaded

    @classmethod
    def of(cls, since: int, weights: npt.ArrayLike) -> _Weights:
        checked = _weights(weights)
        # Scaled first, because a sum of finite weights may be infinite. The last bound is the total.
        return cls(since, checksum(checked.astype("<f8").tobytes()), np.cumsum(checked / checked.max()))


_UNKNOWN: Final = np.empty(0)


def _weights(weights: npt.ArrayLike) -> npt.NDArray[np.float64]:
    checked = np.asarray(weights, dtype=np.float64)
    if checked.ndim != 1 or not checked.size:
        raise ValueError(
            f"weights have shape {checked.shape}, but there must be one per item of the dataset: shape (n,), n > 0."
        )
    wrong = np.flatnonzero(~(np.isfinite(checked) & (checked >= 0)))
    if wrong.size:
        raise ValueError(
            f"weights[{wrong[0]}] is {checked[wrong[0]]}, but a weight must be finite and not negative ({wrong.size} "
            f"are not). Use 0 to exclude an item."
        )
    if not checked.any():
        raise ValueError(
            f"all {checked.size} weights are 0, so nothing can be drawn. Give at least one item a weight above 0."
        )
    return checked
