"""What a run changes in what comes, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from penstock._errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Callable


class Changing:
    """An order or a source of which a run may change what comes.

    Its changes are lists of positions and of what changes there, as JSON. They are in the states of the run, and are
    given to it when a state is loaded.

    Attributes:
        grain: Of a mix: its stages start at a multiple of this. 0: it is none.
    """

    grain = 0

    def changes(self) -> dict[str, Any]:
        """What the run has changed, by name. Empty: nothing."""
        return {}

    def adopt(self, changes: dict[str, Any]) -> None:
        """Replace the changes, which may be damaged. Nothing is read meanwhile.

        Raises:
            StateError: They are damaged.
            ValueError: These changes are not possible.
        """
        raise NotImplementedError

    def presumed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The changes of a run whose state has none, with these ``settings``: its loader could not have any then. They
        may be damaged.
        """
        return {}

    def resume_at(self, epoch: int, position: int, sample: int) -> None:
        """A run goes on at ``position`` of ``epoch``, which is this sample of training."""

    def choices(self) -> dict[str, Any]:
        """What ranks must agree on, for people."""
        return {}

    @property
    def state(self) -> Any:
        """What its indices depend on now, compared by identity. None: nothing that changes between epochs."""
        return None

    def begins(self, epoch: int, position: int) -> None:
        """The loop asks for the first sample of ``epoch``, or of its rest from ``position`` on."""


@final
class Fixed(Changing):
    """What a run may change elsewhere, but not here; ``why`` is the reason. Ranks compare it all the same."""

    def __init__(self, choices: Callable[[], dict[str, Any]], why: str) -> None:
        self.choices = choices  # type: ignore[method-assign]
        self._why = why

    def adopt(self, changes: dict[str, Any]) -> None:
        if changes:
            raise ValueError(f"{self._why}, so these changes are not possible.")


def begins_block(changing: Changing | None, planned_by: Any, epoch: int, block: int) -> None:
    """The loop asks for the first group of a block; ``planned_by`` is the `Changing.state` when planning began.

    Raises:
        GraphError: The order was changed since, and groups are planned ahead.
    """
    if changing is not None:
        changing.begins(epoch, block)
        if changing.state is not planned_by:
            raise GraphError(
                "the order was updated, but groups are planned ahead by the weights that it was built with. Build a "
                "new loader, and call its set_epoch."
            )
