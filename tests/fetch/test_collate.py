"""Batches written in place always equal those of torch's ``default_collate``, whatever the batches before were.

A *column* of samples goes through a `Collator`, whole and in pieces, with and without a schema learned before; the
result is compared with ``default_collate`` of the same samples in type, dtype, shape and value, or in the type of the
error.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from comparison import difference, outcome
from penstock._fetch.collate import BatchBuilder, Collator
from penstock._memory.allocation import afresh, anywhere

pytestmark = [pytest.mark.filterwarnings("ignore")]


def in_pieces(collator, samples, sizes, allocate=afresh):
    batch = BatchBuilder(collator, len(samples), allocate)
    start, sizes = 0, iter(sizes)
    while start < len(samples):
        end = start + max(1, next(sizes, 1))
        batch.add(samples[start:end])
        start = end
    return batch.finish()


def at_once(n):
    return [n]


def one_by_one(n):
    return [1] * n


def in_two(n):
    return [n // 2, n]


WAYS = [
    (at_once, afresh),
    (at_once, anywhere),
    (one_by_one, anywhere),
    (one_by_one, afresh),
    (in_two, afresh),
    (in_two, anywhere),
]
"""Every second of them, from either on, has all pieces and both kinds of memory: for tests of many pairs of samples,
which take them by turns."""


def check(*batches, ways=WAYS):
    """Compare ``batches`` in order: whole, sample by sample, and in two pieces, in memory of ours and at once; each
    starts with the schema that the earlier ones left."""
    whole = [outcome(theirs, samples) for samples in batches]
    for pieces, allocate in ways:
        collator = Collator()
        for number, (samples, expected) in enumerate(zip(batches, whole, strict=True)):
            found = outcome(in_pieces, collator, samples, pieces(len(samples)), allocate)
            assert difference(found, expected) is None, (
                f"batch {number} in pieces of {pieces(len(samples))}: {difference(found, expected)}"
            )
    collator = Collator()
    for samples, expected in zip(batches, whole, strict=True):
        assert difference(outcome(collator, samples), expected) is None


# Samples.


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Plain:
    x: Any
    y: Any = 0


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclass(slots=True)
class Slotted:
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Both:
    x: Any
    y: Any


@dataclass
class Checked:
    x: Any
    y: Any
    area: Any = field(init=False)
    calls = 0

    def __post_init__(self):
        type(self).calls += 1
        if isinstance(self.y, torch.Tensor):
            raise AssertionError("a batch is no sample: __init__ must not be called for it")
        self.area = self.y * 2


@dataclass
class Child(Plain):
    z: Any = "z"


RECORDS = [Plain, Frozen, Slotted, Both, Checked, Child]


def field_by_field(samples, *, collate_fn_map):
    """What torch lacks: a dataclass of batches."""
    if len({*map(type, samples)}) > 1:
        raise TypeError("other classes")
    record = object.__new__(type(samples[0]))
    for one in dataclasses.fields(record):
        values = [getattr(sample, one.name) for sample in samples]
        object.__setattr__(record, one.name, collate(values, collate_fn_map=collate_fn_map))
    return record


def theirs(samples):
    return collate(samples, collate_fn_map=default_collate_fn_map | dict.fromkeys(RECORDS, field_by_field))


class Marked(torch.Tensor):
    pass


def graded(k):
    return torch.full((2,), float(k), requires_grad=True)


LEAVES = {
    "float32": lambda k: torch.full((2, 3), float(k)),
    "float64": lambda k: torch.full((2, 3), float(k), dtype=torch.float64),
    "wider": lambda k: torch.full((2, 4), float(k)),
    "flat": lambda k: torch.full((6,), float(k)),
    "int64": lambda k: torch.arange(3) + k,
    "uint8": lambda k: torch.full((5,), k % 256, dtype=torch.uint8),
    "uint16": lambda k: torch.full((5,), k, dtype=torch.uint16),
    "bool": lambda k: torch.tensor([k % 2 == 0, True]),
    "complex64": lambda k: torch.full((2,), k + 1j * k),
    "conjugate": lambda k: torch.full((2,), k + 1j * k).conj(),
    "complex32": lambda k: torch.full((2,), k, dtype=torch.float16).to(torch.complex32),
    "bfloat16": lambda k: torch.full((2, 2), k, dtype=torch.bfloat16),
    "float16": lambda k: torch.full((2, 2), k, dtype=torch.float16),
    "float8": lambda k: torch.full((2,), float(k % 4)).to(torch.float8_e4m3fn),
    "scalar tensor": lambda k: torch.tensor(k),
    "scalar bfloat16": lambda k: torch.tensor(float(k), dtype=torch.bfloat16),
    "not a number": lambda k: torch.tensor([float("nan"), -0.0, float("inf")]),
    "empty": lambda k: torch.empty(0, 3),
    "strided": lambda k: (torch.arange(12) + k).reshape(3, 4)[:, ::2],
    "transposed": lambda k: (torch.arange(6.0) + k).reshape(2, 3).T,
    "expanded": lambda k: torch.tensor([float(k)]).expand(4),
    "channels last": lambda k: (torch.arange(24) + k).reshape(2, 4, 3).permute(2, 0, 1),
    "sparse": lambda k: torch.eye(2).to_sparse(),
    "compressed": lambda k: torch.eye(2).to_sparse_csr(),
    "quantized": lambda k: torch.quantize_per_tensor(torch.full((2,), float(k)), 0.5, 0, torch.quint8),
    "parameter": lambda k: torch.nn.Parameter(torch.full((2,), float(k)), requires_grad=False),
    "requires grad": graded,
    "not a leaf": lambda k: graded(k) * 2,
    "subclass": lambda k: torch.full((2,), float(k)).as_subclass(Marked),
    "array": lambda k: np.full((2, 3), k, np.float32),
    "double array": lambda k: np.full((2, 3), k, np.float64),
    "long array": lambda k: np.full(4, k),
    "short array": lambda k: np.full(3, k, np.int16),
    "uint16 array": lambda k: np.full(3, k, np.uint16),
    "bool array": lambda k: np.array([k % 2 == 0, False]),
    "complex array": lambda k: np.full(2, k * 1j),
    "scalar array": lambda k: np.array(k),
    "empty array": lambda k: np.empty((0, 2)),
    "empty rows": lambda k: np.empty((2, 0), np.float32),
    "fortran": lambda k: np.asfortranarray(np.arange(6).reshape(2, 3) + k),
    "view": lambda k: (np.arange(8) + k)[::2],
    "big-endian": lambda k: np.full(3, k, ">f4"),
    "structured": lambda k: np.zeros(2, [("a", "i4"), ("b", "f4")]),
    "objects": lambda k: np.array([k, "x"], object),
    "strings": lambda k: np.array(["a", "b"]),
    "bytestrings": lambda k: np.array([b"a", b"b"]),
    "dates": lambda k: np.array(["2020-01-01"], "M8[D]"),
    "long double": lambda k: np.full(2, k, np.longdouble),
    "masked": lambda k: np.ma.array([k, k + 1], mask=[True, False]),
    "matrix": lambda k: np.asmatrix([[k, 1]]),
    "np.float32": lambda k: np.float32(k),
    "np.float64": lambda k: np.float64(k),
    "np.float16": lambda k: np.float16(k),
    "np.int64": lambda k: np.int64(k),
    "np.uint8": lambda k: np.uint8(k % 256),
    "np.uint16": lambda k: np.uint16(k),
    "np.uint64": lambda k: np.uint64(k),
    "np.bool": lambda k: np.bool_(k % 2),
    "np.complex64": lambda k: np.complex64(k * 1j),
    "np.longdouble": lambda k: np.longdouble(k),
    "np.datetime64": lambda k: np.datetime64("2020-01-01"),
    "np.str": lambda k: np.str_(k),
    "np.bytes": lambda k: np.bytes_(b"x"),
    "np.void": lambda k: np.zeros(1, [("a", "i4")])[0],
    "Python bool": lambda k: k % 2 == 0,
    "Python int": lambda k: k - 2,
    "Python float": lambda k: k / 3,
    "Python complex": lambda k: k * 1j,
    "huge": lambda k: 2**63,
    "nearly huge": lambda k: -(2**63) if k % 2 else 2**63 - 1,
    "str": lambda k: f"sample {k}",
    "bytes": lambda k: b"x" * k,
    "None": lambda k: None,
    "object": lambda k: object(),
    "set": lambda k: {k},
}
NAMES = sorted(LEAVES)
TREES = {
    "dict": lambda leaf: lambda k: {"x": leaf(k), "y": k},
    "tuple": lambda leaf: lambda k: (leaf(k), k),
    "list": lambda leaf: lambda k: [k, leaf(k)],
    "named": lambda leaf: lambda k: Point(leaf(k), k),
    "nested": lambda leaf: lambda k: {"a": [leaf(k), (k, {"b": Point(f"{k}", leaf(k))})], 3: torch.tensor(k)},
    "numbers": lambda leaf: (
        lambda k: {
            "a": k + 0.5,
            "n": k,
            "x": leaf(k),
            "b": -k / 3,
            "m": k * k,
            "c": 1.5,
            "o": True,
            "d": 1.0 * k,
            "p": -1,
            "q": k,
        }
    ),
    "ordered": lambda leaf: lambda k: collections.OrderedDict(x=leaf(k), y=k),
}


def column(make, *ks):
    return [make(k) for k in ks]


@pytest.mark.parametrize("name", NAMES)
def test_a_field_of_any_kind(name):
    """A first batch, a second, a single sample, and a shorter last batch. Seen to fail: `_numbers` writing its column
    backwards."""
    leaf = LEAVES[name]
    check(column(leaf, 1, 2, 3, 4), column(leaf, 5, 6, 7, 8), column(leaf, 9), column(leaf, 10, 11))
    for tree in TREES.values():
        make = tree(leaf)
        check(column(make, 1, 2, 3), column(make, 4, 5, 6), column(make, 7))


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", NAMES)
def test_a_field_that_becomes_another(name, step):
    """A whole batch, and one odd sample: at the start, in the middle or at the end, in turn. Seen to fail: `_tensors`
    without the set of dtypes; `_numbers` without the set of types (a bool among ints); `_arrays` with
    casting="same_kind".
    """
    one = LEAVES[name]
    for place, other in list(enumerate(NAMES, NAMES.index(name)))[NAMES.index(name) % step :: step]:
        two, ways = LEAVES[other], WAYS if step == 1 else WAYS[place // step % 2 :: 2]
        check(column(one, 1, 2, 3), column(two, 4, 5, 6), column(one, 7, 8, 9), ways=ways)
        odd = column(one, 4, 5, 6)
        odd[place % 3] = two(4 + place % 3)
        check(column(one, 1, 2, 3), odd, column(one, 7, 8), ways=ways)


@pytest.mark.parametrize("name", [*NAMES[::4], "Python bool", "Python float", "Python int"])
def test_a_number_of_many_that_becomes_another(name):
    """Numbers of one kind are written together. Seen to fail: without the check of the first sample's types; the
    others' fallback without what was written."""
    for make in (TREES["numbers"](LEAVES["float32"]), lambda k: (k, 0.5, k + 1, 1.5, k + 2, 2.5, k + 3, 3.5)):
        for key in ("a", "q") if isinstance(make(1), dict) else (1, 6):
            for place in range(3):
                odd = column(make, 4, 5, 6)
                odd[place] = type(odd[place])(
                    {**odd[place], key: LEAVES[name](4)}
                    if key in ("a", "q")
                    else [*odd[place][:key], LEAVES[name](4), *odd[place][key + 1 :]]
                )
                check(column(make, 1, 2, 3), odd, column(make, 7, 8), ways=WAYS[place % 2 :: 2])


