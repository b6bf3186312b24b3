"""Shards: records by position or read forward, what is open, what is refused."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from format_laws import open_files
from torch.utils.data import IterableDataset, Subset

import penstock
from penstock import Loader, Mix, Shards, StateMismatch, Stream
from penstock._fetch.fetch import Fetch
from penstock._fetch.fetch_task import FetchTask
from penstock._fetch.indices import Indices
from penstock._files.files import Stamp
from penstock._streams.tables import Pieces
from penstock._workers.lane_info import LaneInfo, seen_as
from penstock._workers.pool import IDLE

COUNTS = [7, 0, 40, 3, 1, 25, 12]


class Lines:
    """Opens a text file with a number in each line; ``kind`` is how it can be read."""

    def __init__(self, kind="forward"):
        self.kind = kind
        self.opened = 0
        self.read = 0

    def __call__(self, path):
        self.opened += 1
        return Indexed(path, self) if self.kind == "indexed" else self.forward(path)

    def forward(self, path):
        with open(path) as lines:
            for line in lines:
                self.read += 1
                yield int(line)


class Indexed:
    def __init__(self, path, lines):
        self.file = open(path)  # noqa: SIM115
        self.numbers = [int(line) for line in self.file]
        self.lines = lines

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, number):
        self.lines.read += 1
        return self.numbers[number]

    def close(self):
        self.file.close()


class Seeking(Lines):
    """Begins where it is asked to."""

    def __call__(self, path, *, start=0):
        self.opened += 1
        return self.skipped(path, start)

    def skipped(self, path, start):
        for k, number in enumerate(self.forward(path)):
            if k >= start:
                yield number


OPEN = {"forward": Lines, "indexed": lambda: Lines("indexed"), "seeking": Seeking}
kinds = pytest.mark.parametrize("kind", OPEN)


@pytest.fixture
def files(tmp_path):
    """Record i of all files together is i."""
    first = np.cumsum([0, *COUNTS])
    for k, n in enumerate(COUNTS):
        (tmp_path / f"{k}.txt").write_text("".join(f"{first[k] + i}\n" for i in range(n)))
    return [str(tmp_path / f"{k}.txt") for k in range(len(COUNTS))]


def shards(files, kind="forward", **words):
    return Shards(files, OPEN[kind](), counts=words.pop("counts", COUNTS), **words)


def read(dataset, epochs=1, **words):
    with Loader.from_dataset(dataset, **{"batch_size": 8, "seed": 1, **words}) as loader:
        return [[value for batch in loader for value in batch.tolist()] for _ in range(epochs)]


class TestWhatComes:
    @kinds
    def test_any_record_can_be_asked_for_at_any_time(self, files, kind):
        dataset = shards(files, kind)
        rng = np.random.default_rng(0)
        for _ in range(30):
            wanted = rng.integers(-88, 88, 12)
            assert dataset.__getitems__(wanted.tolist()) == (wanted % 88).tolist()
        assert [dataset[k] for k in (-1, 5, 5, 0, 87, -88)] == [87, 5, 5, 0, 87, 0]
        assert dataset.__getitems__([]) == []
        dataset.close()

    def test_a_shard_may_be_any_iterable_and_may_gather(self):
        class Sized(IterableDataset):
            def __len__(self):
                return 3

            def __iter__(self):
                yield from range(3)

        class Gathers(list):
            def __getitems__(self, numbers):
                return [-self[number] for number in numbers]

        assert read(Shards(1, lambda _: Sized(), counts=[3]), 2) == [[0, 1, 2]] * 2
        assert read(Shards(2, lambda k: Gathers([k] * 3), counts=[3, 3])) == [[0, 0, 0, -1, -1, -1]]

    def test_data_that_changes_with_settings_is_other_data(self, files):
        said = [
            shards(files, settings=settings).order(shuffle=True, seed=1).settings()
            for settings in (None, {"a": 1}, {"a": 2})
        ]
        assert len({str(one) for one in said}) == 3
        state = Loader.from_dataset(shards(files, settings={"columns": "x"}), shuffle=True).state_dict()
        with pytest.raises(penstock.StateMismatch, match=r"data\.columns was 'x' and is 'y'"):
            Loader.from_dataset(shards(files, settings={"columns": "y"}), shuffle=True).load_state_dict(state)


class TestNames:
    """A state loads over the same shards in the same order only. Seen to fail: of counted shards, nothing but the
    counts was compared."""

    PATHS = tuple(f"/data/{name}" for name in ("a.txt", "b.txt", "c.txt"))

    def dataset(self, paths):
        return Shards([*paths], len, lanes=1, counts=[7] * len(paths))

    def stream(self, paths):
        return Stream([*paths], len, lanes=1, epoch_size=9, bookmarks=False)

    @pytest.mark.parametrize(
        ("now", "same"),
        [
            (PATHS, True),
            (PATHS[::-1], False),
            (["/data/a.txt", "/data/b.txt", "/data/d.txt"], False),
            (["/else/where/a.txt", "b.txt.gz", "https://bucket/c.txt?signature=1"], True),  # moved, and one compressed
            (["/data/x/a.txt", "/data/y/a.txt", "/data/z/a.txt"], False),
        ],
    )
    @pytest.mark.parametrize(
        "build",
        [
            dataset,
            stream,
            lambda self, paths: Mix(
                {"a": penstock.Cached(Subset(self.dataset(paths), range(5))), "b": self.dataset(paths)},
                {"a": 1, "b": 1},
            ),
            lambda self, paths: Mix({"a": self.stream(paths)}, {"a": 1}, epoch_size=9),
        ],
        ids=["plain", "stream", "inside", "mixed stream"],
    )
    def test_say_whether_a_state_fits(self, build, now, same):
        """Seen to fail: a stream was refused once its files were compressed or signed anew."""
        state = Loader.from_dataset(build(self, self.PATHS)).state_dict()
        loader = Loader.from_dataset(build(self, now))
        if same:
            loader.load_state_dict(state)
        else:
            with pytest.raises(
                StateMismatch,
                match=(
                    r"under other settings: shard_names was '\w+' and is '\w+' \(checksums of the names of the shards, "
                    r"in their order\)\. Load"
                ),
            ):
                loader.load_state_dict(state)

    def test_are_told_apart_by_their_folders_where_they_are_the_same(self):
        """As the parts of a table are: ``date=1/0.parquet``, ``date=2/0.parquet``. Seen to fail: of a stream, only the
        last part of each path was compared."""
        for kind in (self.dataset, self.stream):
            first, other, moved = (
                kind([f"{root}/{day}/0.parquet" for day in days])
                for root, days in [("a", "12"), ("a", "21"), ("/b/c", "12")]
            )
            assert first.shard_names == moved.shard_names != other.shard_names

    @pytest.mark.parametrize(
        "pattern", ["d/a?{}.txt", "s3://b/a?{}.txt", "zip://{}.txt::file:///d.zip", "zip://a.txt::https://h/{}.zip?s=1"]
    )
    def test_are_told_apart_by_what_is_not_a_signature(self, pattern):
        """Seen to fail: all behind a ``?`` was cut off, and of an archive only its own name was compared."""
        one, two, three = (pattern.format(number) for number in "123")
        assert len({self.dataset(paths).shard_names for paths in ([one, two], [two, one], [one, three])}) == 3

    @pytest.mark.parametrize("mixed", [False, True])
    @pytest.mark.parametrize("kind", [dataset, stream])
    def test_a_state_without_them_is_refused(self, kind, mixed):
        data = kind(self, self.PATHS)
        loader = Loader.from_dataset(Mix({"a": data}, {"a": 1}, epoch_size=9) if mixed else data)
        state = json.loads(loader.state_dict()["penstock"])
        del state["settings"]["shard_names"]
        with pytest.raises(penstock.StateMismatch, match="shard_names was missing and is"):
            loader.load_state_dict({"penstock": json.dumps(state)})

    def test_of_files_that_a_format_lists(self, tmp_path):
        """Files of tokens, and pieces of files. A pattern is sorted, so it is the same wherever the files were
        listed."""
        files = [str(tmp_path / f"{number}.bin") for number in range(3)]
        for file in files:
            np.arange(8, dtype=np.uint16).tofile(file)
        listed, other, pattern = (
            penstock.formats.tokens(paths, 4) for paths in (files, files[::-1], str(tmp_path / "*.bin"))
        )
        assert listed.shard_names == pattern.shard_names != other.shard_names
        for paths in (files, files[::-1]):
            pieces = Pieces(paths, [Stamp(1, 1)] * 3, [1, 1, 1])
            assert Shards(pieces, len, counts=[1, 1, 1]).shard_names == Shards(paths, len, counts=[1, 1, 1]).shard_names


class TestReadingForward:
    """What is read how often, and what is kept."""

    @pytest.mark.parametrize("words", [{}, {"lanes": 2}, {"lanes": 7}, {"lanes": 2, "window": 30}], ids=str)
    def test_an_epoch_reads_each_record_once_but_for_the_borders_of_lanes(self, files, words):
        """A lane that begins inside a shard skips what lies before; nothing else is read twice."""
        opener = Lines()
        lanes = words.get("lanes", 1)
        read(Shards(files, opener, counts=COUNTS, **words), shuffle=True)
        assert opener.opened <= 6 + lanes
        assert opener.read <= 88 + 40 * (lanes - 1)
        assert words or opener.read == 88

    def test_several_lanes_in_one_shard_have_a_reader_each(self):
        """Seen red with one reader a shard, which starts again for each batch."""
        count = Counting(4000)
        dataset = Shards(1, count, counts=[4000], lanes=4)
        assert sorted(read(dataset, shuffle=True, batch_size=100)[0]) == list(range(4000))
        assert count.read <= 1000 + 2000 + 3000 + 4000

    def test_what_was_passed_over_is_kept_until_asked_for(self):
        count = Counting(200)
        dataset = Shards(1, count, counts=[200], window=20)
        assert dataset.__getitems__(list(range(30, 40))) == list(range(30, 40))
        assert dataset.__getitems__(list(range(30))) == list(range(30))
        assert count.read == 40

    def test_a_seek_skips(self, files):
        opener = Seeking()
        dataset = Shards(files, opener, counts=COUNTS)
        assert dataset.__getitems__([30, 31, 46]) == [30, 31, 46]
        assert opener.opened == 1
        dataset.close()

    def test_a_seek_that_is_ignored_is_seen(self):
        """Seen red where only an iterable that ends early is checked."""
        dataset = Shards(1, lambda k, start: iter(range(5)), counts=[5])
        with pytest.raises(ValueError, match="shard 0 should have 5 records, but it has more"):
            dataset.__getitems__([2, 3, 4])


class Counting:
    """One shard of n records, which counts what is read."""

    def __init__(self, n):
        self.n = n
        self.read = 0

    def __call__(self, shard):
        for k in range(self.n):
            self.read += 1
            yield k


class TestCounts:
    @pytest.mark.parametrize(("n", "what"), [(4, "ended after 4"), (6, "has more")])
    def test_a_shard_is_measured_or_counted_while_it_is_read_forward(self, n, what):
        forward = Shards(["a", "b"], lambda path: iter(range(5 if path == "a" else n)), counts=[5, 5])
        with pytest.raises(ValueError, match=f"shard b should have 5 records, but it {what}.*count it again"):
            read(forward)
        with pytest.raises(ValueError, match=f"shard 0 should have 5 records, but it has {n}"):
            Shards(1, lambda _: [0] * n, counts=[5])[0]


class TestErrors:
    @kinds
    def test_a_missing_shard_is_named(self, files, kind):
        os.remove(files[2])
        dataset = shards(files, kind)
        with pytest.raises(FileNotFoundError) as caught:
            read(dataset)
        dataset.close()  # the error holds it, so that otherwise the collector may come to its files first
        assert files[2] in str(caught.value) + "".join(caught.value.__notes__)

    def test_an_error_in_a_record_names_it(self, files):
        with open(files[2], "a") as file:
            file.write("no number\n")
        with pytest.raises(ValueError, match="no number") as caught:
            read(shards(files, counts=[7, 0, 41, 3, 1, 25, 12]))
        assert f"in record 40 of shard {files[2]}" in caught.value.__notes__

    def test_what_lies_behind_damage_is_not_looked_for_again_and_again(self):
        """Seen red without a dead end: each record behind it reads the shard up to there, 90,000 records in all."""

        class Damaged(Counting):
            def __call__(self, shard):
                for k in super().__call__(shard):
                    if k == 500:
                        raise ValueError("damaged")
                    yield k

        count = Damaged(1000)
        with (
            Loader.from_dataset(Shards(1, count, counts=[1000]), batch_size=20, on_error="skip") as loader,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            with pytest.raises(penstock.PenstockError) as caught:
                list(loader)
        assert count.read < 3000
        assert "record 519 of shard 0 comes after record 500, at which reading failed twice" in str(caught.value)


class TestOpenFiles:
    @kinds
    def test_are_bounded_while_reading_and_gone_after_close(self, tmp_path, kind):
        """Seen red without `_tidy`."""
        paths = [tmp_path / f"{k}" for k in range(150)]
        for path in paths:
            path.write_text("1\n" * 4)
        dataset = Shards([str(path) for path in paths], OPEN[kind](), counts=[4] * 150)
        bound = 64 if kind == "indexed" else dataset.details()["lanes"] + 4
        seen = 0
        with Loader.from_dataset(dataset, batch_size=7, shuffle=True) as loader:
            for _ in loader:
                seen = max(seen, len(open_files(tmp_path)))
        assert 8 < seen <= bound
        dataset[1], dataset[9]
        dataset.close()
        assert open_files(tmp_path) == []
        assert dataset[0] == 1
        dataset.close()

    @kinds
    def test_are_not_used_after_a_fork(self, tmp_path, kind):
        """Two processes that read on in one open file take records from each other. Seen red without the check of the
        pid."""
        path = tmp_path / "x.txt"
        path.write_text("".join(f"{k}\n" for k in range(20_000)))  # more than is buffered
        dataset = shards([str(path)], kind, counts=[20_000])
        assert dataset[10] == 10
        if not (child := os.fork()):
            os._exit([dataset[k] for k in (11, 19_998)] == [11, 19_998])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert [dataset[k] for k in (11, 19_997)] == [11, 19_997]
        dataset.close()

    def test_a_fork_in_mid_read_leaves_no_lock_behind(self):
        """Seen red without the check of the pid: the child waits for a thread that it does not have."""
        inside, go_on = threading.Event(), threading.Event()

        def opened(_):
            yield 0
            if os.getpid() == parent:
                inside.set()
                go_on.wait()
            yield 1

        parent, dataset = os.getpid(), Shards(1, opened, counts=[2])
        thread = threading.Thread(target=lambda: dataset[1])
        thread.start()
        inside.wait()
        if not (child := os.fork()):
            signal.alarm(20)
            os._exit(dataset[1])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        go_on.set()
        thread.join()


def test_threads_wait_for_each_other_only_at_one_shard():
    """One thread stands inside shard 0, and another reads shard 1 meanwhile. Seen red with one lock for all."""
    inside, go_on = threading.Event(), threading.Event()

    def opened(shard):
        if shard == 0:
            inside.set()
            go_on.wait()
        return [shard]

    dataset = Shards(2, opened, counts=[1, 1])
    first, second = (threading.Thread(target=dataset.__getitem__, args=(k,)) for k in (0, 1))
    first.start()
    inside.wait()
    second.start()
    second.join(100)
    waited = second.is_alive()
    go_on.set()
    first.join()
    second.join()
    assert not waited


class TestSeveralThreads:
    def test_read_first_what_is_free(self):
        """Opening shard 0 lasts until shard 1 is opened, which the same batches need. Seen red when each thread took
        its shards in turn: both waited for shard 0."""
        opened = [threading.Event(), threading.Event()]

        def open_shard(shard):
            opened[shard].set()
            assert opened[1].wait(20), "no thread opens shard 1"
            return range(1000 * shard, 1000 * shard + 4)

        dataset = Shards(2, open_shard, counts=[4, 4])
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(dataset.__getitems__, [5, 1, 4, 0])
            assert opened[0].wait(20)
            second = pool.submit(dataset.__getitems__, [7, 2, 6, 3])
            assert first.result() == [1001, 1, 1000, 0]
            assert second.result() == [1003, 2, 1002, 3]
        dataset.close()

    def test_with_a_transform_read_first_what_is_free(self):
        """The same by two workers of a loader. Seen to fail: samples were loaded in the order of the batch."""
        opened = [threading.Event(), threading.Event()]

        def open_shard(shard):
            opened[shard].set()
            assert opened[1].wait(20), "no thread opens shard 1"
            return range(1000 * shard, 1000 * shard + 4)

        work = FetchTask(Fetch(Shards(2, open_shard, counts=[4, 4], transform=str), list), 0, False)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(work, Indices(0, np.arange(4), np.array([1, 5, 0, 4])), [IDLE])
            assert opened[0].wait(20)
            second = pool.submit(work, Indices(0, np.arange(4, 8), np.array([2, 6, 3, 7])), [IDLE])
            assert first.result() == ["1", "1001", "0", "1000"]
            assert second.result() == ["2", "1002", "3", "1003"]
        work.close()

    def test_that_overtake_each_other_read_no_record_again(self):
        """One thread stands in shard 0 while eight others read shard 1 past its records there. Seen red when the number
        of threads had no part in how many records are kept: shard 1 was opened twice."""
        threads, n, opened = 9, 20, []
        inside, go_on = threading.Event(), threading.Event()

        def open_shard(shard):
            opened.append(shard)
            for number in range(threads * n):
                if not shard and not number:
                    inside.set()
                    assert go_on.wait(20)
                if shard and number == threads * n - 1:
                    go_on.set()
                yield 1000 * shard + number

        dataset = Shards(2, open_shard, counts=[threads * n] * 2)
        batches = [[shard * threads * n + number for number in range(k * n, k * n + n) for shard in (0, 1)]
                   for k in range(threads)]  # fmt: skip
        with ThreadPoolExecutor(threads) as pool:
            first = pool.submit(dataset.__getitems__, batches[0])
            assert inside.wait(20)
            results = [first, *(pool.submit(dataset.__getitems__, batch) for batch in batches[1:])]
            for k, result in enumerate(results):
                expected = [1000 * shard + number for number in range(k * n, k * n + n) for shard in (0, 1)]
                assert result.result() == expected
        assert sorted(opened) == [0, 1]


@pytest.mark.parametrize(
    ("kind", "worker", "workers", "said"),
    [("forward", 0, 2, 1), ("forward", 1, 2, 0), ("forward", 0, 1, 0), ("indexed", 0, 2, 0), ("seeking", 0, 2, 0)],
)
def test_worker_processes_that_all_read_every_shard_say_so(files, kind, worker, workers, said, caplog, monkeypatch):
    """Once, and only one of them. Seen to fail: not said at all; said by each; said where records are read by
    position."""
    monkeypatch.setattr("penstock._errors.first_time.said", set())
    dataset = shards(files, kind)
    with seen_as(LaneInfo(worker, workers, 0, None)):
        assert [dataset[0], dataset[87]] == [0, 87]
    dataset.close()
    assert len(caplog.messages) == said
    assert all(
        "each of the 2 worker processes reads all shards" in message and "penstock index" in message
        for message in caplog.messages
    )


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (lambda: Shards("a.txt", list, counts=[1]), TypeError, r"shards='a.txt' is a single path, .*: \['a.txt'\]"),
        (
            lambda: Stream(["a.txt"], list, epoch_size=4, steps=penstock.Filter(bool)),
            TypeError,
            r"steps=Filter\(.*\) is a single step, but must be a list of steps",
        ),  # type: ignore[arg-type]
        (lambda: Shards(["a"], "r", counts=[1]), TypeError, "open must be a function"),
        (
            lambda: Shards(["a"], list, counts=None),
            ValueError,
            "counts=None.*counts=; or .*python -m penstock index.*epoch_size=",
        ),
        (lambda: Shards(["a", "b"], list, counts=[1]), ValueError, "got 1 counts for 2 shards"),
        (lambda: Shards(-1, list, counts=[]), ValueError, "shards=-1 must be a whole number"),
        (lambda: Shards(1, list, counts=[-3]), ValueError, r"counts\[0\] is -3"),
        (lambda: Shards(1, list, counts=[3], lanes=0), ValueError, "lanes=0"),
        (lambda: Shards(1, list, counts=[3], window=-1), ValueError, "window=-1"),
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_built(make, error, why):
    with pytest.raises(error, match=why):
        make()
