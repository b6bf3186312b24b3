"""Long work of our own says how far it is: tqdm's bar on a terminal, a line each ten seconds elsewhere, nothing if it
is soon done."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Cached, Loader, Resident, Stream, filtered
from penstock._streams import lanes, progress
from penstock._streams.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def is_even(sample: Any) -> bool:
    return sample % 2 == 0


def test_lines_come_ten_seconds_apart() -> None:
    """Seen to fail: a line for each call."""
    clock, lines = Clock(), list[str]()
    with Progress("loading", 1000, "samples", say=lines.append, clock=clock) as shown:
        for second in range(35):
            clock.now = 100.0 + second
            shown.at(second * 10)
    assert lines == [f"loading: {done} of 1,000 samples in {done // 10} s" for done in (100, 200, 300)]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A person at the terminal, who sees every step."""
    pytest.importorskip("tqdm")
    terminal = Terminal()
    monkeypatch.setattr(progress, "_DRAW_S", 0.0)
    monkeypatch.setattr("sys.stderr", terminal)
    yield terminal
    monkeypatch.undo()


def is_clean(terminal: Terminal) -> bool:
    """Whether nothing is left in the line of the bar."""
    *_, wiped, last = terminal.getvalue().split("\r")
    return wiped.strip() == last == ""


def test_a_bar_is_drawn_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: a bar that stays when the work has ended, or while something else is printed."""
    lines, clock = list[str](), Clock()
    with watched(monkeypatch) as terminal, Progress("loading", 200, "samples", say=lines.append, clock=clock) as shown:
        shown.at(100)
        clock.now += 1000
        assert re.search(r"loading:  50%\|.* 100/200 .* samples/s", terminal.getvalue())
        shown.clear()
        assert is_clean(terminal)
        shown.at(150)
        assert "loading:  75%" in terminal.getvalue()
    assert is_clean(terminal)
    assert lines == []


def test_without_tqdm_a_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: an ImportError, which ended the work."""
    lines, clock = list[str](), Clock()
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with Progress("loading", 200, "samples", say=lines.append, clock=clock) as shown:
        clock.now += 10
        shown.at(100)
    assert lines == ["loading: 100 of 200 samples in 10 s"]
    assert terminal.getvalue() == ""


def test_a_terminal_that_is_gone_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DRAW_S", 0.0)
    ours, theirs = pty.openpty()
    terminal = os.fdopen(theirs, "w")
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("x", 5, "samples") as shown:
        os.close(ours)
        shown.at(1)
    with contextlib.suppress(OSError):
        terminal.close()
    monkeypatch.setattr("sys.stderr", closed := Terminal())
    with Progress("x", 5, "samples") as shown:
        shown.at(1)
        closed.close()
        shown.at(2)
    with Progress("x", 5, "samples") as shown:
        shown.at(1)


def test_only_the_main_thread_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: ``isatty`` alone."""

    def work() -> None:
        with Progress("x", 5, "samples") as shown:
            shown.at(1)

    with watched(monkeypatch) as terminal:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert terminal.getvalue() == ""
        work()
        assert "x:  20%" in terminal.getvalue()


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: Resident(range(100)), r"loading range:  64%\|.* 64/100 "),
        (lambda: filtered(range(1000), is_even), r"is_even:  77%\|.* 768/1000 "),
    ],
    ids=["loaded", "judged"],
)
def test_a_dataset_that_is_read_to_its_end_shows_how_far_it_is(
    work: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(monkeypatch) as terminal:
        work()
    assert re.search(said, terminal.getvalue())
    assert is_clean(terminal)


def test_without_a_terminal_it_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    caplog.set_level(logging.INFO, "penstock")
    Resident(range(100))
    assert "loading range: 64 of 100 samples in " in caplog.text
    assert re.search("100 samples of range .* loaded onto cpu in .* s", caplog.text)


@pytest.mark.parametrize(
    "how", [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 2}], ids=["inline", "threads", "processes"]
)
def test_a_cache_is_filled(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: samples that were cached already loaded again."""
    cached = Cached(range(100))
    before = cached[3], cached[99]
    with watched(monkeypatch) as terminal:
        cached.fill(**how)
    assert cached.filled == 100
    assert (cached[3], cached[99]) == before
    assert re.search(r"caching builtins.range:  98%\|.* 96/98 ", terminal.getvalue())
    with watched(monkeypatch) as terminal:
        cached.fill(**how)
    assert terminal.getvalue().strip("\r ") == ""
    cached.close()


def test_an_error_while_a_cache_is_filled_keeps_what_is_cached() -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index == 50:
                raise OSError("no such file")
            return index

    cached = Cached(Broken(range(100)))
    with pytest.raises(OSError, match="no such file"):
        cached.fill()
    assert cached.filled >= 48
    cached.close()


def records(shard: int) -> Iterator[int]:
    yield from range(1000 * shard, 1000 * shard + 200)


def test_a_search_in_a_lane_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Two lanes that search one after another warn once. Seen to fail: a warning for each lane."""
    monkeypatch.setattr(lanes, "SLOW_S", 0.0)
    data = Stream(8, records, epoch_size=1600, lanes=2, bookmarks=False)
    with watched(monkeypatch) as terminal, Loader.from_dataset(data, batch_size=None) as loader:
        loader.set_epoch(1)
        batches = iter(loader)
        next(batches)
        next(batches)
    assert re.search(r"lane 0: finding item 800: +\d+%\|.* \d+/800 ", terminal.getvalue())
    assert is_clean(terminal)
    assert caplog.text.count("it has taken") == 1