@pytest.mark.parametrize("make", [lambda shape: np.ones(shape, np.float32), torch.ones], ids=["arrays", "tensors"])
@pytest.mark.parametrize(
    "shapes",
    [
        [(2,), (1,), (3,)],
        [(1,), (3,), (2,)],
        [(3,), (1,), (3,)],
        [(3,), (), (3,)],
        [(), (1,), ()],
        [(2, 3), (3, 3), (1, 3)],
        [(2, 3), (2, 1), (2, 5)],
        [(2, 3), (3, 2), (2, 3)],
        [(2, 3), (6,), (2, 3)],
        [(2, 3), (1, 3), (2, 3)],
        [(0, 3), (1, 3), (0, 3)],
        [(2, 8192), (1, 8192), (3, 8192)],
        [(1, 8193), (8193,), (1, 8193)],
    ],
    ids=str,
)
def test_shapes_that_only_add_up(shapes, make):
    """Nothing is broadcast, and no row overlaps the next. Seen to fail: `_arrays` without the set of lengths, and
    without the shape of a single row."""
    alike, other = column(make, *[shapes[0]] * 3), column(make, *shapes)
    check(alike, other, alike)
    check(alike, other[1:], alike)
    check(alike, other[1:2], alike)
    check(other[1:2] * 3, other[::-1], alike)


