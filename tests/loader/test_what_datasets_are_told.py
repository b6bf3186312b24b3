"""What the loop tells a part of the dataset, or changes in it, between epochs counts for the next one, as with a
``DataLoader`` whose workers get the dataset anew. By value and in order."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

import pytest
import torch
from pairwise import mostly_soak
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, IterableDataset, Subset, get_worker_info

from penstock import Loader

EPOCHS = 3


class Part(torch.utils.data.Dataset[int]):
    """Sample i is 1000 * what it was told + i."""

    def __init__(self) -> None:
        self.epoch = 0
        self.stage = 0
        self.box = {"stage": 0}
        self.holder = Holder()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 1000 * self.now() + index

    def now(self) -> int:
        return self.epoch

    def __len__(self) -> int:
        return 4


class Holder:
    stage = 0

    def __init__(self) -> None:
        self.stage = 0


class Stream(Part, IterableDataset[int]):
    def __iter__(self) -> Any:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return (1000 * self.now() + k for k in range(worker, 4, workers))


class Staged(Part):
    """Has no ``set_epoch``; the loop changes attributes."""

    set_epoch = None  # type: ignore[assignment]

    def now(self) -> int:
        return self.stage + 10 * self.box["stage"] + 100 * self.holder.stage


class StagedStream(Stream):
    set_epoch = None  # type: ignore[assignment]
    now = Staged.now


class Wrapper(torch.utils.data.Dataset[int]):
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def all(self) -> list[Any]:
        held = next(iter(vars(self).values()))
        return [*held.values()] if isinstance(held, dict) else held if isinstance(held, list) else [held]

    def __getitem__(self, index: int) -> int:
        return int(self.all()[index // 4][index % 4])

    def __len__(self) -> int:
        return 4 * len(self.all())


class WrapperStream(Wrapper, IterableDataset[int]):
    def __iter__(self) -> Any:
        for part in self.all():
            yield from part


WHOLES: dict[str, Any] = {
    "a + b": lambda kind, a, b: ConcatDataset([a, b]) if kind is Wrapper else ChainDataset([a, b]),
    "a wrapper": lambda kind, a, b: kind(part=a),
    "a list of parts": lambda kind, a, b: kind(parts=[a, b]),
    "a dict of parts": lambda kind, a, b: kind(parts={"a": a, "b": b}),
}


def stage(part: Any, epoch: int) -> None:
    part.stage = epoch


def boxed(part: Any, epoch: int) -> None:
    part.box["stage"] = epoch


def held(part: Any, epoch: int) -> None:
    part.holder.stage = epoch


CALLS: dict[str, Any] = {  # what the loop does before an epoch, and whether parts have a set_epoch
    "the epoch": (True, lambda part, epoch: part.set_epoch(epoch)),
    "another number": (True, lambda part, epoch: part.set_epoch(2 * epoch + 1)),
    "an attribute": (False, stage),
    "in a dict": (False, boxed),
    "of what it holds": (False, held),
}
METHODS: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"num_workers": 2, "method": "thread"},
    "processes": {"num_workers": 2},
    "lanes": {"lanes": 2},
    "lanes in processes": {"lanes": 2, "num_workers": 2},
}


def plain(loader: Any) -> list[int]:
    return [int(value) for batch in loader for value in batch]


def read(build: Any, call: str, whole: str, streams: bool) -> list[list[int]]:
    told, tell = CALLS[call]
    kind = (Stream if told else StagedStream) if streams else (Part if told else Staged)
    a, b = kind(), kind()
    loader = build(WHOLES[whole](WrapperStream if streams else Wrapper, a, b))
    found = []
    for epoch in range(EPOCHS):
        tell(a, epoch)
        tell(b, epoch)
        found.append(plain(loader))
    if isinstance(loader, Loader):
        loader.close()
    return found


CASES = [
    (call, whole, how, streams)
    for call in CALLS
    for whole in WHOLES
    for how in METHODS
    for streams in (False, True)
    if streams or "lanes" not in how
]


@pytest.mark.parametrize(("call", "whole", "how", "streams"), mostly_soak(CASES, CASES[::9]))
def test_the_loop_speaks_last(call: str, whole: str, how: str, streams: bool) -> None:
    """Seen to fail: epoch 0 three times, without a word."""
    words = METHODS[how]
    lanes = words.get("lanes", 0)
    expected = read(lambda data: DataLoader(data, 2, num_workers=lanes), call, whole, streams)
    assert read(lambda data: Loader.from_dataset(data, 2, seed=0, **words), call, whole, streams) == expected


@pytest.mark.parametrize("how", ["inline", "threads", "processes", "lanes"])
def test_parts_that_nobody_tells_are_told(how: str) -> None:
    """Seen to fail: parts of a wrapper stayed at 0."""
    parts = [Stream(), Stream()]
    with Loader.from_dataset(WrapperStream(parts=parts), 2, **METHODS[how]) as loader:
        assert [{value // 1000 for value in plain(loader)} for _ in range(4)] == [{0}, {1}, {2}, {3}]
        next(iter(loader))
        assert {value // 1000 for value in plain(loader)} == {5}
    data = Wrapper(parts=[Part(), Part()])
    if how != "lanes":
        with Loader.from_dataset(data, 2, **METHODS[how]) as loader:
            assert [{value // 1000 for value in plain(loader)} for _ in range(4)] == [{0}, {1}, {2}, {3}]


@pytest.mark.filterwarnings("ignore:WrapperStream has no state_dict")
@pytest.mark.parametrize("how", ["inline", "threads", "lanes"])
def test_a_part_that_keeps_no_number_is_resumed(how: str) -> None:
    """Seen to fail: it was in epoch 0 after a resume in epoch 3."""

    class Hides(Stream):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = 10 * epoch

    with Loader.from_dataset(WrapperStream(part=Hides()), 2, **METHODS[how]) as loader:
        loader.set_epoch(3)
        batches = iter(loader)
        next(batches)
        state, rest = loader.state_dict(), plain(batches)
        assert {value // 1000 for value in rest} == {30}
    with Loader.from_dataset(WrapperStream(part=Hides()), 2, **METHODS[how]) as loader:
        loader.load_state_dict(state)
        assert plain(loader) == rest


def test_what_below_a_part_has_a_set_epoch_is_its_own_business() -> None:
    class Outer(Part):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Part()

        def set_epoch(self, epoch: int) -> None:
            self.inner.set_epoch(10 * epoch)

        def now(self) -> int:
            return self.inner.epoch

    with Loader.from_dataset(Wrapper(part=Outer()), 2, num_workers=1) as loader:
        assert [plain(loader)[0] // 1000 for _ in range(3)] == [0, 10, 20]


@pytest.mark.parametrize("asks", ["the loader", "a trainer"])
def test_a_request_inside_an_epoch_moves_no_data(asks: str) -> None:
    """Threads that load, and a stream that is read, are still in the epoch before. Seen to fail: 0, 5001, 2, 3."""
    may_go = threading.Event()

    class Waits(Part):
        def __getitem__(self, index: int) -> int:
            assert index == 0 or may_go.wait(50)
            return super().__getitem__(index)

    with Loader.from_dataset(Waits(), 1, num_workers=2, method="thread") as loader:
        batches = iter(loader)
        first = next(batches).item()
        (loader if asks == "the loader" else loader.sampler).set_epoch(5)
        may_go.set()
        assert [first, *plain(batches)] == [0, 1, 2, 3]
        assert plain(loader) == [5000, 5001, 5002, 5003]

    class Slowly(Stream):
        def __iter__(self) -> Any:
            return (1000 * self.now() + k for k in range(4))

    with Loader.from_dataset(WrapperStream(part=Slowly()), 1) as loader:
        batches = iter(loader)
        first = next(batches).item()
        loader.set_epoch(5)
        assert [first, *plain(batches)] == [0, 1, 2, 3]
        assert plain(loader) == [5000, 5001, 5002, 5003]


@pytest.mark.parametrize("how", ["inline", "processes"])
def test_a_batch_that_is_made_again_leaves_what_the_loop_has_set(how: str) -> None:
    """The dataset is told its epoch, and then the loop's again. Seen to fail: epoch 1, where the loop had set 5."""
    data, parts = Part(), [Part(), Part()]
    with Loader.from_dataset(data, 2, **METHODS[how]) as loader:
        assert plain(loader) == [0, 1, 2, 3]
        assert loader.last is not None
        data.set_epoch(5)
        assert loader.load(loader.last).tolist() == [2, 3]
        assert plain(loader) == [5000, 5001, 5002, 5003]
    with Loader.from_dataset(Wrapper(parts=parts), 2, **METHODS[how]) as loader:
        plain(loader)
        assert loader.last is not None
        for part in parts:
            part.set_epoch(5)
        loader.load(loader.last)
        assert plain(loader)[0] == 5000


