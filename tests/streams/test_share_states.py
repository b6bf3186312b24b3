"""Marks: states of a dataset that is read in lanes. They save time, and whatever they hold, the sequence is the
same."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import signal
from itertools import islice, product
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from by_worker import OwnIterator, Restarting, Saved, stream
from global_draws import draw, generators
from hypothesis import HealthCheck, given, settings
from pairwise import mostly_soak
from tensors import KINDS as KINDS_OF_TENSORS
from tensors import SLOW, make, of_prototypes
from worker_pids import worker_pids

from penstock import Loader, StateMismatch, Stream
from penstock._memory.parcel import pickled
from penstock._streams import retrying, worker_shares
from penstock._streams.share_states import checksum_of_item

LENGTHS = [400, 300]
LANES = 2


@pytest.fixture(autouse=True)
def _marks_at_once(monkeypatch):
    """A mark every five items, in place of one a second."""
    monkeypatch.setattr(worker_shares, "LEAST_S", 0.0)
    monkeypatch.setattr(worker_shares, "SHARE_OF_TIME", float("inf"))


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


def endless(data, folder, **words):
    stream = Stream(data, lanes=LANES, epoch_size=100_000, bookmarks=folder)
    return Loader.from_dataset(stream, **{"batch_size": None, "collate_fn": tuple, "seed": 3, **words})


def in_epochs(data, folder, **words):
    return Loader.from_dataset(
        data, **{"batch_size": None, "collate_fn": tuple, "seed": 3, "lanes": LANES, "bookmarks": folder, **words}
    )


def resumed(build, at, after):
    """The items around a save point: those before it, and those of another run after it."""
    with build() as loader:
        before = list(islice(loader, at))
        state = json.dumps(loader.state_dict())
        assert len(state) < 1024
        assert "at" not in json.loads(state)
    with build() as loader:
        loader.load_state_dict(json.loads(state))
        return before + list(islice(loader, after))


class Example(NamedTuple):
    x: torch.Tensor
    tags: set[str]
    name: str
    twin: str


class Examples(Saved):
    """Items of a class of the user's, which hold what its pickle would not show as it is."""

    def __iter__(self):
        for record, worker in super().__iter__():
            name = f"record {record}"
            yield Example(torch.tensor([record, worker]), {name, "a", "b"}, name, name)


class InOneBuffer(Saved):
    """Fills the same tensor for each item."""

    def __iter__(self):
        buffer = torch.zeros(2, dtype=torch.int64)
        for item in super().__iter__():
            buffer[:] = torch.tensor(item)
            yield buffer


class ByMode(Saved):
    """Items that tell whether there were gradients, and are yielded without."""

    def __iter__(self):
        for item in super().__iter__():
            enabled = torch.is_grad_enabled()
            with torch.no_grad():
                yield *item, enabled


@pytest.mark.parametrize("way", [endless, in_epochs])
def test_a_state_is_proved_in_the_mode_of_a_new_thread(tmp_path, said, way):
    """Seen to fail: the copy was read without gradients, so its items were others, and the states were not used."""
    found = resumed(lambda: way(ByMode(LENGTHS, None), tmp_path / "marks"), 100, 20)
    assert found == [(*item, True) for item in islice(stream(LENGTHS, LANES), 120)]
    assert said() == []


KINDS = [Saved, Restarting, OwnIterator]


@pytest.mark.parametrize("way", [endless, in_epochs])
def test_items_of_a_class_are_known_by_their_content(tmp_path, said, way):
    """Seen to fail with a plain pickle of each item, which has the addresses of its tensors."""
    read = tmp_path / "read"
    found = resumed(lambda: way(Examples(LENGTHS, read), tmp_path / "marks", collate_fn=None), 500, 20)
    assert [tuple(example.x.tolist()) for example in found] == list(islice(stream(LENGTHS, LANES), 520))
    assert len(read.read_text().splitlines()) < 500 + 20 + 8 + 100
    assert said() == []


@pytest.mark.parametrize("way", [endless, in_epochs])
def test_a_state_of_a_dataset_that_fills_one_buffer(tmp_path, said, way):
    """Seen to fail: the state was found false, because all items after it were compared when the last one was read."""
    read = tmp_path / "read"
    found = resumed(lambda: way(InOneBuffer(LENGTHS, read), tmp_path / "marks"), 300, 20)
    assert [(int(record), int(worker)) for record, worker in found] == list(islice(stream(LENGTHS, LANES), 320))
    assert len(read.read_text().splitlines()) < 300 + 20 + 8 + 100
    assert said() == []