@pytest.mark.parametrize("later", [(64, 128), (4096,), (16384,), ()], ids=str)
@pytest.mark.parametrize("learned", [False, True])
def test_another_shape_from_the_second_call_on(learned, later):
    """Tensors of this size are written four at a time. Seen to fail: only the shape of the first sample was compared,
    and `stack` took the others elsewhere."""
    alike = [torch.full((8192,), float(k)) for k in range(8)]
    collator = Collator()
    if learned:
        collator(alike)
    samples = [*alike[:4], *(torch.full(later, 10.0 + k) for k in range(4))]
    assert difference(outcome(collator, samples), outcome(default_collate, samples)) is None


# Samples that change in structure.

SHAPES = [
    lambda k: {"x": torch.full((2,), float(k)), "y": k},
    lambda k: {"y": k, "x": torch.full((2,), float(k))},
    lambda k: {"x": torch.full((2,), float(k))},
    lambda k: {"x": torch.full((2,), float(k)), "z": k},
    lambda k: {"x": torch.full((2,), float(k)), "y": k, "z": k},
    lambda k: {"x": {"x": k}, "y": k},
    lambda k: [torch.full((2,), float(k)), k],
    lambda k: (torch.full((2,), float(k)), k),
    lambda k: (torch.full((2,), float(k)), k, k),
    lambda k: Point(torch.full((2,), float(k)), k),
    lambda k: torch.full((2,), float(k)),
    lambda k: "xy",
    lambda k: [],
    lambda k: {},
    lambda k: None,
    lambda k: (k, "xy"),
    lambda k: (k, [k, (k, k)]),
    lambda k: (k, [k, (k,)]),
    lambda k: Plain(torch.full((2,), float(k)), k),
    lambda k: Plain(torch.full((3,), float(k)), "y"),
    lambda k: Child(torch.full((2,), float(k)), k),
]


