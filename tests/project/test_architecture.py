"""Rooms import downwards: who may import whom, no circles among files, and the front door.

Imports are parsed, not executed, and those for type checkers only count too. A file outside every room is a fault.
"""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.project import house
from tests.project.house import boxes_of, circles, code_of, files_of, floors, imports, name_of
from torch.utils.data import IterableDataset, Subset

import penstock
from penstock.nodes import DatasetLike

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(penstock.__file__).parent

MAY_IMPORT = {  # room: those it may import from
    "_arguments": "",
    "_errors": "",
    "_statistics": "",
    "_random": "_arguments _errors",
    "_memory": "",
    "_files": "_arguments _statistics",
    "_workers": "_errors _statistics _memory",
    "_fetch": "_arguments _errors _statistics _random _memory _workers",
    "_nodes": "_arguments _errors _statistics _random _memory _workers _fetch",
    "_changing": "_arguments _errors _random _fetch _nodes",
    "_observe": "_arguments _errors _statistics _workers _fetch",
    "_loader": "_arguments _errors _statistics _random _memory _workers _fetch _nodes _changing _observe _streams",
    "_datasets": "_arguments _errors _random _memory _files _workers _fetch _streams _loader",
    "_streams": "_arguments _errors _statistics _random _memory _files _workers _fetch",
    # the front door itself
    "": (
        "_observe _errors _statistics _random _fetch _nodes _changing _loader _datasets _streams formats nodes orders "
        "statistics testing"
    ),
    "formats": "_arguments _errors _files _fetch _streams",
    "nodes": "_fetch _nodes _changing",  # the front door of that room, as the next two are of theirs
    "orders": "_random",
    "statistics": "_observe _statistics",
    "_command": (
        "_arguments _errors _statistics _files _workers _fetch _nodes _changing _observe _loader _streams formats"
    ),
    "__main__": "_command",
    "testing": "_errors _random _fetch _nodes _loader",
    "integrations": "front nodes",
}
CODE = 29_595
"""Lines of code, at most (of 120 columns: at 140 the same code had 26,324). Raised only with a reason beside it;
`house.py` says how many there are in each room. 950 of them are lanes over an ``IterableDataset``, and 750 addresses
and the ledger; 55 are small batches made at once; 885 are runs that change: data that grow, weights and sources of a
mix (261), ranges to skip and batch sizes (229), the weights of a draw (91); 560 are batches by key, by a sum and dealt
by cost; 380 are packs with media, and lengths by source and by function; 8 are for the fork server of Python 3.14; 31
are what users asked for after four ports: messages, a state whose growth is damaged, ``| head``; 14 are objects that
refuse to be looked at; 43 are tensors in shared memory, passed to new interpreters; 60 are samples that travel in
columns; 87 are seeds, ``worker_init_fn`` and shared values in lanes; 37 are samplers that a copy may not repeat; 27 are
the gradient mode of a user's generator; 145 are whole batches, and what Accelerate counts, gathers and schedules; 140
are epochs of differing lengths, in trainers; 110 are weights that were replaced, loaders built again, and what leaves
no batch; 60 are other lengths of epochs on a resume, and 185 what it takes to have all that a run changes in files of
its own; 120 are live sources and generators that end; 100 are tensors of every dtype and memory that is filled again;
80 are the seeds of lanes, and what a rank gives up to compare; 50 are links, encodings and copies of files; 30 are what
is ready before more is read, files that are free first, and generators of shards that end."""

WIDTH = 120
"""Columns of a line of the package, at most."""