@of_prototypes
@pytest.mark.parametrize("item", [kind for kind in KINDS_OF_TENSORS if kind not in SLOW])
def test_every_item_has_a_checksum(item):
    """Of its content, as far as that can be read. Seen to fail by a NotImplementedError."""
    made, other = make(item), make(item)
    assert checksum_of_item(made) == checksum_of_item(other) == checksum_of_item(pickle.loads(pickled(made)))
    if item not in ("meta", "large meta"):
        assert checksum_of_item(made) != checksum_of_item(torch.zeros(1)), "not the name of the type"
        assert len(checksum_of_item(made)) == 16


def test_what_cannot_be_read_has_the_name_of_its_type():
    class Odd(dict):
        def __reduce_ex__(self, protocol):
            raise ArithmeticError

    assert checksum_of_item([Odd()]) == "list"
    assert checksum_of_item(Odd()).endswith("Odd")


@pytest.mark.parametrize(
    ("workers", "way", "kind"),
    mostly_soak(
        product([0, 2], [endless, in_epochs], KINDS),
        [*zip([0, 0, 0, 0, 2, 2], [endless, in_epochs] * 3, KINDS * 2, strict=True)],
    ),
)
def test_a_resume_reads_few_items_again(tmp_path, said, kind, way, workers):
    """Seen to fail with marks that are never used."""
    read = tmp_path / "read"
    found = resumed(lambda: way(kind(LENGTHS, read), tmp_path / "marks", **fork(workers)), 300, 20)
    assert found == list(islice(stream(LENGTHS, LANES), 320))
    assert len(read.read_text().splitlines()) < 300 + 20 + 8 + 100
    assert said() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "every"),
    [
        (Saved, 1, 3),
        (Restarting, 2, 3),
        (OwnIterator, 3, 3),
        *(pytest.param(kind, 1, 1, marks=pytest.mark.soak) for kind in KINDS),
    ],
)
def test_a_resume_at_every_item(tmp_path, said, kind, first, every):
    """Seen to fail: a share that began behind its first items compared its next ones with those of the trial, and said
    that they were others."""
    lengths = [9, 6]
    whole = list(islice(stream(lengths, LANES), 40))
    for at in range(first, 34, every):
        assert resumed(lambda at=at: endless(kind(lengths), tmp_path / str(at)), at, 6) == whole[: at + 6]
    assert said() == []


class Shuffled(Saved):
    """Drops its shuffle buffer."""

    def __iter__(self):
        buffer, rng = [], random.Random(5)
        for item in super().__iter__():
            buffer.append(item)
            if len(buffer) == 20:
                yield buffer.pop(rng.randrange(20))
        yield from buffer


class OffByOne(Saved):
    def __iter__(self):
        own = [*self.own()]
        while self.at < len(own):
            yield own[self.at]
            self.at += 1


class OffByOneOverEqualItems(Saved):
    """Labels: each comes seven times in a row."""

    def __iter__(self):
        own = [*self.own()]
        while self.at < len(own):
            yield own[self.at][0] // 7, own[self.at][1]
            self.at += 1


class Packs(Saved):
    """Forgets the item with which the next pack begins."""

    def __iter__(self):
        pack = []
        for item in super().__iter__():
            if len(pack) == 3:
                yield tuple(pack)
                pack = []
            pack.append(item[0])


class Raises(Saved):
    def state_dict(self):
        raise ValueError("not now")


class Large(Saved):
    def state_dict(self):
        return {"at": self.at, "buffer": b"0" * 10_000_000}


class Objects(Saved):
    def state_dict(self):
        return {"at": self.at, "rng": random.Random(1)}


class Refuses(Saved):
    def load_state_dict(self, state):
        raise KeyError("version")


class Draws(Saved):
    """Its ``state_dict`` and ``load_state_dict`` draw, which must not show."""

    def state_dict(self):
        draw()
        return super().state_dict()

    def load_state_dict(self, state):
        draw()
        super().load_state_dict(state)


LIARS = [Shuffled, OffByOne, OffByOneOverEqualItems, Packs, Raises, Large, Objects, Refuses]