@pytest.mark.parametrize("one", range(len(SHAPES)))
def test_another_structure(one):
    """From one batch to the next, and within a batch. Seen to fail: `columns` without the lengths (extra keys), and
    `_write` that keeps the old schema's filler after `OtherStructure` in mid-batch.
    """
    first = SHAPES[one]
    for place, second in enumerate(SHAPES, one):
        some, others = WAYS[place % 2 :: 2], WAYS[1 - place % 2 :: 2]
        check(column(first, 1, 2, 3), column(second, 4, 5, 6), column(first, 7, 8), ways=some)
        check([first(1), first(2), second(3)], [second(4), first(5), first(6)], column(second, 7, 8), ways=others)
        check(column(first, 1, 2, 3), [first(4), second(5), first(6)], column(first, 7, 8), ways=some)


def test_strings_in_a_tuple_are_a_tuple():
    """As in ``default_collate``, which returns a list for every other sequence; in a dict they are a list."""
    collator = Collator()
    for pieces in ([2], [1, 1]):
        for _ in range(2):
            names, numbers = in_pieces(collator, [("a", 1), ("b", 2)], pieces)
            assert names == ("a", "b")
            assert numbers.tolist() == [1, 2]
    assert Collator()([{"x": "a"}, {"x": "b"}]) == {"x": ["a", "b"]}
    assert Collator()([Point("a", b"1"), Point("b", b"2")]) == Point(("a", "b"), (b"1", b"2"))
    assert Collator()(["a", "b"]) == ["a", "b"]


