"""Recycled memory: the parts of a batch that a user keeps never change, however they are kept; memory that nothing
views is reused.

Sample i of epoch e is full of ``1000 * e + i``, so that a batch says what it ought to be; and what is kept is
remembered with a checksum, because ordinary data has no address.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import random
import resource
import signal
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from children import in_a_child
from pairwise import pairwise
from worker_pids import worker_pids

import penstock
from comparison import difference
from penstock import Loader
from penstock._memory.buffers import carved, carved_bytes
from penstock._memory.parcel import Parcel, unpack
from penstock._memory.recycler import LARGE
from penstock._memory.shared_memory import attach
from penstock._memory.slots import KEPT, NO_SLOT, KeptBatches, SlotTable
from penstock._memory.tree import leaves
from penstock._workers.processes.slot_maker import WorkerSlots

KINDS = {
    "inline": {"num_workers": 0},
    "threads": {"num_workers": 2, "method": "thread"},
    "processes": {"num_workers": 2, "method": "process", "multiprocessing_context": "fork"},
}
by_kind = pytest.mark.parametrize("kind", KINDS)


class Full:
    """Samples of several tensors and arrays. The first has ``floats`` values, so four samples take 16 bytes times
    that."""

    def __init__(self, n=40, floats=LARGE // 16):
        self.n, self.floats = n, floats

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        value = 1000 * penstock.sample().epoch + index
        return {
            "x": torch.full((self.floats,), float(value)),
            "pair": [np.full((50, 40), value), value],
            "bits": torch.full((8,), value, dtype=torch.bfloat16),
            "name": f"{value}",
        }


def check_batch(batch, epoch, number, size=4):
    expected = [1000 * epoch + number * size + row for row in range(len(batch["x"]))]
    assert batch["x"].amin(1).tolist() == batch["x"].amax(1).tolist() == expected
    assert batch["pair"][0].amin((1, 2)).tolist() == batch["pair"][0].amax((1, 2)).tolist() == expected
    assert batch["pair"][1].tolist() == expected
    assert batch["name"] == [f"{value}" for value in expected]


# Ways to keep part of a batch. Each returns a function that returns the current bytes, and holds nothing else.


def plainly(batch):
    return lambda: batch["x"].numpy().tobytes() + batch["pair"][0].numpy().tobytes()


def of(make):
    def keep(batch):
        kept = make(batch)
        return lambda: np.ascontiguousarray(kept).tobytes()

    return keep


def storage(batch):
    kept = batch["x"].untyped_storage()
    return lambda: torch.empty(0).set_(kept).numpy().tobytes()


def saved_by_autograd(batch):
    weight = torch.ones(batch["x"].shape[1], requires_grad=True)
    product = (batch["x"] * weight).sum()
    return lambda: torch.autograd.grad(product, weight, retain_graph=True)[0].numpy().tobytes()


class InAThread:
    """Only a thread holds the view."""

    def __init__(self, batch):
        self.part, self.asked, self.told = batch["x"][1:3], threading.Event(), threading.Event()
        threading.Thread(target=self.hold, args=(self.__dict__.pop("part"),), daemon=True).start()

    def hold(self, part):
        while self.asked.wait() and not self.__dict__.get("over"):
            self.asked.clear()
            self.bytes = part.numpy().tobytes()
            self.told.set()

    def __call__(self):
        self.told.clear()
        self.asked.set()
        self.told.wait()
        return self.bytes

    def end(self):
        self.over = True
        self.asked.set()


WAYS = [
    plainly,
    of(lambda batch: batch["pair"][0].numpy()),
    of(lambda batch: batch["pair"].pop(0)),
    of(lambda batch: batch["x"][2]),
    of(lambda batch: batch["x"][1:, 7:-7:3]),
    of(lambda batch: list(batch["x"])[-1]),
    of(lambda batch: batch["x"].t()[3:50:7].detach().view(torch.int32).T),
    of(lambda batch: np.from_dlpack(batch["x"])[0]),
    of(lambda batch: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(batch["x"]))),
    of(lambda batch: memoryview(batch["x"].numpy())),
    of(lambda batch: np.lib.stride_tricks.sliding_window_view(batch["x"].numpy()[0, :100], 5)),
    of(lambda batch: torch.nn.Parameter(batch["x"]).detach()),
    of(lambda batch: batch["bits"].view(torch.int16)),
    of(lambda batch: np.asarray(batch["x"]).view(np.uint8)[:, 3:9]),
    storage,
    saved_by_autograd,
    InAThread,
]


class Keeper:
    """Keeps parts of batches for a while, and checks them when it drops them."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.held = []

    def keep(self, batch):
        for _ in range(self.chance.choice([0, 0, 1, 1, 2])):
            look = self.chance.choice(WAYS)(dict(batch, pair=list(batch["pair"])))
            self.held.append((look, zlib.crc32(look())))

    def let_go(self, most):
        while len(self.held) > most:
            self.check(self.held.pop(self.chance.randrange(len(self.held))))

    def check(self, one):
        look, checksum = one
        assert zlib.crc32(look()) == checksum, "something that was kept has changed"
        if isinstance(look, InAThread):
            look.end()


