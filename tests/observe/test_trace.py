"""``penstock.statistics.trace``: the file has the form that viewers read, its events say what happened, and afterwards
everything is as before."""

from __future__ import annotations

import gc
import itertools
import json
import os
import tempfile
import weakref
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from torch.utils.data import IterableDataset

import penstock
from penstock import Loader
from penstock._workers.meter import traced

if TYPE_CHECKING:
    from collections.abc import Callable

HOW = {"inline": {}, "threads": {"num_workers": 2, "method": "thread"}, "processes": {"num_workers": 2}}


class Squares:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> float:
        if index == 999:
            raise OSError("no such file")
        return float(index**2)


class Stream(IterableDataset):
    def __iter__(self):
        yield from ("a", "b\x1b", None)


@pytest.fixture(autouse=True)
def everything_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert traced == []
    assert list(tmp_path.glob("penstock-trace-*")) == []


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, which has the form that the format's document demands."""
    whole = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    events: list[dict[str, Any]] = whole["traceEvents"]
    assert whole.keys() == {"traceEvents", "displayTimeUnit"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    tracks = defaultdict(list)
    for event in events:
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["name"], str)
        assert isinstance(event.get("args", {}), dict)
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                assert event["ts"] >= 0
                tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["ts"] + event["dur"]))
            case "i":
                assert event["s"] in ("g", "p", "t")
                assert event["ts"] >= 0
            case "M":
                assert (event["name"], *event["args"]) in {
                    ("process_name", "name"),
                    ("thread_name", "name"),
                    ("thread_sort_index", "sort_index"),
                }
            case other:
                pytest.fail(f"an event of the kind {other}")
    for one in tracks.values():  # apart, or one inside the other
        open_: list[float] = []
        for begin, _, end in sorted(one):
            while open_ and open_[-1] <= begin + 0.002:  # rounding
                open_.pop()
            assert not open_ or end <= open_[-1] + 0.002
            open_.append(end)
    return events


def bytes_of_workers() -> list[int]:
    """The sizes of the files that worker processes have open for a trace, although they are deleted."""
    workers = psutil.Process().children(recursive=True)
    files = (
        [link for worker in workers for link in Path(f"/proc/{worker.pid}/fd").glob("*")]
        if Path("/proc").exists()
        else []
    )
    return [link.stat().st_size for link in files if "penstock-trace-" in os.readlink(link)]


def tracks_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}