def test_a_schema_that_no_longer_fits_is_given_up():
    """An earlier type of a field must not keep later batches from being written in place, or dataclasses from being
    collated."""
    arena, collator = Arena(), Collator()
    collator([{"x": "a"}, {"x": "b"}])
    for _ in range(2):
        batch = collator([{"x": Plain(torch.ones(3), 1)}, {"x": Plain(torch.ones(3), 1)}], arena)
        assert batch["x"].y.tolist() == [1, 1]
    assert arena.holds(batch["x"].x)


def test_negative_strides_do_not_depend_on_the_batches_before():
    """``default_collate`` refuses such arrays. We accept them, so we must always accept them."""
    collator = Collator()
    assert collator([np.arange(3)[::-1], np.arange(3)[::-1]]).tolist() == [[2, 1, 0]] * 2
    assert collator([np.arange(4)[::-1], np.arange(4)[::-1]]).tolist() == [[3, 2, 1, 0]] * 2
    assert collator([np.arange(4.0)[::-1]]).tolist() == [[3, 2, 1, 0]]


# Gradients.


@pytest.mark.parametrize(("learned", "odd"), [(False, 0), (True, 2)])
def test_gradients_flow(learned, odd):
    """Even if only one sample of a batch requires grad. Seen to fail: `_numpy` with a ``detach``."""
    for pieces in ([3], [1, 1, 1]):
        collator = Collator()
        if learned:
            collator([torch.zeros(2), torch.zeros(2)])
        samples = [torch.ones(2, requires_grad=row == odd) for row in range(3)]
        batch = in_pieces(collator, samples, pieces)
        assert batch.requires_grad
        (batch * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
        assert samples[odd].grad.tolist() == [odd + 1.0] * 2


@pytest.mark.parametrize("rows", [2, 3])
def test_numbers_may_be_changed_in_place_by_what_has_gradients(rows):
    """Seen to fail: they were the results of one ``unbind``, which autograd does not allow to be changed in place."""
    batch = BatchBuilder(Collator(), 3, afresh)
    batch.add([dict.fromkeys("abcd", k + 1.0) for k in range(rows)])
    fields = batch.finish()
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    fields["a"].mul_(weight)
    fields["a"].sum().backward()
    assert weight.grad.item() == sum(range(rows + 1))
    assert [fields[key].requires_grad for key in "abcd"] == [True, False, False, False]
    assert fields["b"].tolist() == [k + 1.0 for k in range(rows)]


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("name", ["float32", "array", "str", "Python int", "requires grad", "None"])
def test_dataclasses_field_by_field(kind, name):
    """Seen to fail: a record built by ``kind(**fields)``."""

    def make(k):
        record = kind(LEAVES[name](k), k)
        return {"a": [record, Frozen(record, (k, Plain(record)))], "b": k}

    check(column(make, 1, 2, 3), column(make, 4, 5, 6), column(make, 7))


@dataclass
class Output(collections.OrderedDict):
    """A mapping that is also a dataclass, like a ``ModelOutput`` of Transformers."""

    x: Any = None

    def __post_init__(self):
        self["x"] = self.x


def test_a_mapping_that_is_a_dataclass_is_a_mapping():
    samples = [Output(torch.ones(2)), Output(torch.zeros(2))]
    theirs = default_collate(samples)
    assert torch.equal(Collator()(samples)["x"], theirs["x"])


# Memory.


class Arena:
    """An `Allocate` that knows its memory; a second call for a batch returns the same memory."""

    def __init__(self):
        self.calls = []
        self.memory = torch.empty(1 << 20, dtype=torch.uint8)

    def __call__(self, specs):
        tensors, start = [], 0
        self.memory.fill_(0xA5)
        for shape, dtype in specs:
            n = torch.Size(shape).numel() * dtype.itemsize
            tensors.append(self.memory[start : start + n].view(dtype).reshape(shape))
            start += -(-n // 64) * 64
        self.calls.append([(shape, dtype) for shape, dtype in specs])
        self.given = {one.data_ptr() for one in tensors}
        return tensors

    def holds(self, tensor):
        return tensor.data_ptr() in self.given


@pytest.mark.parametrize("pieces", [[4], [1, 3]])
def test_fields_that_fit_lie_in_the_memory_that_was_given(pieces):
    """And fields that do not fit leave them in place. Seen to fail: `_TensorField.filler` using ``torch.empty_like`` of
    its memory."""
    arena, collator = Arena(), Collator()

    def make(k, odd=False):
        return {
            "image": np.full((3, 8), k, np.float32),
            "name": f"{k}",
            "label": k,
            "box": torch.full((5 if odd else 4,), float(k), dtype=torch.bfloat16),
            "flag": np.bool_(k % 2),
            "rest": [torch.eye(2).tolist(), np.int16(k)],
        }

    for round_ in range(3):
        samples = column(make, *range(4 * round_, 4 * round_ + 4))
        batch = in_pieces(collator, samples, pieces, arena)
        assert difference(batch, default_collate(samples)) is None
        assert all(arena.holds(batch[key]) for key in ("image", "label", "box", "flag"))
        assert arena.holds(batch["rest"][1])
    samples = [make(1), make(2), make(3), {**make(4), "label": 4.0}]
    batch = in_pieces(collator, samples, pieces, arena)
    assert difference(batch, default_collate(samples)) is None
    assert arena.holds(batch["image"])
    assert not arena.holds(batch["label"])
    in_pieces(collator, column(make, 1, 2, 3, 4), pieces, arena)
    samples = column(lambda k: make(k, odd=True), 1, 2, 3, 4)
    for fits in (False, True):
        batch = in_pieces(collator, samples, pieces, arena)
        assert difference(batch, default_collate(samples)) is None
        assert arena.holds(batch["box"]) is fits, "a new shape is learned from the batch in which it came"
        assert arena.holds(batch["image"])


def test_memory_is_asked_for_once_and_only_where_needed():
    """Seen to fail: `_begin` without ``if schema.specs``."""
    arena = Arena()
    strings = Collator()
    strings(["a", "b"], arena)
    strings(["a", "b"], arena)
    assert arena.calls == []
    collator = Collator()
    for _ in range(2):
        collator([{"x": 1.5, "s": "a"}, {"x": 2.5, "s": "b"}], arena)
    assert arena.calls == [[((2,), torch.float64)]] * 2


def test_large_rows():
    """Seen to fail: only the first piece of a column of tensors that is written in pieces."""
    check(
        column(lambda k: torch.full((2000,), k), *range(40)), column(lambda k: torch.full((2000,), k), *range(40, 60))
    )
    check(
        column(lambda k: np.full((200, 200), k, np.float32), 1, 2, 3),
        column(lambda k: np.full((200, 200), k, np.float32), 4, 5),
    )
    check(column(lambda k: torch.full((200, 200), k, dtype=torch.bfloat16).T, 1, 2, 3))


def test_batches_share_nothing():
    """One collator builds two batches at once, as in two threads. Seen to fail: a schema that keeps its fillers."""
    collator = Collator()
    collator([(1, "a", torch.zeros(2))])
    one, two = BatchBuilder(collator, 4, afresh), BatchBuilder(collator, 4, afresh)
    for k in range(4):
        one.add([(k, f"{k}", torch.full((2,), k * 1.0))])
        two.add([(-k, f"-{k}", torch.full((2,), -k * 1.0))])
    for batch, sign in ((one, 1), (two, -1)):
        numbers, _, rows = batch.finish()
        assert numbers.tolist() == [sign * k for k in range(4)]
        assert rows.tolist() == [[sign * k] * 2 for k in range(4)]


def test_samples_that_torch_would_stack_in_its_own_threads():
    """From 32,768 numbers on they are written by the piece, or by NumPy; with the same result and the same errors."""
    rows = [torch.full((200, 60), float(k)) for k in range(5)]
    check(
        rows[:3],
        rows,
        [*rows[:2], rows[2].double()],
        [*rows[:2], rows[2][:, :59]],
        [{"a": one, "b": k} for k, one in enumerate(rows)],
    )
    check(rows[:3], [one.clone().requires_grad_() for one in rows])
    check([np.full((200, 60), k) for k in range(3)])


# Random structures and changes.

leaf_names = st.sampled_from([name for name in NAMES if name not in ("object", "not a number")])
trees = st.recursive(
    leaf_names,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3).map(lambda parts: ("list", parts)),
        st.lists(inside, max_size=3).map(lambda parts: ("tuple", parts)),
        st.dictionaries(st.sampled_from(["a", "b", 3, None]), inside, max_size=3).map(lambda parts: ("dict", parts)),
        st.tuples(inside, inside).map(lambda parts: ("named", parts)),
    ),
    max_leaves=5,
)
"""The name of a leaf, or a container of names."""


