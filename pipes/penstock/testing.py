"""Tools to test a graph with: ours, and users' own nodes.

`assert_resumes_everywhere` is the resume law itself; `tagged` is a dataset that carries its own address.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock import EndOfEpoch, Indices, Loader, Node

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["Tagged", "assert_resumes_everywhere", "plain"]


class Tagged:
    """A dataset whose item i is ``1000 * e + i`` when it is loaded in epoch e: a lost or doubled one names where it came from.

    Args:
        n: Its length, up to 1000.
    """

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        from penstock import sample

        if not 0 <= index < self.n:
            raise IndexError(index)
        return 1000 * sample().epoch + index


def plain(item: Any) -> Any:
    """``item`` in types that compare by value: tensors and arrays as nested lists, with their dtype; containers kept."""
    if isinstance(item, torch.Tensor | np.ndarray):
        return (str(item.dtype), item.tolist())
    if isinstance(item, Indices):
        return ("Indices", item.epoch, plain(item.positions), plain(item.values))
    if isinstance(item, dict):
        return {key: plain(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [plain(value) for value in item]
    return item


def assert_resumes_everywhere(build: Callable[[], Node[Any] | Loader[Any]], *, steps: int) -> None:
    """Stopping after any step and resuming elsewhere must not change one item, nor one state.

    Each state goes through JSON, is checked as one from a file would be, and is loaded into a graph that is built anew, which must then
    give the same items and the same states in the same order as the graph that never stopped.

    Args:
        build: Makes the graph, or a `Loader` over it, anew; it is called ``steps + 2`` times.
        steps: Items to look at, marks included. Choose it so that they cross two ends of an epoch.

    Raises:
        AssertionError: Names the step, and what differs.
    """
    make = _Stepper if isinstance(first := build(), Node) else _LoaderStepper
    whole = make(first)
    states, items = [whole.state()], []
    for _ in range(steps):
        items.append(plain(whole.step()))
        states.append(whole.state())
    whole.close()
    crossed = whole.crossed
    assert crossed >= 2, f"{steps} steps cross {crossed} ends of an epoch; at least 2 are needed to see the states there."
    for stop, state in enumerate(states):
        resumed = make(build())
        try:
            resumed.load(state)
            assert resumed.state() == state, (
                f"a graph reset to the state after {stop} steps has another one at once: {resumed.state()} and not {state}"
            )
            for step in range(stop, steps):
                item = plain(resumed.step())
                assert item == items[step], f"resumed after {stop} steps, step {step} gave {item} and not {items[step]}"
                assert resumed.state() == states[step + 1], (
                    f"resumed after {stop} steps, the state after step {step} differs: {resumed.state()} and not {states[step + 1]}"
                )
        finally:
            resumed.close()


class _Stepper:
    """A node, step by step; marks are steps too."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.crossed = 0

    def state(self) -> str:
        return json.dumps(self.node.state_dict(), sort_keys=True)

    def load(self, state: str) -> None:
        loaded = json.loads(state)
        self.node.check(loaded)
        self.node.reset(loaded)

    def step(self) -> Any:
        item = next(self.node)
        self.crossed += isinstance(item, EndOfEpoch)
        return item

    def close(self) -> None:
        self.node.shutdown()


class _LoaderStepper:
    """A loader, batch by batch, over the ends of its epochs."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.iterator = iter(loader)
        self.crossed = 0

    def state(self) -> str:
        return json.dumps(self.loader.state_dict())

    def load(self, state: str) -> None:
        self.loader.load_state_dict(json.loads(state))

    def step(self) -> Any:
        for batch in self.iterator:
            return (self.loader.epoch, batch)
        self.crossed += 1
        self.iterator = iter(self.loader)
        return self.step()

    def close(self) -> None:
        self.loader.close()
