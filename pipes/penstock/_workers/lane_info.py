"""LaneInfo: what ``torch.utils.data.get_worker_info`` returns to a dataset that is read as one of several workers,
wherever that is.

Torch has one worker info per process. So it is set only while such a dataset works, and one thread at a time.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data._utils import worker as torch_worker

if TYPE_CHECKING:
    from collections.abc import Iterator


class LaneInfo(torch_worker.WorkerInfo):
    """The info of one worker. Notes whether it was ``asked`` for what tells workers apart."""

    asked = False

    def __init__(self, worker: int, workers: int, seed: int, dataset: Any) -> None:
        super().__init__(id=worker, num_workers=workers, seed=seed, dataset=dataset)

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "seed"):
            object.__setattr__(self, "asked", True)
        return super().__getattribute__(name)


_one_at_a_time = threading.RLock()


def _forked() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.RLock()  # another thread of the parent may have held it
    if type(torch_worker._worker_info) is LaneInfo:
        torch_worker._worker_info = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@contextmanager
def seen_as(info: LaneInfo) -> Iterator[None]:
    """In this context ``get_worker_info`` returns ``info``."""
    with _one_at_a_time:
        before = torch_worker._worker_info
        try:
            torch_worker._worker_info = info
            yield
        finally:
            torch_worker._worker_info = before


def next_as(info: LaneInfo, iterator: Any) -> Any:
    """``next(iterator)`` in that context, faster."""
    with _one_at_a_time:
        before = torch_worker._worker_info
        try:
            torch_worker._worker_info = info
            return next(iterator)
        finally:
            torch_worker._worker_info = before
