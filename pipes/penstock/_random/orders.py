"""The orders: in which sequence an epoch visits the dataset. Pure rules: no thread, no torch.distributed.

An order is a pure, random-access sequence per epoch: ``indices(epoch, positions)`` computes the indices at any
positions without computing those before them. So a checkpoint is a position, and resuming is a jump. The indices for
given (seed, epoch, position) are frozen: golden values in the tests check them to the last bit, on every platform.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch

from penstock._arguments import Shown, checksum, whole_number
from penstock._errors import GraphError, StateMismatch
from penstock._random.permutation import (
    SHORT,
    WEIGHTED,
    FeistelPermutation,
    Int64s,
    SortedPermutation,
    philox_words,
    splitmix64_stream,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Permutation = npt.NDArray[np.signedinteger[Any]]

LONGEST: Final = 2**56


class Forgotten(GraphError):
    """What an order says itself that it does not know any more."""


class PlainOrder(Shown):
    """What orders share: their length, and their settings, which are in ``_said``.

    Attributes:
        grain: Of a mix: its stages start at a multiple of this. 0: it is none.
        marks: Checksums of what only reading shows, for other ranks to compare, as `FirstNode.note` returns them, with
            its argument ``again``. None if there is nothing of the kind.
        why_ranks_differ: What to say and to do if they are not the same; None: see `dealt_twice`.
        run: How many consecutive items stay together.
    """

    _n: int
    _said: dict[str, Any]
    marks: Callable[..., tuple[int, ...]] | None = None
    why_ranks_differ: str | None = None
    grain = 0
    run = 1

    def __len__(self) -> int:
        return self._n

    def settings(self) -> dict[str, Any]:
        """See `Order.settings`."""
        return dict(self._said)

    def details(self) -> dict[str, Any]:
        return {"n": self._n, **{name: self._said[name] for name in ("window", "seed") if name in self._said}}

    def say(self, **more: Any) -> None:
        """Add settings of what the order applies to."""
        self._said |= more

    def choices(self) -> dict[str, Any]:
        """What ranks must agree on and a run may change, for people."""
        return {}

    def changes(self) -> dict[str, Any]:
        """What the run has changed in its order, as JSON for its state. Empty: nothing."""
        return {}

    def adopt(self, changes: dict[str, Any]) -> None:
        """Have these changes, and no others. They may be damaged.

        Raises:
            StateError: They are.
            ValueError: This order cannot have them.
        """
        if changes:
            raise ValueError(f"a {type(self).__name__} has none{' without grow=True' if 'grow' in changes else ''}.")

    def presumed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The changes of a run whose state, with these ``settings``, was saved when its loader could not have any.

        They may be damaged.
        """
        return {}

    def resume_at(self, sample: int) -> None:
        """A run goes on at this sample of training."""

    @property
    def state(self) -> Any:
        """What its indices depend on now, compared by identity. None: nothing that changes between epochs."""
        return None

    def begin(self, epoch: int, position: int) -> None:
        """The loop asks for the first sample of ``epoch``, or of its rest from ``position`` on."""

    def take(self) -> None:
        """Called when a loader that reads in this order was built, or starts; see `InterleavedOrder`."""


@final
class SequentialOrder(PlainOrder):
    """0, 1, 2, … in every epoch.

    Args:
        n: Length of the dataset, from 0 to 2**56.
    """

    __module__ = "penstock.orders"

    def __init__(self, n: int) -> None:
        self._n = checked_length(n)
        self._said = {"order": "sequential", "length": self._n}

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """The positions themselves."""
        check_positions(positions, self._n)
        return positions.copy()


@final
class ShuffledOrder(PlainOrder):
    """A permutation of 0 … n-1 in every epoch, computed index by index in O(1) time and memory.

    A generalised Feistel network over the pairs ``(left, right)`` of ``[0, a) x [0, b)``, with ``a = ceil(sqrt(n))``
    and ``b = ceil(n / a)``: a number x is the pair ``(x mod a, x div a)``, and rounds alternately add a keyed hash of
    one half to the other, modulo a or b. Every round can be undone, so the network is a bijection whatever the hash.
    Results from n to a*b - 1 (fewer than one in sqrt(n)) are enciphered again until they fall below n: cycle walking.
    Both are from Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. Round keys are drawn from
    Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) under the key (seed, epoch).

    A small number of rounds is enough only for few queries in a large domain (Luby and Rackoff 1988), but here all of
    it is visible: at n = 101 four rounds fail a test of pairs by 400 standard deviations, six by 2, and eight pass. So
    the number of rounds grows as n shrinks, and up to n = 4096 there is no network but the permutation that sorts n
    random words: all n! permutations are equally likely.

    Args:
        n: Length of the dataset, from 0 to 2**56.
        seed: From 0 to 2**63 - 1.
    """

    __module__ = "penstock.orders"

    def __init__(self, n: int, seed: int = 0) -> None:
        self._n = checked_length(n)
        self._seed = checked_seed(seed)
        self._said = {"order": "shuffled", "length": self._n, "seed": self._seed}
        # of this epoch and the one that is read ahead
        self._keyed: tuple[SortedPermutation | FeistelPermutation, ...] = (self._under(0),)

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """See `Order.indices`."""
        check_positions(positions, self._n)
        kept = self._keyed  # read once, so that threads on different epochs at most compute a key again
        keyed = kept[0] if kept[0].epoch == epoch else kept[-1]
        if keyed.epoch != epoch:
            keyed = self._under(epoch)
            self._keyed = keyed, kept[0]
        return keyed(positions)

    def _under(self, epoch: int) -> SortedPermutation | FeistelPermutation:
        return (
            SortedPermutation(epoch, self._seed, self._n)
            if self._n <= SHORT
            else FeistelPermutation(epoch, self._seed, self._n)
        )


