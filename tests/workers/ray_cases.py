"""Does the cases of workers on other machines that its stdin names, on one cluster of two nodes, and answers each with
a line of JSON.

Data carries its address, and draws from every generator, so that one digest says whether items, order and random
numbers are the same.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import io
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import ray_ledger
import torch
from ray.cluster_utils import Cluster
from strikes import Strikes, only_locks_of_c
from tensors import DTYPES, Holds, Yields, as_they_are, content, make
from torch.utils.data import IterableDataset, get_worker_info

import penstock
from penstock import Loader
from penstock._command.index import index_files, outcomes_of
from penstock._workers import ray_actors
from penstock.formats import jsonl
from penstock.testing import assert_resumes_everywhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CASES: dict[str, Callable[[], None]] = {}
CPUS = 3
LONG: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def long_case(function: Callable[[], None]) -> Callable[[], None]:
    """One of the soak."""
    LONG.append(function)
    return case(function)


class Draws:
    """Sample ``i``: its address, and what each generator gives it."""

    def __init__(self, n: int = 83) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        sample = penstock.sample()
        drawn = [random.random(), np.random.rand(), float(torch.rand(())), float(sample.rng.random())]
        return {"at": 1000 * sample.epoch + i, "drawn": torch.tensor(drawn), "large": torch.full((20_000,), float(i))}


class Once(Draws):
    """The process that loads sample ``at`` ends, as often as there are files to be made in ``folder``."""

    def __init__(self, folder: str, at: int, times: int = 1) -> None:
        super().__init__()
        self.folder, self.at, self.times = folder, at, times

    def __getitem__(self, i: int) -> dict[str, Any]:
        for k in range(self.times * (i == self.at)):
            try:
                os.close(os.open(f"{self.folder}/{k}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def built(dataset: Any, workers: int = 0, *, method: Any = "ray", **options: Any) -> Loader[Any]:
    return Loader.from_dataset(
        dataset, num_workers=workers, method=method, **{"batch_size": 4, "shuffle": True, "seed": 3, **options}
    )


def digest(batches: list[Any]) -> str:
    found = hashlib.sha256()
    for batch in batches:
        for key in ("at", "drawn", "large"):
            found.update(batch[key].numpy().tobytes())
    return found.hexdigest()


def read(loader: Loader[Any], epochs: int = 2) -> str:
    with loader:
        return digest([batch for _ in range(epochs) for batch in loader])


def inline(dataset: Any = None, **options: Any) -> str:
    return read(built(dataset or Draws(), **options))


def folder() -> str:
    found = Path("folders") / str(time.monotonic_ns())
    found.mkdir(parents=True)
    return str(found.absolute())


def raised(kind: type[BaseException], act: Callable[[], Any]) -> str:
    """The error that ``act`` raises, with all that is told of it."""
    try:
        act()
    except kind as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError(f"no {kind.__name__}")


def pool_of(loader: Loader[Any]) -> Any:
    return next(node for node in loader.root.chain() if hasattr(node, "executor")).executor._pool


def actors_of(loader: Loader[Any]) -> Any:
    return pool_of(loader)._actors


def alive() -> int:
    """Actors that Ray has not ended."""
    from ray._private.state import actors

    return sum(one["State"] != "DEAD" for one in actors().values())


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@case
def the_same_as_inline() -> None:
    """Also by calls of several tasks, by another number of workers, and going on from the state of a loader with
    processes."""
    with built(Draws(), 1, method="process") as loader:
        batches = iter(loader)
        found, state = [next(batches) for _ in range(9)], loader.state_dict()
    with built(Draws(), 2, prefetch_factor=8) as loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        found, state = found + [next(batches) for _ in range(9)], loader.state_dict()
    with built(Draws(), 3, method="process") as loader:
        loader.load_state_dict(state)
        assert digest([*found, *loader, *loader]) == inline()


@long_case
def states_go_from_each_method_to_each() -> None:
    for before, after in [("thread", "ray"), ("ray", "thread"), ("ray", "ray")]:
        with built(Draws(), 2, method=before) as loader:
            batches = iter(loader)
            found = [next(batches) for _ in range(9)]
            state = loader.state_dict()
        with built(Draws(), 1, method=after) as loader:
            loader.load_state_dict(state)
            found += [*loader, *loader]
        if "thread" not in (before, after):
            assert digest(found) == inline()
        else:
            assert [int(at) for batch in found for at in batch["at"]] == addresses(), (before, after)


def addresses() -> list[int]:
    with built(Draws()) as loader:
        return [int(at) for _ in range(2) for batch in loader for at in batch["at"]]


@long_case
def not_in_order() -> None:
    with built(Draws(), 2, in_order=False) as loader:
        assert sorted(int(at) for batch in loader for at in batch["at"]) == [*range(83)]


@long_case
def batches_as_they_are_made() -> None:
    """A list, a dict of arrays, bytes, and a class of the program itself, which an actor cannot import; and keys of
    such a class as tasks."""

    def kinds(samples: list[int]) -> Any:
        return Own([*samples]), {"x": np.arange(40_000) + samples[0]}, [bytes([k]) * 5000 for k in samples], samples

    with built(list(range(8)), 1, shuffle=False, collate_fn=kinds) as loader:
        for k, (own, arrays, texts, samples) in enumerate(loader):
            own.samples.append(0)
            assert type(own) is Own
            assert samples == [*range(4 * k, 4 * k + 4)]
            arrays["x"] += 1  # memory of ours, and not the object store's, which is read-only
            assert arrays["x"].tolist() == list(range(4 * k + 1, 4 * k + 40_001))
            assert texts == [bytes([n]) * 5000 for n in samples]
    keys = {Own([k]): k for k in range(8)}
    with built(keys, 1, shuffle=False, sampler=list(keys)) as loader:
        assert [int(k) for batch in loader for k in batch] == [*range(8)]


class Own:
    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def __hash__(self) -> int:
        return hash(tuple(self.samples))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and self.samples == other.samples


@long_case
def a_worker_is_told_which_it_is() -> None:
    def said(worker: int) -> None:
        os.environ["SAID"] = str(worker)

    class Tells(Draws):
        def __getitem__(self, i: int) -> Any:
            info: Any = get_worker_info()
            return int(os.environ["SAID"]), info.id, info.num_workers, torch.get_num_threads(), torch.is_grad_enabled()

    with torch.no_grad(), built(Tells(8), 2, worker_init_fn=said, collate_fn=list) as loader:
        found = {sample for batch in loader for sample in batch}
    assert found <= {(0, 0, 2, 1, True), (1, 1, 2, 1, True)}


@long_case
def files_in_lanes_are_read_once() -> None:
    """Each file by one worker, forward."""
    place = folder()
    for file in range(4):
        Path(place, f"{file}.jsonl").write_text("".join(f"{100 * file + line}\n" for line in range(20)))

    def found(**options: Any) -> list[int]:
        with (
            closing(jsonl(f"{place}/*.jsonl", epoch_size=80, lanes=4)) as data,
            built(data, shuffle=False, **options) as loader,
        ):
            return [int(record) for batch in loader for record in batch]

    assert found(workers=2) == found(workers=0)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(50))


@long_case
def a_stream_is_read_here_and_transformed_there() -> None:
    def there(item: int) -> tuple[int, bool]:
        return 2 * item, os.getpid() != driver

    driver = os.getpid()
    with built(Numbers(), 2, shuffle=False, transform=there, collate_fn=list) as loader:
        assert [item for batch in loader for item in batch] == [(2 * k, True) for k in range(50)]


@case
def tensors_of_every_dtype() -> None:
    """Held by the dataset, as items on their way to a worker, and in a class of the program's own."""
    with built(Holds(DTYPES), 1, batch_size=None, collate_fn=as_they_are, shuffle=False) as loader:
        found = dict(list(loader))
    assert {DTYPES[number]: content(one) for number, one in found.items()} == {
        name: content(make(name)) for name in DTYPES
    }

    class Mine(Yields):
        def of(self, number: int) -> Any:
            return Own(super().of(number))

    with built(Mine(DTYPES), 1, batch_size=None, collate_fn=as_they_are, shuffle=False) as loader:
        found = dict(list(loader))
    assert [content(one.samples) for one in found.values()] == [content(make(name)) for name in DTYPES]


