"""An iterable that knows its place, as torchdata asks of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Resumable(IterableDataset[Any]):
    """Yields ``item(0)``, ``item(1)``, … up to ``n`` items, from where it is; at the end it begins anew."""

    def __init__(self, n: int, item: Callable[[int], Any] = lambda at: at) -> None:
        self.n, self.item, self.at = n, item, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.n:
            self.at += 1
            yield self.item(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
