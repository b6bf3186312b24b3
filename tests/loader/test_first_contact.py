"""The first errors that somebody meets: each says what came, and what to write."""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections import UserDict, deque
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from pairwise import by_turns, mostly_soak
from torch.utils.data import DistributedSampler, IterableDataset

import penstock
import penstock.formats
from penstock import Buckets, Cached, GraphError, Loader, Mix, Packs, Shards, Stream
from penstock.nodes import IterableSource
from penstock.orders import SequentialOrder, ShuffledOrder, WeightedOrder

# not its name alone: the folder of the project may have the same
PACKAGE = os.path.join(Path(penstock.__file__).parent, "")
HOW = [{}, {"num_workers": 1, "method": "thread"}, {"num_workers": 1, "multiprocessing_context": "fork"}]
by_how = pytest.mark.parametrize("how", HOW, ids=["inline", "thread", "process"])


class Samples:
    def __init__(self, make, n=4):
        self.make, self.n = make, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.make(index)


@dataclass
class Pair:
    image: torch.Tensor
    label: int


def raised(loader):
    with loader, pytest.raises(Exception) as caught:  # noqa: PT011  # every kind of it
        list(loader)
    return caught.value


# Samples that make no batch.


@by_how
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda i: torch.ones(2 + (i == 2)),
            (
                r"samples 0 and 2 of this batch differ: Tensor of shape \(2,\) and dtype torch.float32, and Tensor of "
                r"shape \(3,\)"
            ),
        ),
        (
            lambda i: {"x": {"z": np.ones(1 + (i > 0))}},
            r"0 and 1 of this batch differ in field \['x'\]\['z'\]: ndarray of shape \(1,\) and dtype float64",
        ),
        (
            lambda i: (i, [1] * (i + 1)),
            r"0 and 1 of this batch differ in field \[1\]: list of length 1, and list of length 2",
        ),
        (lambda i: Pair(torch.ones(i + 1), i), r"differ in field \['image'\]"),
        (
            lambda i: {"x": i} if i < 3 else {"y": i},
            r"samples 0 and 3 of this batch differ: dict with the keys \['x'\], and dict with the keys \['y'\]",
        ),
        (
            lambda i: {"x": i, "name": None},
            r"there is no collate rule for NoneType, which is field \['name'\] of these samples",
        ),
        (lambda i: i if i < 2 else "two", r"samples 0 and 2 of this batch differ: int, and str"),
    ],
)
def test_ragged_samples_are_told_the_field_and_the_remedy(make, said, how):
    """Seen to fail: torch's own words only, which name no field."""
    notes = "\n".join(raised(Loader.from_dataset(Samples(make), 4, **how)).__notes__)
    assert len(re.findall(said, notes)) == 1, notes
    assert "collate_fn=list" in notes


def test_nested_tensors_are_refused_in_the_words_of_torch():
    """Seen to fail: "Internal error: NestedTensorImpl doesn't support sizes. Please file an issue."."""
    with warnings.catch_warnings(action="ignore"):  # torch says once in a process that they are a prototype
        samples = [torch.nested.nested_tensor([torch.ones(2)])] * 2
    error = raised(Loader.from_dataset(samples, 2))
    assert "Batches of nested tensors are not currently supported" in str(error)
    assert "there is no collate rule for nested Tensor" in error.__notes__[0]


# Tracebacks.


def fails_at_2(index):
    if index == 2:
        raise KeyError("two")
    return index


@by_how
def test_a_traceback_goes_from_the_users_line_to_the_users_line(how):
    """Seen to fail: ten frames of this library between the two, inline, and each note twice from a worker process; in a
    folder called penstock."""
    error = raised(Loader.from_dataset(Samples(fails_at_2), 4, **how))
    text = "".join(traceback.format_exception(error))
    assert PACKAGE not in text, text
    assert "in fails_at_2" in text
    assert text.count("while loading dataset index 2 (epoch 0, position 2)") == 1
    assert text.count("in worker ") == bool(how) + ("process" in text)  # the heading of its traceback says so, too


