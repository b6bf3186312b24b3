"""Notes for other ranks, as far as one process can tell; the rest is in tests/distributed/notes_laws.py and
notes_troubles.py."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from penstock import Loader
from penstock._loader import note_board, rank_notes
from penstock._loader.note_board import Board, Clerk, Question, _signed, agree
from penstock._loader.rank_notes import _digest, _without_seeds, place_in_the_code
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def board(rank: int = 0, store: Any = None) -> Board:
    return Board(store or dist.HashStore(), rank)


def note(marks: list[int], age_s: float = 0.0, **more: Any) -> dict[str, Any]:
    return {**_signed(marks=marks, rank=7), "at": note_board.since - age_s, **more}


def test_the_first_note_stays() -> None:
    one = board()
    first, second = note([1]), note([2])
    assert one.first("key", first) == first
    assert one.first("key", second) == first
    assert one.read("key") == first
    one.put("key", second)
    assert one.first("key", first) == second
    assert one.read("another") is None


@pytest.mark.parametrize(
    ("age_s", "host", "is_old"), [(0.1, None, True), (0.0, None, False), (5.0, "other", False), (20.0, "other", True)]
)
def test_a_note_of_an_earlier_job_is_replaced(age_s: float, host: str | None, is_old: bool) -> None:
    """Older than this process; the clock of another host may be wrong. Seen to fail without the times, and without the
    hosts."""
    one = board()
    old, mine = note([1], age_s, **({} if host is None else {"host": host})), note([2])
    one.put("key", old)
    assert (one.read("key") is None) is is_old
    assert one.first("key", mine) == (mine if is_old else old)


def test_this_process_began_before_now() -> None:
    """And not when penstock was imported: others may have written notes by then. Seen to fail with seconds since the
    machine was started."""
    began = note_board.began()
    assert time.time() - 24 * 3600 < began < time.time()
    assert abs(began - note_board.began()) < 0.1
    assert began < note_board.since + 0.1


def test_notes_agree_if_they_share_a_mark_or_were_given_up() -> None:
    assert agree([1, 2], [2, 3])
    assert not agree([1, 2], [3])
    assert agree([], [3])
    assert agree([3], [])


def test_old_notes_are_deleted() -> None:
    """A run may have millions of epochs. Seen to fail without the deletion."""
    store = dist.HashStore()
    one = board(store=store)
    for k in range(note_board.KEPT + 10):
        one.first(f"{k}", note([k]))
    assert store.num_keys() == note_board.KEPT
    assert one.read("9") is None
    assert one.read("10") is not None


class Dead:
    """A store whose server has died, and comes back."""

    revived: dist.Store | None = None

    def clone(self) -> Any:
        if self.revived is None:
            raise dist.DistNetworkError("connection reset by peer")
        return self.revived


def ask(clerk: Clerk, one: Board, *, marks: list[int], key: str = "key") -> Clerk:
    clerk.asked += 1
    clerk(Question(one, "alarm", key, marks, 3), [0], None)  # type: ignore[arg-type]
    return clerk


def test_a_store_that_fails_is_not_used_again() -> None:
    """And it is no error. Seen to fail: the error came in the thread, and the next question was asked."""
    store = Dead()
    one = board(store=store)
    clerk = ask(Clerk(), one, marks=[1])
    assert one.dead
    assert clerk.fault is None
    store.revived = dist.HashStore()
    ask(clerk, one, marks=[1])
    assert store.revived.num_keys() == 0
    assert clerk.has_answered(wait=True)


def test_an_answer_is_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for long. Seen to fail: each batch waited again."""
    waits: list[float] = []

    class Silent:
        def wait(self, timeout: float) -> bool:
            waits.append(timeout)
            return False

        def ring(self) -> None:
            pass

    monkeypatch.setattr(note_board, "Bell", Silent)
    clerk = Clerk()
    clerk.asked = 1
    assert [clerk.has_answered(wait=True) for _ in range(3)] == [False] * 3
    assert len(waits) == 1
    assert 0 < waits[0] <= note_board.AT_MOST_S


