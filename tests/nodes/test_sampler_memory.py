"""Samplers that remember, and those that lie. What comes of any, in any order of calls:
`tests/loader/test_cursor.py`."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from penstock import Loader
from penstock._nodes import sampler_reading

BLOCK = 4


class Grows:
    """Every epoch begins like the first, and ends with one item more."""

    epoch = 0

    def __iter__(self) -> Any:
        yield from [*range(2 * BLOCK), *range(100, 100 + self.epoch)]
        self.epoch += 1


def test_a_memory_that_cannot_be_led_is_named(caplog: pytest.LogCaptureFixture, wrap: Any) -> None:
    """It is led forward, and cannot be moved back. Seen to fail: epoch 5 was given the order of epoch 1."""
    node = wrap(Grows())
    assert len(list(node)) == 2 * BLOCK
    node.reset(node.start(5))
    assert len(list(node)) == 2 * BLOCK + 5
    assert not caplog.records
    node.reset(node.start(0))
    assert len(list(node)) == 2 * BLOCK + 6
    assert "Grows may remember what it has yielded, and cannot be moved back, so epoch 0 is what it" in caplog.text


def test_a_memory_that_shows_only_at_the_end_of_an_epoch_is_found(monkeypatch: pytest.MonkeyPatch, wrap: Any) -> None:
    """Where the state's checksum is that of any epoch, and the sampler is read in blocks. Seen to fail: epoch 3 ended
    like epoch 0."""
    monkeypatch.setattr(sampler_reading, "CHUNK", BLOCK)
    node = wrap(Grows())
    node.reset({"epoch": 3, "position": 1, "checksum": zlib.crc32(np.arange(1).astype("<i8").tobytes())})
    assert [item.values for item in node if item.values >= 100] == [100, 101, 102]


class Lies:
    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Any:
        return iter(range(6))


def test_a_length_is_believed_until_an_epoch_shows_otherwise() -> None:
    with Loader.from_dataset(range(9), sampler=Lies()) as loader:
        assert len(loader) == 7
        with pytest.warns(
            UserWarning,
            match="Lies has a length of 7, but epoch 0 has 6 items. From now on the length counts as unknown",
        ):
            assert [batch.item() for batch in loader] == list(range(6))
        assert [batch.item() for batch in loader] == list(range(6))
        with pytest.raises(TypeError, match="no length"):
            len(loader)
