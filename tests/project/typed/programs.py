"""What a type checker makes of programs that use penstock: `test_typing.py` has it read this file, and nothing runs it.

``assert_type`` says what is known, and an ``ignore`` what must be refused: a checker that does not refuse it calls the
``ignore`` unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypedDict, assert_type

import penstock
from penstock import SKIP, Loader, Sample, sample
from penstock.nodes import (
    Batcher,
    Cycler,
    Fetch,
    Mapper,
    Node,
    OnError,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    Sampler,
    Sharder,
    Tail,
    ToDevice,
)
from penstock.orders import Order, SequentialOrder
from penstock.statistics import (
    Durations,
    FailureStatistics,
    LoaderStatistics,
    NodeStatistics,
    PinStatistics,
    WorkerStatistics,
)


class Batch(TypedDict):
    ids: list[int]


data = ["a", "b"]


def collate(rows: list[str]) -> Batch:
    return {"ids": [len(row) for row in rows]}


def collate_any(rows: list[Any]) -> dict[str, Any]:
    return {"rows": rows}


# What collate_fn returns is what the loop gets, whatever else is said.

assert_type(Loader.from_dataset(data, 2, collate_fn=collate), Loader[Batch])
assert_type(Loader.from_dataset(data, 2, True, None, None, 0, collate), Loader[Batch])
assert_type(Loader.from_dataset(data, 2, True, None, None, 0, collate, False, True, 30.0, seed=1), Loader[Batch])
assert_type(Loader.from_dataset(data, batch_sampler=[[0, 1]], collate_fn=collate), Loader[Batch])
assert_type(Loader.from_dataset(data, None, collate_fn=len), Loader[int])
assert_type(Loader.from_dataset(data, 2, collate_fn=lambda rows: len(rows)), Loader[int])
assert_type(Loader.from_dataset(data, 2, collate_fn=collate_any), Loader[dict[str, Any]])
assert_type(
    Loader.from_dataset(data, 2, collate_fn=collate, on_error="skip", pin_memory=True, device="cpu", num_workers=2),
    Loader[Batch],
)
assert_type(Loader.from_dataset(data, collate_fn=collate, groups=penstock.Buckets([1, 1], 2)), Loader[Batch])
assert_type(
    Loader.from_dataset(
        data, collate_fn=collate, groups=penstock.Buckets(keys=[(1, 2), (1, 2)], batch_size={(1, 2): 1})
    ),
    Loader[Batch],
)
assert_type(Loader.from_dataset(data, 2, collate_fn=collate, balance=[1, 2]), Loader[Batch])

loader = Loader.from_dataset(data, 2, collate_fn=collate)
assert_type(iter(loader), Iterator[Batch])
for batch in loader:
    assert_type(batch, Batch)
    batch["labels"]  # type: ignore[typeddict-item]
with loader as opened:
    assert_type(opened, Loader[Batch])

# Nothing is known of a batch that torch's default makes, and nothing is claimed.

assert_type(Loader.from_dataset(data), Loader[Any])
assert_type(Loader.from_dataset(data, 2, True), Loader[Any])
assert_type(Loader.from_dataset(data, None), Loader[Any])
assert_type(Loader.from_dataset(data, 2, True, None, None, 0, None), Loader[Any])
hoped: Loader[Batch] = Loader.from_dataset(data, 2)
options: dict[str, Any] = {"batch_size": 2}
assert_type(Loader.from_dataset(data, **options), Loader[Any])


def maybe_collated(collate_fn: Callable[[list[str]], Batch] | None) -> None:
    assert_type(Loader.from_dataset(data, 2, collate_fn=collate_fn), Loader[Batch])


# What is wrong is said where it is written.

Loader.from_dataset(data, 2, collate_fn=5)  # type: ignore[arg-type]
Loader.from_dataset(data, 2, collat_fn=collate)  # type: ignore[call-arg]
Loader.from_dataset(data, 2, method="threads")  # type: ignore[arg-type]
Loader.from_dataset(data, 2, tail="cut")  # type: ignore[arg-type]
Loader.from_dataset(data, 2, on_error="ignore")  # type: ignore[arg-type]
Loader.from_dataset(data, 2, on_error=len)  # type: ignore[arg-type]
Loader.from_dataset(data, 2, order=[1, 0])  # type: ignore[arg-type]
Loader(data, 2, True)  # type: ignore[call-overload]
Loader(data)  # type: ignore[call-overload]
Loader(dataset=data, batch_size=2)  # type: ignore[call-overload]
Loader(Sampler(SequentialOrder(3)), batch_size=2)  # type: ignore[call-overload]

# A graph built by hand.


def length(value: Any) -> int:
    return len(str(value))


samples = Sharder(Cycler(Sampler(SequentialOrder(9))), 0, 1)
mapped = ParallelMapper(Batcher(samples, 3), length, 0)
assert_type(mapped, ParallelMapper[int])
assert_type(Prefetcher(mapped), Prefetcher[int])
assert_type(PinMemory(mapped), PinMemory[int])
assert_type(ToDevice(mapped, "cpu"), ToDevice[int])
assert_type(Mapper(samples, length), Mapper[int])
assert_type(Loader(Prefetcher(mapped)), Loader[int])
assert_type(Loader(ParallelMapper(samples, Fetch(data), 0)), Loader[Any])
assert_type(Loader(samples), Loader[Any])  # the plain indices, without their addresses
assert_type(Loader(Batcher(samples, 2)), Loader[Any])


class Doubled(Node[int]):
    def transform(self, item: int) -> int:
        return 2 * item


assert_type(Loader(Doubled(mapped)), Loader[int])

# The names that annotations need.


class Reversed:
    def __len__(self) -> int:
        return 2

    def indices(self, epoch: int, positions: Any) -> Any:
        return positions[::-1]

    def settings(self) -> dict[str, Any]:
        return {}


order: Order = Reversed()
tail: Tail = "exact"
tail = "cut"  # type: ignore[assignment]


def substitute(exc: Exception, index: Any, epoch: int, position: int) -> Any:
    return SKIP


on_error: OnError = substitute
on_error = "skip"
on_error = "ignore"  # type: ignore[assignment]


def configured(order: Order, tail: Tail, on_error: OnError) -> Loader[Batch]:
    return Loader.from_dataset(data, 2, order=order, tail=tail, on_error=on_error, collate_fn=collate)


def augmented(row: str, at: Sample) -> float:
    assert_type(at.epoch, int)
    return float(at.rng.random())


augmented("a", sample())


def told(statistics: LoaderStatistics) -> None:
    assert_type(statistics.waits, Durations)
    for node in statistics.nodes:
        assert_type(node, NodeStatistics)
        assert_type(node.workers, WorkerStatistics | None)
        assert_type(node.failures, FailureStatistics | None)
        assert_type(node.pinned, PinStatistics | None)


told(loader.statistics())

# `import penstock` is enough, and a name that is not there is refused.

assert_type(Loader.from_dataset(penstock.formats.jsonl("rows.jsonl"), 2), Loader[Any])
penstock.testing.assert_order_is_pure(order)
penstock.formats.tarr("x.tar")  # type: ignore[attr-defined]
_ = penstock.Louder  # type: ignore[attr-defined]