def grown(tree, k):
    if isinstance(tree, str):
        return LEAVES[tree](k)
    kind, parts = tree
    if kind == "dict":
        return {key: grown(part, k) for key, part in parts.items()}
    values = [grown(part, k) for part in parts]
    return Point(*values) if kind == "named" else tuple(values) if kind == "tuple" else values


def changed(tree, chance, other):
    """``tree`` with some of its parts changed."""
    if isinstance(tree, str) or not tree[1] or chance.random() < 0.3:
        return other
    kind, parts = tree
    if kind == "dict":
        key = chance.choice(list(parts))
        if chance.random() < 0.2:
            return kind, {name: part for name, part in parts.items() if name != key}
        return kind, {**parts, key: changed(parts[key], chance, other)}
    place = chance.randrange(len(parts))
    if chance.random() < 0.2 and kind != "named":
        return kind, parts[:place] + parts[place + 1 :]
    return kind, [*parts[:place], changed(parts[place], chance, other), *parts[place + 1 :]]


def run_of_changes(tree, others, seed):
    chance = random.Random(seed)
    collator = Collator()
    arena = Arena()
    k = 0
    for _ in range(6):
        if chance.random() < 0.3:
            tree = changed(tree, chance, chance.choice(others))
        samples = []
        for _ in range(chance.randint(1, 5)):
            k += 1
            samples.append(grown(changed(tree, chance, chance.choice(others)) if chance.random() < 0.1 else tree, k))
        sizes = [chance.randint(1, 3) for _ in samples] if chance.random() < 0.7 else [len(samples)]
        expected = outcome(theirs, samples)
        found = outcome(in_pieces, collator, samples, sizes, chance.choice([afresh, anywhere, anywhere, arena]))
        assert difference(found, expected) is None, f"{samples} in pieces of {sizes}: {difference(found, expected)}"


@settings(max_examples=60, deadline=None)
@given(trees, st.lists(trees, min_size=1, max_size=3), st.integers(0, 2**32))
def test_random_structures_and_random_changes(tree, others, seed):
    """Seen to fail: each of the faults named above."""
    run_of_changes(tree, others, seed)
