"""A dataset that holds a generator is copied with it, and only its copies draw from theirs."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset, get_worker_info

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LANES = 3


class Noisy(IterableDataset[int]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        for _ in range(8):
            yield 1000 * info.id + int(self.rng.integers(1000))


def plus_one(item: int) -> int:
    return item + 1


def streamed(**words: Any) -> penstock.Loader:
    return penstock.Loader.from_dataset(penstock.Stream(Noisy(), lanes=LANES, epoch_size=24), batch_size=None, **words)


def in_lanes(**words: Any) -> penstock.Loader:
    return penstock.Loader.from_dataset(Noisy(), lanes=LANES, batch_size=None, **words)


@pytest.mark.parametrize("build", [streamed, in_lanes])
@pytest.mark.parametrize("words", [{}, {"transform": plus_one}], ids=["plain", "transform"])
def test_a_generator_of_the_dataset_is_copied_and_not_seeded(
    build: Callable[..., penstock.Loader], words: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Seen to fail: the copies' generators were found in the lanes, and seeded for each sample once they were."""
    draws = np.random.default_rng(3).integers(1000, size=8).tolist()
    expected = [1000 * worker + draw + len(words) for draw in draws for worker in range(LANES)]
    with caplog.at_level(logging.WARNING, "penstock"), build(**words) as loader:
        assert list(islice(loader, 24)) == expected
    assert caplog.messages == []


@pytest.mark.slow
@pytest.mark.parametrize("build", [streamed, in_lanes])
def test_a_generator_of_the_dataset_is_copied_in_workers(build: Callable[..., penstock.Loader]) -> None:
    with build() as loader, build(num_workers=2) as other:
        assert list(other) == list(loader)


def noted(items: Iterator[int]) -> Iterator[tuple[int, float]]:
    for item in items:
        yield drawn(item)


def drawn(item: int) -> tuple[int, float]:
    return item, float(penstock.sample().rng.random())


@pytest.mark.parametrize(
    "build",
    [
        lambda: penstock.Loader.from_dataset(
            penstock.Stream(4, range, lanes=2, epoch_size=20, steps=[noted], bookmarks=False), batch_size=None
        ),
        lambda: penstock.Loader.from_dataset(
            penstock.Stream(Noisy(), lanes=2, epoch_size=16, steps=[noted]), batch_size=None
        ),
        lambda: in_lanes(transform=drawn),
    ],
    ids=["files", "streamed", "in lanes"],
)
def test_the_generator_of_a_record_is_no_generator_of_the_dataset(
    build: Callable[[], penstock.Loader], caplog: pytest.LogCaptureFixture
) -> None:
    """Seen to fail: those of the records that the lanes were at were found, and a warning said that they were seeded
    too late."""
    with caplog.at_level(logging.WARNING, "penstock"), build() as loader:
        draws = [draw for _, draw in loader]
    assert caplog.messages == []
    assert len({*draws}) == len(draws)