@case
def errors_come_from_where_they_happened() -> None:
    class Mine(KeyError):
        """Of the program itself."""

    class Fails(Draws):
        def __getitem__(self, i: int) -> Any:
            raise Mine("no such sample")

    said = raised(Mine, lambda: read(built(Fails(), 1)))
    assert "no such sample" in said
    assert "while loading dataset index" in said
    assert "Ray worker 0 (pid" in said
    assert " on node " in said


@long_case
def an_error_policy_holds() -> None:
    class Some(Draws):
        def __getitem__(self, i: int) -> Any:
            return 1 // (i % 5) * 0 + i

    with built(Some(), 2, shuffle=False, on_error="skip") as loader:
        assert [int(i) for batch in loader for i in batch] == [i for i in range(83) if i % 5]


@long_case
def what_cannot_be_sent_is_said() -> None:
    assert "cannot be pickled" in raised(
        penstock.SampleError, lambda: read(built(Draws(), 1, collate_fn=lambda samples: threading.Lock()))
    )
    assert "cannot pickle" in raised(TypeError, lambda: read(built(Draws(), 1, transform=threading.Lock().locked)))


@long_case
def an_actor_is_killed() -> None:
    assert read(built(Once(folder(), 30), 2)) == inline()


@long_case
def all_actors_are_killed() -> None:
    with built(Draws(), 2) as loader:
        batches = iter(loader)
        found = [next(batches)]
        for actor in actors_of(loader):
            ray.kill(actor.handle)
        found += [*batches, *loader]
        assert loader.statistics().nodes[-1].workers.restarts == 2
    assert digest(found) == inline()