def keep_and_check(options, seed, batches, floats, *, kill=0.0):
    keeper = Keeper(seed)
    number = epoch = 0
    with Loader.from_dataset(Full(floats=floats), batch_size=4, max_restarts=1000, **options) as loader:
        iterator = iter(loader)
        for _ in range(batches):
            try:
                batch = next(iterator)
            except StopIteration:
                iterator = iter(loader)
                number, epoch = 0, epoch + 1
                batch = next(iterator)
            check_batch(batch, epoch, number)
            keeper.keep(batch)
            del batch
            keeper.let_go(keeper.chance.randrange(12))
            number += 1
            if keeper.chance.random() < kill:
                with contextlib.suppress(ProcessLookupError, IndexError):  # it is being replaced, or all are
                    os.kill(keeper.chance.choice(worker_pids()), signal.SIGKILL)
            if keeper.chance.random() < 0.05 and number < 10:
                state = loader.state_dict()
                loader.load_state_dict(state)
                iterator = iter(loader)
    for one in keeper.held:
        keeper.check(one)


@by_kind
@pytest.mark.parametrize(
    ("floats", "seed", "steps"),
    [(12_000, 7, 25), *(pytest.param(*case, marks=pytest.mark.soak) for case in [(12_000, 1, 200), (125_000, 2, 100)])],
)
def test_what_is_kept_never_changes(kind, floats, seed, steps):
    """The main property. Seen to fail: `SlotTable.view` with a reference to a slice of the view; `SlotTable.lend`
    lending the oldest viewed slot; `give_back` of the slot that holds the answer; `carved` over the memory itself.
    """
    keep_and_check(KINDS[kind], seed, steps, floats)


@pytest.mark.slow
def test_what_is_kept_outlives_the_workers_that_made_it(caplog):
    """Workers are killed by SIGKILL now and then."""
    keep_and_check(KINDS["processes"], 5, 60, 12_000, kill=0.1)