@final
class TorchOrder(PlainOrder):
    """Bit for bit the shuffle of ``torch.utils.data.DistributedSampler(seed=seed)`` after ``set_epoch(epoch)``.

    For runs that must reproduce an older run. It uses ``torch.randperm``, so it takes O(n) time and memory per epoch:
    40 s at n = 10^9. To compute an epoch ahead of time, call `plan` anywhere and then `keep`; otherwise it is computed
    on demand. One permutation is kept, at 4 bytes per index (8 from n = 2**31 on).

    Args:
        n: Length of the dataset.
        seed: Like that of DistributedSampler; from -2**63 to 2**63 - 1.
    """

    __module__ = "penstock.orders"

    def __init__(self, n: int, seed: int = 0) -> None:
        self._n = checked_length(n)
        self._seed = checked_seed(seed, least=-(2**63))
        self._said = {"order": "torch", "length": self._n, "seed": self._seed}
        self._kept: tuple[int, Permutation] | None = None
        if n > 10**7:
            warnings.warn(
                f"TorchOrder({n}) shuffles the whole dataset at once, as DistributedSampler does: an epoch costs about "
                f"{n / 25e6:.1f} s and {12 * n / 2**20:.0f} MiB on every rank. Unless you must reproduce an older run, "
                f"use ShuffledOrder, which costs neither.",
                stacklevel=2,
            )

    def plan(self, epoch: int) -> Permutation:
        """The permutation of ``epoch``, shape ``(n,)``. Pure: any thread may compute it, with its own generator."""
        generator = torch.Generator()
        generator.manual_seed(self._seed + epoch)
        permutation = torch.randperm(self._n, generator=generator, device="cpu")
        return (permutation.to(torch.int32) if self._n < 2**31 else permutation).numpy()

    def keep(self, epoch: int, plan: Permutation) -> None:
        """Keep the ``plan`` of ``epoch``, replacing the one kept before."""
        self._kept = epoch, plan

    def keeps(self, epoch: int) -> bool:
        """Whether `indices` of ``epoch`` will find its plan ready."""
        return self._kept is not None and self._kept[0] == epoch

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """See `Order.indices`."""
        check_positions(positions, self._n)
        kept = self._kept  # read once, because another thread may request another epoch meanwhile
        if kept is None or kept[0] != epoch:
            kept = self._kept = epoch, self.plan(epoch)
        return kept[1][positions].astype(np.int64)


@final
class WeightedOrder(PlainOrder):
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

    def begin(self, epoch: int, position: int) -> None:
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
        """See `PlainOrder.changes`."""
        now = self._used[0]
        return {"weights": [now.since, now.digest, self._latest.digest]} if self._changed or self._next else {}

    def adopt(self, changes: dict[str, Any]) -> None:
        """See `PlainOrder.adopt`."""
        if changes.keys() - {"weights"}:
            raise ValueError("a WeightedOrder has weights to change, and nothing else.")
        since, digest, expected = changes.get("weights", (0, None, None))
        whole_number("since", since, 0)
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
            int(digest, 16)  # raises if it is none
            # `resume_at` knows which of the two the run goes on with
            used, following = (_Weights(since, digest, _UNKNOWN), latest._replace(since=0)), latest
        self._used, self._next, self._expected, self._changed = used, following, expected, digest is not None
        self._replaced = before

    def resume_at(self, sample: int) -> None:
        """See `PlainOrder.resume_at`."""
        self._begun = self._begun or sample > 0
        if not self._used[0].bounds.size and sample < self._used[0].since * self._n:  # a commit, behind the loop
            self._used, self._next = self._used[1:], None
        elif not self._used[0].bounds.size:
            self._used = self._used[:1]

    @property
    def state(self) -> Any:
        """See `PlainOrder.state`."""
        return self._used[0].bounds

    def note(self, *, again: bool = False) -> tuple[int, ...]:
        """See `PlainOrder.marks`."""
        return (int(self._used[0].digest, 16),)

    def choices(self) -> dict[str, Any]:
        """See `PlainOrder.choices`."""
        return {"next weights": self._latest.digest}

    def settings(self) -> dict[str, Any]:
        """See `Order.settings`."""
        return {**self._said, "weights": self._used[0].digest}

    def settings_at(self, epoch: int, position: int) -> dict[str, Any]:
        """See `ScheduledOrder.settings_at`. At the start of an epoch, `update` may come yet, so `begin` compares."""
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


def checked_length(n: int, name: str = "n") -> int:
    return whole_number(name, n, 0, LONGEST + 1, "Pass the number of items, as len(dataset).")


def checked_seed(seed: int, least: int = 0) -> int:
    """``seed`` as an ``int`` from ``least`` to 2**63 - 1."""
    return whole_number("seed", seed, least, remedy="A larger one can be folded: seed % 2**63.")


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


def check_positions(positions: Int64s, n: int) -> None:
    # A negative position is huge as an unsigned number, so one comparison finds both.
    if positions.size and positions.view(np.uint64).max() >= n:
        wrong = positions[(positions < 0) | (positions >= n)]
        raise IndexError(f"position {wrong[0]} is outside an epoch of {n} items. Wrap it first: positions % {n}.")
