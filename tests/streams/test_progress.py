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

import numpy as np
import pytest

import penstock
from penstock import Cached, Loader, Resident, Shards, filtered
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


class Squares:
    def __init__(self, n: int = 100) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return np.float32(index)


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


def test_a_dataset_that_is_loaded_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    with watched(monkeypatch) as terminal:
        Resident(Squares())
    assert re.search(r"loading Squares: 64 of 100 samples \[#{13}\.{7}\] 64%", terminal.getvalue())
    assert terminal.getvalue().endswith("\r\x1b[K")
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    caplog.set_level(logging.INFO, "penstock")
    Resident(Squares())
    assert "loading Squares: 64 of 100 samples 64%" in caplog.text
    assert re.search("100 samples of Squares .* loaded onto cpu in .* s", caplog.text)


def test_samples_that_are_judged_show_how_far_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as terminal:
        assert len(filtered(Squares(1000), is_even)) == 500
    assert "is_even: 768 of 1,000 samples" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("how", [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 2}], ids=["inline", "threads", "processes"])
def test_a_cache_is_filled(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: samples that were cached already loaded again."""
    cached = Cached(Squares())
    before = cached[3], cached[99]
    with watched(monkeypatch) as terminal:
        cached.fill(**how)
    assert cached.filled == 100
    assert (cached[3], cached[99]) == before
    assert "caching Squares: 96 of 98 samples" in terminal.getvalue().replace(f"{Squares.__module__}.", "")
    with watched(monkeypatch) as terminal:
        cached.fill(**how)
    assert terminal.getvalue() == ""
    cached.close()


def test_an_error_while_a_cache_is_filled_keeps_what_is_cached() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> Any:
            if index == 50:
                raise OSError("no such file")
            return super().__getitem__(index)

    cached = Cached(Broken())
    with pytest.raises(OSError, match="no such file"):
        cached.fill()
    assert cached.filled >= 48
    cached.close()


def records(shard: int) -> Iterator[int]:
    yield from range(1000 * shard, 1000 * shard + 200)


def test_a_search_in_a_lane_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Two lanes that search one after another warn once. Seen to fail: a warning for each lane."""
    monkeypatch.setattr(lanes, "SLOW_S", 0.0)
    data = Shards(8, records, epoch_size=1600, lanes=2, bookmarks=False)
    with watched(monkeypatch) as terminal, Loader.from_dataset(data, batch_size=None) as loader:
        loader.set_epoch(1)
        batches = iter(loader)
        next(batches)
        next(batches)
    assert re.search(r"lane 0: finding item 800: \d+ of 800 items \[#+\.+\]", terminal.getvalue())
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert caplog.text.count("it has taken") == 1


def test_a_bar_of_tqdm_after_a_resume_shows_the_right_totals() -> None:
    """What the documentation says: ``tqdm(loader, initial=loader.position)``."""
    tqdm = pytest.importorskip("tqdm").tqdm

    def build() -> Loader[Any]:
        return penstock.Loader.from_dataset(Squares(), batch_size=8, shuffle=True)

    with build() as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    shown = []
    with build() as loader:
        loader.load_state_dict(state)
        for _epoch in range(loader.epoch, 2):
            with tqdm(loader, initial=loader.position, file=io.StringIO()) as bar:
                shown.append((bar.n, bar.total))
                for _ in bar:
                    pass
                shown.append((bar.n, bar.total))
    assert shown == [(5, 13), (13, 13), (0, 13), (13, 13)]