@pytest.mark.parametrize(
    ("way", "workers", "kind"),
    mostly_soak(
        ((*how, kind) for how in [(endless, 0), (in_epochs, 0), (endless, 2)] for kind in LIARS),
        [
            *((endless, 0, kind) for kind in LIARS),
            *((in_epochs, 0, kind) for kind in (OffByOne, Packs, Objects)),
            *((endless, 2, kind) for kind in (Shuffled, Large, Refuses)),
        ],
    ),
)
def test_one_that_lies_is_read_again_and_said_once(tmp_path, said, kind, way, workers):
    """Seen to fail with states that are used as they are, and with a warning in each process. Equal items prove
    nothing: they were a mark once."""
    with way(kind(LENGTHS), tmp_path / "none") as loader:
        whole = list(islice(loader, 130))
    before = len(said())
    assert before == 1
    assert resumed(lambda: way(kind(LENGTHS), tmp_path / "marks", **fork(workers)), 100, 30) == whole
    warned = said()[before:]
    assert 1 <= len(warned) <= 2, "one for each loader"
    assert all(f"the state_dict of {kind.__name__} is not used" in line for line in warned)


class Live(Saved):
    """Its ``state_dict`` is what it works with, and ``load_state_dict`` keeps what it is given."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.state = {"at": 0, "seen": []}

    def __iter__(self):
        own = [*self.own()]
        while self.state["at"] < len(own):
            self.state["at"] += 1
            self.state["seen"] = [*self.state["seen"][-3:], self.state["at"]]
            yield *own[self.state["at"] - 1], tuple(self.state["seen"])

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize("way", [endless, in_epochs])
def test_a_state_that_changes_later_is_kept_as_it_was(tmp_path, said, way):
    """For it is made JSON at once."""
    with way(Live(LENGTHS), tmp_path / "none") as loader:
        whole = list(islice(loader, 130))
    assert resumed(lambda: way(Live(LENGTHS), tmp_path / "marks"), 100, 30) == whole
    assert said() == []


@pytest.mark.parametrize("way", [endless, in_epochs])
def test_draws_around_a_state_do_not_show(tmp_path, way):
    """Neither in the items nor in the caller's generators."""
    before = generators()
    assert resumed(lambda: way(Draws(LENGTHS), tmp_path), 100, 30) == list(islice(stream(LENGTHS, LANES), 130))
    assert generators() == before


class Drawn(Saved):
    """Draws for each item from its number ``quiet`` on."""

    quiet = 0

    def __iter__(self):
        for item in super().__iter__():
            yield item, draw() if self.at > self.quiet else None


class DrawnLate(Drawn):
    quiet = 80


@pytest.mark.parametrize("kind", [Drawn, DrawnLate])
@pytest.mark.parametrize("at", [100, 190])
def test_draws_are_the_same_after_a_state(tmp_path, said, kind, at):
    """Seen to fail with items that are numbered from where the state stood."""
    with endless(kind(LENGTHS), tmp_path / "none") as loader:
        whole = list(islice(loader, at + 30))
    assert resumed(lambda: endless(kind(LENGTHS), tmp_path / "marks"), at, 30) == whole
    assert said() == []


def test_whatever_becomes_of_the_marks(tmp_path_factory):
    """Lines deleted, damaged, swapped between workers, or of another seed. Seen to fail with a line that is believed
    without its checksum."""
    folder = tmp_path_factory.mktemp("marks")
    for seed in (4, 3):
        with endless(Saved(LENGTHS), folder / str(seed), seed=seed) as loader:
            list(islice(loader, 600))
            state = loader.state_dict()
    whole = list(islice(stream(LENGTHS, LANES), 620))[600:]
    (marks,) = (folder / "3").glob("*/worker-0.jsonl")
    kept = {file.name: file.read_text().splitlines() for file in marks.parent.iterdir()}
    (other,) = (folder / "4").glob("*/worker-0.jsonl")
    others = {file.name: file.read_text().splitlines() for file in other.parent.iterdir()}
    assert all(len(lines) == 12 for lines in kept.values())

    @given(data=st.data())
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def law(data):
        for name, lines in kept.items():
            swapped = next(those for its, those in kept.items() if its != name)
            made = []
            for k, line in enumerate(lines):
                what = data.draw(
                    st.sampled_from(["kept", "deleted", "damaged", "short", "swapped", "other seed", "noise"])
                )
                damaged = line.replace('"at', '"ax') if k % 2 else line[:30] + chr(ord(line[30]) ^ 1) + line[31:]
                turned = {
                    "kept": line,
                    "damaged": damaged,
                    "short": line[:-7],
                    "swapped": swapped[k],
                    "other seed": others[name][k],
                    "noise": "\x00\ud7ff {}",
                }
                made += [turned[what]] if what in turned else []
            (marks.parent / name).write_text("".join(f"{line}\n" for line in made))
        with endless(Saved(LENGTHS), folder / "3") as loader:
            loader.load_state_dict(state)
            assert list(islice(loader, 20)) == whole

    law()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Saved, OwnIterator])
