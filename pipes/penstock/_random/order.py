"""The interface of orders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from penstock._random.permutation import Int64s


@runtime_checkable
class Order(Protocol):
    """Which sample comes at which position of an epoch.

    Any class with these three methods is an order. Its indices must depend only on its settings, the epoch and the
    position: not on earlier calls, and not on a generator that other code draws from. It need not be a permutation: an
    index may occur several times in an epoch, or never. `penstock.testing.assert_order_is_pure` checks an order.
    """

    def __len__(self) -> int:
        """Number of positions in an epoch; the same in every epoch."""
        ...

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """The dataset indices at ``positions`` of ``epoch``.

        Args:
            epoch: From 0.
            positions: int64, shape ``(n,)``, in any order, from 0 to ``len - 1``. Must not be written to.

        Returns:
            A new array: int64, shape ``(n,)``.
        """
        ...

    def settings(self) -> dict[str, Any]:
        """JSON of at most a few hundred bytes that identifies the order. A saved state loads only if it is equal."""
        ...


Order.__module__ = "penstock.orders"  # in the class it would be a member of the protocol


@runtime_checkable
class ScheduledOrder(Order, Protocol):
    """An order with a plan whose later part may change during training.

    Only the part before a state's position must match.
    """

    def settings_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The entries of `Order.settings` that describe the plan, limited to the part before ``position`` of ``epoch``.

        None: the state has no such entry.
        """
        ...


@runtime_checkable
class ContinuingOrder(Order, Protocol):
    """An endless order, of which each epoch is the next piece.

    An epoch begins where the previous one stopped, even if that was left early.

    `Order.indices` receives positions since the beginning of training, and ignores the epoch.
    """

    round: int
    """The number of lanes: item k since the beginning of training belongs to lane ``k mod round``. At least 1."""


@runtime_checkable
class PlannedOrder(Order, Protocol):
    """An order that is computed one epoch at a time, so that the next epoch can be computed ahead."""

    def plan(self, epoch: int) -> Any:
        """The plan of the whole ``epoch``. Pure: any thread may compute it."""

    def keep(self, epoch: int, plan: Any) -> None:
        """Keep the ``plan`` of ``epoch``, replacing the one kept before."""

    def keeps(self, epoch: int) -> bool:
        """Whether `Order.indices` of ``epoch`` will find its plan ready."""
        ...
