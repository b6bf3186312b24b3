"""Which small values the loop may share with the workers."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import multiprocessing.sharedctypes
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
import torch

from penstock._fetch.shared_values import shared_in

KEPT = multiprocessing.Value("i", 0)
"""The first one opens a file, which stays open as long as the process lives."""


class Holds:
    def __init__(self, value):
        self.value = value


class Told(Holds):
    def set_epoch(self, epoch):
        self.value.fill_(epoch)


def path_of(value):
    return shared_in({"dataset": Holds([value]), "nothing": None})


SHARED = {
    "Value": lambda: multiprocessing.Value("i", 0),
    "RawValue": lambda: multiprocessing.sharedctypes.RawValue(ctypes.c_long, 0),
    "Array": lambda: multiprocessing.Array("d", 3),
    "RawArray seen as an array": lambda: np.frombuffer(multiprocessing.RawArray("l", 4), "l"),
    "tensor": lambda: torch.zeros(3).share_memory_(),
    "tensor seen as an array": lambda: torch.zeros(3).share_memory_().numpy()[1:],
    "mapped page": lambda: mmap.mmap(-1, 100),
    "a part of a mapped page": lambda: np.frombuffer(mmap.mmap(-1, 10_000), np.uint8)[:10],
    "Event": multiprocessing.Event,
    "Lock": multiprocessing.Lock,
    "Condition": multiprocessing.Condition,
}
PRIVATE = {
    "large Array": lambda: multiprocessing.Array("d", 300),
    "large tensor": lambda: torch.zeros(300).share_memory_(),
    "tensor": lambda: torch.zeros(3),
    "tensor seen as an array": lambda: torch.zeros(3).numpy(),
    "bytes seen as an array": lambda: np.frombuffer(b"abcd", np.uint8),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "ctypes": lambda: ctypes.c_int(3),
    "told": lambda: Told(torch.zeros(()).share_memory_()),
    "told, inside": lambda: Holds(Told(torch.zeros(()).share_memory_())),
}


@pytest.mark.parametrize("what", SHARED)
def test_what_is_shared(what):
    """Seen to fail: each kind left out."""
    assert path_of(SHARED[what]()).startswith("dataset.value[0]")


@pytest.mark.parametrize("what", PRIVATE)
def test_what_is_not(what):
    """Large memory is data, and what has a ``set_epoch`` may keep its epoch there. Seen to fail: each of these."""
    assert path_of(PRIVATE[what]()) is None


def test_a_block_of_shared_memory():
    block = SharedMemory(create=True, size=100)
    try:
        assert path_of(block) == "dataset.value[0]._mmap"
        seen = np.ndarray((3,), np.uint8, block.buf)
        assert path_of(seen) == "dataset.value[0]"
        del seen
    finally:
        block.close()
        block.unlink()


def test_what_a_manager_keeps():
    with multiprocessing.Manager() as manager:
        assert path_of(manager.dict()) == path_of(manager.Value("i", 0)) == "dataset.value[0]"
        assert path_of(manager.Event()) == "dataset.value[0]"
