"""What lanes cannot read, or cannot read with other arguments, is refused or said once, with the values and the line to
add."""

from __future__ import annotations

import itertools
import logging
import random
import signal
import threading
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from by_worker import Split, share, stream
from pairwise import mostly_soak
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

import penstock
from penstock import GraphError, Loader, StateMismatch, Stream

LENGTHS = [9, 7, 8, 6]
WORKERS = [0, 2]


@pytest.fixture
def said(tmp_path):
    """The log of all processes, as a function."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("penstock").addHandler(handler)
    yield lambda: (tmp_path / "log").read_text().splitlines()
    logging.getLogger("penstock").removeHandler(handler)
    handler.close()


def fork(workers):
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


def same(item):
    return item


def endless(data, lanes=2, size=24, **words):
    return Loader.from_dataset(
        Stream(data, lanes=lanes, epoch_size=size), **{"batch_size": None, "collate_fn": same, **words}
    )


def in_epochs(data, lanes=2, **words):
    return Loader.from_dataset(data, **{"lanes": lanes, "batch_size": None, "collate_fn": same, **words})


WAYS = [endless, in_epochs]
both = pytest.mark.parametrize("way", WAYS)


def read(loader):
    with loader:
        return list(loader)


class Whole(IterableDataset):
    def __iter__(self):
        yield from range(12)


class Asks(Whole):
    """Asks for its worker, and does not split itself."""

    def __iter__(self):
        assert get_worker_info().id < get_worker_info().num_workers
        yield from range(12)


class AsksHowMany(Whole):
    """Only the number of workers is of interest to it."""

    def __iter__(self):
        yield from range(12 // get_worker_info().num_workers)


@pytest.mark.parametrize(
    ("kind", "workers", "way"),
    mostly_soak(
        product([Whole, AsksHowMany], WORKERS, WAYS),
        [*product([Whole, AsksHowMany], [0], WAYS), (Whole, 2, in_epochs), (AsksHowMany, 2, endless)],
    ),
)
def test_one_that_does_not_split_itself(way, workers, kind):
    """Seen to fail without `LaneInfo.asked`."""
    with pytest.raises(
        GraphError,
        match=(
            rf"(?s){kind.__name__} never asks for the id of its worker .*lanes=2 would yield all.*islice\(items, "
            rf"info.id, None"
        ),
    ) as raised:
        read(way(kind(), **fork(workers)))
    assert "or pass lanes=1" in str(raised.value)
    assert read(way(kind(), lanes=1, size=12) if way is endless else way(kind(), lanes=1)) == [*range(12)]


class Noise(Whole):
    def __iter__(self):
        for _ in range(12):
            yield random.random()


class ShufflesAll(Whole):
    """Every worker has all of it, in another order."""

    def __iter__(self):
        yield from random.sample(range(12), 12)


@pytest.mark.parametrize(
    ("kind", "workers", "way"),
    mostly_soak(
        product([Noise, ShufflesAll], WORKERS, WAYS),
        [*product([Noise, ShufflesAll], [0], WAYS), (Noise, 2, endless), (ShufflesAll, 2, in_epochs)],
    ),
)
def test_one_that_draws_and_does_not_split_itself_is_said(way, workers, kind, said):
    """Noise needs no split. Seen to fail: every item of the other came once for each lane, without a word."""
    found = read(way(kind(), **fork(workers)))
    assert len({*found}) == (24 if kind is Noise else 12)
    (line, *example) = said()
    assert f"{kind.__name__} never asks for the id of its worker" in line
    assert "unless it draws with replacement" in line
    assert len(example) == 2


@both
@pytest.mark.parametrize("workers", WORKERS)
def test_equal_heads_are_said_once(way, workers, said):
    """Seen to fail with a warning in each process."""
    assert (
        len(
            read(
                way(Asks(), lanes=4, size=48, **fork(workers))
                if way is endless
                else way(Asks(), lanes=4, **fork(workers))
            )
        )
        == 48
    )
    (line, *example) = said()
    assert "of Asks begin with the same items" in line
    assert len(example) == 2


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_worker_without_items(workers, on_error):
    """Seen to fail: on_error="skip" left it out with a warning, and the records of others came twice in a pass."""
    data = Stream(Split([5, 5]), lanes=3, epoch_size=30, on_error=on_error)
    with pytest.raises(
        GraphError, match=r"worker 2 of 3 of Split yields no item in pass 0.*lanes= of at most the number of its shards"
    ):
        read(Loader.from_dataset(data, None, collate_fn=same, **fork(workers)))


class ByRank(Split):
    def __init__(self):
        super().__init__([5, 5])
        self._distributed = True


@both
def test_one_that_splits_itself_by_rank(way):
    pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    import datasets

    whole = datasets.Dataset.from_dict({"x": [*range(12)]}).to_iterable_dataset(4)
    with pytest.raises(GraphError, match=r"lanes=2 would give every rank a share of its share.*split='own'"):
        way(split_dataset_by_node(whole, 0, 2))


class Open(Split):
    def __init__(self, held):
        super().__init__([5, 5])
        self.held = held


@both
@pytest.mark.parametrize(
    "held", [lambda: (n for n in range(3)), threading.Lock, partial(open, __file__)], ids=["generator", "lock", "file"]
)
def test_one_that_cannot_be_copied(way, held):
    data = Open(held())
    with pytest.raises(
        GraphError,
        match=r"Open cannot be copied .*Open files and connections, and make generators and locks, in __iter__",
    ):
        read(way(data))
    if hasattr(data.held, "close"):
        data.held.close()


class InPlace(Split):
    def __init__(self, array):
        super().__init__([5, 5])
        self.array = array

    def __iter__(self):
        self.array[0] += 1
        yield from self.own()


@both
def test_a_shared_array_changed_in_place(way):
    """NumPy's own words alone would not say why."""
    with pytest.raises(ValueError, match="read-only") as raised:
        read(way(InPlace(np.zeros(100_000))))
    assert any("copy one in __iter__" in note for note in raised.value.__notes__), raised.value.__notes__


