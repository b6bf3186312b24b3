"""The epochs of an order that plans each as a whole."""

from __future__ import annotations

from typing import Any, final

from penstock._nodes.plan_source import Place, PlanRequest, PlanSource


@final
class PlannedEpochs:
    """Plans the epochs of a `PlannedOrder`, the next one in a thread, because it draws from its own generator."""

    place: Place = "thread"

    def __init__(self, order: Any, plans: PlanSource[Any]) -> None:
        self._order, self._plans = order, plans

    def __call__(self, request: PlanRequest) -> Any:
        return self._order.plan(request.epoch)

    def keep(self, epoch: int) -> None:
        """Have the order know ``epoch``."""
        if not self._order.keeps(epoch):
            self._order.keep(epoch, self._plans.get(self, PlanRequest(epoch)))
            self._plans.order(self, PlanRequest(epoch + 1))
