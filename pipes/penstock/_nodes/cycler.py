"""Cycler: one epoch after another, forever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, final

from penstock._errors import SourceError, StateError
from penstock._nodes.node import EndOfEpoch, Node, State, fields, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from penstock._nodes.node import BaseNode


T = TypeVar("T", covariant=True)


@final
class Cycler(Node[T]):
    """Repeat ``source`` epoch after epoch, with an `EndOfEpoch` mark after each.

    Put it downstream of the sampler and upstream of everything slow. Then workers never learn that an epoch ended, and the pipeline never drains.

    Its state is ``{"epoch": e, "source": s}``. ``s`` is None if epoch ``e`` has no items left, only its mark.

    Args:
        source: A finite node, ours or torchdata's. It signals its end with ``StopIteration``.

    """

    __module__ = "penstock"

    def __init__(self, source: BaseNode[T]) -> None:
        super().__init__(source)
        self._epoch = 0
        self._ended = False  # only the mark is left, because a state said so
        self._begins = True  # the epoch has not begun: `_begin` resets the source at the first read, because a reset must not read anything
        self._after: State | None = None  # where the epoch before was left, for a source that continues from there
        self._failure: BaseException | None = None  # after an error the position of the source is unknown, so it is not read again

    @property
    def infinite(self) -> bool:
        return True

    def reset(self, initial_state: State | None = None) -> None:
        if initial_state is None:
            initial_state = self.start_of(0)
        super(Node, self).reset(initial_state)
        self._failure = None
        self._epoch = initial_state["epoch"]
        self._ended = initial_state["source"] is None
        self._after = self._left_at(initial_state)
        self._begins = initial_state == self.start_of(self._epoch, self._after)
        if not self._begins and not self._ended:
            self.source.reset(initial_state["source"])

    def next(self) -> T | EndOfEpoch:  # type: ignore[override]
        if not self._ended:
            try:
                self._begin()
                item: T = next(self.source)
            except StopIteration:
                pass
            except SourceError:
                raise
            except BaseException as error:
                self._failure = error
                raise
            else:
                return item
        mark, self._after = EndOfEpoch(self._epoch), self._left_at(self.get_state())
        self._epoch += 1
        self._ended, self._begins = False, True
        return mark

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Sequence[T]:
        if self._ended:
            return []
        try:
            self._begin()
            block: Sequence[T] = self.source.take(n, every=every, first=first)
        except SourceError:
            raise
        except BaseException as error:
            self._failure = error
            raise
        return block

    def finish(self) -> None:
        self.take(0)
        self.source.finish()

    def at(self, positions: np.ndarray) -> Sequence[T]:
        if self._ended and not len(positions):
            return []  # a reset to the end of an epoch left the source alone, so it cannot be asked
        try:
            self._begin()
            block: Sequence[T] = self.source.at(positions)
        except SourceError:
            raise
        except BaseException as error:
            self._failure = error
            raise
        return block

    def remaining(self, state: State | None = None) -> int | None:
        if state is None:
            return 0 if self._ended else self.source.remaining(self._start if self._begins else None)
        return 0 if state["source"] is None else self.source.remaining(state["source"])

    def items_per_epoch(self) -> int | None:
        items = self.source.remaining(self._start) if self._begins else None
        return self.source.items_per_epoch() if items is None else items

    def get_state(self) -> State:
        if self._begins:
            return self.start_of(self._epoch, self._after)
        return {"epoch": self._epoch, "source": None if self._ended else self.source.get_state()}

    def failure(self) -> BaseException | None:
        return self._failure

    def start_of(self, epoch: int, after: State | None = None) -> State:
        return {"epoch": epoch, "source": super().start_of(epoch, after)}

    def end_of(self, epoch: int) -> State:
        return {"epoch": epoch, "source": None}

    def check(self, state: Any) -> None:
        inner = fields(state, epoch=int, source=object)["source"]
        if inner is None:
            if self.continues:
                raise StateError(
                    "this state does not say where its epoch ended, and this source goes on from there: it is of another graph, or damaged."
                )
            return
        self.source.check(inner)
        while isinstance(inner, dict):  # nodes with a state of their own nest their source's
            if inner.get("epoch", state["epoch"]) != state["epoch"]:
                raise StateError(f"this state is damaged: it is of epoch {state['epoch']}, but its source is in epoch {inner['epoch']}.")
            inner = inner.get("source")

    def _begin(self) -> None:
        """Move the source to the start of the epoch, unless it has begun.

        Raises:
            SourceError: The source has raised before, and was not reset since.
        """
        if self._failure is not None:
            raise SourceError.after(self._failure)
        if self._begins:
            self.source.reset(self._start)
            self._begins = False

    @property
    def _start(self) -> State | None:
        """The source's state at the start of this epoch."""
        return super().start_of(self._epoch, self._after)

    def _left_at(self, state: State) -> State | None:
        place = place_of(state) if self.looks_back else None
        return None if place is None else place[1]
