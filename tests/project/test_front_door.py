"""The front door is lazy: what a program imports, and that nobody notices otherwise.

Modules are counted, not seconds, and in a process that has imported torch and NumPy only, because this one has imported
everything by now.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from programs import Programs

import penstock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

pytestmark = pytest.mark.timeout(240)  # the first program of a process waits until torch has been imported


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Run code in a process that has not imported penstock."""
    folder, programs = tmp_path_factory.mktemp("fresh"), Programs({"import": ["torch", "numpy"]})
    programs.start()

    def run(code: str) -> str:
        (folder / "program.py").write_text(code)
        return programs.run(folder / "program.py", cwd=folder)

    yield run
    programs.stop()


@pytest.fixture(scope="module")
def loaded_by(fresh: Callable[[str], str]) -> Callable[[str], set[str]]:
    """The modules that code imports."""
    return lambda code: set(
        fresh(f"import sys\nbefore = {{*sys.modules}}\n{code}\nprint(*({{*sys.modules}} - before))").split()
    )


def test_importing_penstock_imports_nothing_else(loaded_by: Callable[[str], set[str]]) -> None:
    """Seen to fail: the front door imported the errors eagerly."""
    assert loaded_by("import penstock") == {"penstock"}


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        ("", "_workers.thread_pool _workers.process_pool _workers.processes"),
        (", num_workers=2, method='thread'", "_workers.process_pool _workers.processes"),
        (", num_workers=1, multiprocessing_context='fork'", "_workers.thread_pool"),
    ],
)
def test_a_loader_imports_only_what_it_uses(arguments: str, unused: str, loaded_by: Callable[[str], set[str]]) -> None:
    """Seen to fail: the processes imported where the pool of threads is made."""
    loaded = loaded_by(
        f"from penstock import Loader\nwith Loader.from_dataset([*range(9)], 2, True{arguments}) as loader: "
        f"next(iter(loader))"
    )
    assert "penstock._nodes.parallel_mapper" in loaded
    unused += (
        " _streams _datasets _nodes.grouper _nodes.iterable_source _nodes.sampler_wrapper _nodes.pin_memory "
        "_nodes.to_device"
    )
    assert [
        module
        for module in sorted(loaded)
        if f"{module}.".startswith(tuple(f"penstock.{room}." for room in unused.split()))
    ] == []


class Told:
    """Samples that say what the process that loads them has imported."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[str]:
        return [module for module in sys.modules if module.startswith(("penstock.", "torchdata."))]


@pytest.mark.slow
def test_a_spawned_worker_imports_only_what_its_work_needs() -> None:
    """Each worker pays for its imports. Seen to fail: the task imported a node, and with it torchdata."""
    with penstock.Loader.from_dataset(
        Told(), None, num_workers=1, multiprocessing_context="spawn", collate_fn=list
    ) as loader:
        loaded = next(iter(loader))
    assert "penstock._fetch.fetch_task" in loaded
    assert [
        module for module in loaded if module.startswith(("torchdata.nodes", "penstock._nodes", "penstock._loader"))
    ] == []


def test_one_thread_at_a_time_imports_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch crashes if threads begin to import it at different ends. Seen to fail: without the lock (and a program of
    12 threads died in every second run)."""
    others = []

    def imported(name: str) -> ModuleType:
        other = threading.Thread(target=lambda: others.append(vars(penstock)["_importing"].acquire(blocking=False)))
        other.start()
        other.join()
        return sys.modules[name]

    from penstock import Loader

    monkeypatch.delitem(vars(penstock), "Loader")
    monkeypatch.setattr(importlib, "import_module", imported)
    assert penstock.Loader is Loader
    assert others == [False]


def test_a_fork_in_the_middle_of_an_import_leaves_nothing_locked(fresh: Callable[[str], str]) -> None:
    """Another thread was importing, and is not there any more. Seen to fail: without the new lock in the child, which
    waited forever."""
    program = """
import os, signal, threading, warnings
warnings.simplefilter("ignore")
import penstock
held, done = threading.Event(), threading.Event()
def hold():
    with penstock._importing:
        held.set()
        done.wait()
other = threading.Thread(target=hold)
other.start()
held.wait()
if not (child := os.fork()):
    signal.alarm(20)
    penstock.ClosedError
    os._exit(7)
status = os.waitpid(child, 0)[1]
done.set()
other.join()
print(os.waitstatus_to_exitcode(status))
"""
    assert fresh(program) == "7\n"


