"""``DataLoader = Loader.from_dataset`` ports a script: every argument, by position and by name, and every attribute
that scripts read."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import deque

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    default_convert,
)

from penstock import GraphError, Loader
from penstock._errors import first_time
from penstock.nodes import Batcher, Cycler, Fetch, ParallelMapper, Sampler
from penstock.orders import SequentialOrder

KEYWORDS = {  # of torch 2.6 to 2.13
    "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
    "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor",
    "persistent_workers", "pin_memory_device", "in_order",
}  # fmt: skip
SHOWN = ("dataset", "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last")
N = 10


class Numbers(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return index


def tupled(samples):
    return tuple(samples)


def parameters(function, kind):
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind is kind and name != "self"]


def test_takes_the_arguments_of_torch_in_their_order():
    """Seen to fail: everything but the dataset was keyword-only."""
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    theirs = parameters(DataLoader.__init__, positional)
    assert parameters(Loader.from_dataset, positional)[: len(theirs)] == theirs
    assert set(parameters(DataLoader.__init__, inspect.Parameter.KEYWORD_ONLY)) <= set(
        inspect.signature(Loader.from_dataset).parameters
    )


def test_knows_every_keyword():
    assert set(inspect.signature(Loader.from_dataset).parameters) >= KEYWORDS


def test_positional_arguments_mean_the_same():
    arguments = (
        Numbers(),
        3,
        False,
        SequentialSampler(range(N)),
        None,
        0,
        tupled,
        False,
        True,
        0,
        None,
        None,
        torch.Generator(),
    )
    with Loader.from_dataset(*arguments) as batches:
        assert list(batches) == list(DataLoader(*arguments)) == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]


def test_what_means_nothing_is_told_once(caplog):
    first_time.said.clear()
    for _ in range(2):
        Loader.from_dataset(Numbers(), persistent_workers=False, pin_memory_device="cuda")
    messages = [record.getMessage() for record in caplog.records]
    assert [text.partition("=")[0] for text in messages] == ["persistent_workers", "pin_memory_device"]
    assert "loader.close()" in messages[0]


# Attributes that scripts read.


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"batch_size": None},
        {"batch_size": 3, "drop_last": True, "shuffle": True},
        {"batch_sampler": BatchSampler(SequentialSampler(range(N)), 2, False)},
        {"num_workers": 2, "collate_fn": tupled, "pin_memory": False, "sampler": RandomSampler(range(N))},
    ],
)
def test_shows_what_it_was_built_with_as_torch_does(words):
    dataset = Numbers()
    ours, theirs = Loader.from_dataset(dataset, **words), DataLoader(dataset, **words)
    assert {name: getattr(ours, name) for name in SHOWN} == {name: getattr(theirs, name) for name in SHOWN}
    assert ours.dataset is dataset


class InDeques(Numbers):
    def __getitems__(self, indices):
        return deque(indices)


def test_shows_the_functions_of_torch_where_none_was_given():
    assert Loader.from_dataset(Numbers()).collate_fn is default_collate
    assert Loader.from_dataset(Numbers(), batch_size=None).collate_fn is default_convert
    # seen to fail: passed on, which took twice as long
    for given, size in ((default_collate, 2), (default_convert, None)):
        loader = Loader.from_dataset(Numbers(), batch_size=size, collate_fn=given)
        assert (loader.collate_fn, loader.root.map_fn.collate_fn) == (given, None)
    assert (
        Loader.from_dataset(Numbers(), batch_size=None, collate_fn=default_collate).root.map_fn.collate_fn
        is default_collate
    )
    # Seen to fail: the deque for a batch. Without a collate_fn, __getitems__ may return one.
    assert next(iter(Loader.from_dataset(InDeques(), 2, collate_fn=default_collate))).tolist() == [0, 1]


@pytest.mark.parametrize("name", sorted(KEYWORDS - {*SHOWN, "shuffle", "sampler", "batch_sampler"}))
def test_says_of_the_others_what_they_are(name):
    """Trainers that find more attributes rebuild a ``DataLoader``, and resume in another order."""
    loader = Loader.from_dataset(Numbers())
    assert not hasattr(loader, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. It is an argument of Loader.from_dataset"):
        getattr(loader, name)
    assert not hasattr(loader, "_iterator")


@pytest.mark.parametrize("name", [*SHOWN, "sampler", "batch_sampler", "timeout", "in_order"])
def test_none_of_them_can_be_assigned(name):
    """Seen to fail: ``loader.batch_size = 4`` was accepted and had no effect."""
    loader = Loader.from_dataset(Numbers())
    with pytest.raises(
        AttributeError, match=rf"loader.{name} cannot be assigned.*Loader.from_dataset\(..., {name}=...\)"
    ):
        setattr(loader, name, 4)
    assert loader.batch_size == 1


def test_a_loader_over_a_graph_shows_none_of_them():
    loader = Loader(ParallelMapper(Batcher(Cycler(Sampler(SequentialOrder(N))), 2), Fetch(Numbers()), 0))
    for name in SHOWN:
        assert not hasattr(loader, name)
    with pytest.raises(AttributeError, match="if it was built from a graph"):
        loader.dataset  # noqa: B018


# Numbers of any type.


@pytest.mark.parametrize("method", ["thread", "process"])
def test_numbers_of_numpy_and_torch_are_numbers(method):
    """Seen to fail: ``batch_size``, ``num_workers``, ``prefetch_factor`` and ``timeout`` were refused, and ``seed``
    overflowed in the worker."""
    words = {
        "batch_size": np.int64(4),
        "num_workers": torch.tensor(1),
        "prefetch_factor": np.int32(2),
        "seed": np.int64(7),
        "timeout": np.float32(5),
        "rank": np.int64(1),
        "world_size": np.uint8(2),
        "max_restarts": np.int16(1),
    }
    with Loader.from_dataset(Numbers(), shuffle=True, method=method, **words) as ours:
        got = [batch.tolist() for batch in ours]
        assert "seed" in ours.state_dict()["penstock"]
    plain = {name: float(value) if name == "timeout" else int(value) for name, value in words.items()}
    with Loader.from_dataset(Numbers(), shuffle=True, method=method, **plain) as ours:
        assert got == [batch.tolist() for batch in ours]


@pytest.mark.parametrize(
    ("method", "timeout"),
    [
        ("thread", float("inf")),
        ("process", float("inf")),
        ("thread", 1e300),
        ("process", 2**40),
        ("process", None),
        ("thread", 0),
    ],
)
def test_a_timeout_of_more_than_a_month_waits_forever(method, timeout):
    """Seen to fail: an OverflowError inside ``next``."""
    with Loader.from_dataset(Numbers(), N, num_workers=1, method=method, timeout=timeout) as batches:
        assert next(iter(batches)).tolist() == list(range(N))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"batch_size": True}, "batch_size=True, a bool, must be a whole number of at least 1"),
        ({"batch_size": 2.0}, "batch_size=2.0, a float, must be a whole number"),
        ({"batch_size": np.int64(0)}, r"batch_size=.*0.* must be a whole number of at least 1"),
        ({"num_workers": -1}, "num_workers=-1 must be a whole number of at least 0"),
        ({"num_workers": "2"}, "num_workers='2', a str, must be a whole number"),
        ({"prefetch_factor": 0}, "prefetch_factor=0 must be a whole number of at least 1"),
        ({"timeout": -1}, "timeout=-1 must be a number of seconds, 0 or more"),
        ({"timeout": float("nan")}, "timeout=nan must be a number of seconds"),
        ({"timeout": "5"}, "timeout='5' must be a number of seconds"),
        (
            {"seed": 2**63},
            r"seed=9223372036854775808 must be a whole number below 9223372036854775808. A larger one can be folded",
        ),
        ({"rank": 1.0, "world_size": 2}, "rank=1.0, a float, must be a whole number"),
        ({"max_restarts": -1}, "max_restarts=-1 must be a whole number"),
    ],
)
def test_what_is_no_number_is_refused(words, said):
    with pytest.raises(ValueError, match=said):
        Loader.from_dataset(Numbers(), **words)


# Sending a loader to another process.


@pytest.mark.parametrize(
    "words", [{}, {"num_workers": 1, "method": "thread"}, {"num_workers": 1}, {"sampler": SequentialSampler(range(N))}]
)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_that_was_not_started_goes_its_own_way(copied, words):
    with Loader.from_dataset(TensorDataset(torch.arange(N)), 3, **words) as one:
        begun = iter(one)
        next(begun)
        next(begun)
        state = one.state_dict()
    with Loader.from_dataset(TensorDataset(torch.arange(N)), 3, **words) as one:
        one.load_state_dict(state)
        with copied(one) as other:
            assert [batch[0].tolist() for batch in other] == [batch[0].tolist() for batch in one] == [[6, 7, 8], [9]]
            assert other.dataset is not one.dataset


def test_a_shallow_copy_is_refused_and_so_is_one_of_a_started_loader():
    with Loader.from_dataset(Numbers()) as loader:
        with pytest.raises(TypeError, match="would read the same graph. Call copy.deepcopy before it starts"):
            copy.copy(loader)
        next(iter(loader))
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="was started or closed cannot be copied or pickled"):
                copied(loader)


# Users who take Loader itself for DataLoader.


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Loader(Numbers()), r"not a Numbers. For a dataset write Loader.from_dataset\(dataset, batch_size=…\)"),
        (
            lambda: Loader(Numbers(), batch_size=4, shuffle=True),
            r"write Loader.from_dataset\(dataset, batch_size=4, shuffle=True\)",
        ),
        (lambda: Loader(Numbers(), 4, pin_memory=True), r"write Loader.from_dataset\(dataset, 4, pin_memory=True\)"),
        (
            lambda: Loader(dataset=Numbers(), batch_size=4),
            r"a dataset write Loader.from_dataset\(dataset, batch_size=4\)",
        ),
        (lambda: Loader(), "not a NoneType"),
        (lambda: Loader(iter(range(3))), "not a range_iterator"),
        (
            lambda: Loader(Sampler(SequentialOrder(3)), 4),
            r"takes only a graph. Pass the other arguments \(4\) to its nodes: the Batcher",
        ),
        (
            lambda: Loader(Sampler(SequentialOrder(3)), dataset="numbers"),
            r"Pass the other arguments \(dataset='numbers'\) to its nodes",
        ),
    ],
)
def test_a_dataset_given_to_loader_itself_is_shown_the_way(make, said):
    with pytest.raises(GraphError, match=said):
        make()