def test_the_same_exception_again_has_each_note_once():
    """Seen to fail: one more note each time."""
    always = KeyError("always the same object")

    def fails(index):
        raise always

    with Loader.from_dataset(Samples(fails, 1)) as loader:
        for _ in range(3):
            loader.set_epoch(0)
            with pytest.raises(KeyError) as caught:
                next(iter(loader))
            assert caught.value.__notes__ == ["while loading dataset index 0 (epoch 0, position 0)"]


def test_an_error_of_the_library_itself_keeps_its_frames():
    with (
        Loader.from_dataset(IterableSource(range(3)), rank=0, world_size=2) as loader,
        pytest.raises(GraphError) as caught,
    ):
        next(iter(loader))
    assert any(frame.filename.startswith(PACKAGE) for frame in traceback.extract_tb(caught.value.__traceback__))


# Datasets that are none, and orders that do not fit.


@pytest.mark.parametrize(
    ("dataset", "error", "said"),
    [
        ((i for i in range(3)), TypeError, "generator can be read only once.*IterableDataset"),
        (iter([1, 2]), TypeError, r"list_iterator can be read only once.*list\(...\)"),
        ({1, 2}, TypeError, r"set is neither. Wrap it: Loader.from_dataset\(IterableSource\(data\), ...\)"),
        (3, TypeError, "int is neither. Give it a __getitem__ and a __len__"),
    ],
)
def test_what_is_no_dataset_is_shown_the_way(dataset, error, said):
    with pytest.raises(error, match=said):
        Loader.from_dataset(dataset)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (
            WeightedOrder([1, 1, 1], 9),
            "WeightedOrder has 3 weights, but Samples has 4 samples. Pass one weight for each sample",
        ),
        (WeightedOrder([1] * 5, 9), "WeightedOrder has 5 weights"),
        (ShuffledOrder(5), r"ShuffledOrder has 5 positions, but Samples has 4 samples. Build it with len\(dataset\)"),
    ],
)
def test_an_order_that_does_not_fit_the_dataset_is_refused(order, said):
    """Seen to fail: too many weights were an IndexError in the middle of an epoch, too few left samples out in
    silence."""
    with pytest.raises(ValueError, match=said):
        Loader.from_dataset(Samples(int), order=order)


def test_an_order_of_a_part_of_the_dataset_is_fine():
    with Loader.from_dataset(Samples(int), 4, order=SequentialOrder(3)) as batches:
        assert [batch.tolist() for batch in batches] == [[0, 1, 2]]


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_that_grew_or_shrank_is_told_before_the_next_epoch(n, shuffle):
    """Seen to fail: what it grew by was left out in silence."""
    samples = Samples(int)
    with Loader.from_dataset(samples, 2, shuffle) as batches:
        assert len(list(batches)) == 2
        samples.n = n
        with pytest.raises(
            GraphError, match=f"Samples had 4 samples when this loader was built, and has {n} now.*Build a new loader"
        ):
            next(iter(batches))


def test_with_a_sampler_a_dataset_may_grow():
    samples = Samples(int)
    with Loader.from_dataset(samples, 2, sampler=[0, 3]) as batches:
        samples.n = 7
        assert [batch.tolist() for batch in batches] == [[0, 3]]


class Unsized(Samples):
    error: type[Exception] = NotImplementedError

    def __len__(self):
        raise self.error("is not known")


class Drawn:
    def __init__(self, items, error):
        self.items, self.error = items, error

    def __iter__(self):
        return iter(self.items)

    __len__ = Unsized.__len__


NO_LENGTH = pytest.mark.parametrize("error", [NotImplementedError, ValueError, AttributeError])


