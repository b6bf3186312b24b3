"""What the training loop does around ``next`` does not reach the batches: they are the same in whatever mode, and
wherever, they are loaded."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, TensorDataset, get_worker_info
from torch_modes import every_mode, seen
from ways import every_way

import penstock
from penstock import Loader, Resident
from penstock._memory.tree import leaves
from penstock.orders import TorchOrder

N, BATCH = 8, 4


class Samples:
    """A bit of everything, with what its own code sees of the modes."""

    def __init__(self, side=2):
        self.side = side

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {
            "tensor": torch.full((self.side, self.side), float(index)),
            "array": np.full((self.side, self.side), index, np.float32),
            "number": index / 4,
            "scalar": np.float32(index),
            "integer": index,
            "seen": repr(seen()),
        }


class Stream(IterableDataset):
    def __iter__(self):
        return map(Samples().__getitem__, range(N))


def rows(n=N):
    return TensorDataset(torch.arange(float(n))[:, None].expand(n, 3).contiguous(), torch.arange(n))


DATASETS = {
    "samples": Samples,
    "large samples": lambda: Samples(100),
    "stream": Stream,
    "tensors": rows,
    "parts": lambda: ConcatDataset([rows(3), rows(5)]),
}


def plain(batch):
    """A batch in values: what two that are the same have in common."""
    return [
        (leaf.dtype, leaf.device.type, leaf.requires_grad, leaf.is_inference(), leaf.is_meta or leaf.numpy().tobytes())
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves(batch)
    ]


@every_way
@pytest.mark.parametrize("dataset", DATASETS)
def test_batches_are_the_same_in_any_mode(dataset, way):
    """The loader's workers are started in it too, so a fork inherits it. Seen to fail: without `neutral_modes` in
    `inline` and `IterableSource` (inline), in `together` (the first batch of threads and processes), in
    `WorkerHandle.value` and in `worker_main` (processes).
    """
    expected = [plain(batch) for batch in Loader.from_dataset(DATASETS[dataset](), batch_size=BATCH)]
    assert len(expected) == 2
    with Loader.from_dataset(DATASETS[dataset](), batch_size=BATCH, **way) as loader:
        with every_mode():
            batches = list(loader)
        assert [plain(batch) for batch in batches] == expected


def test_an_autocast_for_a_device_that_is_not_there_is_passed_over():
    """It is none of the modes that can be left. Seen to fail: a RecursionError."""
    torch.set_autocast_enabled("hpu", True)
    try:
        with Loader.from_dataset(range(8), batch_size=4) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    finally:
        torch.set_autocast_enabled("hpu", False)


@every_way
def test_a_batch_that_came_in_inference_mode_can_be_trained_on(way):
    """Seen to fail: "Inference tensors cannot be saved for backward"; of threads, in the first batch, which the
    consumer puts together."""
    for make in (Samples, rows, Stream, lambda: Resident(rows())):
        weight = torch.zeros((), requires_grad=True)
        made = make()
        options = {} if isinstance(made, Resident) else way
        with Loader.from_dataset(made, batch_size=BATCH, **options) as loader:
            with torch.inference_mode():
                batches = list(loader)
            for batch in batches:
                values = batch["tensor"][:, 0, 0] if isinstance(batch, dict) else batch[0][:, 0]
                (values * weight).sum().backward()
        assert weight.grad == sum(range(N))


@every_way
def test_user_code_runs_with_gradients_wherever_it_runs(way):
    """Under the consumer's ``torch.no_grad`` too, as in a worker. Seen to fail: inline, and for the first batch of
    threads, it did not."""
    weight = torch.ones(2)

    def collate(samples):
        return (weight.requires_grad_() * len(samples)).requires_grad

    with Loader.from_dataset(range(N), batch_size=BATCH, collate_fn=collate, **way) as loader, torch.no_grad():
        assert list(loader) == [True, True]


def test_resident_data_loaded_in_inference_mode_can_be_trained_on():
    """Seen to fail: a row of them was an inference tensor."""
    dataset = rows()
    with torch.inference_mode(), torch.device("meta"):
        resident = Resident(dataset)
    weight = torch.ones(3, requires_grad=True)
    (resident[2][0] * weight).sum().backward()
    assert weight.grad.tolist() == [2, 2, 2]


def test_augment_is_in_no_mode_of_the_consumers():
    resident = Resident(rows(), augment=lambda batch, rng: [*batch, seen(), rng.uniform().dtype])
    with Loader.from_dataset(resident, batch_size=BATCH) as loader:
        expected = [plain(batch) for batch in loader]
        with every_mode():
            batches = list(loader)
    assert [plain(batch) for batch in batches] == expected


@every_way
def test_default_collate_does_not_follow_the_default_dtype(way):
    """Numbers are float64, as they are from a ``DataLoader``, in whatever process they are collated."""
    samples = [(0.5 * k, k, np.float32(k), np.full(2, k / 2), True) for k in range(N)]
    expected = [plain(batch) for batch in Loader.from_dataset(samples, batch_size=BATCH)]
    with Loader.from_dataset(samples, batch_size=BATCH, **way) as loader:
        before = torch.get_default_dtype()
        for dtype in (torch.float64, torch.float16):
            torch.set_default_dtype(dtype)
            try:
                batches = list(loader)
            finally:
                torch.set_default_dtype(before)
            assert [plain(batch) for batch in batches] == expected


def test_an_order_of_torchs_is_drawn_on_the_cpu():
    """Seen to fail: ``torch.randperm`` on the default device."""
    expected = TorchOrder(N, 3).plan(1).tolist()
    with torch.device("meta"):
        assert TorchOrder(N, 3).plan(1).tolist() == expected


class WithoutGradients(IterableDataset):
    """Yields within ``torch.no_grad``, item by item or all of them; reports the mode after each ``yield``."""

    def __init__(self, around):
        self.around = around

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        if self.around == "all":
            with torch.no_grad():
                for number in range(first, N, step):
                    yield number, torch.is_grad_enabled()
        else:
            for number in range(first, N, step):
                enabled = torch.is_grad_enabled()
                with torch.no_grad():
                    yield number, enabled


def computed(records):
    """A step that computes without gradients."""
    with torch.no_grad():
        for number, _ in records:
            yield number, torch.is_grad_enabled()


def opened(shard):
    return ((number, True) for number in range(shard, N, 2))


FORWARD = {
    "iterable": lambda around, **way: Loader.from_dataset(WithoutGradients(around), batch_size=2, **way),
    "own epochs": lambda around, **way: Loader.from_dataset(WithoutGradients(around), batch_size=2, lanes=2, **way),
    "stream": lambda around, **way: Loader.from_dataset(
        penstock.Stream(WithoutGradients(around), lanes=2, epoch_size=N), batch_size=2, **way
    ),
    "step": lambda around, **way: Loader.from_dataset(
        penstock.Stream(2, opened, epoch_size=N, steps=[computed]), batch_size=2, shuffle=False, **way
    ),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("around", ["all", "each"])
@pytest.mark.parametrize("name", FORWARD)
def test_a_generator_that_yields_without_gradients_leaves_them_to_the_loop(name, around, workers):
    """It goes on without them, after a break too. Seen to fail without workers: the loop had none, and none after it;
    and where they were only put back, the generator went on with gradients."""
    expected = around == "each" and name != "step"
    for outside in (contextlib.nullcontext, torch.no_grad):
        with FORWARD[name](around, num_workers=workers) as loader, outside():
            mode = torch.is_grad_enabled()
            for batches in (1, 4):
                found = 0
                for _, enabled in itertools.islice(loader, batches):
                    assert torch.is_grad_enabled() == mode
                    assert enabled.tolist() == [expected] * 2
                    found += 1
                assert found == batches
            assert torch.is_grad_enabled() == mode
        assert torch.is_grad_enabled()
