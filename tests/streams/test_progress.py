"""Long work of our own says how far it is: a bar on a terminal, a line each ten seconds elsewhere, nothing if it is soon done."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
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
    with Progress("loading", 1000, "samples", stream=io.StringIO(), say=lines.append, clock=clock) as shown:
        for second in range(35):
            clock.now = 100.0 + second
            shown.at(second * 10)
    assert lines == [
        "loading: 100 of 1,000 samples 10%, 10/s, 90 s left",
        "loading: 200 of 1,000 samples 20%, 10/s, 80 s left",
        "loading: 300 of 1,000 samples 30%, 10/s, 70 s left",
    ]


def test_a_bar_is_drawn_over_itself_and_taken_away() -> None:
    """Seen to fail: a bar that stays when the work has ended."""
    clock, terminal, lines = Clock(), Terminal(), list[str]()
    with Progress("loading", 200, "samples", stream=terminal, say=lines.append, clock=clock) as shown:
        for step in range(1, 201):
            clock.now += 0.01
            shown.at(step)
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert drawn[0] == drawn[-1] == ""
    assert 18 <= len(drawn) - 2 <= 20
    assert drawn[10] == "loading: 100 of 200 samples [##########..........] 50%, 100/s, 1 s left"
    assert all(len(text) < 80 for text in drawn)
    assert lines == []


def test_a_terminal_that_is_gone_does_not_end_the_work() -> None:
    clock = Clock()
    ours, theirs = pty.openpty()
    terminal = os.fdopen(theirs, "w")
    with Progress("x", 5, "samples", stream=terminal, clock=clock) as shown:
        os.close(ours)
        clock.now += 1
        shown.at(1)
    with contextlib.suppress(OSError):
        terminal.close()
    closed = Terminal()
    with Progress("x", 5, "samples", stream=closed, clock=clock) as shown:
        clock.now += 1
        shown.at(1)
        closed.close()
        clock.now += 1
        shown.at(2)


def test_only_the_main_thread_draws() -> None:
    """Seen to fail: ``isatty`` alone."""
    drawn: list[bool] = []
    thread = threading.Thread(target=lambda: drawn.append(Progress("x", 5, "samples", stream=Terminal())._draws))
    thread.start()
    thread.join()
    assert drawn == [False]
    assert Progress("x", 5, "samples", stream=Terminal())._draws


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A person at the terminal, who sees every step."""
    terminal = Terminal()
    monkeypatch.setattr(progress, "_DRAW_S", 0.0)
    monkeypatch.setattr("sys.stderr", terminal)
    yield terminal
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: Resident(range(100)), r"loading range: 64 of 100 samples \[#{13}\.{7}\] 64%"),
        (lambda: filtered(range(1000), is_even), "is_even: 768 of 1,000 samples"),
    ],
    ids=["loaded", "judged"],
)
def test_a_dataset_that_is_read_to_its_end_shows_how_far_it_is(work: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as terminal:
        work()
    assert re.search(said, terminal.getvalue())
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_without_a_terminal_it_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    caplog.set_level(logging.INFO, "penstock")
    Resident(range(100))
    assert "loading range: 64 of 100 samples 64%" in caplog.text
    assert re.search("100 samples of range .* loaded onto cpu in .* s", caplog.text)


@pytest.mark.parametrize("how", [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 2}], ids=["inline", "threads", "processes"])
def test_a_cache_is_filled(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: samples that were cached already loaded again."""
    cached = Cached(range(100))
    before = cached[3], cached[99]
    with watched(monkeypatch) as terminal:
        cached.fill(**how)
    assert cached.filled == 100
    assert (cached[3], cached[99]) == before
    assert "caching builtins.range: 96 of 98 samples" in terminal.getvalue()
    with watched(monkeypatch) as terminal:
        cached.fill(**how)
    assert terminal.getvalue() == ""
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
    assert re.search(r"lane 0: finding item 800: \d+ of 800 items \[#+\.+\]", terminal.getvalue())
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert caplog.text.count("it has taken") == 1