@by_how
@NO_LENGTH
def test_a_length_that_is_not_implemented_is_no_obstacle_where_none_is_needed(how, error):
    """As many base classes of datasets have it. Seen to fail: the state could not be taken; and any error but
    NotImplementedError stopped the loader.

    Fails, too, if the user's own error is lost where a length is needed.
    """
    unsized = Unsized(int)
    unsized.error = error
    with Loader.from_dataset(unsized, 2, sampler=[3, 1], **how) as batches:
        assert [batch.tolist() for batch in batches] == [[3, 1]]
        assert "dataset_length" not in batches.state_dict()["penstock"]
    with Loader.from_dataset(unsized, 2, order=SequentialOrder(2), **how) as batches:
        assert [batch.tolist() for batch in batches] == [[0, 1]]
    for needs in (
        lambda: Loader.from_dataset(unsized),
        lambda: Loader.from_dataset(unsized, groups=Packs([1], 1)),
        lambda: Mix({"it": unsized}, {"it": 1}),
        lambda: Cached(unsized),
    ):
        with pytest.raises(
            TypeError, match="Unsized has no length|Unsized.* cannot be read by index|Unsized does not qualify"
        ) as caught:
            needs()
        assert repr(caught.value.__cause__) == repr(error("is not known"))


@NO_LENGTH
@pytest.mark.parametrize("word", ["sampler", "batch_sampler", "stream"])
def test_a_sampler_whose_length_raises_has_none(word, error):
    """As PyTorch Geometric's DynamicBatchSampler raises ValueError. Fails if only some errors mean that, or len(loader)
    does not show the user's own."""
    drawn = Drawn([[3], [1, 2]] if word == "batch_sampler" else [3, 1], error)
    dataset, given = (IterableSource(drawn), {}) if word == "stream" else (range(4), {word: drawn})
    with Loader.from_dataset(dataset, **given) as batches:
        assert [batch.tolist() for batch in batches] == ([[3], [1, 2]] if word == "batch_sampler" else [[3], [1]])
        assert batches.position is None
        with pytest.raises(TypeError, match="this loader has no length") as caught:
            len(batches)
        assert repr(caught.value.__cause__) == repr(error("is not known"))


class Undecided:
    """Is neither true nor false, as an array of two numbers."""

    def __init__(self, function=None, items=()):
        self.function, self.items = function, items

    def __bool__(self):
        raise AssertionError("asked for its truth")

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def __call__(self, *given):
        return self.function(*given)


@by_how
@pytest.mark.parametrize("batch_size", [2, None])
def test_nothing_that_the_user_passes_is_asked_for_its_truth(how, batch_size):
    """Fails if a falsy ``collate_fn`` is replaced by the default, or another argument is tested for more than None."""
    collate, truth = Undecided(lambda samples: samples), Undecided(lambda sample: -sample)
    given = {
        "sampler": Undecided(items=[1, 0]),
        "transform": truth,
        "on_error": truth,
        "worker_init_fn": Undecided(lambda worker: None),
    }
    with Loader.from_dataset(Undecided(items=[5, 6]), batch_size, collate_fn=collate, **given, **how) as batches:
        assert batches.collate_fn is collate
        assert list(batches) == ([[-6, -5]] if batch_size else [-6, -5])
    stream = IterableSource(Undecided(items=[5, 6]))
    with Loader.from_dataset(stream, batch_size, collate_fn=collate, transform=truth) as batches:
        assert list(batches) == ([[-5, -6]] if batch_size else [-5, -6])


class Broken:
    def __iter__(self):
        raise TypeError("a bug of mine")


@pytest.mark.parametrize(
    "given", [{"steps": [lambda records: Broken()], "epoch_size": 2, "bookmarks": False}, {"counts": [2]}]
)
def test_an_error_in_the_users_own_iter_is_the_cause_of_ours(given):
    """Fails if "this is not iterable" is all that is left of it."""
    with (
        Loader.from_dataset((Stream if "steps" in given else Shards)(1, lambda shard: Broken(), **given)) as batches,
        pytest.raises(TypeError, match="must return") as caught,
    ):
        next(iter(batches))
    assert repr(caught.value.__cause__) == "TypeError('a bug of mine')"


class LendsNothing:
    @property
    def generator(self):
        return None

    @generator.setter
    def generator(self, value):
        raise TypeError("cannot be set")

    def __iter__(self):
        return iter([1, 0])


