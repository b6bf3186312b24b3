"""Notes for other ranks, as far as one process can tell; the rest is in tests/distributed/notes_laws.py and
notes_troubles.py."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from penstock import Loader
from penstock._loader import rank_notes
from penstock._loader.rank_notes import _HOST, _agree, _Group, _group, _is_old, _since, _without_seeds
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield tmp_path
    dist.destroy_process_group()


def note(marks: list[int], age_s: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"marks": marks, "length": 4, "rank": 0, "at": _since - age_s, "host": _HOST, **more}


@pytest.mark.usefixtures("group")
def test_the_first_note_stays_unless_it_is_given_up() -> None:
    one, other, first, second, empty = _Group(0), _Group(0), note([1]), note([2]), note([])
    assert one.first("name", first) == first
    assert other.first("name", second) == first
    assert other.first("another", second) == second
    assert [one.first("name", empty), other.first("name", second)] == [empty, empty]


def test_notes_agree_if_they_share_a_mark_or_were_given_up() -> None:
    assert _agree([1, 2], [2, 3])
    assert not _agree([1, 2], [3])
    assert _agree([], [3])
    assert _agree([3], [])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("age_s", "host", "is_old"), [(0.1, None, True), (0.0, None, False), (5.0, "other", False), (20.0, "other", True)]
)
def test_a_note_of_an_earlier_job_is_replaced(age_s: float, host: str | None, is_old: bool) -> None:
    """Older than this process; the clock of another host may be wrong. Seen to fail without the times, and without the
    hosts."""
    old, mine = note([1], age_s, **({} if host is None else {"host": host})), note([1])
    assert _is_old(old) is is_old
    _Group(0).first("name", old)
    assert _Group(0).first("name", mine) == (mine if is_old else old)


def test_this_process_began_before_now() -> None:
    """And not when penstock was imported: others may have written notes by then. Seen to fail with seconds since the
    machine was started."""
    assert time.time() - 24 * 3600 < _since < time.time()
    assert abs(_since - rank_notes.began()) < 0.1


def test_seeds_are_not_in_the_name_of_a_loader() -> None:
    """Or ranks with other seeds would not be compared. Seen to fail with all settings, and with those of nested
    ones."""
    assert _without_seeds({"seed": 1, "of": [{"sample_seed": 2, "n": 3}, 4], "stream_seed": [5]}) == {
        "of": [{"n": 3}, 4]
    }


class Order(list[int]):
    """A list to which there may be weak references."""


def test_loaders_without_a_process_group_can_be_copied_and_are_collected() -> None:
    sampler = Order(range(8))
    loader = Loader.from_dataset(Tagged(8), batch_size=2, sampler=sampler)
    for one in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), loader):
        with one:
            assert [batch.tolist() for batch in one] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    gone = weakref.ref(sampler)
    del loader, one, sampler
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("group")
def test_a_group_of_one_rank_writes_nothing() -> None:
    before = (store := distributed_c10d._get_default_store()).num_keys()
    with Loader.from_dataset(Tagged(8), batch_size=2, sampler=[*range(8)]) as loader:
        assert len(list(loader)) == 4
    assert store.num_keys() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("used", [True, False])
def test_a_fork_is_no_rank_of_the_group_of_its_parent(used: bool) -> None:
    """Seen to fail: it left notes as one, of other data."""
    one, before = _group() if used else None, note([1])
    if (pid := os.fork()) == 0:
        child = _group()
        os._exit(0 if child is not None and child.dead and _is_old(before) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert one is None or not one.dead
