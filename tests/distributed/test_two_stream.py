"""The batch samplers of examples/two_stream.py in one process: what they yield, and that a loader over them can be stopped anywhere."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

from penstock import Loader
from penstock.testing import Tagged, assert_resumes_everywhere

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def samplers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("two_stream")


def test_the_first_stream_is_passed_once_and_the_second_one_is_cycled(samplers: Any) -> None:
    sampler = samplers.TwoStreamBatchSampler(range(10), range(100, 107), primary_size=4, secondary_size=3)
    used: Counter[int] = Counter()
    for epoch in range(7):  # 63 samples of 7: each nine times
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert [len(batch) for batch in batches] == [7, 7, 5]
        assert len(sampler) == 3
        assert sorted(index for batch in batches for index in batch if index < 100) == list(range(10))
        used.update(index for batch in batches for index in batch if index >= 100)
        assert list(sampler) == batches
    assert used == dict.fromkeys(range(100, 107), 9)


def test_every_batch_has_p_classes_with_k_samples(samplers: Any) -> None:
    labels = [index % 6 for index in range(50)]
    sampler = samplers.PKBatchSampler(labels, p=2, k=4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler) == 3
        assert all(sorted(Counter(labels[index] for index in batch).values()) == [4, 4] for batch in batches)
        assert len({index for batch in batches for index in batch}) == 24
    with pytest.raises(ValueError, match="0 classes have at least 40 samples, but a batch needs 2 classes"):
        samplers.PKBatchSampler(labels, p=2, k=40)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1}, {"rank": 1, "split": "within"}])
def test_a_loader_of_two_streams_resumes_everywhere(samplers: Any, options: dict[str, Any]) -> None:
    def build() -> Loader[Any]:
        sampler = samplers.TwoStreamBatchSampler(range(12), range(100, 110), primary_size=4, secondary_size=2)
        return Loader.from_dataset(Tagged(200), batch_sampler=sampler, world_size=2, plan_ahead=False, **options)

    assert_resumes_everywhere(build, steps=7)


def test_a_dataloader_never_tells_the_epoch_and_a_loader_does(samplers: Any) -> None:
    """And each rank of a ``DataLoader`` draws the same batches."""
    sampler = samplers.TwoStreamBatchSampler(range(12), range(100, 110), primary_size=4, secondary_size=2)
    theirs = DataLoader(range(200), batch_sampler=sampler)
    epochs = [[batch.tolist() for batch in theirs] for _ in range(2)]
    assert epochs[0] == epochs[1]
    with Loader.from_dataset(range(200), batch_sampler=sampler, plan_ahead=False, rank=0, world_size=1) as ours:
        assert [batch.tolist() for batch in ours] == epochs[0]
        second = [batch.tolist() for batch in ours]
    assert second != epochs[0]
    sampler.set_epoch(1)
    assert second == list(sampler)