CONCURRENCY = (
    "_thread",
    "asyncio",
    "concurrent",
    "multiprocessing",
    "subprocess",
    "threading",
    "torch.multiprocessing",
)
# the files that may start threads or processes, or hold a lock, besides those of _workers; and why
THREADS_AND_LOCKS = {
    "front": "names are imported when first asked for, and threads that import rooms at the same time may crash",
    "_loader.ledger": "samples are settled, and states saved, in any thread",
    "_memory.recycler": "all worker threads take memory for their batches from one table",
    "_streams.bookmarks": "all threads that read a stream share what is known of its shards",
    "_streams.open_shards": "all threads that read a dataset share its open files",
    "_streams.lanes": "all threads that read a stream share its lanes, each of which moves for one of them at a time",
    "_streams.tables": "many files are looked into at once, because each look waits for a disk or a network",
    "_command.index": "files are indexed in processes, because that is work for all cores",
    "_command.bench": "each candidate is measured in a process of its own, which no other one has warmed up",
}
# what any file may use: it starts nothing and locks nothing. It tells where the code runs, or hands a descriptor to a
# process that is being started.
ASKED = {
    "threading.current_thread",
    "threading.get_ident",
    "threading.main_thread",
    "multiprocessing.parent_process",
    "multiprocessing.context.get_spawning_popen",
    "multiprocessing.reduction.DupFd",
}
ONLY_IN = {  # module: the rooms and files that may import it
    **dict.fromkeys(CONCURRENCY, " ".join(["_workers", *THREADS_AND_LOCKS])),
    "torchdata": "_nodes.node",
    "torch.distributed": (
        "_nodes.ranks _nodes.sharder _loader.check_ranks _loader.rank_notes _loader.canonical_graph _loader.loader"
    ),
    "accelerate": "integrations.accelerate",
    "lightning": "integrations.lightning",
    "pytorch_lightning": "integrations.lightning",
    "transformers": "integrations.transformers",
    "matplotlib": "_observe.picture",
    "tqdm": "_streams.progress",
    "ray": "_workers.ray_actors _workers.ray_pool _workers.ray_worker _command.index",
}
FOR_ALL = {"numpy", "torch", "typing_extensions"}  # torch brings the last one, which only type checkers read here
ALIASES = {"OnError", "Tail"}  # types made of others, which know no name of their own
DOORS = (penstock, penstock.nodes, penstock.orders, penstock.statistics)


def faults(package: Path) -> list[str]:
    """Every import under ``package`` (the folder ``penstock``) that the tables do not allow, in words."""
    return sorted(fault for file in package.rglob("*.py") for fault in faults_of(file, name_of(file, package)))


def faults_of(file: Path, name: str) -> Iterator[str]:
    if room_of(name) not in MAY_IMPORT:
        yield f"{name or 'penstock'} stands in no room: give it a row in the table"
        return
    tree = ast.parse(file.read_text())
    for line, target in imports(tree, name, is_package=file.name == "__init__.py"):
        if not allowed(name, target) and not only_asks(tree, target):
            yield f"{name or 'penstock'}, line {line}: may not import {target}"


def only_asks(tree: ast.AST, target: str) -> bool:
    """Whether ``target`` is in `ASKED`, or is a module of which ``tree`` uses nothing else."""
    name = target.rpartition(".")[2]
    named = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
    used = [
        f"{target}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    ]
    return target in ASKED or (0 < len(used) == named and {*used} <= ASKED)


def allowed(name: str, target: str) -> bool:
    room = room_of(name)
    if target == "penstock" or target.startswith("penstock."):
        other = room_of(target.partition(".")[2])
        return (other or "front") in MAY_IMPORT[room].split() or other == room != ""
    for module, owners in ONLY_IN.items():
        if target == module or target.startswith(f"{module}."):
            return any((name or "front") == owner or name.startswith(f"{owner}.") for owner in owners.split())
    top = target.split(".")[0]
    return top in FOR_ALL or top in sys.stdlib_module_names


def room_of(name: str) -> str:
    """``_nodes.node.Node`` -> ``_nodes``; ``Node``, at the front door -> the empty name."""
    first = name.split(".")[0]
    return first if first in MAY_IMPORT or (first.startswith("_") and not first.startswith("__")) else ""


def test_packages_import_downwards() -> None:
    assert faults(PACKAGE) == []


def test_the_map_names_every_room() -> None:
    """The docstring of the package is the only map. Seen to fail: without the line of `_observe`."""
    rooms = re.findall(
        r"^    (_*[a-z]\w*(?:, \w+)*)(?:  |$)", (penstock.__doc__ or "").partition("Each package")[2], re.MULTILINE
    )
    named = {name for line in rooms for name in line.split(", ")}
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} == named