def test_a_killed_worker_s_share_is_read_from_its_last_state(tmp_path, kind):
    """A folder is not needed. Seen to fail with states in memory."""

    class Stateless(Saved):
        state_dict = load_state_dict = None

    read = {}
    for one in (kind, Stateless):
        file = tmp_path / one.__name__
        with endless(one(LENGTHS, file), True, **fork(1)) as loader:
            batches = iter(loader)
            found = list(islice(batches, 300))
            os.kill(worker_pids()[0], signal.SIGKILL)
            found += islice(batches, 60)
        assert found == list(islice(stream(LENGTHS, LANES), 360))
        read[one] = len(file.read_text().splitlines())
    assert read[Stateless] > 600
    assert read[kind] < 450


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path, said, workers):
    """Seen to fail: said by each process."""
    (tmp_path / "marks").write_text("a file")
    with in_epochs(Saved(LENGTHS), tmp_path / "marks", **fork(workers)) as loader:
        assert list(islice(loader, 130)) == list(islice(stream(LENGTHS, LANES), 130))
    (line,) = said()
    assert "costs only time" in line


def test_steps_hold_items_so_states_are_not_used(tmp_path):
    """Seen to fail with states under `Shuffle`."""
    from penstock import Shuffle

    def build(folder):
        data = Stream(Saved(LENGTHS), lanes=LANES, epoch_size=1000, steps=[Shuffle(16)], bookmarks=folder)
        return Loader.from_dataset(data, None, collate_fn=tuple, seed=3)

    with build(tmp_path / "none") as loader:
        whole = list(islice(loader, 330))
    assert resumed(lambda: build(tmp_path / "marks"), 300, 30) == whole
    assert not list(tmp_path.glob("marks/*/worker-*"))


class FailsOnce(Saved):
    """Raises OSError at the 150th item of a worker, once."""

    def note(self, item):
        super().note(item)
        if item == (149, 0) and not self.read.with_suffix(".failed").exists():
            self.read.with_suffix(".failed").touch()
            raise OSError("once")


@pytest.mark.parametrize("way", [endless, in_epochs])
def test_after_an_oserror_the_share_is_read_from_its_last_state(tmp_path, way, monkeypatch):
    """Seen to fail with retries that begin at the beginning."""
    monkeypatch.setattr(retrying, "LONGEST_PAUSE_S", 0.01)
    read = tmp_path / "read"
    with way(FailsOnce(LENGTHS, read), None if way is in_epochs else True) as loader:
        assert list(islice(loader, 360)) == list(islice(stream(LENGTHS, LANES), 360))
    assert len(read.read_text().splitlines()) < 360 + 8 + 30


class OtherLength(Saved):
    """Has fewer items when a share is read a second time."""

    def __iter__(self):
        for item in self.own():
            self.note(item)
            if item[0] % 20 < 10 or not self.read.with_suffix(".short").exists():
                yield item


def test_a_share_that_changes_its_length_is_said(tmp_path):
    """If its length was relied on, to skip it: what comes later would be other data. Seen to fail with counts that are
    not kept."""

    def build():
        return endless(OtherLength([20, 20], tmp_path / "read"), tmp_path / "marks")

    with build() as loader:
        begin = loader.state_dict()
        list(islice(loader, 50))
        later = loader.state_dict()
    with build() as loader:
        loader.load_state_dict(later)
        assert list(islice(loader, 10)) == list(islice(stream([20, 20], 2), 60))[50:]
        (tmp_path / "read.short").touch()
        loader.load_state_dict(begin)
        with pytest.raises(StateMismatch, match="20 outputs before .pass 0. and 10 now"):
            list(islice(loader, 50))