def test_a_sampler_whose_generator_cannot_be_set_is_lent_none():
    """Fails if only an AttributeError means that."""
    with Loader.from_dataset(range(2), sampler=LendsNothing()) as batches:
        assert [batch.tolist() for batch in batches] == [[1], [0]]


# Nothing to load.


EMPTY = [
    lambda **how: Loader.from_dataset([], 2, **how),
    lambda **how: Loader.from_dataset([], 2, shuffle=True, **how),
    lambda **how: Loader.from_dataset([1, 2, 3], 4, drop_last=True, **how),
    lambda **how: Loader.from_dataset([1, 2, 3], sampler=[], **how),
    lambda **how: Loader.from_dataset([1, 2, 3], batch_sampler=[], **how),
    lambda **how: Loader.from_dataset(IterableSource([]), 2, **how),
    lambda **how: Loader.from_dataset([1], 1, rank=0, world_size=2, tail="drop", **how),
]
of_nothing = pytest.mark.parametrize(("make", "how"), mostly_soak(product(EMPTY, HOW), by_turns(EMPTY, HOW)))


@of_nothing
def test_an_epoch_of_nothing_yields_nothing_and_says_so(make, how, caplog):
    """As ``DataLoader``. Seen to fail: refused, some when built and some on reading."""
    with make(**how) as loader:
        for epoch in range(3):
            assert (loader.epoch, list(loader)) == (epoch, [])
            assert caplog.records[-1].getMessage().startswith(f"epoch {epoch} has no batch on this rank")
        state = loader.state_dict()
    with make(**how) as other:
        other.load_state_dict(state)
        assert (other.epoch, list(other), other.epoch) == (3, [], 4)
        other.set_epoch(7)
        assert (list(other), other.epoch) == ([], 8)


@of_nothing
def test_an_endless_loader_of_nothing_raises_and_does_not_spin(make, how):
    with (
        pytest.raises(ValueError, match="epoch 0 has no batch on this rank, so an infinite loader would loop"),
        make(infinite=True, **how) as loader,
    ):
        next(iter(loader))


FOUR_OF_RANKS = {"rank": 3, "world_size": 4}


@pytest.mark.parametrize(
    ("data", "words", "remedy", "followed"),
    [
        (range(3), {"batch_size": 8, "drop_last": True}, "or leave drop_last=True out.", {"drop_last": False}),
        (
            range(6),
            {"batch_size": 4, "drop_last": True, "tail": "pad", "rank": 1, "world_size": 2},
            "more samples, or",
            {"drop_last": False},
        ),
        (range(3), {"tail": "drop", **FOUR_OF_RANKS}, "or pass tail='pad' (with groups or ", {"tail": "pad"}),
        (range(3), {"sampler": [2, 1, 0], "tail": "drop", **FOUR_OF_RANKS}, "tail='pad'", {"tail": "pad"}),
        (
            range(3),
            {"batch_size": 2, "drop_last": True, "tail": "drop", **FOUR_OF_RANKS},
            "or leave drop_last=True out and pass tail='pad'",
            {"drop_last": False, "tail": "pad"},
        ),
        (
            [[1]] * 3,
            {"groups": Packs([1] * 3, 1), **FOUR_OF_RANKS},
            "a stream: use fewer ranks)",
            {"rank": 2, "world_size": 3},
        ),
        (
            [[1]] * 9,
            {"groups": Buckets([1] * 9, max_tokens=99, max_samples=10, drop_last=True)},
            "or leave drop_last=True of Buckets out.",
            {"groups": Buckets([1] * 9, max_tokens=99, max_samples=10)},
        ),
        (
            [[1]] * 9,
            {"groups": Buckets(keys=[*range(9)], batch_size=2, short="drop")},
            "or give Buckets another short=",
            {"groups": Buckets(keys=[*range(9)], batch_size=2)},
        ),
        ([], {"batch_size": 8, "drop_last": True}, "Its dataset or its sampler is empty", None),
        (range(3), {"sampler": [], "tail": "drop", **FOUR_OF_RANKS}, "Its dataset or its sampler is empty", None),
        (
            range(3),
            {"batch_size": 8, "drop_last": True, "skip": [(1, 2)]},
            "leave drop_last=True out.",
            {"drop_last": False},
        ),
        (range(3), {"tail": "drop", "skip": [(0, 4)], **FOUR_OF_RANKS}, "pass tail='pad'", {"tail": "pad"}),
        (
            range(3),
            {"batch_size": 8, "drop_last": True, "skip": [(10**9, 10**9 + 1)]},
            "drop_last",
            {"drop_last": False},
        ),
    ],
)
def test_what_an_endless_loader_of_nothing_advises_helps(data, words, remedy, followed):
    """Seen to fail: ``tail='pad'``, the default, whatever the cause. With ``skip``: it looped forever."""
    words = {"infinite": True, **words}
    with (
        Loader.from_dataset(data, **words) as loader,
        pytest.raises(ValueError, match="has no batch on this rank") as caught,
    ):
        next(iter(loader))
    assert remedy in str(caught.value)
    if followed is not None:
        with Loader.from_dataset(data, **{**words, **followed}) as loader:
            assert len(next(iter(loader)))
        if not words.keys() & {"groups", "sampler"}:  # or more samples
            with Loader.from_dataset([*data] * 9, **words) as loader:
                assert len(next(iter(loader)))