@both
@pytest.mark.parametrize("workers", WORKERS)
def test_a_shared_tensor_changed_in_place_is_said_once(way, workers, said):
    data = InPlace(torch.zeros(100_000))
    assert len(read(way(data, **fork(workers)))) == (24 if way is endless else 10)
    (line,) = said()
    assert "InPlace changed a tensor of more than 64 KB in place" in line


@both
def test_a_small_array_is_copied(way):
    data = InPlace(np.zeros(10))
    assert len(read(way(data))) == (24 if way is endless else 10)
    assert data.array[0] == 0


class Counts(Split):
    """Its passes differ by its own counter."""

    set_epoch = None

    def __init__(self, lengths):
        super().__init__(lengths)
        self.n = 0

    def __iter__(self):
        self.n += 1
        self.epoch = self.n - 1
        yield from self.own()


@pytest.mark.parametrize("workers", WORKERS)
def test_passes_alike_though_the_object_changed_are_said_once(workers, said):
    with in_epochs(Counts([5, 5]), **fork(workers)) as loader:
        first = list(loader)
        assert list(loader) == first
    (line,) = said()
    assert "Counts changes its own attributes" in line
    assert "set_epoch(epoch)" in line


class OtherItems(Split):
    made = itertools.count()

    def __iter__(self):
        rng = np.random.default_rng()
        for item in self.own():
            yield *item, rng.random()


@both
@pytest.mark.parametrize("workers", WORKERS)
def test_one_that_is_not_deterministic_is_said_once(way, workers, said):
    """Seen to fail: with two processes it was said only if that of worker 0 came later."""
    read(way(OtherItems([5, 5]), **fork(workers)))
    (line,) = said()
    assert "OtherItems gave other items when worker 0 was begun a second time" in line


class OneBuffer(Split):
    """Fills one tensor again and again."""

    def __iter__(self):
        buffer = torch.zeros(2)
        for item in self.own():
            yield buffer.copy_(torch.tensor(item))