def test_a_node_of_torchdata_needs_no_import_of_ours_first(fresh: Callable[[str], str]) -> None:
    """Seen to fail: only the file of `IterableSource` told the nodes about it, and nobody had imported that."""
    code = (
        "import penstock, torchdata.nodes as theirs; "
        "print(next(iter(penstock.Loader(penstock.nodes.Cycler(theirs.IterableWrapper([7]))))))"
    )
    assert fresh(code) == "7\n"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("DataLoader", "penstock.Loader.from_dataset"),
        ("from_dataset", "penstock.Loader.from_dataset"),
        ("Sampler", "penstock.nodes.Sampler"),
        ("ShuffledOrder", "penstock.orders.ShuffledOrder"),
        ("LoaderStatistics", "penstock.statistics.LoaderStatistics"),
    ],
)
def test_a_wrong_guess_is_shown_the_way(name: str, way: str) -> None:
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}': write {re.escape(way)}"):
        getattr(penstock, name)


def test_a_misspelt_name_is_refused_by_python_and_by_mypy() -> None:
    """mypy would say that the ``ignore`` is not needed if it took any name for one of ours."""
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'Louder'") as caught:
        penstock.Louder  # type: ignore[attr-defined]  # noqa: B018
    # of which Python makes "Did you mean: 'Loader'?"
    assert (caught.value.name, caught.value.obj) == ("Louder", penstock)


def test_an_unknown_argument_is_refused_under_the_name_that_was_called() -> None:
    """Seen to fail: it named a class inside."""
    with pytest.raises(TypeError, match=r"^Loader\.from_dataset\(\) got an unexpected keyword argument 'resume'"):
        penstock.Loader.from_dataset([1], resume=True)  # type: ignore[call-overload]


def as_a_reader(name: str) -> tuple[str, str]:
    return name.casefold(), name


@pytest.mark.parametrize("door", [penstock, penstock.nodes], ids=["penstock", "penstock.nodes"])
def test_type_checkers_and_python_are_told_the_same_homes(door: ModuleType) -> None:
    """Seen to fail: two homes exchanged in the table; a name left out of it."""
    typed = {
        alias.name: node.module
        for block in ast.parse(inspect.getsource(door)).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != "penstock"  # the public modules
        for alias in node.names
    }
    assert {name: getattr(door, name) for name in typed} == {
        name: getattr(importlib.import_module(home), name) for name, home in typed.items()
    }
    assert sorted(typed, key=as_a_reader) == door.__all__


def test_every_name_is_listed_before_it_is_loaded(fresh: Callable[[str], str]) -> None:
    """For completion, ``help`` and ``inspect``; and each is loaded by ``import *``. Seen to fail: no ``__dir__``."""
    listing = "import penstock; print(*(name for name in dir(penstock) if not name.startswith('_')))"
    named = fresh(listing).split()
    assert sorted(named, key=as_a_reader) == penstock.__all__
    fresh(
        "from penstock import *; import penstock; assert all(globals()[n] is getattr(penstock, n) for n in "
        "penstock.__all__)"
    )


def test_a_format_is_loaded_when_it_is_used(loaded_by: Callable[[str], set[str]]) -> None:
    """Seen to fail: all of them imported where the package begins."""
    loaded = loaded_by("import penstock; penstock.formats.jsonl; from penstock.formats import *")
    named = {getattr(penstock.formats, name).__module__ for name in penstock.formats.__all__}
    assert named <= loaded
    assert "pyarrow" not in loaded
    loaded = loaded_by(
        "import penstock; penstock.formats.tar; assert dir(penstock.formats)[-len(penstock.formats.__all__) :] == "
        "penstock.formats.__all__"
    )
    assert loaded & named == {"penstock.formats._tar"}


def test_a_pickle_made_elsewhere_finds_its_class_through_the_door(fresh: Callable[[str], str]) -> None:
    """Seen to fail: a class that named its room instead."""
    pickled = pickle.dumps(penstock.nodes.EndOfEpoch(3))  # a dataclass, whose module is set after it was made
    assert b"penstock._nodes" not in pickled
    code = f"import pickle; print(pickle.loads({pickled!r}))"
    assert fresh(code) == "EndOfEpoch(epoch=3)\n"
