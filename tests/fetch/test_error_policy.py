"""Errors in user code are raised with an address, skipped, or replaced, and the loader continues."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset
from ways import SPAWN, WAYS, every_way

import penstock
from penstock import SKIP, Loader, SampleError
from penstock._fetch.error_policy import WINDOW, ErrorBudget, PartialBatch, SampleFailure
from penstock.testing import Tagged

ways = pytest.mark.parametrize("way", [*WAYS, SPAWN])


class Tangled(Exception):
    """Its constructor needs arguments that its pickle does not carry."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Closed(Exception):
    def __reduce__(self):
        raise SystemExit("no pickling")


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Failing(Tagged):
    """Some indices raise."""

    def __init__(self, n, *bad, kind=ValueError, arguments=("bad pixel",)):
        super().__init__(n)
        self.bad = bad
        self.kind = kind
        self.arguments = arguments

    def __getitem__(self, index):
        if index in self.bad:
            raise self.kind(*self.arguments)
        return super().__getitem__(index)


class FailingGathered(Failing):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def epoch(loader):
    """The batches as lists, and the exceptions themselves, until the epoch has ended."""
    batches = iter(loader)
    seen = []
    while True:
        try:
            seen.append(next(batches).tolist())
        except StopIteration:
            return seen
        except Exception as error:
            seen.append(error)


def shapes(seen):
    return [one if isinstance(one, list) else type(one) for one in seen]


# Raised.


@ways
def test_an_error_has_its_type_its_traceback_and_its_address(way):
    """And the loader continues. Seen to fail: without the note that names the worker."""
    with Loader.from_dataset(Failing(8, 3), batch_size=2, **way) as loader:
        for number in range(2):
            seen = epoch(loader)
            assert shapes(seen) == [
                [1000 * number, 1000 * number + 1],
                ValueError,
                *[[1000 * number + i, 1000 * number + i + 1] for i in (4, 6)],
            ]
            error = seen[1]
            assert str(error) == "bad pixel"
            assert error.__notes__[0] == f"while loading dataset index 3 (epoch {number}, position 3)"
            where = (
                {"thread": "in worker thread ", None: "in worker process "}[way.get("method")]
                if way["num_workers"]
                else None
            )
            assert (where is None and len(error.__notes__) == 1) or error.__notes__[1].startswith(where)
            assert "__getitem__" in str(error.__cause__) or error.__traceback__.tb_next is not None


@every_way
@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt])
def test_what_means_something_to_loops_arrives_as_an_error(way, kind):
    """Seen to fail: `Job.result` raising the error directly. Inline, Ctrl-C cannot be distinguished from a
    KeyboardInterrupt of the dataset."""
    if kind is KeyboardInterrupt and not way["num_workers"]:
        pytest.skip("inline, it is raised as it is")
    with Loader.from_dataset(Failing(6, 3, kind=kind, arguments=()), batch_size=2, **way) as loader:
        seen = epoch(loader)
    assert shapes(seen) == [[0, 1], SampleError, [4, 5]]
    assert kind.__name__ in str(seen[1])
    assert "dataset index" in str(seen[1])
    assert type(seen[1].__cause__) is kind


@every_way
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(Tangled, (1, 2)), (Closed, ("closed",)), (Unspeakable, ()), (Frozen, (5,))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_exception_arrives(way, kind, arguments):
    """As itself without worker processes; with them as itself or as text. Seen to fail: `except Exception` around its
    pickling (`Closed`)."""
    if kind is Frozen and not way["num_workers"]:
        pytest.skip("Python's own context managers fail on such an exception")
    with Loader.from_dataset(Failing(6, 3, kind=kind, arguments=arguments), batch_size=2, **way) as loader:
        seen = epoch(loader)
    assert shapes([seen[0], seen[2]]) == [[0, 1], [4, 5]]
    if way["num_workers"] == 0 or way.get("method") == "thread":
        assert type(seen[1]) is kind
    else:
        assert type(seen[1]) is SampleError
        assert kind.__name__ in str(seen[1])
        assert "__getitem__" in str(seen[1].__cause__)