def test_the_rank_that_differs_tells_the_one_that_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third one, which agrees with neither, is not told by the alarm of others, nor one that has given up. Seen to
    fail: everyone who looked was told."""
    store = dist.HashStore()
    first, second = ask(Clerk(), board(0, store), marks=[1]), ask(Clerk(), board(1, store), marks=[2])
    assert first.fault is None
    assert second.fault is not None
    assert second.fault["ranks"] == [0, 1]
    for said, hears in (([1], True), ([2], False), ([], False)):
        monkeypatch.setattr(note_board, "said_here", {"key": said})
        clerk = Clerk()
        clerk(Question(board(0, store), "alarm"), [0], None)  # type: ignore[arg-type]
        assert (clerk.fault is not None) is hears, said
    monkeypatch.setattr(note_board, "said_here", {"key": [1]})
    monkeypatch.setattr(note_board, "given_up", {"alarm": None})
    clerk = Clerk()
    clerk(Question(board(0, store), "alarm"), [0], None)  # type: ignore[arg-type]
    assert clerk.fault is None


def test_a_note_that_was_given_up_is_compared_with_nothing() -> None:
    store = dist.HashStore()
    ask(Clerk(), board(0, store), marks=[1])
    ask(Clerk(), board(1, store), marks=[])
    assert ask(Clerk(), board(2, store), marks=[2]).fault is None


def places(count: int) -> list[str]:
    return [place_in_the_code() for _ in range(count)]


def test_aplace_in_the_code_is_a_line_and_its_callers() -> None:
    """Without folders, which may differ between hosts. Seen to fail with whole paths."""
    one = places(2)
    other = places(1)
    assert one[0] == one[1] != other[0]
    assert "/" not in one[0]
    assert "test_rank_notes.py" in one[0]
    assert len(one[0].split(", ")) == rank_notes.FRAMES


def test_aplace_in_the_code_has_no_frames_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless all code is installed. Seen to fail: threading.py was in it, and installed code had no place."""
    found: list[str] = []
    for is_library_file in (rank_notes.is_library_file, lambda _: True):
        monkeypatch.setattr(rank_notes, "is_library_file", is_library_file)
        thread = threading.Thread(target=lambda: found.append(place_in_the_code()))
        thread.start()
        thread.join()
    assert [place.count(", ") for place in found] == [0, rank_notes.FRAMES - 1]
    assert all(place.startswith("test_rank_notes.py") for place in found)


def test_seeds_are_not_in_the_name_of_a_loader() -> None:
    """Or ranks with other seeds would not be compared. Seen to fail with all settings, and with those of nested
    ones."""
    assert _without_seeds({"seed": 1, "of": [{"sample_seed": 2, "n": 3}, 4], "stream_seed": [5]}) == {
        "of": [{"n": 3}, 4]
    }


def test_tables_keep_the_newest() -> None:
    """Seen to fail: names that were given up, and lengths, were kept for ever."""
    table = dict.fromkeys(map(str, range(4 * note_board.KEPT + 3)))
    note_board.drop_oldest(table, {})
    assert [*table] == [*map(str, range(3, 4 * note_board.KEPT + 3))]


def test_the_name_of_a_loader_is_the_same_in_every_process() -> None:
    assert _digest("a", [1], {"b": None}) == "penstock/" + _digest("a", [1], {"b": None}).removeprefix("penstock/")
    assert len({_digest(1), _digest("1"), _digest(1, 2), _digest([1, 2])}) == 4


class Order(list[int]):
    """A list to which there may be weak references."""


def writes() -> bool:
    """Whether a thread writes notes."""
    return any(thread.name.startswith("penstock-notes") for thread in threading.enumerate())


def test_loaders_without_a_process_group_write_nothing() -> None:
    """They can be copied and pickled, are collected at once, and start no thread."""
    sampler = Order(range(8))
    loader = Loader.from_dataset(Tagged(8), batch_size=2, sampler=sampler)
    for one in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), loader):
        with one:
            assert [batch.tolist() for batch in one] == [[0, 1], [2, 3], [4, 5], [6, 7]]
            assert not writes()
    gone = weakref.ref(sampler)
    del loader, one, sampler
    gc.collect()
    assert gone() is None
    for options in ({"rank": 0, "world_size": 2}, {}):
        with Loader.from_dataset(
            Tagged(8), batch_size=2, **({"sampler": [*range(8)], **options} if options else {"shuffle": True})
        ) as other:
            assert other._reader.notes is None


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield tmp_path
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_group_of_one_rank_writes_nothing() -> None:
    with Loader.from_dataset(Tagged(8), batch_size=2, sampler=[*range(8)]) as loader:
        assert len(list(loader)) == 4
        assert not writes()


def test_a_group_that_is_collected_late_ends_when_the_next_one_is_seen(group: Path) -> None:
    """Something may still hold it. Seen to fail: notes of the next group were taken for old ones, and forgotten; and
    those of the old one were not."""
    old = distributed_c10d.group.WORLD
    assert Board.of_group() is not None
    dist.destroy_process_group()
    note_board.said_here["key"] = [1]
    dist.init_process_group("gloo", init_method=f"file://{group}/next", rank=0, world_size=1)
    Board.of_group()
    assert "key" not in note_board.said_here
    note_board.said_here["key"], since, gone = [2], note_board.since, weakref.ref(old)
    del old
    gc.collect()
    assert gone() is None
    assert (note_board.said_here.pop("key", None), note_board.since) == ([2], since)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("used", [True, False])
def test_a_fork_does_not_use_the_connection_of_its_parent(used: bool) -> None:
    """It is no rank of that group. Seen to fail: each got replies to what the other had asked."""
    one = Board.of_group() if used else None
    if (pid := os.fork()) == 0:
        board = Board.of_group()
        os._exit(0 if board is not None and board.dead else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert one is None or not one.dead
