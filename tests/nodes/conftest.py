"""What the tests of several nodes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.nodes import SamplerWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def wrap() -> Iterator[Callable[..., SamplerWrapper]]:
    """A `SamplerWrapper`, shut down behind the test."""
    made: list[SamplerWrapper] = []

    def build(*args: Any, **options: Any) -> SamplerWrapper:
        made.append(SamplerWrapper(*args, **options))
        return made[-1]

    yield build
    for node in made:
        node.shutdown()