@both
def test_one_buffer_that_is_yielded_again_is_no_other_item(way, said):
    """Seen to fail with checksums that were taken once all items had been read."""
    with way(OneBuffer([12, 12])) as batches:
        found = [tuple(batch.tolist()) for batch in batches]
    assert sorted(found) == sorted(share([12, 12], 2, 0, 0) + share([12, 12], 2, 1, 0))
    assert said() == []


REFUSED = {
    "threads": (
        {"num_workers": 2, "method": "thread"},
        ValueError,
        "method='thread'.*torch has one worker info per process.*num_workers=0",
    ),
    "auto": ({"num_workers": "auto"}, ValueError, "num_workers='auto'.*Pass a number .num_workers=2."),
    "shuffle": ({"shuffle": True}, ValueError, "shuffle"),
    "sampler": ({"sampler": [0, 1]}, (TypeError, ValueError), "sampler"),
    "batch_sampler": (
        {"batch_sampler": [[0, 1]], "batch_size": 1, "collate_fn": None},
        (TypeError, ValueError),
        "sampler",
    ),
    "order": ({"order": penstock.orders.ShuffledOrder(24, 1)}, (TypeError, ValueError), "order"),
    "groups": ({"groups": penstock.Buckets([3] * 24, 12), "batch_size": 1}, (TypeError, ValueError), "groups"),
}
OF_EPOCHS = {
    "split": ({"split": "items"}, ValueError, "lanes=2 and split='items' exclude each other"),
    "in_order": ({"in_order": False}, ValueError, "lanes=2 and in_order=False exclude each other"),
    "on_error": ({"on_error": "skip"}, ValueError, "lanes=2 and on_error='skip' exclude each other"),
    "ranks": (
        {"rank": 0, "world_size": 2},
        GraphError,
        (
            r"Split in its own epochs, which only one rank can do: 2 ranks.*penstock.Stream\(Split\(…\), lanes=…, "
            r"epoch_size=…\)"
        ),
    ),
    "lanes 0": ({"lanes": 0}, ValueError, "lanes=0"),
    "lanes -1": ({"lanes": -1}, ValueError, "lanes=-1"),
    "lanes 65537": ({"lanes": 65537}, ValueError, "lanes=65537"),
    "lanes 2.5": ({"lanes": 2.5}, (TypeError, ValueError), "lanes=2.5"),
    "lanes True": ({"lanes": True}, (TypeError, ValueError), "lanes=True"),
    "lanes '2'": ({"lanes": "2"}, (TypeError, ValueError), "lanes='2'"),
}


@pytest.mark.parametrize("what", [*REFUSED, *OF_EPOCHS])
def test_arguments_that_exclude_lanes(what):
    words, kind, match = {**REFUSED, **OF_EPOCHS}[what]
    for way in (endless, in_epochs) if what in REFUSED else (in_epochs,):
        with pytest.raises(kind, match=match):
            read(way(Split(LENGTHS), **words))


@pytest.mark.parametrize("lanes", [0, -1, 65537, 2.5, True, "2"])
def test_lanes_of_a_stream(lanes):
    with pytest.raises((TypeError, ValueError), match=f"lanes={lanes!r}"):
        Stream(Split(LENGTHS), lanes=lanes, epoch_size=8)


def test_what_a_stream_is_made_of():
    with pytest.raises(TypeError, match=r"needs lanes=.*At most the number of its shards"):
        Stream(Split(LENGTHS), epoch_size=8)
    for one in (
        TensorDataset(torch.arange(3)),
        Stream(Split(LENGTHS), lanes=2, epoch_size=8),
        Loader.from_dataset([1, 2]),
        [1, 2],
        4,
        None,
    ):
        with pytest.raises(TypeError, match=r"IterableDataset, and \w+ is none"):
            Stream(one, lanes=2, epoch_size=8)
    for one in (TensorDataset(torch.arange(3)), Stream(Split(LENGTHS), lanes=2, epoch_size=8), [1, 2]):
        with pytest.raises(TypeError, match=r"lanes=2 reads a torch.utils.data.IterableDataset.*Leave lanes out"):
            Loader.from_dataset(one, lanes=2)
    with pytest.raises(TypeError, match=r"most_lanes= is about shards that penstock opens, but Split opens its own"):
        Stream(Split(LENGTHS), lanes=2, epoch_size=8, most_lanes=3)
    with pytest.raises(
        ValueError, match=r"bookmarks='x' keeps states of an IterableDataset that is read in lanes. Pass lanes="
    ):
        Loader.from_dataset(Split(LENGTHS), bookmarks="x")