def test_threads_and_locks_are_in_few_files() -> None:
    """And each of these needs its place in the table. Seen to fail: with two files there that had no thread and no lock
    any more."""
    assert len(THREADS_AND_LOCKS) <= 9  # one of them, the ledger, is for nothing else
    needed = set()
    for file in PACKAGE.rglob("*.py"):
        tree, name = ast.parse(file.read_text()), name_of(file, PACKAGE)
        targets = [
            target
            for _, target in imports(tree, name, is_package=file.name == "__init__.py")
            if target.startswith(CONCURRENCY)
        ]
        if not name.startswith("_workers") and not all(only_asks(tree, target) for target in targets):
            needed.add(name or "front")
    assert needed == {*THREADS_AND_LOCKS}


def test_no_line_is_wider_than_120_columns() -> None:
    """Not even where `ruff` lets one pass, such as a long word or a ``type: ignore``. Seen to fail: a row of a table
    with one column more."""
    lines = [(name_of(file, PACKAGE), line) for file in PACKAGE.rglob("*.py") for line in file.read_text().splitlines()]
    assert [name for name, line in lines if len(line) > WIDTH] == []


def test_no_circles_among_files() -> None:
    """Seen to fail: the canonical graph built by importing the loader, which imports it."""
    assert circles(files_of(PACKAGE)) == []


def test_a_circle_is_seen(tmp_path: Path) -> None:
    for name, code in {
        "_a": "from penstock import _b",
        "_b": "import penstock._c",
        "_c": "from penstock._a import x",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    assert [sorted({*circle}) for circle in circles(files_of(tmp_path))] == [["_a", "_b", "_c"]]


def test_the_house_is_small() -> None:
    boxes = boxes_of(files_of(PACKAGE))
    assert len(boxes) <= 20
    assert max(floors(boxes).values()) <= 9  # what a run changes stands between the nodes and the loader
    assert sum(code_of(PACKAGE).values()) <= CODE


class Squares:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index**2


class Told(Squares):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(8)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Squares(), {"num_workers": 2, "method": "thread"}),
        (Subset(Squares(), range(8)), {"num_workers": 2, "method": "thread"}),
        (Told(), {}),
        (Stream(), {"num_workers": 2, "method": "thread"}),
        (penstock.Mix({"a": Squares(), "b": Squares()}, {"a": 1, "b": 1}), {}),
        ([torch.arange(3)] * 8, {"groups": penstock.Packs([3] * 8, 6)}),
    ],
    ids=["map-style", "subset", "told", "stream", "mix", "packs"],
)
def test_a_dataset_makes_few_stays(dataset: Any, words: dict[str, Any]) -> None:
    """From the constructor through one epoch. Prints the walk if it is too long. Seen to fail: with ``has_getitems``,
    ``is_arrays`` and ``epoch_aware`` asked by `Fetch` and its task, and the shared values looked for by the nodes."""
    with house.Walk(dataset, PACKAGE) as walk, penstock.Loader.from_dataset(dataset, batch_size=4, **words) as loader:
        assert len(list(loader)) > 0
    assert len(walk.stays) > 5, str(walk)
    # two walks over what it holds, for what has a set_epoch and for what is shared memory, are seven of them
    assert len(walk.stays) <= 23, str(walk)
    assert walk.climbs <= 1, str(walk)


def test_what_a_dataset_may_have_is_asked_in_one_file() -> None:
    """And stands in `DatasetLike`. Samplers have some of these names too. Seen to fail: `SharedValues` that looked for
    a ``set_epoch`` itself."""
    names = {
        name
        for name in {*vars(DatasetLike), *DatasetLike.__annotations__}
        if not name.startswith("_") or name in ("__getitems__",)
    }
    found: dict[str, set[str]] = {}
    for file in [
        file for room in ("_fetch", "_loader", "_nodes", "_workers") for file in (PACKAGE / room).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]) if (
                    name in names
                ):
                    found.setdefault(name_of(file, PACKAGE), set()).add(name)
    assert found.pop("_fetch.dataset_facts") == names - {"shard_names"}  # which `said_of` asks by a variable
    assert found == {
        "_fetch.array_dataset": {"__getitems__"},  # an override of one of torch's classes
        "_fetch.epoch_attribute": {"set_epoch"},  # anything that the user may tell an epoch
        "_nodes.sampler_traits": {"set_epoch"},
    }


