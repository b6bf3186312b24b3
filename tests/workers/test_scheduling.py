"""Which policy of Linux's scheduler a worker process has."""

from __future__ import annotations

import os
import time
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import Dataset

from penstock import Loader

if not hasattr(os, "SCHED_BATCH"):
    pytest.skip("only Linux has these policies", allow_module_level=True)


class Works(Dataset[Any]):
    """Its samples are the policy of the worker before them. They take 20 ms of sleep, or of computing."""

    def __init__(self, sleeps: bool) -> None:
        self.sleeps = sleeps

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> int:
        policy, end = os.sched_getscheduler(0), time.thread_time() + 0.02
        while time.thread_time() < end:
            if self.sleeps:
                time.sleep(0.02)
                break
        return policy


def policies(loader: Loader[Any]) -> Any:
    return (int(policy) for policy in loader)


def test_a_worker_that_mostly_waits_gets_the_usual_policy_back() -> None:
    """Seen to fail: without `_look_at_waits`."""
    with Loader.from_dataset(Works(sleeps=True), batch_size=None, num_workers=1) as loader:
        found = policies(loader)
        assert next(found) == os.SCHED_BATCH
        assert os.SCHED_OTHER in found


def test_a_worker_that_computes_keeps_the_policy_that_lets_the_loop_run() -> None:
    """Seen to fail: with the comparison turned around."""
    with Loader.from_dataset(Works(sleeps=False), batch_size=None, num_workers=1) as loader:
        assert {*islice(policies(loader), 20)} == {os.SCHED_BATCH}


def test_a_policy_that_the_user_chose_is_kept() -> None:
    """Seen to fail: with workers that look at their waits under any policy."""
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with Loader.from_dataset(
            Works(sleeps=True), batch_size=None, num_workers=1, multiprocessing_context="fork"
        ) as loader:
            assert {*islice(policies(loader), 40)} == {os.SCHED_BATCH}
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))
