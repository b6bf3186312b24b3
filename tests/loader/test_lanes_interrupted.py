"""Ctrl-C, or a handler that raises, at any line of what reads an IterableDataset in lanes: nothing is lost, nothing
comes twice, and the process is as it was."""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest
from by_worker import Draws, Saved, Split
from global_draws import generators
from strikes import PACKAGE, Alarm, Strikes, alarm, answering, in_turn
from torch.utils.data import get_worker_info

from penstock import Loader, Stream
from penstock._streams import worker_shares


class OffByOne(Saved):
    def __iter__(self):
        own = [*self.own()]
        while self.at < len(own):
            yield own[self.at]
            self.at += 1


def stream(data, lanes=2):
    return lambda folder: Loader.from_dataset(
        Stream(data, lanes=lanes, epoch_size=9, bookmarks=folder), None, collate_fn=tuple
    )


def epochs(data, lanes=2):
    return lambda folder: Loader.from_dataset(data, 2, lanes=lanes, collate_fn=list, bookmarks=folder)


OURS = tuple(f"{PACKAGE}/_streams/{name}" for name in ("share_", "worker_shares", "run_folder"))
BUILDS = {
    "stream": stream(Split([5, 4])),
    "stream, drawing": stream(Draws([5, 4])),
    "stream with a state": stream(Saved([12, 13])),
    "stream with a state that lies": stream(OffByOne([12, 13])),
    "epochs": epochs(Split([5, 4, 7])),
    "epochs, drawing": epochs(Draws([5, 4])),
    "epochs with a state": epochs(Saved([12, 9])),
}


@pytest.fixture(autouse=True)
def _marks_at_once(monkeypatch):
    monkeypatch.setattr(worker_shares, "LEAST_S", 0.0)
    monkeypatch.setattr(worker_shares, "SHARE_OF_TIME", float("inf"))


@cache
def uninterrupted(name, folder):
    with BUILDS[name](folder) as loader:
        expected = list(loader) + list(loader)
    with BUILDS[name](folder) as loader:
        return expected, [loader.state_dict()] + [loader.state_dict() for _ in loader]


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("before", "again"),
    [(0, False), pytest.param(3, False, marks=pytest.mark.soak), pytest.param(4, True, marks=pytest.mark.soak)],
    ids=["at first", "later", "with marks"],
)
def test_ctrl_c_at_any_line(tmp_path, before, again, every):
    """Seen to fail: a batch in epochs whose count came a line after its items."""
    strikes, user, runs = Strikes(within=OURS), generators(), 0

    def strike(name):
        nonlocal runs
        runs += 1
        expected, states = uninterrupted(name, tmp_path / "whole")
        folder = tmp_path / "whole" if again else tmp_path / str(runs)
        with BUILDS[name](folder) as loader:
            if again:
                loader.load_state_dict(states[before])
                got = expected[:before]
                batches = iter(loader)
            else:
                batches = iter(loader)
                got = list(islice(batches, before))
            _, stopped = strikes(lambda: next(batches), every)
            if not stopped:
                return False
            assert get_worker_info() is None, strikes.last
            assert generators() == user, strikes.last
            assert loader.state_dict() == states[before], strikes.last
            got += list(batches) + list(loader)
            assert got == expected, strikes.last
        return True

    in_turn(BUILDS, strike)
    assert len(strikes.at) > 30


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_an_ordinary_exception_of_a_handler_arrives_as_itself(tmp_path, every):
    """Seen to fail with a trial, or a state, that takes it for the dataset's."""
    runs = 0

    def strike(name):
        nonlocal runs
        runs += 1
        expected, _ = uninterrupted(name, tmp_path / "whole")
        with BUILDS[name](tmp_path / str(runs)) as loader:
            batches, got = iter(loader), []
            got += islice(batches, runs % 3)
            try:
                _, struck = strikes(lambda: next(batches), every)
                assert not struck, f"nothing was raised, although the signal came: {strikes.last}"
                return False
            except Alarm:
                got += list(batches) + list(loader)
        assert got == expected, strikes.last
        return True

    with answering(alarm) as send:
        strikes = Strikes(send, within=OURS)
        in_turn(BUILDS, strike)
    assert len(strikes.at) > 30
