"""Cycler: one epoch after another, forever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, final

from penstock._errors import SourceError, StateError
from penstock._nodes.index_node import IndexNode
from penstock._nodes.node import EndOfEpoch, State, fields, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from penstock._nodes.node import BaseNode


T = TypeVar("T", covariant=True)


@final
class Cycler(IndexNode[T]):
    """Repeat ``source`` epoch after epoch, with an `EndOfEpoch` marker after each.

    Put it downstream of the sampler and upstream of everything slow. Then workers never learn that an epoch ended, and
    the pipeline never drains.

    Its state is ``{"epoch": e, "source": s}``. ``s`` is None if epoch ``e`` has no items left, only its marker.

    Args:
        source: A finite node, ours or torchdata's. It signals its end with ``StopIteration``.

    """

    __module__ = "penstock.nodes"

    def __init__(self, source: BaseNode[T]) -> None:
        super().__init__(source, infinite=True)
        self._failure: BaseException | None = None  # after an error the source is not read again until the next `seek`
        self._ended: State | None = None  # the source's place where it was seen to end, known by its identity

    @property
    def failure(self) -> BaseException | None:
        """The error that the source has raised, which stops further reads; None if there is none."""
        return self._failure

    def start(self, epoch: int, after: State | None = None) -> State:
        return {"epoch": epoch, "source": self.upstream.start(epoch, after)}

    def left(self, place: State) -> int | None:
        return 0 if place["source"] is None else self.upstream.left(place["source"])

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[T], State]:
        inner = place["source"]
        if inner is None:  # a state said that only the marker is left
            return [], place
        if self._failure is not None:
            raise SourceError.after(self._failure)
        try:
            items, inner = self.upstream.read(inner, n, every, first)
        except SourceError:
            raise
        except BaseException as error:
            self._failure = error
            raise
        if len(items) < n:
            self._ended = inner
        return items, {"epoch": place["epoch"], "source": inner}

    def peek(self, place: State, positions: np.ndarray) -> Sequence[T]:
        inner = place["source"]
        if inner is None:
            if not len(positions):
                return []
            inner = self.upstream.start(place["epoch"])
        return self.upstream.peek(inner, positions)

    def skip(self, place: State) -> State:
        return (
            place
            if place["source"] is None
            else {"epoch": place["epoch"], "source": self.upstream.skip(place["source"])}
        )

    def over(self, place: State) -> tuple[EndOfEpoch, State]:
        epoch = place["epoch"]
        items: Sequence[T] = ()
        if place["source"] is not self._ended:  # the end was not seen, and `left` may be wrong if the state is damaged
            items, place = self.read(place, 1)
        if len(items):
            raise StateError(
                f"epoch {epoch} should end here, but there is another item: the state is damaged, or a length is wrong."
            )
        left = place_of(place) if self.first.looks_back else None
        return EndOfEpoch(epoch), self.start(epoch + 1, None if left is None else left[1])

    def seek(self, place: State) -> State:
        self._failure = self._ended = None
        inner = place["source"]
        return {"epoch": place["epoch"], "source": None if inner is None else super().seek(inner)}

    def restart(self, place: State | None) -> State:
        return self.start(0)

    def check(self, state: Any) -> None:
        inner = fields(state, epoch=int, source=object)["source"]
        if inner is None:
            if self.facts.carries_over_epochs:
                raise StateError(
                    "this state does not say where its epoch ended, but this source continues from there: the state is "
                    "damaged, or of another graph."
                )
            return
        self.upstream.check(inner)
        while isinstance(inner, dict):  # nodes with a state of their own nest their source's
            if inner.get("epoch", state["epoch"]) != state["epoch"]:
                raise StateError(
                    f"this state is damaged: it is in epoch {state['epoch']}, but its source is in epoch "
                    f"{inner['epoch']}."
                )
            inner = inner.get("source")