@pytest.mark.parametrize(
    ("name", "other"), [("lanes", {"lanes": 3}), ("batch_size", {"batch_size": 3}), ("drop_last", {"drop_last": True})]
)
def test_a_state_of_other_epochs(name, other):
    """The slot in it counts batches of these sizes."""

    def build(**words):
        return Loader.from_dataset(Split(LENGTHS), **{"lanes": 2, "batch_size": 2, "collate_fn": list, **words})

    with build() as loader:
        next(iter(loader))
        state = loader.state_dict()
    with build(**other) as loader, pytest.raises(StateMismatch, match=name):
        loader.load_state_dict(state)


def test_a_state_of_a_stream_needs_the_same_lanes_and_no_more():
    def build(lanes=2, batch_size=2):
        return Loader.from_dataset(Stream(Split(LENGTHS), lanes=lanes, epoch_size=24), batch_size, collate_fn=list)

    with build() as loader:
        next(iter(loader))
        state = loader.state_dict()
    with build(lanes=3) as loader, pytest.raises(StateMismatch, match="lanes"):
        loader.load_state_dict(state)
    expected = stream(LENGTHS, 2)
    next(expected), next(expected)
    with build(batch_size=3) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)) == [next(expected) for _ in range(3)]


class Itself(Split):
    """Its own iterator."""

    def __iter__(self):
        self.items = self.own()
        return self

    def __next__(self):
        return next(self.items)


@both
def test_one_whose_iter_returns_itself(way):
    found = read(way(Itself([12, 12])))
    assert sorted(found) == sorted(share([12, 12], 2, 0, 0) + share([12, 12], 2, 1, 0))


class FailsOnce(Split):
    """Raises OSError at an item, once."""

    def __init__(self, lengths, at, flag):
        super().__init__(lengths)
        self.at, self.flag = at, flag

    def __iter__(self):
        for item in self.own():
            if item[0] == self.at and not self.flag.exists():
                self.flag.touch()
                raise OSError("once")
            yield item


@pytest.mark.parametrize(
    ("workers", "at", "way"),
    mostly_soak(
        product(WORKERS, [0, 2, 11], WAYS), [*product([0], [0, 2, 11], WAYS), (2, 0, endless), (2, 11, in_epochs)]
    ),
)
def test_an_oserror_is_retried(way, at, workers, tmp_path, monkeypatch):
    """Seen to fail: one at the very beginning was raised, because worker 0 is begun for comparison first."""
    from penstock._streams import retrying

    monkeypatch.setattr(retrying, "LONGEST_PAUSE_S", 0.01)
    found = read(way(FailsOnce([12, 12], at, tmp_path / "failed"), **fork(workers)))
    assert sorted(found) == sorted(share([12, 12], 2, 0, 0) + share([12, 12], 2, 1, 0))
    assert (tmp_path / "failed").exists()


class OverShards(IterableDataset):
    """Opens shards itself, and reads its part of them."""

    def __init__(self):
        self.shards = penstock.Shards(4, lambda shard: iter(range(10 * shard, 10 * shard + 5)), counts=[5] * 4)

    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, len(self.shards), info.num_workers):
            yield self.shards[index], info.id


@both
@pytest.mark.parametrize("workers", WORKERS)
def test_one_that_reads_shards_itself(way, workers):
    values = [10 * shard + k for shard in range(4) for k in range(5)]
    found = read(way(OverShards(), size=20, **fork(workers)) if way is endless else way(OverShards(), **fork(workers)))
    assert found == [(value, k % 2) for k, value in enumerate(values)]


@both
def test_a_lambda_and_a_local_function_are_no_hindrance(way):
    data = Split([12, 12])
    data.function = lambda item: item
    assert len(read(way(data))) == 24