def test_a_skip_that_covers_epochs_is_no_empty_dataset():
    """Neither where an endless stream was left early, so that its epochs begin elsewhere."""
    with Loader.from_dataset(range(3), infinite=True, skip=[(0, 10)]) as loader:
        assert next(iter(loader)).tolist() == [1]


def test_an_epoch_of_nothing_among_others(caplog):
    """By set_epoch, a sampler gives nothing in epoch 1."""

    class Sometimes:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([] if self.epoch == 1 else [self.epoch])

    with Loader.from_dataset(range(9), sampler=Sometimes()) as loader:
        assert [[batch.tolist() for batch in loader] for _ in range(4)] == [[[0]], [], [[2]], [[3]]]
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["epoch 1 has no batch on this rank"]


def test_an_epoch_whose_batches_all_raised_was_not_empty(caplog):
    """Seen to fail: told as empty, because nothing was delivered."""
    with Loader.from_dataset(Samples(lambda i: 1 // 0)) as loader:
        batches = iter(loader)
        for _ in range(4):
            with pytest.raises(ZeroDivisionError):
                next(batches)
        assert list(batches) == []
    assert not caplog.records


def test_the_empty_rest_of_an_epoch_is_no_empty_epoch(caplog):
    """Nothing is told of the loop that only runs what stands behind an epoch's last batch."""
    with Loader.from_dataset([1, 2]) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
    with Loader.from_dataset([1, 2]) as loader:
        loader.load_state_dict(state)
        assert list(loader) == []
    assert not caplog.records


# Streams.


class Sized(IterableDataset):
    def __init__(self, said, real):
        self.said, self.real = said, real

    def __len__(self):
        return self.said

    def __iter__(self):
        return iter(range(self.real))


@pytest.mark.parametrize(
    "words", [{}, {"drop_last": True}, {"rank": 1, "world_size": 3, "split": "items", "tail": "exact"}]
)
def test_a_stream_with_a_length_has_one_in_batches(words):
    """Seen to fail: TypeError, where ``DataLoader`` has a length."""
    with Loader.from_dataset(Sized(10, 10), 4, **words) as loader:
        assert len(loader) == len(list(loader)) == len(loader) == len(list(loader))
        assert hasattr(loader.sampler, "set_epoch")
        assert loader.remaining is None or loader.remaining == 0


def test_a_stream_whose_length_lies_is_told_once_and_read_to_its_end():
    with Loader.from_dataset(Sized(10, 7), 4) as loader:
        with pytest.warns(UserWarning, match="Sized has a length of 10, but epoch 0 had 7 items.*len.loader. is wrong"):
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6]]
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6]]


