"""A source that gives a batch's items only once the loop has used the batch before: a queue, rollouts."""

from __future__ import annotations

import logging
import multiprocessing
import queue
import threading
import tracemalloc
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.nodes import IterableWrapper

from penstock import Loader
from penstock._workers import slow_read
from penstock.nodes import IterableSource

BATCH, BATCHES = 4, 5


class Live(IterableDataset):
    """What a queue holds, up to None. It raises, where a real one would wait for ever: nothing must be read ahead."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self):
        while (item := self.items.get(block=False)) is not None:
            yield item


def plain(items: Any) -> Any:
    return Live(items)


def generators(items: Any) -> Any:
    class Each:
        def __iter__(self):
            return iter(Live(items))

    return IterableSource(Each())


def node(items: Any) -> Any:
    return IterableWrapper(Live(items))


WORKERS = [
    {},
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 1},
    {"num_workers": "auto"},
    {"timeout": 60},
    {"device": "cpu"},
]


@pytest.mark.parametrize("source", [plain, generators, node])
@pytest.mark.parametrize(
    "options", [*WORKERS, {"num_workers": 2, "method": "thread"}, {"num_workers": 2, "timeout": 9}]
)
def test_nothing_is_read_before_the_loop_asks_for_it(source: Any, options: dict[str, Any]) -> None:
    """Each batch comes as soon as its items are there. Seen to fail: with any worker, the source was read for the
    second batch before the first was handed over.
    """
    items: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    with Loader.from_dataset(source(items), batch_size=BATCH, **options) as loader:
        put(items, 0)
        came = []
        for batch in loader:
            came.append(batch.tolist())
            put(items, len(came))
    assert came == [[BATCH * number + k for k in range(BATCH)] for number in range(BATCHES)]


def put(items: Any, number: int) -> None:
    for k in range(BATCH):
        items.put(BATCH * number + k if number < BATCHES else None)


class Shared(IterableDataset):
    """Waits for what is in a queue of processes."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self):
        while (item := self.items.get()) is not None:
            yield item


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_queue_of_processes_that_the_loop_feeds(context: str) -> None:
    """As in the test above, with a real queue, whose ``get`` waits."""
    items = multiprocessing.get_context(context).Queue()
    with Loader.from_dataset(Shared(items), batch_size=BATCH, num_workers=2, multiprocessing_context=context) as loader:
        put(items, 0)
        came = 0
        for batch in loader:
            assert batch.tolist() == [BATCH * came + k for k in range(BATCH)]
            came += 1
            put(items, came)
    items.close()
    items.join_thread()
    assert came == BATCHES


class Counted(IterableDataset):
    """Item i of epoch e is ``1000 * e + i``, and a draw."""

    def __init__(self) -> None:
        self.epoch = self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for item in range(12):
            self.read += 1
            yield 1000 * self.epoch + item, torch.rand(())


def twice(item: Any) -> Any:
    return item


def test_as_many_items_are_read_as_the_batches_need_and_a_state_is_the_same() -> None:
    """With workers that have nothing to do, and a resume with others. Seen to fail: 12 items were read for the first
    batch.
    """
    whole = batches(Loader.from_dataset(Counted(), batch_size=3))
    dataset = Counted()
    with Loader.from_dataset(dataset, batch_size=3, num_workers=2) as loader:
        first = next(iter(loader))
        assert dataset.read == 3
        state = loader.state_dict()
    assert first[0].tolist() == whole[0][0]
    for options in ({}, {"num_workers": 1}, {"num_workers": 1, "method": "thread", "transform": twice}):
        resumed = Loader.from_dataset(Counted(), batch_size=3, **options)
        resumed.load_state_dict(state)
        with pytest.warns(UserWarning, match="reads its first 3 items again"):
            assert batches(resumed) == whole[1:]


def batches(loader: Any) -> list[list[Any]]:
    with loader:
        return [[part.tolist() for part in batch] for batch in loader]


def test_workers_run_what_is_the_users() -> None:
    """A ``transform`` is still called in a worker, and ``num_workers`` tells. Seen to fail: it always said 1."""

    def where(item: Any) -> str:
        return threading.current_thread().name

    with Loader.from_dataset(Counted(), batch_size=3, num_workers=1, method="thread", transform=where) as loader:
        assert (next(iter(loader)), loader.num_workers) == (["penstock-map-0"] * 3, 1)
    with Loader.from_dataset(Counted(), batch_size=3, num_workers=1) as loader:
        assert (len(list(loader)), loader.num_workers) == (4, 0)