@long_case
def a_sample_that_kills_twice_is_named() -> None:
    """With the first death it is known which batch it was, and from then on which sample."""
    said = raised(penstock.SampleError, lambda: read(built(Once(folder(), 30, times=9), 1)))
    assert "dataset index 30 (epoch 0" in said
    assert "has killed two workers" in said


@long_case
def the_table_of_faults() -> None:
    """The column of docs/reliability.md."""
    from test_reliability import FAULTS, tried  # which imports what the other cases do without

    found = {fault: tried(fault, "ray", Path(folder()), 100.0) for fault in FAULTS if fault != "descriptors"}
    # Results need no descriptor there, so such a worker lives on, and the next sample that opens a file says what is
    # wrong.
    assert "Too many open files" in raised(OSError, lambda: tried("descriptors", "ray", Path(folder()), 100.0))
    found["descriptors"] = "goes on; `OSError` when a sample opens a file"
    Path("faults.json").write_text(json.dumps(found))


@long_case
def workers_die_more_often_than_they_may() -> None:
    assert "max_restarts=1 allows no more" in raised(
        penstock.WorkerDied, lambda: read(built(Once(folder(), 30, times=9), 2, max_restarts=1, on_error="skip"))
    )


@long_case
def a_start_that_fails_is_told() -> None:
    def fails(worker: int) -> None:
        raise OSError("no data here")

    said = raised(OSError, lambda: read(built(Draws(), 2, worker_init_fn=fails)))
    assert "no data here" in said
    assert "on node" in said


@long_case
def a_start_that_hangs_is_told() -> None:
    said = raised(
        TimeoutError, lambda: read(built(Draws(), 1, worker_init_fn=lambda worker: threading.Event().wait(), timeout=2))
    )
    assert "waited 2.0 s for " in said
    assert "1 have not finished their start" in said


@long_case
def ray_is_shut_down_by_the_program() -> None:
    """Nothing starts another cluster, and nobody waits for what will not come."""
    with built(Draws(), 1, infinite=True) as loader:
        batches = iter(loader)
        next(batches)
        ray.shutdown()
        assert "Ray was shut down" in raised(penstock.ClosedError, lambda: [*batches])
        loader.close()
        assert not ray.is_initialized()
        with built(Draws(), 1, infinite=True) as other:
            ray.init(address=CLUSTER.address, log_to_driver=False, logging_level="warning")
            batches = iter(other)
            next(batches)
            ray.shutdown()
            ray.init(address=CLUSTER.address, log_to_driver=False, logging_level="warning")
            assert "reconnected" in raised(penstock.ClosedError, lambda: [*batches])