@every_way
def test_an_error_of_collate_names_the_batch(way):
    with Loader.from_dataset([torch.zeros(n % 3) for n in range(4)], batch_size=2, on_error="skip", **way) as loader:
        error = epoch(loader)[0]
    assert isinstance(error, RuntimeError)
    assert "samples 0 and 1 of this batch differ" in error.__notes__[0]
    assert "while loading the batch of dataset indices [0, 1]" in error.__notes__[1]


# Skipped.


@pytest.mark.parametrize(
    ("way", "kind"), [(WAYS[0].values[0], Failing), (WAYS[1].values[0], Failing), (WAYS[2].values[0], FailingGathered)]
)
def test_skip_shortens_the_batch_and_moves_nothing_else(way, kind, caplog):
    """Seen to fail: the sample before repeated in place of the bad one."""
    with Loader.from_dataset(kind(8, 2, 5), batch_size=3, on_error="skip", **way) as loader:
        assert epoch(loader) == [[0, 1], [3, 4], [6, 7]]
        assert len(loader) == 3
        assert epoch(loader) == [[1000, 1001], [1003, 1004], [1006, 1007]]
        statistics = loader.statistics().nodes[-1].failures
        assert (statistics.samples, statistics.failed, statistics.skipped) == (16, 4, 4)
        assert statistics.last == "dataset index 5 (epoch 1, position 5)"
    messages = [record.getMessage() for record in caplog.records if "skipped" in record.message]
    assert len(messages) == 4
    assert messages[0].startswith("skipped dataset index 2 (epoch 0, position 2)")
    assert "ValueError: bad pixel" in messages[0]


@every_way
def test_a_batch_of_which_nothing_is_left_raises(way):
    with Loader.from_dataset(Failing(6, 2, 3), batch_size=2, on_error="skip", **way) as loader:
        seen = epoch(loader)
        assert shapes(seen) == [[0, 1], SampleError, [4, 5]]
        assert "all 2 samples of a batch failed" in str(seen[1])
        assert loader.statistics().nodes[-1].failures.failed == 2


@every_way
def test_a_single_sample_that_fails_raises_or_is_replaced(way):
    """Without batches there is no batch to shorten."""
    with Loader.from_dataset(Failing(3, 1), batch_size=None, on_error="skip", **way) as loader:
        batches = iter(loader)
        assert next(batches) == 0
        with pytest.raises(SampleError, match="dataset index 1"):
            next(batches)
        assert next(batches) == 2
    with Loader.from_dataset(Failing(3, 1), batch_size=None, on_error=blank, **way) as loader:
        assert list(loader) == [0, -1, 2]


def blank(exc, index, epoch, position):
    return -index


def choosy(log, exc, index, epoch, position):
    """Logs its arguments; returns a substitute or SKIP."""
    assert isinstance(exc, ValueError)
    assert penstock.sample().index == index
    with open(log, "a") as file:
        file.write(f"{index} {epoch} {position}\n")
    return SKIP if index == 5 else -1000 * epoch - index


@ways
def test_a_function_decides(way, tmp_path):
    """The function runs in the worker and gets the sample's address."""
    log = tmp_path / "log"
    with Loader.from_dataset(Failing(8, 2, 5), batch_size=3, on_error=partial(choosy, str(log)), **way) as loader:
        assert epoch(loader) == [[0, 1, -2], [3, 4], [6, 7]]
        assert epoch(loader)[0] == [1000, 1001, -1002]
        assert loader.statistics().nodes[-1].failures.skipped < loader.statistics().nodes[-1].failures.failed
    assert {"2 0 2", "5 0 5", "2 1 2"} <= set(log.read_text().splitlines())


def test_an_error_of_the_function_is_an_error():
    def worse(exc, index, epoch, position):
        raise LookupError("no substitute")

    with Loader.from_dataset(Failing(4, 1), batch_size=2, on_error=worse) as loader:
        seen = epoch(loader)
    assert shapes(seen) == [LookupError, [2, 3]]
    assert isinstance(seen[0].__context__, ValueError)


