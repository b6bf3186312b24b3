"""EndlessOrder: an endless sequence, cut into epochs whose length a run may change."""

from __future__ import annotations

import logging
from bisect import bisect_right
from itertools import pairwise
from typing import Any

from penstock._errors import StateError
from penstock._random.changing import Changing
from penstock._random.orders import LONGEST, PlainOrder

log = logging.getLogger("penstock")


class EndlessOrder(PlainOrder, Changing):
    """An order that has no end. Where epochs begin does not matter to it, so a state that was saved with another
    ``epoch_size`` loads: the epoch that it is inside, and all later ones, have the new one. If that epoch is longer
    already, it ends there.
    """

    _eras: list[tuple[int, int, int]] | None = None  # first epoch, its first item, items in an epoch

    def begin_of(self, epoch: int) -> int:
        """See `PlainOrder.begin_of`."""
        since, begin, size = self._era_of(epoch)
        return begin + (epoch - since) * size

    def length_of(self, epoch: int) -> int:
        """See `PlainOrder.length_of`."""
        return self._era_of(epoch)[2]

    def changes(self) -> dict[str, Any]:
        """See `Changing.changes`."""
        return {} if self._eras is None else {"epochs": [[*era] for era in self._eras]}

    def adopt(self, changes: dict[str, Any]) -> None:
        """See `Changing.adopt`."""
        if others := changes.keys() - {"epochs"}:
            without = " without grow=True" if "grow" in others else ""
            raise ValueError(f"a {type(self).__name__} has no {', '.join(sorted(others))} to change{without}.")
        eras: list[Any] = [tuple(era) for era in changes.get("epochs", ())]
        rests = [
            epoch <= since or at - begin != (epoch - since) * size
            for (since, begin, size), (epoch, at, _) in pairwise(eras)
        ]
        if eras and (any(rests) or eras[0][:2] != (0, 0) or not all(0 < size <= LONGEST for _, _, size in eras)):
            raise StateError("the lengths of epochs are damaged in this state. Load an older one.")
        self._eras = eras or None

    def presumed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """See `Changing.presumed`."""
        size = settings.get("length", self._n)
        return {} if size == self._n else {"epochs": [[0, 0, size]]}

    def resume_at(self, epoch: int, position: int, sample: int) -> None:
        """See `Changing.resume_at`."""
        if self._eras is None or (size := self._eras[-1][2]) == self._n:
            return
        log.info("epochs had %d items, and from epoch %d on they have %d.", size, epoch, self._n)
        begin, earlier = self.begin_of(epoch), [era for era in self._eras if era[0] < epoch]
        if position > self._n:  # it ends here, or behind the present run
            ended = -(-position // self.run) * self.run
            earlier, epoch, begin = [*earlier, (epoch, begin, ended)], epoch + 1, begin + ended
        self._eras = [*earlier, (epoch, begin, self._n)] if earlier else None

    def choices(self) -> dict[str, Any]:
        """See `Changing.choices`."""
        return EndlessOrder.changes(self)

    def settings_of(self, epoch: int) -> dict[str, Any]:
        """The settings that depend on the epoch."""
        return {"length": self.length_of(epoch)}

    def _era_of(self, epoch: int) -> tuple[int, int, int]:
        if self._eras is None:
            return 0, 0, self._n
        return self._eras[bisect_right(self._eras, epoch, key=lambda era: era[0]) - 1]
