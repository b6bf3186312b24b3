"""The contract of orders, and of datasets that bring one."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from penstock._random.permutation import Int64s


@runtime_checkable
class Order(Protocol):
    """Which sample stands at which position of an epoch.

    Any class with these three methods is an order. Its indices must depend on its settings, the epoch and the position, and on nothing else: not on
    earlier calls, and not on a generator that others draw from. It need not be a permutation: an index may come several times in an epoch, or
    never. `penstock.testing.assert_order_is_pure` checks an order.
    """

    def __len__(self) -> int:
        """Positions in an epoch; the same in every epoch."""
        ...

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        """The indices of the dataset at ``positions`` of ``epoch``.

        Args:
            epoch: From 0.
            positions: int64, shape ``(n,)``, in any order, from 0 to ``len - 1``. Must not be written to.

        Returns:
            A new array: int64, shape ``(n,)``.
        """
        ...

    def settings(self) -> dict[str, Any]:
        """What identifies the order, as JSON of a few hundred bytes at most. A saved state loads only if it is equal."""
        ...


Order.__module__ = "penstock.orders"  # in the class it would be a member of the protocol


@runtime_checkable
class ScheduledOrder(Order, Protocol):
    """An order with a plan whose later part may change during training. A state must agree with the part before it only."""

    def settings_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The entries of `Order.settings` that describe the plan, restricted to what comes before ``position`` of ``epoch``."""
        ...


@runtime_checkable
class ContinuingOrder(Order, Protocol):
    """An order that never ends, of which each epoch is the next piece. An epoch begins where the one before it was left, even if that was left early.

    `Order.indices` gets the positions since the beginning of training, and does not look at the epoch.
    """

    round: int
    """The number of lanes: item k since the beginning of training is of lane ``k mod round``. At least 1."""


@runtime_checkable
class PlannedOrder(Order, Protocol):
    """An order that is computed an epoch at a time, so that whoever walks through it can have the next epoch made ahead."""

    def plan(self, epoch: int) -> Any:
        """All of ``epoch``. Pure: any thread may make it."""

    def keep(self, epoch: int, plan: Any) -> None:
        """Keep the ``plan`` of ``epoch``, in the place of the one kept before."""

    def keeps(self, epoch: int) -> bool:
        """Whether `Order.indices` of ``epoch`` will find its plan made."""
        ...


class OrderedDataset(Protocol):
    """A dataset that brings its order: `Loader.from_dataset` uses it unless it is given another one."""

    def order(self, *, shuffle: bool, seed: int) -> Order | None:
        """The order, as a pure function of the arguments; None stands for the usual one.

        Args:
            shuffle: Whether the user asked for a shuffle.
            seed: The seed of everything random.
        """
        ...


def dataset_order(dataset: Any, *, shuffle: bool, seed: int) -> Order | None:
    """The order that ``dataset`` brings, if it does.

    An ``order`` that is not a method, or takes other arguments, has nothing to do with this and is left alone.

    Raises:
        TypeError: Its ``order`` returned something else.
    """
    method = getattr(type(dataset), "order", None)
    if not callable(method):
        return None
    try:
        inspect.signature(method).bind(dataset, shuffle=shuffle, seed=seed)
    except (TypeError, ValueError):
        return None
    order = dataset.order(shuffle=shuffle, seed=seed)
    if order is not None and not isinstance(order, Order):
        raise TypeError(
            f"{type(dataset).__name__}.order(shuffle=, seed=) returned a {type(order).__name__}, but an order has __len__, indices and settings. If the method "
            f"is not meant for the loader, rename it."
        )
    return order
