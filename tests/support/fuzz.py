"""How many examples a fuzzed test tries: few and always the same ones, or as many times more as ``PENSTOCK_FUZZ`` says,
each time others."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("PENSTOCK_FUZZ", "1"))


def fuzzed(examples: int) -> Any:
    """The settings of a test that tries ``examples``, times ``PENSTOCK_FUZZ``."""
    return settings(
        max_examples=examples * TIMES,
        deadline=None,
        database=None,
        derandomize=TIMES == 1,
        suppress_health_check=list(HealthCheck),
    )