class Grows(IterableDataset):
    def __init__(self):
        self.n = 8

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, self.n, info.num_workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_loop_changes_is_read_after_a_refresh(workers, caplog):
    """A number between epochs even without one. Seen to fail: ``refresh`` had no effect without workers; nothing was
    said."""
    data = Grows()
    with Loader.from_dataset(data, batch_size=None, lanes=2, num_workers=workers) as loader:
        assert sorted(loader) == [*range(8)]
        data.n = 12
        assert sorted(loader) == [*range(12)]
        assert "dataset.n was changed before epoch 1 began" in caplog.text
        items = iter(loader)
        first = next(items)
        data.n = 14
        loader.refresh()
        assert sorted([first, *items]) == [*range(14)]


def test_a_dataset_opens_its_own_shards():
    with pytest.raises(TypeError, match="open= is about shards that penstock opens, but Grows opens its own"):
        Stream(Grows(), open, lanes=2, epoch_size=4)


def test_a_data_pipe_is_split_by_dataloader_itself():
    """Seen to fail: each item came once from every lane, with a warning only."""
    pipe = torch.utils.data.datapipes.iter.IterableWrapper(range(8)).sharding_filter()
    with pytest.raises(GraphError, match="is a data pipe, which a DataLoader itself splits"):
        Loader.from_dataset(pipe, lanes=2)


def test_without_a_folder_for_notes_each_process_is_alone(monkeypatch):
    """Seen to fail: building the loader raised a bare FileNotFoundError."""

    def fails(**_):
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr("tempfile.mkdtemp", fails)
    with Loader.from_dataset(Grows(), batch_size=None, lanes=2, num_workers=2) as loader:
        assert sorted(loader) == [*range(8)]
    with Loader.from_dataset(Stream(Grows(), lanes=2, epoch_size=8), batch_size=None) as loader:
        assert sorted(loader) == [*range(8)]


class Claims(Split):
    """Claims 20 items."""

    def __len__(self):
        return 20


@pytest.mark.parametrize(("workers", "last"), [(0, 2), (0, 3), (0, 4), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_a_length_that_is_not_true_is_said(last, workers, said):
    """Once, whichever process finds it out, also after a resume. Seen to fail: nothing was said."""
    of = partial(Loader.from_dataset, Claims([5, 3, 9, last]), batch_size=2, lanes=4, collate_fn=tuple)
    with of(**fork(workers)) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        assert sum(map(len, batches)) == 15 + last
        assert sum(map(len, loader)) == 17 + last
    with of() as loader:
        loader.load_state_dict(state)
        list(loader)
    lines = [line for line in said() if f"a length of 20, but its 4 workers yielded {17 + last} items" in line]
    assert len(lines) == (0 if last == 3 else 2)


STRIKES = []


class Struck(IterableDataset):
    """A signal comes before item 5, as often as `STRIKES` says."""

    def __iter__(self):
        for item in range(12):
            if item == 5 and STRIKES:
                STRIKES.pop()
                signal.raise_signal(signal.SIGUSR1)
            yield item


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("times", [7, 20])
def test_interrupts_that_keep_a_lane_where_it_is_are_said(times, endless, said):
    """Once, and what is read is right afterwards. Seen to fail: a handler that raised every 10 ms kept a loop at one
    item, without a word.
    """

    def strike(number, frame):
        raise KeyboardInterrupt

    data = Stream(Struck(), lanes=1, epoch_size=12) if endless else Struck()
    before, found, struck = signal.signal(signal.SIGUSR1, strike), [], 0
    with Loader.from_dataset(data, batch_size=None, lanes=None if endless else 1) as loader:
        STRIKES.extend([None] * times)
        batches = iter(loader)
        while True:
            try:
                found.append(int(next(batches)))
            except KeyboardInterrupt:
                struck += 1
            except StopIteration:
                break
    signal.signal(signal.SIGUSR1, before)
    assert (found, struck) == ([*range(12)], times)
    assert sum("was interrupted 8 times in a row before the same item" in line for line in said()) == (times == 20)
