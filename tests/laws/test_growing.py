"""Data that grow: each life of a run finds more than the one before. What has begun ends with what there was then, and
all comes after that.

Sample i of part s is ``1000 * s + i``. Shards have 3, 4 or 5 records, and ranks are read in step, so that all of it is
compared in order.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import Subset

import penstock
from penstock import GraphError, Loader, Mix, Shards, StateError, StateMismatch, Stream, formats, nodes
from penstock._changing.run_changes import skipping
from penstock._loader import loader as roof
from penstock._random import growth
from penstock._streams import sharded, stream
from penstock.orders import SequentialOrder, ShuffledOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LANES = 3
EPOCH = 60


def records(shard: str) -> list[int]:
    return [1000 * int(shard) + i for i in range(3 + int(shard) % 3)]


def names(many: int) -> list[str]:
    return [f"{shard}" for shard in range(many)]


def counted(many: int, **words: Any) -> Shards:
    return Shards(names(many), records, counts=[len(records(name)) for name in names(many)], lanes=LANES, **words)


def streamed(many: int, **words: Any) -> Stream:
    return Stream(names(many), records, epoch_size=EPOCH, lanes=LANES, bookmarks=False, **words)


KINDS: dict[str, Callable[..., Any]] = {"samples": range, "shards": counted, "stream": streamed}


def load(kind: str, many: int, **words: Any) -> Loader[Any]:
    """A loader over data that grow."""
    given = {"batch_size": 2, "seed": 3, "tail": "drop", "drop_last": True, "infinite": True, **words}
    if kind == "samples":
        return Loader.from_dataset(range(many), grow=True, **given)
    return Loader.from_dataset(KINDS[kind](many, grow=True), **given)


class Epochs:
    """What is read of counted data, by an epoch's number and what there was when it began: as a run from the beginning
    reads it."""

    def __init__(self, kind: str, many: int, shuffle: bool) -> None:
        self.kind, self.shuffle = kind, shuffle
        self.epoch, self.at, self.many = 0, 0, many

    def grown_to(self, many: int) -> None:
        self.next = many
        if self.at == 0:
            self.many = many

    next: int | None = None

    def take(self, samples: int) -> list[int]:
        whole = self.whole()
        if len(whole) - self.at < samples:
            self.on()
            whole = self.whole()
        self.at += samples
        found = whole[self.at - samples : self.at]
        if len(whole) - self.at < samples:  # too few for another step of all ranks
            self.on()
        return found

    def on(self) -> None:
        self.epoch, self.at, self.many, self.next = self.epoch + 1, 0, self.next or self.many, None

    def whole(self) -> list[int]:
        with Loader.from_dataset(KINDS[self.kind](self.many), batch_size=None, shuffle=self.shuffle, seed=3) as loader:
            loader.set_epoch(self.epoch)
            return [int(value) for value in loader]


class Lane:
    """One lane of a stream, by its rule in plain words."""

    def __init__(self, number: int, shuffle: bool) -> None:
        self.number, self.shuffle = number, shuffle
        self.items: list[int] = []
        self.passes: list[tuple[int, int, list[int]]] = []  # each with its era and the shards of this lane
        self.era = self.pass_ = 0

    def fill(self, until: int, eras: list[tuple[int, int]]) -> None:
        """Read whole passes until item ``until`` is there. What is known of the eras must reach as far."""
        while len(self.items) <= until:
            n = eras[self.era][1]
            order = ShuffledOrder(n, 3) if self.shuffle else SequentialOrder(n)
            of_pass = order.indices(self.pass_, torch.arange(n).numpy()).tolist()
            if not self.shuffle:  # pass e begins with shard e
                of_pass = of_pass[self.pass_ % n :] + of_pass[: self.pass_ % n]
            mine = [shard for place, shard in enumerate(of_pass, self.pass_ * n) if place % LANES == self.number]
            self.passes.append((self.era, self.pass_, mine))
            for shard in mine:
                first = len(self.items)
                self.items += records(str(shard))
            latest = max(era for era, (since, _) in enumerate(eras) if since // LANES <= first)
            self.era, self.pass_ = (latest, 0) if latest > self.era else (self.era, self.pass_ + 1)


def of_stream(lives: list[tuple[int, int]], samples: int, shuffle: bool) -> tuple[list[int], list[Lane]]:
    """The first ``samples`` of a run whose lives began at a sample, with so many shards each."""
    eras: list[tuple[int, int]] = []
    for begun, many in lives:
        since = -(-begun // LANES) * LANES
        if not eras or many > eras[-1][1]:
            eras = [*(era for era in eras if era[0] < since), (since, many)]
    lanes = [Lane(number, shuffle) for number in range(LANES)]
    for lane in lanes:
        lane.fill(samples // LANES, eras)
    return [lanes[k % LANES].items[k // LANES] for k in range(samples)], lanes


class Ranks:
    """The ranks of one life, in step."""

    def __init__(self, build: Callable[..., Loader[Any]], world_size: int, state: Any) -> None:
        self.loaders = [build(rank=rank, world_size=world_size) for rank in range(world_size)]
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(state)
        self.iterators = [iter(loader) for loader in self.loaders]

    def step(self) -> list[int]:
        batches = [next(iterator).tolist() for iterator in self.iterators]
        return [value for row in zip(*batches, strict=True) for value in row]

    def close(self) -> Any:
        states = [json.loads(json.dumps(loader.state_dict())) for loader in self.loaders]
        for loader in self.loaders:
            loader.close()
        assert states == states[:1] * len(states)
        return states[0]


def lives_of(draw: random.Random, least: int, most: int) -> Iterator[tuple[int, dict[str, Any], int, int]]:
    """How many parts there are, the workers, the ranks and the steps of each of five lives."""
    many = draw.randrange(least, most)
    for _ in range(5):
        workers = draw.choice([0, 0, 2])
        words = {"num_workers": workers, "method": "thread", "prefetch_factor": draw.choice([1, 3])} if workers else {}
        yield many, words, draw.choice([1, 2, 3]), draw.randrange(1, 14)
        many += draw.choice([0, 1, 2, 7])


class TestLives:
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("kind", ["samples", "shards"])
    @pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.soak)])
    def test_counted(self, kind: str, shuffle: bool, seed: int) -> None:
        """Seen to fail: an epoch that grows within itself, and what is found only one epoch later."""
        draw, state, expected = random.Random(seed), None, None
        for many, words, world_size, steps in lives_of(draw, 20, 30):
            expected = expected or Epochs(kind, many, shuffle)
            expected.grown_to(many)
            ranks = Ranks(
                lambda many=many, words=words, **of: load(kind, many, shuffle=shuffle, **words, **of), world_size, state
            )
            for _ in range(steps):
                assert ranks.step() == expected.take(2 * world_size)
            state = ranks.close()

    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (3, 4))])
    def test_a_stream(self, shuffle: bool, seed: int) -> None:
        """Every lane reads its whole share of each pass that it begins, and then the shards that there are by then.

        Seen to fail: lanes that go on in the numbering of the passes, a lane that looks at the item behind the pass,
        and workers that keep the copy of the stream that they had.
        """
        draw, state, lives, seen = random.Random(seed), None, [], []
        for many, words, world_size, steps in lives_of(draw, 4, 7):
            lives.append((len(seen), many))
            ranks = Ranks(
                lambda many=many, words=words, **of: load("stream", many, shuffle=shuffle, **words, **of),
                world_size,
                state,
            )
            for _ in range(steps):
                seen += ranks.step()
            state = ranks.close()
        expected, lanes = of_stream(lives, len(seen), shuffle)
        assert seen == expected
        # the oracle's own law: once in each pass
        for era, pass_ in {(era, pass_) for lane in lanes for era, pass_, _ in lane.passes}:
            shares = [
                shards for lane in lanes for of_era, number, shards in lane.passes if (of_era, number) == (era, pass_)
            ]
            assert len([shard for share in shares for shard in share]) == len(
                {shard for share in shares for shard in share}
            )

    @pytest.mark.parametrize("kind", ["samples", "shards"])
    def test_an_epoch_that_has_not_begun_has_all(self, kind: str) -> None:
        """Seen to fail: with all of them in the epoch after it only."""
        for epoch in range(2):
            with load(kind, 6) as loader:
                loader.set_epoch(epoch)
                state = loader.state_dict()
            with load(kind, 9, infinite=False, drop_last=False) as loader:
                loader.load_state_dict(state)
                assert sum(len(batch) for batch in loader) == len(KINDS[kind](9))

    @pytest.mark.parametrize("kind", KINDS)
    def test_worker_processes(self, kind: str) -> None:
        state, expected = None, []
        for num_workers in (0, 2):
            got, saved = [], None
            for many in (8, 13, 20):
                with load(kind, many, num_workers=num_workers) as loader:
                    if saved is not None:
                        loader.load_state_dict(saved)
                    batches = iter(loader)
                    got += [next(batches).tolist() for _ in range(9)]
                    saved = loader.state_dict()
            expected, state = (expected or got), (state or saved)
            assert got == expected
            assert saved == state

    def test_a_loader_that_has_begun_takes_a_state_of_fewer_shards(self) -> None:
        """Its workers have copies of a stream that deals all shards. Seen to fail: without new workers."""
        with load("stream", 4) as loader:
            batches = iter(loader)
            next(batches)
            state = loader.state_dict()
        with load("stream", 9, num_workers=2) as fresh, load("stream", 9, num_workers=2) as used:
            next(iter(used))
            for loader in (fresh, used):
                loader.load_state_dict(state)
            assert [next(iter(fresh)).tolist() for _ in range(1)] == [next(iter(used)).tolist() for _ in range(1)]
            one, other = iter(fresh), iter(used)
            assert [next(one).tolist() for _ in range(20)] == [next(other).tolist() for _ in range(20)]

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_copy_and_a_pickle(self, kind: str) -> None:
        """Seen to fail: with a function inside a function, and with a dataset that has forgotten that it grows."""
        with load(kind, 6) as loader:
            next(iter(loader))
            state = loader.state_dict()
        found = []
        for copied in (None, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))):
            with load(kind, 9) as built, built if copied is None else copied(built) as loader:
                loader.load_state_dict(state)
                found.append(
                    ([batch.tolist() for _, batch in zip(range(30), loader, strict=False)], loader.state_dict())
                )
        assert found[1:] == found[:1] * 2

    @pytest.mark.parametrize("kind", ["samples", "shards"])
    def test_sizes_of_batches_that_change(self, kind: str) -> None:
        """They are counted in samples since the start of training, of epochs that became longer. Seen to fail: with all
        epochs as long as the present one."""
        sizes = penstock.Ramp([(0, 2), (2 * len(KINDS[kind](6)) + 4, 3)])
        words: dict[str, Any] = {"batch_size": sizes, "tail": None, "drop_last": False, "infinite": False}
        with load(kind, 6, **words) as loader:
            assert {len(batch) for batch in loader} == {2} or kind == "shards"
            state = loader.state_dict()
        with load(kind, 9, **words) as loader:
            loader.load_state_dict(state)
            seen = [len(batch) for _ in range(2) for batch in loader]
            assert sum(seen) == 2 * len(KINDS[kind](9))
        first = len(KINDS[kind](6)) + 4  # of the samples after the first epoch, so many come in twos
        assert [size for size in seen if size == 3]
        assert sum(seen[: seen.index(3)]) in (first, first + 1)

    def test_an_attribute_of_that_name(self) -> None:
        """A user's dataset may have parts of its own. Seen to fail: by calling them."""

        class Kept(list[int]):
            parts = ("a", "b")

        with Loader.from_dataset(Kept(range(3)), grow=True, batch_size=None) as loader:
            assert list(loader) == [0, 1, 2]

    def test_empty_shards_come_first(self) -> None:
        """A state from before there was grow=True has the number of its records, not of its shards. Seen to fail: with
        the most shards of that number."""

        def build(counts: list[int], **words: Any) -> Loader[Any]:
            data = Shards(
                names(len(counts)),
                lambda shard: [1000 * int(shard) + i for i in range(counts[int(shard)])],
                counts=counts,
                lanes=1,
                **words,
            )
            return Loader.from_dataset(data, batch_size=None)

        for before in ([3, 4], [0, 0], [3, 0, 4, 0], []):
            with build(before) as loader:
                state = loader.state_dict()
            with build([*before, 0, 0, 5], grow=True) as loader:
                loader.load_state_dict(state)
                assert len(list(loader)) == sum(before) + 5

    def test_shards_are_named_once(self) -> None:
        """A state takes no longer for many shards. Seen to fail: with their names in each."""
        looked: list[Any] = []
        for kind in ("shards", "stream"):
            words = {"counts": [3] * 50} if kind == "shards" else {"epoch_size": EPOCH, "bookmarks": False}
            data: Any = (Shards if kind == "shards" else Stream)(names(50), records, lanes=LANES, grow=True, **words)
            with Loader.from_dataset(data, batch_size=2) as loader, pytest.MonkeyPatch.context() as patch:
                state = loader.state_dict()
                patch.setattr(sharded, "names_of", looked.append)
                assert loader.state_dict() == state
        assert not looked

    def test_a_run_that_began_without_it(self) -> None:
        """Seen to fail: without `presumed`."""
        for kind in KINDS:
            with Loader.from_dataset(KINDS[kind](8), batch_size=2) as loader:
                batches = iter(loader)
                begun = [next(batches).tolist() for _ in range(2)]
                state = loader.state_dict()
                rest = [batch.tolist() for batch in batches]
            with load(kind, 12, batch_size=2, tail=None, drop_last=False, infinite=False, seed=0) as loader:
                loader.load_state_dict(state)
                found = [batch.tolist() for batch in loader]
                assert begun
                assert (found == rest) or kind == "stream"
                assert json.loads(loader.state_dict()["penstock"])["changes"]["grow"][0] == [0, 8]

    def test_a_pass_is_counted_from_0_for_the_steps(self) -> None:
        """And its random numbers are others than those of the first pass over fewer shards. Seen to fail: with the
        pass's number in its seed cut off as well."""

        def passes(items: Any) -> Any:
            for item in items:
                yield item, penstock.sample().epoch, int(penstock.sample().rng.integers(2**40))

        def build(many: int) -> Loader[Any]:
            data = Stream(names(many), records, epoch_size=EPOCH, lanes=2, bookmarks=False, steps=[passes], grow=True)
            return Loader.from_dataset(data, batch_size=1, collate_fn=list)

        with build(2) as loader:
            batches = iter(loader)
            seen = [next(batches)[0] for _ in range(4)]
            state = loader.state_dict()
        with build(3) as loader:
            loader.load_state_dict(state)
            seen += [batch[0] for batch in loader]
        of_first = [one for one in seen if one[0] == 0]
        assert [pass_ for _, pass_, _ in of_first] == [0, 1, 0, 1, 2, 3]
        assert len({drawn for _, _, drawn in of_first}) == len(of_first)

    def test_a_thousand_times(self) -> None:
        """The state of a run that was resumed 1,000 times, with one more each time."""
        for kind in ("samples", "stream"):
            with load(kind, 1010, shuffle=True) as loader:
                state = json.loads(loader.state_dict()["penstock"])
                state["changes"] = {"grow": [[3 * k, 10 + k] for k in range(1000)]}
                state["settings"] |= {"dataset_length": 10, "length": 10} if kind == "samples" else {"shards": 10}
                if kind == "stream":
                    state["settings"]["shard_names"] = json.loads(load(kind, 10).state_dict()["penstock"])["settings"][
                        "shard_names"
                    ]
                loader.load_state_dict({"penstock": json.dumps(state)})
                saved = loader.state_dict()
                assert len(json.dumps(saved)) < 2**16
                assert len(list(zip(range(50), loader, strict=False))) == 50


