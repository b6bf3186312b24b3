"""``transform=``: applied to each sample in the workers, with the sample's own random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from ways import every_way

import penstock
from penstock import Cached, Loader
from penstock._random.sample_rng import numpy_generator
from penstock.nodes import Fetch

N = 23


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(N))


class Together(Dataset):
    """Loads many samples at once."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return list(indices)


def jittered(sample: int) -> tuple[int, float, float]:
    """The sample, what it draws from its own generator, and its position."""
    own = penstock.sample()
    return sample, float(own.rng.random()), float(own.position)


def rows(loader: Loader[Any], epochs: int = 2) -> list[list[list[float]]]:
    with loader:
        return [
            [[float(value) for value in row] for batch in loader for row in zip(*batch, strict=True)]
            for _ in range(epochs)
        ]


def expected(values: list[int], epoch: int) -> list[list[float]]:
    return [
        [float(value), numpy_generator(5, epoch, position).random(), float(position)]
        for position, value in enumerate(values)
    ]


@every_way
@pytest.mark.parametrize(
    "data",
    [lambda: list(range(N)), Stream, Together, lambda: Cached(Together())],
    ids=["list", "stream", "together", "cached"],
)
def test_each_sample_is_transformed_with_its_own_numbers(data: Any, way: dict[str, Any]) -> None:
    """Seen to fail: a stream's transform applied to the whole batch, so that all its samples had the numbers of the
    first."""
    loader = Loader.from_dataset(data(), batch_size=4, seed=5, transform=jittered, **way)
    assert rows(loader) == [expected(list(range(N)), epoch) for epoch in range(2)]


def augmented(sample: int) -> float:
    return sample + random.random() + float(np.random.random()) + float(torch.rand(()))


@pytest.mark.parametrize("data", [lambda: list(range(N)), Stream, Together], ids=["list", "stream", "together"])
def test_draws_from_the_global_generators_are_the_samples_too(data: Any) -> None:
    """The same in any number of worker processes, and inline; dealt to two ranks, each gets its own of them."""

    def values(**options: Any) -> list[float]:
        with Loader.from_dataset(
            data(), batch_size=1, seed=5, transform=augmented, split="items" if data is Stream else None, **options
        ) as loader:
            return [float(value) for batch in loader for value in batch]

    whole = values()
    assert len(set(whole)) == N
    for workers in (1, 3):
        assert values(num_workers=workers, multiprocessing_context="fork") == whole
    for rank in range(2):
        assert values(rank=rank, world_size=2, tail="exact") == whole[rank::2]


def decoded(sample: int) -> int:
    if sample == 6:
        raise ValueError("no picture")
    return sample


@every_way
@pytest.mark.parametrize(
    ("data", "name"),
    [(lambda: list(range(N)), "dataset index 6"), (Stream, "the item 6"), (Together, "dataset index 6")],
)
def test_an_error_names_the_sample_and_may_skip_it(data: Any, name: str, way: dict[str, Any], caplog: Any) -> None:
    """Seen to fail: what ``__getitems__`` returned was transformed before the rows were, so the error belonged to no
    sample."""
    with Loader.from_dataset(data(), batch_size=4, transform=decoded, **way) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="no picture") as raised:
            next(iterator)
        assert any(f"{name} (epoch 0, position 6)" in note for note in raised.value.__notes__)
    with Loader.from_dataset(data(), batch_size=4, transform=decoded, on_error="skip", **way) as loader:
        assert [batch.tolist() for batch in loader][:3] == [[0, 1, 2, 3], [4, 5, 7], [8, 9, 10, 11]]
    assert f"{name} (epoch 0, position 6)" in caplog.text


def test_arrays_are_transformed_sample_by_sample() -> None:
    """Seen to fail: gathered by one index operation, and not transformed."""
    data = TensorDataset(torch.arange(6.0).reshape(3, 2))
    with Loader.from_dataset(data, batch_size=2, transform=lambda sample: sample[0] + 1) as loader:
        assert [batch.tolist() for batch in loader] == [[[1, 2], [3, 4]], [[5, 6]]]


def test_without_batches_and_by_hand() -> None:
    with Loader.from_dataset([1, 2], batch_size=None, transform=lambda sample: 10 * sample) as loader:
        assert list(loader) == [10, 20]
    assert Fetch([1, 2, 3], list, lambda sample: 10 * sample)([0, 2]) == [10, 30]
    assert Fetch(Together(), list, lambda sample: 10 * sample)([0, 2]) == [0, 20]


class Ready(Together):
    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor(indices)


class Fewer(Together):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices[1:]


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (
            Ready(),
            TypeError,
            (
                r"Ready.__getitems__ returned a whole batch, a Tensor. Return a list of samples, or transform the "
                r"batch in collate_fn"
            ),
        ),
        (Fewer(), ValueError, r"Fewer.__getitems__ returned 3 samples for 4 indices"),
    ],
)
def test_what_cannot_be_transformed_is_refused(data: Any, kind: type[Exception], words: str) -> None:
    with Loader.from_dataset(data, batch_size=4, transform=augmented) as loader, pytest.raises(kind, match=words):
        next(iter(loader))


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="transform must be a function of one sample, but 'flip' is not callable"):
        Loader.from_dataset([1], transform="flip")  # type: ignore[arg-type]