@long_case
def a_program_ends_after_ray_is_shut_down() -> None:
    """Without `close`: what runs at its end neither starts nor joins a cluster. Seen to fail: by a finalizer that asks
    Ray to kill."""
    program = (
        "import ray, sys, penstock\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "loader = penstock.Loader.from_dataset(range(9), batch_size=3, num_workers=1, method='ray')\n"
        "print(next(batches := iter(loader)).tolist())\n"
        "ray.shutdown()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, CLUSTER.address], capture_output=True, text=True, check=True)
    assert ended.stdout == "[0, 1, 2]\n"
    assert ended.stderr.count("Connected to Ray cluster") == 1, ended.stderr


@long_case
def a_module_that_an_actor_lacks_is_named() -> None:
    place = folder()
    Path(place, "only_here.py").write_text(
        "class Data:\n    def __len__(self): return 8\n    def __getitem__(self, i): return i\n"
    )
    sys.path.append(place)
    data = importlib.import_module("only_here").Data()
    said = raised(ModuleNotFoundError, lambda: read(built(data, 1)))
    assert "only_here" in said
    assert "Ray worker 0 (pid" in said


@long_case
def a_file_that_a_node_does_not_see_is_named() -> None:
    """As if it lay on this machine only: it has another name there."""
    path = Path(folder(), "x.jsonl")
    path.write_text("1\n2\n3\n4\n")

    def hides(worker: int) -> None:
        os.rename(path, f"{path}.away")

    with closing(jsonl(str(path), counts=[4])) as data:
        said = raised(FileNotFoundError, lambda: read(built(data, 1, worker_init_fn=hides)))
    assert str(path) in said
    assert " on node " in said


@long_case
def a_file_that_a_node_sees_in_another_version_is_named() -> None:
    """As if it had been copied there at another time."""
    path = Path(folder(), "x.jsonl")
    path.write_text("1\n2\n3\n4\n")

    def later(worker: int) -> None:
        os.utime(path, (1, 1))

    assert indexed(path) == 0
    with closing(jsonl(str(path))) as data:
        said = raised(ValueError, lambda: read(built(data, 1, worker_init_fn=later)))
    assert str(path) in said
    assert "changed" in said
    assert " on node " in said


@long_case
def a_job_that_takes_too_long() -> None:
    class Slow(Draws):
        def __getitem__(self, i: int) -> Any:
            if i == 5:
                threading.Event().wait()
            return i

    with built(Slow(12), 1, shuffle=False, timeout=10) as loader:  # a busy machine takes seconds to start the worker
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        said = raised(TimeoutError, lambda: next(batches))
        assert "waited 10.0 s for the batch of dataset indices [4, 5, 6, 7]" in said
        assert [batch.tolist() for batch in batches] == [[8, 9, 10, 11]]


@long_case
def a_jump_forgets_what_was_under_way() -> None:
    """And the worker stays. Seen to fail: by `ray.cancel` of the calls that it had not begun, after which Ray gave it
    up."""
    with built(Draws(), 1) as loader:
        state = loader.state_dict()
        for jump in range(6):
            batches = iter(loader)
            for _ in range(1 + jump):
                next(batches)
            loader.load_state_dict(state)
        assert digest([*loader, *loader]) == inline()
        assert loader.statistics().nodes[-1].workers.restarts == 0


@long_case
def it_resumes_everywhere() -> None:
    for options in ({"prefetch_factor": 8}, {"rank": 1, "world_size": 2, "drop_last": True}):
        assert_resumes_everywhere(lambda: built(Draws(10), 2, **options), steps=8)  # noqa: B023  # called at once


@long_case
def nothing_is_left_after_close() -> None:
    until(lambda: not alive())
    before = objects()
    loader = built(Draws(), 1)
    batches = iter(loader)
    kept = next(batches)
    loader.close()
    until(lambda: not alive())
    until(lambda: objects() <= before)
    assert kept["large"][0, 0] == kept["at"][0]
    with built(Draws(), 1) as abandoned:
        next(iter(abandoned))
        del abandoned, loader, batches
    until(lambda: not alive())


def objects() -> float:
    return float(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])


