"""What items consist of: tensors of every kind, and memory that the dataset fills again for each item."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensors import KINDS, SLOW, Holds, HoldsAndYields, Yields, as_they_are, content, make, of_prototypes
from torch.utils.data import IterableDataset
from ways import FORK, INLINE, SPAWN, THREAD

from penstock import Loader, Shuffle, Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = of_prototypes

LANES = [
    pytest.param({"lanes": 2}, id="lanes"),
    pytest.param(
        {"lanes": 2, "num_workers": 1, "multiprocessing_context": "fork"}, id="lanes-fork", marks=pytest.mark.slow
    ),
]
FORKSERVER = pytest.param(
    {"num_workers": 1, "multiprocessing_context": "forkserver"}, id="forkserver", marks=pytest.mark.slow
)
SLOW_FORK = pytest.param(*FORK.values, id="fork", marks=pytest.mark.slow)
LANES_FORKSERVER = pytest.param(
    {"lanes": 2, "num_workers": 1, "multiprocessing_context": "forkserver"},
    id="lanes-forkserver",
    marks=pytest.mark.soak,
)
NAMES = [name for name in reversed(KINDS) if name not in SLOW]  # the first ones have their checksums compared


def assert_come(data: Any, **words: Any) -> None:
    with Loader.from_dataset(data, batch_size=None, collate_fn=as_they_are, **words) as loader:
        found = dict(loader)
    assert {NAMES[number]: content(value) for number, value in found.items()} == {
        name: content(make(name)) for name in NAMES
    }


@pytest.mark.parametrize("way", [INLINE, THREAD, SLOW_FORK, *LANES, LANES_FORKSERVER])
@pytest.mark.parametrize("kind", [Yields, HoldsAndYields])
def test_an_iterable_yields_tensors_of_every_kind(kind, way, caplog):
    """Seen to fail: with processes by an AttributeError of torch's, in lanes by a NotImplementedError of the checksum
    of an item, and by a note that a second reading gave other items."""
    with caplog.at_level(logging.WARNING, "penstock"):
        assert_come(kind(NAMES), **way)
    said = [record for record in caplog.records if record.name == "penstock"]
    assert not said or "lanes" not in way, said


@pytest.mark.parametrize("way", [INLINE, THREAD, SLOW_FORK, FORKSERVER, SPAWN])
def test_a_dataset_holds_tensors_of_every_kind(way):
    """Seen to fail as above, in the workers."""
    assert_come(Holds(NAMES), **way)


@pytest.mark.slow
def test_a_shared_tensor_stays_shared():
    """Seen to fail: forkserver passed the memory of dtypes without a storage class as something else."""
    shared = torch.zeros(4, dtype=torch.int64).to(torch.uint16).share_memory_()
    with Loader.from_dataset(
        _Shows(shared), batch_size=None, num_workers=1, multiprocessing_context="forkserver", prefetch_factor=1
    ) as loader:
        batches = iter(loader)
        next(batches)
        shared.view(torch.int16)[0] = 7
        assert 7 in [int(batch[0]) for batch in batches]


class _Shows:
    def __init__(self, shared: torch.Tensor) -> None:
        self.shared = shared

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.shared.clone()


N = 12


class FillsAgain(IterableDataset[Any]):
    """Item i holds i, in ``turns`` buffers that take turns."""

    def __init__(self, kind: str, turns: int = 1) -> None:
        self.kind, self.turns = kind, turns

    def __iter__(self) -> Iterator[Any]:
        buffers = [np.zeros(3, np.int64) for _ in range(self.turns)]
        if self.kind == "tensor":
            buffers = [torch.from_numpy(one) for one in buffers]
        one: dict[str, Any] = {}
        for number in range(N):
            buffer = buffers[number % self.turns]
            buffer[:] = number
            one.update(x=buffer, number=number)
            yield one if self.kind == "dict" else buffer


def numbers(batches: list[Any]) -> list[int]:
    arrays = (batch["x"] if isinstance(batch, dict) else batch for batch in batches)
    return [int(number) for array in arrays for number in torch.as_tensor(array).reshape(-1, 3)[:, 0]]


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize(
    "way",
    [
        INLINE,
        THREAD,
        SLOW_FORK,
        pytest.param({"lanes": 1}, id="lanes"),
        pytest.param(
            {"lanes": 1, "num_workers": 1, "multiprocessing_context": "fork"}, id="lanes-fork", marks=pytest.mark.slow
        ),
        pytest.param({"device": "cpu"}, id="ahead"),
    ],
)
def test_one_buffer_again_and_again_shows_in_no_batch(way, batch_size):
    """All batches are held until the end. Seen to fail in threads with every batch size, and everywhere with batches of
    several; and with lanes, whose states were found false."""
    for kind, turns in [("array", 1), ("tensor", 2), ("dict", 1)]:
        with Loader.from_dataset(FillsAgain(kind, turns), batch_size=batch_size, **way) as loader:
            assert numbers(list(loader)) == numbers(list(loader)) == [*range(N)], (kind, turns)


def test_a_resumed_epoch_has_its_own_memory():
    """The items before the state are read again, and dropped. Seen to fail with a look at these only."""
    for at in range(N):
        with Loader.from_dataset(FillsAgain("array"), batch_size=None, num_workers=1, method="thread") as loader:
            batches = iter(loader)
            before = [int(next(batches)[0]) for _ in range(at)]
            state = loader.state_dict()
        again = pytest.warns(UserWarning, match="no state_dict") if at else nullcontext()
        with again, Loader.from_dataset(FillsAgain("array"), batch_size=None, num_workers=1, method="thread") as loader:
            loader.load_state_dict(state)
            assert before + numbers(list(loader)) == [*range(N)]


@pytest.mark.parametrize("opens", [True, False])
def test_one_buffer_in_the_window_of_a_shuffle(opens):
    """Seen to fail: the window held one record as often as it has room."""
    words: dict[str, Any] = {"epoch_size": N, "steps": [Shuffle(4)], "lanes": 1}
    data = (
        Stream(["shard"], lambda shard: FillsAgain("array"), **words) if opens else Stream(FillsAgain("array"), **words)
    )
    with Loader.from_dataset(data, batch_size=2, collate_fn=list) as loader:
        assert sorted(numbers([item for batch in loader for item in batch])) == [*range(N)]