@pytest.mark.parametrize("how", HOW)
def test_every_batch_wait_and_epoch_is_there(how: str, tmp_path: Path) -> None:
    """By the indices of its samples, in the worker that loaded it. Seen to fail: workers whose track has no name;
    indices of the first row only."""
    path = tmp_path / "trace.json"
    with penstock.statistics.trace(path), Loader.from_dataset(list(range(20)), 4, shuffle=True, **HOW[how]) as loader:
        batches = [batch.tolist() for _ in range(2) for batch in loader]
    events = read(path)
    names = tracks_of(events)
    loads = [event for event in events if event["name"] in ("load", "collate") and event["args"]["epoch"] < 2]
    whole = {(event["args"]["epoch"], tuple(event["args"]["indices"])) for event in loads}
    assert whole >= {(number // 5, tuple(batch)) for number, batch in enumerate(batches)}
    workers = {names[event["pid"], event["tid"]] for event in loads if event["name"] == "load"}
    assert {name.split(":")[0].split()[0] for name in workers} == {"worker"}
    assert len(workers) <= {"inline": 1, "threads": 2, "processes": 2}[how]
    assert ({event["pid"] for event in loads if event["name"] == "load"} == {os.getpid()}) == (how != "processes")
    waits = [event for event in events if event["name"] == "wait"]
    assert [event["args"] for event in waits if "args" in event] == [
        {"epoch": k // 5, "batch": k % 5 + 1} for k in range(10)
    ]
    assert len([event for event in events if event["name"] == "training step"]) == 10
    assert [event["name"] for event in events if event["ph"] == "i"] == [
        "end of an epoch; next: 1",
        "end of an epoch; next: 2",
    ]
    assert (
        Counter(names[event["pid"], event["tid"]] for event in events if event["ph"] == "X")["reads of Batcher"] >= 10
    )


def test_two_loaders_have_tracks_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with (
        penstock.statistics.trace(path),
        Loader.from_dataset([1, 2], 1) as one,
        Loader.from_dataset([3, 4], 1) as other,
    ):
        for _ in zip(one, other, strict=True):
            pass
    names = list(tracks_of(read(path)).values())
    assert names.count("loop over loader 0") == names.count("loop over loader 1") == 1
    assert names.count("reads of Batcher") == 2


def test_an_error_is_marked_and_the_file_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    loader = Loader.from_dataset(Squares(), 1, sampler=[1, 999], num_workers=1, method="thread")
    with loader, pytest.raises(OSError, match="no such file"), penstock.statistics.trace(path):
        list(loader)
    assert [event["name"] for event in read(path) if event["ph"] == "i"] == ["OSError"]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """Seen to fail: the file opened only at the end, after the training."""
    with pytest.raises(FileNotFoundError), penstock.statistics.trace(tmp_path / "missing" / "trace.json"):
        pytest.fail("this is too late")
    with penstock.statistics.trace(tmp_path / "trace.json"):
        pass


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_hides_no_error_of_the_training() -> None:
    """Seen to fail: the OSError of the trace raised instead of the training's error."""
    with pytest.raises(ValueError, match="mine") as caught, penstock.statistics.trace("/dev/full"):
        raise ValueError("mine")
    assert "the trace could not be written" in caught.value.__notes__[0]
    with pytest.raises(OSError, match="No space"), penstock.statistics.trace("/dev/full"):
        pass


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.slow
def test_a_full_disk_does_not_end_the_work_of_a_worker(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """Seen to fail: an event that could not be written raised in place of the worker's result."""
    program = tmp_path / "program.py"
    program.write_text("""
import os, sys
from penstock import Loader
from penstock._observe.trace import _InWorker
from penstock._workers.meter import traced
os.symlink("/dev/full", f"{sys.argv[1]}/{os.getpid()}.jsonl")
_InWorker(None, sys.argv[1], 0)(0)
for _ in range(5):
    traced[0].task(range(4), 0, 1)
print(len(list(Loader.from_dataset(range(20), 4))), flush=True)
os._exit(0)  # without a last try to write
""")
    assert run_program(program, tmp_path) == "5\n"


def test_one_trace_at_a_time(tmp_path: Path) -> None:
    one, two = penstock.statistics.trace(tmp_path / "one.json"), penstock.statistics.trace(tmp_path / "two.json")
    with one, pytest.raises(RuntimeError, match=r"one.json is running already"), two:
        pass
    with penstock.statistics.trace(tmp_path / "two.json"):
        pass
    assert read(tmp_path / "two.json")


@pytest.mark.parametrize("how", HOW)
def test_a_loader_goes_on_before_and_after_a_trace(how: str, tmp_path: Path) -> None:
    """The same batches and the same workers. Seen to fail: a worker that writes on."""
    with Loader.from_dataset(Squares(), 2, shuffle=True, infinite=True, **HOW[how]) as loader:
        expected = [batch.tolist() for batch in itertools.islice(loader, 60)]
    with Loader.from_dataset(Squares(), 2, shuffle=True, infinite=True, **HOW[how]) as loader:
        batches = iter(loader)
        seen = [next(batches).tolist() for _ in range(20)]
        with penstock.statistics.trace(tmp_path / "late.json"):
            seen += [next(batches).tolist() for _ in range(20)]
        seen += [next(batches).tolist() for _ in range(20)]
    assert seen == expected
    names = set(tracks_of(read(tmp_path / "late.json")).values())
    assert "loop over loader 0" in names
    assert any(name.startswith("worker") for name in names) == (how != "processes")  # those run already
    with Loader.from_dataset(Squares(), 2, shuffle=True, infinite=True, **HOW[how]) as loader:
        batches = iter(loader)
        with penstock.statistics.trace(tmp_path / "early.json"):
            seen = [next(batches).tolist() for _ in range(20)]
        seen += [next(batches).tolist() for _ in range(20)]  # some of them were loaded before the end
        written = bytes_of_workers()
        seen += [next(batches).tolist() for _ in range(20)]
        assert bytes_of_workers() == written
    assert seen == expected


def test_a_traced_loader_that_is_dropped_is_freed(tmp_path: Path) -> None:
    """Seen to fail: a trace that holds its loaders, whose workers would live until it ends."""
    with penstock.statistics.trace(tmp_path / "trace.json"):
        loader = Loader.from_dataset(Squares(), 2, num_workers=1, method="thread")
        list(loader)
        watched = weakref.ref(loader)
        del loader
        gc.collect()
        assert watched() is None


def test_samples_of_any_kind_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with penstock.statistics.trace(path):
        with Loader.from_dataset(Stream(), 3, collate_fn=list) as loader:
            assert list(loader) == [["a", "b\x1b", None]]
        with Loader.from_dataset([5, 6], None, sampler=[1, 0]) as loader:
            assert list(loader) == [6, 5]
    args = [event["args"] for event in read(path) if event["name"] == "load"]
    assert args[0]["indices"] == ["'a'", "'b\\x1b'", "None"]
    assert [one["indices"] for one in args[-2:]] == [[1], [0]]