@by_kind
def test_each_way_of_keeping(kind):
    """One batch is kept in each way while others arrive, twelve behind the last. Seen to fail: as above."""
    keeper = Keeper(0)
    with Loader.from_dataset(Full(n=4 * (len(WAYS) + 12), floats=LARGE // 16), batch_size=4, **KINDS[kind]) as loader:
        batches = iter(loader)
        for way in WAYS:
            look = way(next(batches))
            keeper.held.append((look, zlib.crc32(look())))
        for _ in batches:
            for look, checksum in keeper.held:
                assert zlib.crc32(look()) == checksum
    keeper.let_go(0)


# Keeping all batches.


@pytest.mark.slow
@by_kind
def test_a_list_of_all_batches(kind, caplog):
    """The loader does not hang, and warns once."""
    batches = KEPT + 40 if kind == "processes" else KEPT // 2 + 30  # more are in work there
    with Loader.from_dataset(Full(n=4 * batches, floats=LARGE // 16), batch_size=4, **KINDS[kind]) as loader:
        kept = [list(loader) for _ in range(2)]
    for epoch, those in enumerate(kept):
        for number, batch in enumerate(those):
            check_batch(batch, epoch, number)
    (record,) = caplog.records
    assert record.name == "penstock"
    assert "batches are still in use" in caplog.text


def test_a_wide_window_is_not_the_users(caplog):
    """Batches that wait for delivery do not count as kept by the user. Seen to fail: `Recycler` without ``in_work``."""
    with Loader.from_dataset(
        Full(n=4 * KEPT, floats=LARGE // 4), batch_size=1, num_workers=2, prefetch_factor=KEPT, method="thread"
    ) as loader:
        batches = iter(loader)
        first = next(batches)
        while loader.statistics().nodes[-1].workers.tasks < 2 * KEPT:  # the whole window is loaded
            time.sleep(0)
        check_batch(first, 0, 0)
    assert "still in use" not in caplog.text


@by_kind
def test_memory_is_used_again(kind):
    """Seen to fail: `lend` always returning `NO_SLOT`."""
    with Loader.from_dataset(Full(n=400, floats=LARGE // 16), batch_size=4, prefetch_factor=2, **KINDS[kind]) as loader:
        addresses = []
        for batch in loader:
            while sys.getrefcount(batch) > 2:  # a thread may still be about to let go of it
                pass
            addresses.append(batch["x"].data_ptr())
    # batches in progress, one held by the user, and the first
    at_once = {"inline": 3, "threads": 7, "processes": 12}[kind]
    # a slot that was idle for so many tasks had been dropped
    made_again = 0 if kind == "inline" else len(addresses) // SlotTable.PERIOD
    assert len(set(addresses[5:])) <= at_once + made_again


@by_kind
def test_a_batch_may_be_written_to(kind):
    """The user may write to a batch, and no other batch changes."""
    with Loader.from_dataset(Full(n=40, floats=LARGE // 16), batch_size=4, **KINDS[kind]) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                check_batch(batch, loader.epoch, number)
                batch["x"].fill_(-1)
                batch["pair"][0].numpy()[:] = -1
                batch["bits"].zero_()


# After the loader.


@by_kind
def test_after_close(kind, caplog):
    """All batches of an epoch; so few are kept without a warning."""
    loader = Loader.from_dataset(Full(n=80, floats=LARGE // 16), batch_size=4, **KINDS[kind])
    batches = list(loader)
    loader.close()
    del loader
    gc.collect()
    for number, batch in enumerate(batches):
        check_batch(batch, 0, number)
        batch["x"].mul_(2)
    assert caplog.text == ""


@pytest.mark.slow
@by_kind
@pytest.mark.parametrize("dropped", [False, True])
def test_in_a_forked_child(kind, dropped):
    """The child's view stays valid even if the parent drops the batch and the workers fill others; so does the parent's
    if the child lets go."""
    options = {**KINDS[kind], "num_workers": min(1, KINDS[kind]["num_workers"])}
    with Loader.from_dataset(Full(n=160, floats=LARGE // 16), batch_size=4, **options) as loader:
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(6)]
        sums = [zlib.crc32(batch["x"].numpy().tobytes()) for batch in kept]

        def body(wait):
            wait()
            assert [zlib.crc32(batch["x"].numpy().tobytes()) for batch in kept] == sums
            kept.clear()
            gc.collect()

        end = in_a_child(body)
        del body
        if dropped:
            kept.clear()
        for number in range(6, 30):
            check_batch(next(iterator), 0, number)
        end()
        for number in range(30, 40):
            check_batch(next(iterator), 0, number)
        for number, batch in enumerate(kept):
            check_batch(batch, 0, number)


# Data that travels beside the batch.


class Beside:
    """A batch of 0.2 MB, with so much other data that both together need another slot."""

    def __init__(self, chars, varies):
        self.chars, self.varies = chars, varies

    def __len__(self):
        return 80

    def __getitem__(self, index):
        many = self.chars * (index % 3) if self.varies else self.chars
        return {"x": torch.full((12_500,), float(index)), "s": chr(97 + index % 26) * many, "o": (index,)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chars", "varies", "keeps"), pairwise([10, 1_000, 30_000, 300_000], [False, True], [False, True])
)
def test_big_strings_beside_a_batch_in_place(chars, varies, keeps):
    """Seen to fail: `send` without ``other=True``, which overwrites buffers that it has not copied yet."""
    kept = []
    with Loader.from_dataset(Beside(chars, varies), batch_size=4, **KINDS["processes"]) as loader:
        for number, batch in enumerate(loader):
            for row, index in enumerate(range(4 * number, 4 * number + 4)):
                assert set(batch["x"][row].tolist()) == {float(index)}
                assert batch["s"][row] == chr(97 + index % 26) * (chars * (index % 3) if varies else chars)
            if keeps and number % 2:
                kept.append((number, batch))
    for number, batch in kept:
        assert batch["x"][:, ::5000].tolist() == [[float(4 * number + row)] * 3 for row in range(4)]


@pytest.mark.parametrize("kind", ["inline", "threads"])
def test_what_a_collate_fn_returns_is_handed_over(kind):
    """Without workers and with threads nothing is copied. Seen red with a copy."""
    made = []

    def collate(samples):
        made.append(torch.tensor(samples))
        return {"x": made[-1]}

    with Loader.from_dataset(range(40), 4, collate_fn=collate, **KINDS[kind]) as loader:
        for number, batch in enumerate(loader):
            assert batch["x"].tolist() == list(range(4 * number, 4 * number + 4))
            assert any(batch["x"] is one for one in made)


class Tagged(torch.Tensor):
    """A tensor of a class of one's own."""


FORMS = {
    "a tensor": lambda own: own,
    "a dict": lambda own: {"row": own[1], "all": own, "": own[2]},
    "a list": lambda own: [own[0], own[2]],
    "a tuple": lambda own: (own[1:],),
    "one twice": lambda own: {"one": own, "other": own},
    "columns": lambda own: {"columns": own.T, "every third": own[0, ::3]},
    "empty": lambda own: {"empty": own[:0], "row": own[0]},
    "a class": lambda own: {"tagged": own.as_subclass(Tagged)},
    "an attribute": lambda own: {"labelled": labelled(own[0])},
    "half": lambda own: [own.bfloat16(), own.half()],
    "other names": lambda own: {0: own[0], "deeper": [own[1]]},
    "a leaf": lambda own: {"leaf": own.double().requires_grad_()},
    "transposed": lambda own: own.reshape(5000, 3).T,
    "arrays": lambda own: {"array": own.numpy(), "fortran": np.asfortranarray(own.numpy()), "empty": np.empty((0, 5))},
    "read-only": lambda own: [np.broadcast_to(np.float32(own[0, 0]), (20_000,)), None],
    "a number": lambda own: {"scalar": own[0, 0].clone()},
}


def labelled(tensor):
    tensor.label = "a label"
    return tensor


class Reusing:
    """A collate_fn that writes every batch into the same tensors, and returns them, each time in another form."""

    def __init__(self, shared):
        self.own = torch.zeros(3, 5000, dtype=torch.int64)
        self.shared = shared

    def __call__(self, samples):
        if self.shared:
            self.own.share_memory_()  # not before: the memory is this worker's
        self.own.fill_(samples[0])
        return [*FORMS.values()][samples[0] % len(FORMS)](self.own)


@pytest.mark.parametrize("shared", [False, True])
def test_a_collate_fn_may_change_later_what_it_returned(shared):
    """Also if it lies in shared memory. Seen red with a parcel that did not copy, and with one tensor at two places
    that came as two."""
    n = 4 * len(FORMS)
    with Loader.from_dataset(range(n), 1, collate_fn=Reusing(shared), **KINDS["processes"]) as loader:
        batches = list(loader)
    for index, batch in enumerate(batches):
        expected = [*FORMS.values()][index % len(FORMS)](torch.full((3, 5000), index))
        assert difference(batch, expected) is None
        assert [vars(one) for one in leaves(batch) if isinstance(one, torch.Tensor)] == [
            vars(one) for one in leaves(expected) if isinstance(one, torch.Tensor)
        ]
    twice = batches[list(FORMS).index("one twice")]
    assert twice["one"] is twice["other"]


@pytest.mark.slow
def test_sizes_around_the_edges():
    """The edges are those of the small buffer (64 KiB), of the slot sizes, and of recycling. Seen to fail: a slot taken
    that is too small."""
    sizes = [1, 63, 64, 15_000, 16_000, 16_300, 16_384, 16_400, 32_700, 32_768, 33_000, 60_000]

    class Sized:
        def __len__(self):
            return len(sizes) * 4

        def __getitem__(self, index):
            return torch.full((sizes[index % len(sizes)],), index, dtype=torch.float32), "x" * 50

    for options in KINDS.values():
        with Loader.from_dataset(Sized(), batch_size=1, **options) as loader:
            for number, (row, (text,)) in enumerate(loader):
                assert row.shape == (1, sizes[number % len(sizes)])
                assert row.min() == row.max() == number
                assert text == "x" * 50


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128, torch.float8_e5m2])
def test_tensors_that_are_carved_are_aligned_and_do_not_overlap(dtype):
    """Seen to fail: `aligned` as the identity."""
    specs = [((3, 5), dtype), ((), dtype), ((0, 4), dtype), ((7,), dtype), ((2, 1, 3), dtype)]
    memory = np.zeros(carved_bytes(specs) + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: carved_bytes(specs)]
    tensors = carved(memory, specs)
    assert [(tuple(one.shape), one.dtype) for one in tensors] == specs
    assert all(one.data_ptr() % 64 == 0 for one in tensors if one.numel())
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors if one.numel())
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    assert spans[-1][1] <= memory.ctypes.data + len(memory)


def test_a_worker_lets_go_of_memory_that_was_too_small():
    """A batch that is loaded twice asks twice. Seen to fail: the file that was closed, the slot that was unmapped, left
    out."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:penstock")

    maker, before = WorkerSlots(), mapped()
    maker.begin(memoryview(bytearray(65536)), NO_SLOT)
    for length in (50_000, 90_000):
        (rows,) = maker.allocate([((length,), torch.float32)])
        rows.fill_(length)
    assert mapped() == before + 1
    _, size, start, _, fd = maker.send(Parcel(rows))
    memory = attach(fd, size)
    os.close(fd)
    assert unpack(np.frombuffer(memory, np.uint8), start).eq(90_000).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_a_worker_cannot_map_is_memory_that_is_short():
    """Seen to fail: an `OSError`, which ends the worker instead of being answered; and the memory was kept, also where
    only the file was closed."""

    def kept():
        files = [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and "memfd:penstock" in os.readlink(fd)]
        return sum(file.stat().st_blocks for file in files)

    maker, parcel = WorkerSlots(), Parcel(torch.zeros(2**24))

    def worker(_):
        maker.begin(memoryview(bytearray(65536)), NO_SLOT)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(
            resource.RLIMIT_AS, (pages * mmap.PAGESIZE + 2**24, resource.getrlimit(resource.RLIMIT_AS)[1])
        )
        before = kept()
        with pytest.raises(MemoryError, match="no shared memory for a result of 6"):
            maker.send(parcel)
        assert kept() == before

    in_a_child(worker)()


def test_a_slot_that_cannot_be_mapped_is_dropped():
    slots = SlotTable(KeptBatches())
    slots.add(3, None)
    assert slots.dropped(1) == [3]


# Releasing the memory.


def segments():
    """How many segments of worker processes are mapped in this process."""
    gc.collect()
    return sum("penstock" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.slow
def test_memory_is_given_back():
    """The memory is freed with the last batch, after the loader."""
    before = segments()
    with Loader.from_dataset(Full(n=96, floats=LARGE // 16), batch_size=4, **KINDS["processes"]) as loader:
        kept = [batch["x"][0] for batch in loader]
    assert segments() >= before + 20
    kept = kept[:2]
    assert segments() <= before + 2
    del kept
    assert segments() == before