# The budget.


@every_way
def test_more_than_max_errors_raises_and_the_loader_goes_on(way):
    with Loader.from_dataset(Failing(8, 1, 2, 4), batch_size=2, on_error="skip", max_errors=2, **way) as loader:
        seen = epoch(loader)
        assert shapes(seen) == [[0], [3], SampleError, [6, 7]]
        assert (
            "max_errors=2 allows: 3 of 6 so far. The last was dataset index 4 (epoch 0, position 4): ValueError: bad "
            "pixel"
        ) in str(seen[2])
        assert shapes(epoch(loader)) == [SampleError, SampleError, SampleError, [1006, 1007]]


@given(
    st.lists(st.tuples(st.integers(1, 400), st.sets(st.integers(0, 399), max_size=30)), max_size=30),
    st.sampled_from([0, 3, 20, 0.001, 0.004, 0.02, 0.5]),
)
@example([(1, {0}), (399, set()), (400, set()), (200, set()), (1, {0})], 0.001)
def test_the_budget_is_that_of_its_definition(batches, max_errors):
    """Compared with a count from scratch over every window. Seen to fail: `<` instead of `<=` in the window."""
    logging.disable(logging.CRITICAL)
    budget = ErrorBudget(max_errors)
    failed, samples = [], 0
    for size, rows in batches:
        rows = sorted(row for row in rows if row < size)
        failed += [samples + row for row in rows]
        value = (
            PartialBatch("value", [SampleFailure(row, "sample", "error", True) for row in rows], 1) if rows else "value"
        )
        samples += size
        if isinstance(max_errors, int):
            over = len(failed) > max_errors
        else:
            over = any(
                sum(end - WINDOW < one <= end for one in failed) > max_errors * WINDOW
                for end in failed[len(failed) - len(rows) :]
            )
        try:
            assert budget.passed(size, value, "", {"position": samples}) == "value"
            raised = False
        except SampleError:
            raised = True
        assert raised == (over and bool(rows))
    statistics = budget.statistics()
    assert (statistics.samples, statistics.failed, statistics.skipped) == (samples, len(failed), len(failed))
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "options",
    [
        {"on_error": "ignore"},
        {"on_error": None},
        {"max_errors": 3},
        *(
            {"on_error": "skip", "max_errors": max_errors}
            for max_errors in (-1, 0.0, 1.0, 1.5, True, "many", float("nan"))
        ),
    ],
)
def test_policies_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="on_error|max_errors"):
        Loader.from_dataset(Tagged(3), **options)
    with pytest.raises(ValueError, match=r"only Fetch\(dataset\)"):
        penstock.nodes.ParallelMapper(
            penstock.nodes.Cycler(penstock.nodes.Sampler(penstock.orders.SequentialOrder(3))), abs, 0, on_error="skip"
        )


class Forward(IterableDataset):
    def __iter__(self):
        yield from range(7)


def but_3(item):
    if item == 3:
        raise ValueError("damaged")
    return item


@pytest.mark.parametrize("on_error", ["skip", lambda *_: None], ids=["skip", "function"])
@pytest.mark.parametrize("batch_size", [2, None])
def test_items_that_are_read_forward_are_not_skipped(on_error, batch_size):
    """And what the message advises works. Seen to fail: it spoke of ``Fetch(dataset)``, and of the user's function."""
    with pytest.raises(ValueError, match=r"Forward is read forward.*transform=.*penstock.Stream"):
        Loader.from_dataset(Forward(), batch_size, on_error=on_error)
    with Loader.from_dataset(Forward(), 2, on_error="skip", transform=but_3, collate_fn=list) as loader:
        assert list(loader) == [[0, 1], [2], [4, 5], [6]]


def test_skip_is_one_object():
    """In every process. Seen to fail: without `__reduce__`."""
    assert pickle.loads(pickle.dumps(SKIP)) is SKIP