class Counts(Staged):
    """Counts what it loads, and keeps the last index."""

    def __getitem__(self, index: int) -> int:
        self.stage += 1
        self.box["last"] = index
        return index


def test_what_changes_while_loading_runs_is_not_the_loops_doing(caplog: pytest.LogCaptureFixture) -> None:
    """Seen to fail: a counter of the dataset ended loading ahead in threads."""
    with Loader.from_dataset(Counts(), 2, num_workers=2, method="thread") as loader:
        for _ in range(4):
            assert plain(loader) == [0, 1, 2, 3]
    assert not caplog.records


class Passes(Stream):
    """Counts its passes, when they end."""

    set_epoch = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return 90

    def __iter__(self) -> Any:
        yield from [1000 * self.stage + k for k in range(90)]
        self.stage += 1


def test_an_iterable_that_counts_its_passes_is_not_begun_twice(caplog: pytest.LogCaptureFixture) -> None:
    """Seen to fail: each pass that was begun ahead was dropped, and begun again."""
    data = Passes()
    with Loader.from_dataset(data, 1, num_workers=2, method="thread", transform=lambda item: item) as loader:
        assert [plain(loader)[0] // 1000 for _ in range(4)] == [0, 1, 2, 3]
    assert not [record for record in caplog.records if "was changed" in record.message]


@pytest.mark.parametrize("how", ["threads", "processes"])
def test_it_is_said_once_and_after_two_epochs_nothing_is_loaded_ahead(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data = Staged()
    with Loader.from_dataset(data, 2, **METHODS[how]) as loader:
        for data.stage in (0, 5, 6, 6, 7):
            assert {value // 1000 for value in plain(loader)} == {data.stage}
    said = [record.message for record in caplog.records if "dataset.stage" in record.message]
    assert len(said) == 2
    assert "dataset.stage was changed before epoch 1 began, so what was loaded ahead is dropped" in said[0]
    assert "dataset.stage was changed before two epochs in a row" in said[1]


def test_never_inside_an_epoch_and_never_with_infinite(caplog: pytest.LogCaptureFixture) -> None:
    data = Staged()
    with Loader.from_dataset(data, 2, num_workers=1) as loader:
        batches = iter(loader)
        next(batches)
        data.stage = 3
        assert plain(batches) == [2, 3]
        assert plain(loader) == [3000, 3001, 3002, 3003]
    data = Staged()
    with Loader.from_dataset(data, 2, num_workers=1, infinite=True) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        data.stage = 3
        assert next(batches).tolist() == [0, 1]
    assert "dataset.stage has changed, but with infinite=True the workers keep what they have" in caplog.text


def test_a_dataset_that_cannot_be_sent_any_more_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Until then it is, also to processes that inherit nothing."""
    data: Any = Staged()
    with Loader.from_dataset(data, 2, num_workers=1, multiprocessing_context="forkserver") as loader:
        assert plain(loader) == [0, 1, 2, 3]
        data.stage = 2
        assert plain(loader) == [2000, 2001, 2002, 2003]
        data.stage, data.cannot = 3, lambda: None
        assert plain(loader) == [2000, 2001, 2002, 2003]
    assert "can no longer be sent to worker processes" in caplog.text


def two(build: Any, kind: type[Part], inside: bool) -> list[list[int]]:
    """What two loaders over one dataset yield, if the loop reads the second one behind each epoch of the first one, or
    ``inside`` it."""
    data, found = kind(), []
    train, val = build(Subset(data, range(4))), build(Subset(data, range(4)))
    for epoch in range(EPOCHS):
        if kind is Part:
            data.set_epoch(epoch)
        data.stage = 2 * epoch
        batches = iter(train)
        read = [int(value) for value in next(batches)]
        if not inside:
            read += plain(batches)
        data.stage += 1
        found += [plain(val), read + plain(batches)]
    return found


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", ["inline", "threads", "processes"])
@pytest.mark.parametrize("kind", [Part, Staged])
def test_two_loaders_may_share_a_dataset(kind: type[Part], how: str, inside: bool) -> None:
    """Each yields what a ``DataLoader`` would. Seen to fail: the second one was in epochs 0, 2, 3; and the rest of the
    first one's epoch was in the next one."""
    if (kind, how, inside) == (Staged, "threads", True):
        pytest.skip("threads may have read ahead what the loop then changes")
    expected = two(lambda data: DataLoader(data, 2, num_workers=2 * (how == "processes")), kind, inside)
    with contextlib.ExitStack() as stack:
        build = lambda data: stack.enter_context(Loader.from_dataset(data, 2, seed=0, **METHODS[how]))  # noqa: E731
        assert two(build, kind, inside) == expected


@pytest.mark.parametrize("how", ["inline", "processes"])
def test_each_of_two_loaders_over_a_dataset_counts_for_itself(how: str) -> None:
    """Also inside an epoch of the other one. Seen to fail: half of the first epoch was in epoch 2."""
    data = Part()
    with Loader.from_dataset(data, 2, **METHODS[how]) as first, Loader.from_dataset(data, 2) as second:
        for epoch in range(EPOCHS):
            batches = iter(first)
            read = next(batches).tolist()
            assert [plain(second)[0] // 1000 for _ in range(2)] == [2 * epoch, 2 * epoch + 1]
            assert {value // 1000 for value in read + plain(batches)} == {epoch}