def test_long_lists_that_differ_are_told_at_once():
    """Seen to fail: each of their places was taken for a field of its own; 17 s."""
    error = raised(Loader.from_dataset([[0.0] * 200_000, [0.0] * 200_001], 2))
    assert "list of length 200000, and list of length 200001" in error.__notes__[0]


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 0])
def test_close_takes_any_time(timeout):
    """Seen to fail: an OverflowError, and the workers lived on."""
    loader = Loader.from_dataset(range(4), num_workers=1, multiprocessing_context="fork")
    next(iter(loader))
    loader.close(timeout)
    with pytest.raises(ValueError, match="timeout=nan must be a number of seconds"):
        loader.close(float("nan"))


# Not of the usual type, but as good.


class Lists(list):
    pass


class Proxied(UserDict):
    pass


class Fetched(Samples):
    def __getitems__(self, indices):
        return Lists(self.make(index) for index in indices)


def read(dataset, *args, **words):
    with Loader.from_dataset(dataset, *args, **words) as batches:
        return [batch.tolist() for batch in batches]


NUMBERS = pytest.mark.parametrize("number", [np.int64, np.array, torch.tensor], ids=["numpy", "array", "tensor"])


@NUMBERS
def test_a_whole_number_of_any_type_is_one(number):
    """Fails if only an ``int`` is: a sampler's ``set_epoch`` went unheard."""
    sampler, other = (DistributedSampler(range(8), 1, 0) for _ in range(2))
    other.set_epoch(3)
    with Loader.from_dataset(range(8), 8, sampler=sampler) as batches:
        sampler.set_epoch(number(3))
        assert [batch.tolist() for batch in batches] == [list(other)]
        assert batches.epoch == 4
    assert len(read(range(4), on_error="skip", max_errors=number(2))) == 4
    stream = Stream(2, lambda shard: iter(range(3)), epoch_size=4, bookmarks=False)
    assert len(read(Mix({"a": [1, 2], "b": stream}, {"a": number(1), "b": 1}, epoch_size=number(6)))) == 6


def test_a_list_of_any_type_is_one():
    """Fails if a subclass of ``list`` from ``__getitems__`` counts as a whole batch, which DataLoader collates."""
    assert read(Fetched(int), 2) == [[0, 1], [2, 3]]
    assert read(Fetched(int), 2, transform=abs) == [[0, 1], [2, 3]]
    assert read(Cached(Fetched(int)), 2) == [[0, 1], [2, 3]]


def test_a_mapping_of_any_type_is_a_dict():
    """Fails if the type has to be ``dict`` where any mapping will do."""
    samples = [Proxied(x=1), Proxied(x=2)]
    with Loader.from_dataset(Mix({"a": samples}, MappingProxyType({"a": 1}), tag="from")) as batches:
        assert [(batch["x"].item(), batch["from"]) for batch in batches] == [(1, ["a"]), (2, ["a"])]
        state = batches.state_dict()
    with Loader.from_dataset(Mix({"a": samples}, {"a": 1}, tag="from")) as batches:
        batches.load_state_dict(MappingProxyType(state))
        assert batches.epoch == 1


def test_shards_are_any_iterable_but_a_set():
    """Fails if an array or a generator of paths is taken for a number; or if a set is taken, whose order differs
    between processes."""
    names = ["b", "a"]
    for given in (np.array(names), (name for name in names), dict.fromkeys(names).keys(), deque(names)):
        assert read(Shards(given, lambda name: [ord(name)], counts=[1, 1])) == [[98], [97]]
    for refused in (
        lambda: Shards({*names}, ord, counts=[1, 1]),
        lambda: penstock.formats.jsonl({*names}, counts=[1, 1]),
    ):
        with pytest.raises(TypeError, match=r"a set, whose order differs between processes.*sorted"):
            refused()
    with pytest.raises(TypeError, match="b'b' is not a path"):
        penstock.formats.jsonl(b"b")
