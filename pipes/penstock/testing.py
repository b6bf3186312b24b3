"""Test tools for your own graphs and nodes; ours are tested with the same ones.

`assert_resumes_everywhere` is the resume law; `Tagged` is a dataset whose samples carry their own address.
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
    """A dataset whose item i, loaded in epoch e, is ``1000 * e + i``, so a lost or repeated item names its own origin.

    Args:
        n: The length, up to 1000.
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
    """``item`` with tensors and arrays replaced by nested lists and their dtype, so that it compares by value; containers stay."""
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
    """Check that stopping after any step and resuming elsewhere changes no item and no state.

    Each state goes through JSON, is checked like one from a file, and is loaded into a newly built graph. That graph must then produce the
    same items and the same states, in the same order, as the graph that never stopped.

    Args:
        build: Builds a new graph, or a new `Loader` over one; it is called ``steps + 2`` times.
        steps: How many items to compare, marks included. Choose enough to cross the ends of two epochs.

    Raises:
        AssertionError: Names the step and the difference.
    """
    make = _Stepper if isinstance(first := build(), Node) else _LoaderStepper
    whole = make(first)
    states, items = [whole.state()], []
    for _ in range(steps):
        items.append(plain(whole.step()))
        states.append(whole.state())
    whole.close()
    crossed = whole.crossed
    assert crossed >= 2, f"{steps} steps cross {crossed} epoch ends, but at least 2 are needed to test the states there. Use more steps."
    for stop, state in enumerate(states):
        resumed = make(build())
        try:
            resumed.load(state)
            assert resumed.state() == state, (
                f"a graph reset to the state after {stop} steps reports a different one at once: {resumed.state()} instead of {state}"
            )
            for step in range(stop, steps):
                item = plain(resumed.step())
                assert item == items[step], f"resumed after {stop} steps, step {step} gave {item} instead of {items[step]}"
                assert resumed.state() == states[step + 1], (
                    f"resumed after {stop} steps, the state after step {step} is {resumed.state()} instead of {states[step + 1]}"
                )
        finally:
            resumed.close()


class _Stepper:
    """Runs a node step by step; a mark is a step, too."""

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
    """Runs a loader batch by batch, across epoch ends."""

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