@long_case
def ctrl_c_at_any_line_loses_nothing() -> None:
    """Also where it loses what has come from an actor, or a worker that is being started. Seen to fail: without
    `Actors.restore` (it waits forever)."""
    expected, strikes = addresses(), Strikes(within=str(Path(ray_actors.__file__).with_name("ray_")))
    found: list[int] = []
    with built(Draws(), 2) as loader:
        for _ in range(2):
            batches = iter(loader)
            while True:
                batch, struck = strikes(lambda: next(batches, None))  # noqa: B023  # called at once
                if batch is None and struck:
                    continue
                if batch is None:
                    break
                found += [int(at) for at in batch["at"]]
    assert found == expected
    assert len(strikes.at) > 60, len(strikes.at)
    del struck
    gc.collect()  # tracebacks of the strikes hold handles of actors that were being started
    until(lambda: not alive())


@long_case
def the_loop_holds_no_lock_written_in_python() -> None:
    """Fails if it uses Ray's futures. Seen to hang: Ctrl-C left the lock of one held, and Ray's only thread for answers
    waited for it forever."""
    with only_locks_of_c(), built(Draws(), 2) as loader:
        batches = iter(loader)
        found = [next(batches) for _ in range(3)]
        loader.refresh()
        found += [*batches, *loader]
    assert digest(found) == inline()


@case
def no_more_is_loaded_ahead_than_was_asked_for() -> None:
    place = folder()

    class Counts(Draws):
        def __getitem__(self, i: int) -> Any:
            os.close(os.open(f"{place}/{i}", os.O_CREAT))
            return super().__getitem__(i)

    with built(Counts(4000), 2, shuffle=False, prefetch_factor=2) as loader:
        batches = iter(loader)
        until(lambda: next(batches) is not None and loader.statistics().nodes[-1].workers.workers == 2)
        next(batches)  # hands out what there is
        most = 4 * (loader.position + 2 * 2)
        until(lambda: len(os.listdir(place)) >= most)
        time.sleep(1)  # it would load more now
        assert len(os.listdir(place)) == most


@long_case
def a_cluster_smaller_than_asked_for() -> None:
    said = Said()
    with built(Draws(), CPUS + 2, infinite=True) as loader:
        batches = iter(loader)
        until(lambda: next(batches) is not None and loader.statistics().nodes[-1].workers.workers == CPUS)
        actors_of(loader).placed_within_s = 0.5
        until(lambda: next(batches) is not None and bool(said.lines))
    assert "none of 2 of 5 workers. Each needs 1 CPU. Free now: " in said.lines[0]
    assert said.lines[0].endswith("The others continue.")


@long_case
def the_others_are_lost_too() -> None:
    """After the warning that some have no place."""
    said, spare = Said(), CLUSTER.add_node(num_cpus=1, resources={"few": 1})
    with built(Draws(), 2, infinite=True, ray_options={"resources": {"few": 1}}) as loader:
        batches = iter(loader)
        next(batches)
        actors_of(loader).placed_within_s = 0.5
        until(lambda: next(batches) is not None and bool(said.lines))
        CLUSTER.remove_node(spare, allow_graceful=False)
        assert "none of 2 of 2 workers" in raised(TimeoutError, lambda: [*batches])


@long_case
def no_place_at_all() -> None:
    ray_actors.PLACED_WITHIN_S = 2.0
    said = raised(TimeoutError, lambda: read(built(Draws(), 2, ray_options={"resources": {"tape": 1}})))
    assert "In the last 2 s Ray has started none of 2 of 2 workers. Each needs 1 CPU, 1 tape. Free now: " in said


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("penstock").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@long_case
def a_ledger_settles_in_any_order() -> None:
    """While its actors are killed, and then with another number of them. Each sample comes as it does inline, and what
    was open comes first.

    Seen to fail: with a state that had nothing open.
    """
    numbers, expected = random.Random(1), [*islice(ray_ledger.build(0), 100)]
    settled: list[penstock.Address] = []
    with ray_ledger.build(2) as loader, penstock.Ledger(loader, 30, timeout=60) as ledger:
        for number in range(60):
            at, sample = next(ledger)
            assert (at.epoch, at.position) == divmod(number, 40)
            assert torch.equal(sample, expected[number])
            if len(ledger.open) == 30:
                settled += numbers.sample(ledger.open, 20)
                for one in settled[-20:]:
                    ledger.done(one)
                for actor in actors_of(loader):
                    ray.kill(actor.handle)
        state = json.loads(json.dumps(ledger.state_dict()))
    with ray_ledger.build(1) as loader, penstock.Ledger(loader, 60, timeout=60) as ledger:
        ledger.load_state_dict(state)
        wanted = [number for number in range(60) if penstock.Address(*divmod(number, 40)) not in settled] + [
            *range(60, 80)
        ]
        assert len(wanted) == 40
        for number in wanted:
            at, sample = next(ledger)
            assert (at.epoch, at.position) == divmod(number, 40)
            assert torch.equal(sample, expected[number])