@pytest.mark.parametrize(
    ("name", "code", "line", "target"),
    [
        ("_errors", "from penstock._statistics import Report", 1, "penstock._statistics.Report"),
        ("_random/orders", "import penstock._nodes", 1, "penstock._nodes"),
        ("_random/orders", "from penstock.nodes import Node", 1, "penstock.nodes.Node"),
        ("_random/orders", "import threading", 1, "threading"),
        ("_random/orders", "import torch\ntorch.distributed.get_rank()", 2, "torch.distributed"),
        ("_random/orders", "from torch import distributed as dist", 1, "torch.distributed"),
        ("_nodes/executor", "import threading\nthreading.current_thread(), threading.Lock()", 1, "threading"),
        ("_nodes/executor", "import threading\nthreading.current_thread()\nt = threading", 1, "threading"),
        ("_streams/steps", "from threading import Lock", 1, "threading.Lock"),
        ("_nodes/cycler", "from torchdata.nodes import BaseNode", 1, "torchdata.nodes.BaseNode"),
        ("_nodes/cycler", "def late():\n    import concurrent.futures", 2, "concurrent.futures"),
        ("_nodes/cycler", "from ..  import _loader", 1, "penstock._loader"),
        (
            "_nodes/mapper",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import penstock._loader.loader",
            3,
            "penstock._loader.loader",
        ),
        ("__init__", "from .integrations import lightning", 1, "penstock.integrations.lightning"),
        ("__init__", "from importlib import import_module\nimport_module('lightning')", 2, "lightning"),
        ("testing", "from penstock.nodes import Node", 1, "penstock.nodes.Node"),
        ("integrations/lightning", "from penstock._loader.loader import Loader", 1, "penstock._loader.loader.Loader"),
        ("integrations/lightning", "import accelerate", 1, "accelerate"),
        ("_nodes/batcher", "import pandas", 1, "pandas"),
    ],
)
def test_a_forbidden_import_is_seen(tmp_path: Path, name: str, code: str, line: int, target: str) -> None:
    """And no import that the table allows: the package itself has them all."""
    file = tmp_path / "penstock" / f"{name}.py"
    file.parent.mkdir(parents=True)
    file.write_text(code)
    shown = "penstock" if name == "__init__" else name.replace("/", ".")
    assert faults(tmp_path / "penstock") == [f"{shown}, line {line}: may not import {target}"]
    file.rename(tmp_path / "penstock" / "_cellar.py")
    assert "_cellar stands in no room: give it a row in the table" in faults(tmp_path / "penstock")


def test_front_door_and_testing_are_the_only_public_modules() -> None:
    public = {name for file in PACKAGE.rglob("*.py") if "._" not in f".{(name := name_of(file, PACKAGE))}"}
    doors = {"", "formats", "nodes", "orders", "statistics", "testing", "integrations"}
    assert public == doors | {f"integrations.{name}" for name in ("accelerate", "lightning", "transformers")}


def test_every_room_has_its_tests() -> None:
    """So that `make check` tests a change in it. Seen to fail: a room without a folder of tests."""
    rooms = [room.parent.name for room in PACKAGE.glob("_*/__init__.py")]
    assert len(rooms) > 8
    assert [room for room in rooms if not (Path(__file__).parents[1] / room.removeprefix("_")).is_dir()] == []


def test_the_public_modules_need_no_import_of_their_own() -> None:
    """Seen to fail: a page's ``penstock.formats.tar(…)`` after ``import penstock``."""
    used = (
        "import penstock; penstock.formats.tar, penstock.testing.Tagged, penstock.nodes.Node, penstock.orders.Order, "
        "penstock.statistics.trace; hasattr(penstock, 'nowhere') and 1 / 0"
    )
    subprocess.run([sys.executable, "-c", used], check=True)


def test_every_name_of_the_front_door_has_a_docstring() -> None:
    for door in DOORS:
        assert [name for name in {*door.__all__} - ALIASES if not (getattr(door, name).__doc__ or "").strip()] == []


def test_every_name_of_the_front_door_shows_itself_as_such() -> None:
    """Tracebacks and ``help`` say ``penstock.Loader``, not the room it lives in, and pickle finds it by that name."""
    for door in DOORS:
        shown = {
            getattr(getattr(door, name), "__module__", door.__name__) for name in {*door.__all__} - ALIASES - {"SKIP"}
        }
        assert shown == {door.__name__}
    assert pickle.loads(pickle.dumps(penstock.Loader)) is penstock.Loader
    assert pickle.loads(pickle.dumps(penstock.SKIP)) is penstock.SKIP