class TestFiles:
    def write(self, folder: Path, files: range) -> None:
        for file in files:
            (folder / f"{file:03}.jsonl").write_text(
                "".join(json.dumps({"x": one}) + "\n" for one in records(str(file)))
            )

    def test_balance_reads_all_shards(self, tmp_path: Path) -> None:
        """Whose samples go to any rank, and so to any worker. Seen to fail: with lanes of one worker each."""
        self.write(tmp_path, range(5))
        data = formats.jsonl(
            str(tmp_path / "*.jsonl"), counts=[len(records(name)) for name in names(5)], lanes=2, grow=True
        )
        assert isinstance(data, Shards)
        for balance, cuts in ((None, 2), ([1] * len(data), None)):
            with Loader.from_dataset(data, batch_size=2, balance=balance):
                assert data.forward_cuts == cuts

    @pytest.mark.parametrize("kind", ["stream", "shards", "parquet"])
    def test_a_pattern_finds_more(self, kind: str, tmp_path: Path) -> None:
        def build() -> Loader[Any]:
            if kind == "parquet":
                found: Any = formats.parquet(str(tmp_path / "*.parquet"), lanes=2, grow=True)
            elif kind == "shards":
                counts = [len(path.read_text().splitlines()) for path in sorted(tmp_path.glob("*.jsonl"))]
                found = formats.jsonl(str(tmp_path / "*.jsonl"), counts=counts, lanes=2, grow=True)
            else:
                found = formats.jsonl(str(tmp_path / "*.jsonl"), epoch_size=10, lanes=2, bookmarks=False, grow=True)
            return Loader.from_dataset(found, batch_size=None, transform=lambda row: int(row["x"]))

        def arrive(files: range) -> None:
            self.write(tmp_path, files)
            if kind == "parquet":
                parquet = pytest.importorskip("pyarrow.parquet")
                arrow = pytest.importorskip("pyarrow")
                for file in files:
                    parquet.write_table(arrow.table({"x": records(str(file))}), tmp_path / f"{file:03}.parquet")

        arrive(range(3))
        with build() as loader:
            first = iter(loader)
            seen = [next(first) for _ in range(5)]
            state = loader.state_dict()
        arrive(range(3, 5))
        with build() as loader:
            loader.load_state_dict(state)
            if kind == "stream":
                seen += [value for _ in range(4) for value in loader]
                assert seen == of_two_lanes(len(seen))
            else:
                seen += list(loader)
                assert sorted(seen) == sorted(value for name in names(3) for value in records(name))
                assert sorted(loader) == sorted(value for name in names(5) for value in records(name))
        (tmp_path / f"000a.{'parquet' if kind == 'parquet' else 'jsonl'}").write_bytes(
            (tmp_path / f"001.{'parquet' if kind == 'parquet' else 'jsonl'}").read_bytes()
        )
        with build() as loader, pytest.raises(StateMismatch, match=r"shard_names was .* and is "):
            loader.load_state_dict(state)