@long_case
def a_ledger_is_killed_with_its_workers() -> None:
    """Two lives end by SIGKILL, each with another number of workers: over all of them nothing is lost, and nothing
    settled twice.

    Seen to fail: with a state that had nothing open.
    """
    file = Path(folder(), "checkpoint.json")
    expected = [ray_ledger.checksum(sample) for sample in islice(ray_ledger.build(0), 400)]

    def left() -> tuple[list[int], list[int], int]:
        """Of the checkpoint: what was settled, what is open, and the first that nobody has taken."""
        saved = json.loads(file.read_text())
        with ray_ledger.build(0) as loader, penstock.Ledger(loader) as ledger:
            ledger.load_state_dict(saved["ledger"])
            opened = [next(ledger)[0] for _ in ledger.open]
            ends = next(ledger)[0]
        return (
            [40 * epoch + position for (epoch, position), _ in saved["settled"]],
            [*map(number, opened)],
            number(ends),
        )

    def number(at: Any) -> int:
        return int(40 * at.epoch + at.position)

    opened, frontier = [], 0
    for workers, steps, lines in ((2, 10**6, 45), (1, 10**6, 60), (3, 6, None)):
        command = [sys.executable, ray_ledger.__file__, CLUSTER.address, str(file.parent), str(workers), str(steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as life:
            assert life.stdout is not None
            ours = (line for line in life.stdout if line.startswith("["))  # Ray may say something there, too
            said = [*map(json.loads, islice(ours, lines))]
            if lines:
                life.kill()
        assert life.returncode == (-signal.SIGKILL if lines else 0)
        served = {40 * epoch + position: made for (epoch, position), made in said}  # one that is given back comes twice
        assert [*served] == [*opened, *range(frontier, frontier + len(served) - len(opened))]
        assert all(expected[place] == made for place, made in served.items())
        settled, opened, frontier = left()
        assert sorted(settled + opened) == [*range(frontier)]
    assert len(settled) > 60


@long_case
def a_node_is_removed() -> None:
    """With room on the other; and then with none, until another node has come."""
    expected = inline()
    spare = CLUSTER.add_node(num_cpus=2, resources={"spare": 2})
    with built(Draws(), 2, ray_options={"resources": {"spare": 1}}) as loader:
        batches = iter(loader)
        found = [next(batches)]
        CLUSTER.remove_node(spare, allow_graceful=False)
        CLUSTER.add_node(num_cpus=2, resources={"spare": 2})
        found += [*batches, *loader]
    assert digest(found) == expected


@long_case
def two_loaders_at_once() -> None:
    expected = inline()
    with built(Draws(), 1) as one, built(Draws(), 1) as other:
        found = [pair for _ in range(2) for pair in zip(one, other, strict=True)]
    assert [digest([pair[k] for pair in found]) for k in range(2)] == [expected, expected]


@long_case
def in_a_task_of_ray() -> None:
    expected = inline()
    assert ray.get(ray.remote(num_cpus=0)(lambda: read(built(Draws(), 2))).remote()) == expected


def indexed(*paths: Any, workers: Any = 1, index: str | None = None, out: Any = None) -> int:
    return index_files(map(str, paths), index, workers, out or io.StringIO(), sys.stderr)


@long_case
def files_are_indexed_there() -> None:
    """The same bytes as here; what was done before an interrupt is not done again; an error names the node."""
    place, said = folder(), io.StringIO()
    files = [Path(place, f"{k}.jsonl") for k in range(20)]
    for k, file in enumerate(files):
        file.write_text("".join(f"{line}\n" for line in range(100 * k)))
    with closing(outcomes_of({str(file): f"{file}.index" for file in files}, "ray")) as some:  # type: ignore[type-var]
        assert [next(some).error for _ in range(3)] == [""] * 3
    before = len([*Path(place).glob("*.index")])
    assert indexed(*files, workers="ray", out=said) == 0
    assert 3 <= before < 20
    assert f"indexed: {20 - before} (" in said.getvalue()
    assert f"up to date: {before}," in said.getvalue()
    other = folder()
    assert indexed(*files, index=other) == 0
    for file in files:
        assert Path(f"{file}.index").read_bytes() == Path(other, f"{file.name}.index").read_bytes()
    broken = Path(place, "x.jsonl.gz")
    broken.write_bytes(b"not zipped")
    with contextlib.redirect_stderr(io.StringIO()) as told:
        assert indexed(broken, workers="ray") == 1
    assert f"{broken}: on node " in told.getvalue()


@long_case
def bench_compares_them_too() -> None:
    Path("to_compare.py").write_text("import torch\n\ndef data(): return [*torch.arange(100)]\n")
    command = [
        sys.executable,
        "-m",
        "penstock",
        "bench",
        "to_compare.py:data",
        "--compare",
        "--seconds",
        "1",
        "--workers",
        "1",
    ]
    found = subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": CLUSTER.address}, stdout=subprocess.PIPE, text=True, check=True
    )
    assert re.search(r"penstock.Loader of list, 1 Ray worker +[\d,]+ ", found.stdout), found.stdout


@long_case
def in_the_workers_of_ray_train() -> None:
    """Two ranks, each with a Ray worker of its own."""
    import ray.train.torch  # takes as long as all other imports here

    place = folder()

    def train() -> None:
        with built(Draws(), 1, ray_options={"num_cpus": 0.5}) as loader:
            Path(place, str(ray.train.get_context().get_world_rank())).write_text(
                json.dumps([batch["at"].tolist() for batch in loader])
            )

    scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
    ray.train.torch.TorchTrainer(
        train, scaling_config=scaling, run_config=ray.train.RunConfig(storage_path=place)
    ).fit()
    ranks = [json.loads(Path(place, str(rank)).read_text()) for rank in range(2)]
    for rank in range(2):
        with built(Draws(), rank=rank, world_size=2) as loader:
            assert ranks[rank] == [batch["at"].tolist() for batch in loader]


@long_case
def auto_grows_within_the_cluster() -> None:
    class Waits(Draws):
        def __getitem__(self, i: int) -> Any:
            time.sleep(0.02)
            return i

    with built(Waits(4000), "auto", infinite=True) as loader:  # type: ignore[arg-type]
        batches = iter(loader)
        until(lambda: next(batches) is not None and loader.num_workers >= 2)
        assert loader.num_workers <= CPUS


CLUSTER: Any = None


def main() -> None:
    global CLUSTER
    if os.fork():
        os._exit(0)
    # With Ray's niceness of 15, workers get nothing of a machine that does anything else.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0", RAY_worker_niceness="0")
    # Beside ten other jobs a node answers late. Ray would call it dead, and end this program with it.
    os.environ.update(
        RAY_health_check_timeout_ms="60000",
        RAY_health_check_failure_threshold="30",
        RAY_gcs_rpc_server_reconnect_timeout_s="600",
    )
    CLUSTER = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    CLUSTER.add_node(num_cpus=CPUS - 1)
    ray.init(address=CLUSTER.address, log_to_driver=False, logging_level="warning")
    for line in sys.stdin:
        ray_actors.PLACED_WITHIN_S, said = 150.0, None
        signal.alarm(600 if CASES[line.strip()] in LONG else 220)
        try:
            CASES[line.strip()]()
        except BaseException:
            said = traceback.format_exc()
        signal.alarm(0)
        print(json.dumps([line.strip(), said]), flush=True)
    ray.shutdown()
    CLUSTER.shutdown()
    print("ended", flush=True)


def too_late(*_: Any) -> None:
    raise TimeoutError("the case takes too long")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, too_late)
    main()
