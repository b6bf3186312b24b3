"""The orders: in which sequence an epoch visits the dataset. Pure rules: no thread, no torch.distributed.

An order is a pure, random-access sequence per epoch: ``indices(epoch, positions)`` computes the indices at any
positions without computing those before them. So a checkpoint is a position, and resuming is a jump. The indices for
given (seed, epoch, position) are frozen: golden values in the tests check them to the last bit, on every platform.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import numpy.typing as npt
import torch

from penstock._arguments import Shown, whole_number
from penstock._errors import GraphError
from penstock._random.permutation import (
    SHORT,
    FeistelPermutation,
    Int64s,
    SortedPermutation,
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
        marks: Checksums of what only reading shows, for other ranks to compare, as `FirstNode.note` returns them, with
            its argument ``again``. None if there is nothing of the kind.
        why_ranks_differ: What to say and to do if they are not the same; None: see `dealt_twice`.
        run: How many consecutive items stay together.
        compared: Names of settings that ranks compare by ``marks``, so that they may differ until then.
    """

    _n: int
    _said: dict[str, Any]
    marks: Callable[..., tuple[int, ...]] | None = None
    why_ranks_differ: str | None = None
    run = 1
    compared: tuple[str, ...] = ()

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

    def begin_of(self, epoch: int) -> int:
        """The samples of training before ``epoch``, if none before it is left early."""
        return epoch * self._n

    def length_of(self, epoch: int) -> int:
        """The positions in ``epoch``."""
        return self._n

    def take(self) -> None:
        """Called when a loader that reads in this order was built, or starts; see `InterleavedOrder`."""


@final
class ForeignOrder(PlainOrder):
    """What is presumed of a user's order of length ``n``."""

    def __init__(self, n: int) -> None:
        self._n = n


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


def checked_length(n: int, name: str = "n") -> int:
    return whole_number(name, n, 0, LONGEST + 1, "Pass the number of items, as len(dataset).")


def checked_seed(seed: int, least: int = 0) -> int:
    """``seed`` as an ``int`` from ``least`` to 2**63 - 1."""
    return whole_number("seed", seed, least, remedy="A larger one can be folded: seed % 2**63.")


def check_positions(positions: Int64s, n: int) -> None:
    # A negative position is huge as an unsigned number, so one comparison finds both.
    if positions.size and positions.view(np.uint64).max() >= n:
        wrong = positions[(positions < 0) | (positions >= n)]
        raise IndexError(f"position {wrong[0]} is outside an epoch of {n} items. Wrap it first: positions % {n}.")