def of_two_lanes(samples: int) -> list[int]:
    """Two lanes over 3 shards, and from item 6 on, at the end of a lane's pass, over 5."""
    lanes = []
    for lane in range(2):
        items: list[int] = []
        n, pass_, begun = 3, 0, False
        while len(items) <= samples:
            order = [(place + pass_) % n for place in range(n)]
            mine = [shard for place, shard in enumerate(order, pass_ * n) if place % 2 == lane]
            for shard in mine:
                first = len(items)
                items += records(str(shard))
            if not begun and first >= 3:
                n, pass_, begun = 5, 0, True
            else:
                pass_ += 1
        lanes.append(items)
    return [lanes[k % 2][k // 2] for k in range(samples)]


class TestLoadsOfAUsedLoader:
    """Threads read a stream while its loader loads a state."""

    def stream(self, many: int, read: Callable[[str], Any] = records, **words: Any) -> Loader[Any]:
        return Loader.from_dataset(
            Stream(names(many), read, epoch_size=EPOCH, lanes=LANES, bookmarks=False, grow=True),
            batch_size=2,
            seed=3,
            **words,
        )

    def test_one_that_is_refused_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Seen to fail: with threads that read by the shards of the refused state until it was refused."""
        gate, many = threading.Semaphore(0), 40

        def read(shard: str) -> Iterator[int]:
            for record in records(shard):
                gate.acquire(timeout=60)
                yield record

        with self.stream(many) as loader:
            expected = [batch.tolist() for batch in loader]
        with load("stream", 4, seed=99) as loader:
            other = loader.state_dict()
        with self.stream(many, read, num_workers=2, method="thread", prefetch_factor=8) as loader:
            gate.release(100)
            batches = iter(loader)
            found = [next(batches).tolist() for _ in range(3)]

            def differ(*_: Any) -> list[str]:  # while the state is compared, the threads read on
                gate.release(1000)
                stream: Any = loader.dataset
                assert [stream[item] for item in range(90, 96)] == [
                    value for batch in expected_on[45:48] for value in batch
                ]
                return ["all of it"]

            with self.stream(many, infinite=True) as endless:
                expected_on = [batch.tolist() for _, batch in zip(range(48), endless, strict=False)]
            monkeypatch.setattr(roof, "changes", differ)
            with pytest.raises(StateMismatch):
                loader.load_state_dict(other)
            monkeypatch.undo()
            found += [batch.tolist() for batch in batches]
        assert found == expected

    def test_a_thread_that_reads_meanwhile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It may not leave lanes behind that deal as before. Seen to fail: with the deal set after the lanes are
        dropped."""
        with load("stream", 4) as loader:
            next(iter(loader))
            state = loader.state_dict()
        with load("stream", 9) as loader:
            loader.load_state_dict(state)
            expected = [batch.tolist() for _, batch in zip(range(30), loader, strict=False)]
        with load("stream", 9) as loader:
            next(iter(loader))
            data: Any = loader.dataset
            real = growth.GrowingDeal

            def deal(*args: Any, **words: Any) -> Any:
                data[7]  # as a thread would that finishes a batch of before
                return real(*args, **words)

            monkeypatch.setattr(stream, "GrowingDeal", deal)
            loader.load_state_dict(state)
            assert [batch.tolist() for _, batch in zip(range(30), loader, strict=False)] == expected

    def test_it_does_not_wait_for_a_reader(self) -> None:
        """Of a loader without grow=True, whose thread may be stuck in a sample. Seen to fail: by waiting for the
        thread."""
        stuck, on = threading.Event(), threading.Event()

        def slow(index: int) -> int:
            if index == 6:
                stuck.set()
                on.wait(60)
            return index

        source = nodes.Cycler(nodes.Sampler(SequentialOrder(9)))
        with Loader(nodes.Prefetcher(nodes.ParallelMapper(source, slow, num_workers=0), prefetch_factor=4)) as loader:
            state = loader.state_dict()
            items = iter(loader)
            assert [next(items) for _ in range(5)] == [*range(5)]  # the thread begins after a few
            assert stuck.wait(60)
            loader.load_state_dict(state)
            assert not on.is_set()
            on.set()
            assert list(loader) == [*range(9)]


class TestRefused:
    def test_files_whose_pieces_have_moved(self, tmp_path: Path) -> None:
        """An old file with one more row group moves those of the files behind it. Seen to fail: without the pieces in
        the state, which loaded, and other samples came."""
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")

        def write(file: str, groups: int) -> None:
            with parquet.ParquetWriter(tmp_path / file, arrow.schema([("x", arrow.int64())])) as writer:
                for group in range(groups):
                    writer.write_table(arrow.table({"x": [10 * group, 10 * group + 1]}))

        def build(epoch_size: int | None, **words: Any) -> Loader[Any]:
            data = formats.parquet(str(tmp_path / "*.parquet"), lanes=1, epoch_size=epoch_size, **words)
            return Loader.from_dataset(data, batch_size=2, transform=lambda row: row["x"])

        for epoch_size in (None, 10):
            write("a.parquet", 2)
            write("b.parquet", 2)
            with build(epoch_size) as loader:
                plain = loader.state_dict()
            with build(epoch_size, grow=True) as loader:
                loader.load_state_dict(plain)
                state = loader.state_dict()
            write("c.parquet", 1)
            with build(epoch_size, grow=True) as loader:
                loader.load_state_dict(state)
            (tmp_path / "c.parquet").unlink()
            write("a.parquet", 3)
            with build(epoch_size, grow=True) as loader:
                before = loader.state_dict()
                with pytest.raises(StateMismatch, match=r"pieces was '\w+' and is '\w+' .*row groups"):
                    loader.load_state_dict(state)
                assert loader.state_dict() == before

    def test_ranges_that_the_command_would_skip(self) -> None:
        """Seen to fail: with a state that counts its samples by one length, and then loads nowhere."""
        for kind in KINDS:
            with load(kind, 9) as loader:
                state = json.loads(loader.state_dict()["penstock"])
            if kind == "stream":
                assert skipping(state, [(6, 9)])["changes"]["skip"] == [[6, 9]]
            else:
                with pytest.raises(
                    StateError, match="does not count the samples since the start of training: .* grow=True"
                ):
                    skipping(state, [(6, 9)])

    def test_without_strict(self) -> None:
        """As other loaders, it then begins the next epoch. Seen to fail: with an error."""
        for kind in KINDS:
            with load(kind, 9) as loader:
                next(iter(loader))
                state = loader.state_dict()
            with load(kind, 8) as less, Loader.from_dataset(KINDS[kind](9), batch_size=2) as plain:
                for loader in (less, plain):
                    with pytest.warns(UserWarning, match="strict=False: this state was saved under other settings"):
                        loader.load_state_dict(state, strict=False)
                    assert loader.epoch == 1
                    assert len(next(iter(loader))) == 2

    @pytest.mark.parametrize("kind", KINDS)
    def test_data_that_shrank(self, kind: str) -> None:
        with load(kind, 9) as loader:
            state = loader.state_dict()
        what = "samples" if kind == "samples" else "shards"
        with load(kind, 8) as loader:
            before = loader.state_dict()
            with pytest.raises(StateMismatch, match=f"there were 9 {what}, and now there are 8"):
                loader.load_state_dict(state)
            assert loader.state_dict() == before

    @pytest.mark.parametrize("kind", KINDS)
    def test_without_grow(self, kind: str) -> None:
        with load(kind, 9) as loader:
            state = loader.state_dict()
        with (
            Loader.from_dataset(KINDS[kind](9), batch_size=2) as loader,
            pytest.raises(StateMismatch, match="without grow=True"),
        ):
            loader.load_state_dict(state)
        with Loader.from_dataset(KINDS[kind](9), batch_size=2) as loader:
            plain = loader.state_dict()
        with (
            Loader.from_dataset(KINDS[kind](10), batch_size=2) as loader,
            pytest.raises(StateMismatch, match="grow=True"),
        ):
            loader.load_state_dict(plain)

    def test_other_shards_than_there_were(self) -> None:
        """Names, and the numbers of their records. Seen to fail: without the names of the first shards."""
        with load("shards", 5) as loader:
            state = loader.state_dict()
        renamed = Shards(
            ["00", *names(7)[1:]], records, counts=[len(records(name)) for name in names(7)], lanes=LANES, grow=True
        )
        longer = Shards(
            names(7), records, counts=[4, *(len(records(name)) for name in names(7)[1:])], lanes=LANES, grow=True
        )
        for data, what in ((renamed, "shard_names"), (longer, "counts")):
            with (
                Loader.from_dataset(data, batch_size=2, tail="drop", drop_last=True, infinite=True, seed=3) as loader,
                pytest.raises(StateMismatch, match=f"{what} was "),
            ):
                loader.load_state_dict(state)

    @pytest.mark.parametrize(
        "grow", [[], [[1, 4]], [[0, 4], [0, 5]], [[0, 5], [9, 4]], [[0, -1]], [[0]], 7, [["a", 2]]]
    )
    @pytest.mark.parametrize("kind", ["samples", "stream"])
    def test_damaged(self, kind: str, grow: Any) -> None:
        with load(kind, 9) as loader:
            state = json.loads(loader.state_dict()["penstock"])
            state["changes"] = {"grow": grow}
            before = loader.state_dict()
            with pytest.raises(StateError, match="damaged"):
                loader.load_state_dict({"penstock": json.dumps(state)})
            assert loader.state_dict() == before

    @pytest.mark.parametrize("changes", [True, False])
    @pytest.mark.parametrize("length", [-1, True, 2**60, 2**63, 1.5, None])
    @pytest.mark.parametrize("kind", ["samples", "stream", "shards"])
    def test_a_damaged_length(self, kind: str, length: Any, changes: bool) -> None:
        """Seen to fail: a ValueError about the number of items that a dataset of the user's has."""
        with load(kind, 9) as loader:
            state = json.loads(loader.state_dict()["penstock"])
            state["settings"]["length"] = length
            if not changes:
                state.pop("changes", None)
            before = loader.state_dict()
            with pytest.raises(StateError):
                loader.load_state_dict({"penstock": json.dumps(state)})
            assert loader.state_dict() == before

    @pytest.mark.parametrize(
        ("words", "what"),
        [
            ({"sampler": [1, 2]}, "a sampler"),
            ({"batch_sampler": [[1, 2]], "batch_size": 1}, "a sampler"),
            ({"order": ShuffledOrder(9)}, "order"),
            ({"skip": [(1, 2)]}, "skip"),
            ({"groups": penstock.Packs([3] * 9, 8)}, "groups"),
        ],
    )
    def test_what_was_made_for_the_present_length(self, words: dict[str, Any], what: str) -> None:
        with pytest.raises(ValueError, match=rf"grow=True lets epochs grow with range, but {what} was made"):
            Loader.from_dataset(range(9), grow=True, **words)

    def test_what_cannot_be_compared(self) -> None:
        mix = Mix({"a": range(3)}, {"a": 1})  # type: ignore[arg-type]
        for data in (Subset(torch.arange(9), [1, 2]), counted(4), mix, streamed(4)):  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"grow=True compares the length of a map-style dataset, but \w+ has"):
                Loader.from_dataset(data, grow=True)

    def test_the_lanes_must_be_said(self) -> None:
        with pytest.raises(ValueError, match="grow=True needs lanes="):
            Shards(names(9), records, counts=[3] * 9, grow=True)
        with pytest.raises(ValueError, match="grow=True needs lanes="):
            Stream(names(9), records, epoch_size=9, grow=True)

    def test_a_source_of_a_mix(self) -> None:
        with pytest.raises(ValueError, match="the source 'web' has grow=True"):
            Mix({"web": counted(4, grow=True), "code": range(9)}, {"web": 1, "code": 1})

    def test_one_loader_for_each_stream(self) -> None:
        data = streamed(5, grow=True)
        with (
            Loader.from_dataset(data),
            pytest.raises(ValueError, match=re.escape("this Stream with grow=True is already used by a loader")),
        ):
            Loader.from_dataset(data)

    def test_weights(self) -> None:
        with (
            load("shards", 5) as loader,
            pytest.raises((ValueError, GraphError), match=r"a penstock\.Mix, but this loader reads 'shards"),
        ):
            loader.reweight({"a": 1})