@pytest.mark.parametrize(
    "options", [{"num_workers": 2}, {"num_workers": 2, "method": "thread"}, {"num_workers": "auto"}]
)
def test_a_worker_init_fn_that_no_worker_would_call_is_refused(options: dict[str, Any]) -> None:
    """The remedy, lanes, is in the message. Seen to fail: in processes, ``get_worker_info().dataset`` was None; in
    threads it was not called, without a word.
    """
    with pytest.raises(
        ValueError, match=r"worker_init_fn .* pass lanes=[24], the workers that a DataLoader would have"
    ):
        Loader.from_dataset(Counted(), batch_size=3, worker_init_fn=print, **options)
    with Loader.from_dataset(Counted(), batch_size=3, worker_init_fn=print) as loader:  # as with a DataLoader
        assert len(list(loader)) == 4


class WaitsForWorkers(Counted):
    """Each batch takes a tenth of a second, until a worker has begun the second one."""

    def __init__(self, begun: Any) -> None:
        super().__init__()
        self.begun = begun

    def __iter__(self):
        for self.read in range(64 * BATCH):
            if not self.read % BATCH:
                self.begun.wait(0.1)
            yield self.read


class Notes:
    def __init__(self, begun: Any) -> None:
        self.begun = begun

    def __call__(self, items: list[int]) -> list[int]:
        if items[0] == BATCH:
            self.begun.set()
        return items


@pytest.mark.parametrize("method", ["thread", "process"])
def test_a_batch_that_is_ready_waits_for_one_more_at_most(method: Any) -> None:
    """With user code in workers, as many are read ahead as have to be. Seen to fail: as many as ``prefetch_factor``,
    which no worker had begun.
    """
    begun = multiprocessing.get_context("fork").Event()
    words = {"num_workers": 1, "prefetch_factor": 64, "method": method, "multiprocessing_context": "fork"}
    dataset = WaitsForWorkers(begun)
    with Loader.from_dataset(dataset, batch_size=BATCH, collate_fn=Notes(begun), **words) as loader:
        batches = iter(loader)
        assert next(batches) == [*range(BATCH)]
        assert dataset.read < 32 * BATCH
        assert [*batches] == [[*range(BATCH * number, BATCH * number + BATCH)] for number in range(1, 64)]


class WaitsForTheLog(IterableDataset):
    """Waits after its second batch until the log says something: a real one would wait for ever."""

    def __init__(self, said: threading.Event) -> None:
        self.said = said

    def __iter__(self):
        for item in range(5 * BATCH):
            if item == 2 * BATCH:
                assert self.said.wait(60)
            yield item


@pytest.mark.parametrize("options", [{"transform": int}, {"collate_fn": list}])
@pytest.mark.parametrize("method", ["thread", "process"])
def test_one_that_waits_for_batches_that_were_read_ahead_for_workers_is_said(
    options: dict[str, Any], method: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers that run the user's code need batches ahead. Once, and what comes is right. Seen to fail: nothing was
    said of a loop that hung.
    """
    monkeypatch.setattr(slow_read, "AFTER_S", 0.02)
    said = threading.Event()

    class Says(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.set()

    handler = Says()
    logging.getLogger("penstock").addHandler(handler)
    try:
        words = {"num_workers": 1, "method": method, **options}
        with Loader.from_dataset(WaitsForTheLog(said), batch_size=BATCH, **words) as loader:
            came = [list(map(int, batch)) for batch in loader]
    finally:
        logging.getLogger("penstock").removeHandler(handler)
    assert came == [[BATCH * number + k for k in range(BATCH)] for number in range(5)]
    assert [line.count("pass num_workers=0, and nothing is read ahead") for line in caplog.messages] == [1]


def test_an_interrupt_in_a_source_is_no_slow_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen to fail: the read that an interrupt had ended went on for the watch."""
    monkeypatch.setattr(slow_read, "AFTER_S", 0.01)

    class Stops(IterableDataset):
        def __iter__(self):
            yield from range(2 * BATCH)
            raise KeyboardInterrupt

    with Loader.from_dataset(Stops(), batch_size=BATCH, num_workers=1, method="thread", transform=int) as loader:
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        threading.Event().wait(0.05)
    assert not [line for line in caplog.messages if "read ahead" in line]


class Large(IterableDataset):
    """Item i is 200,000 times i."""

    def __iter__(self):
        for item in range(40):
            yield torch.full((200_000,), float(item))


def test_large_batches_are_made_in_recycled_memory() -> None:
    """As those of a dataset with indices, and never while one is in use. Recycled memory stays when no batch is left,
    and does not grow with their number. Seen to fail: each in fresh memory; and in the same memory every time.
    """
    kept = []
    tracemalloc.start()
    try:
        with Loader.from_dataset(Large(), batch_size=4, num_workers=2) as loader:
            for number, batch in enumerate(loader):
                if number in (0, 4, 5):
                    kept.append(batch)
                del batch
                held = tracemalloc.get_traced_memory()[0] / (4 * 800_000)
                assert number < 6 or 4 < held < 9  # batches; three are kept
    finally:
        tracemalloc.stop()
    assert [batch[:, -1].tolist() for batch in kept] == [[4.0 * n + k for k in range(4)] for n in (0, 4, 5)]
