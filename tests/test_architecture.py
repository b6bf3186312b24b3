"""Doors open one way: the table of who may import whom, and the front door.

The imports are read, not run, also those for type checkers only. A file that stands in no room is a fault too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(penstock.__file__).parent

GROUND = {"_bytes", "_errors", "_pool", "_stats", "_tree"}
RULES = {
    "_arrays",
    "_cache_record",
    "_current",
    "_deal",
    "_draws",
    "_fetch",
    "_form",
    "_keying",
    "_keys",
    "_layout",
    "_orders",
    "_plans",
    "_takeover",
    "_tolerance",
    "_work",
}
ENGINE_ROOM = {
    "_cache_files",
    "_crew",
    "_engine",
    "_failure",
    "_fork",
    "_launch",
    "_memory",
    "_once",
    "_planner",
    "_processes",
    "_pump",
    "_seat",
    "_segments",
    "_threads",
    "_wire",
    "_worker",
    "_zygote",
}
CONTRACT = {"_node"}
QUIET_ROOMS = {"_batch", "_cycle", "_iterate", "_shard"}
BUSY_ROOMS = {"_device", "_map", "_pin", "_prefetch", "_sample"}
AHEAD = {"_ahead"}  # the contract of the rooms with a reader thread
BUILD = AHEAD | GROUND | RULES | ENGINE_ROOM | CONTRACT | QUIET_ROOMS | BUSY_ROOMS | {"_loader", "_saved"}

MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(GROUND, GROUND),
    "_errors": set(),
    **dict.fromkeys(RULES, GROUND),
    "_plans": GROUND | {"_keys"},
    "_takeover": GROUND | {"_orders", "_plans"},
    "_arrays": GROUND | CONTRACT | {"_draws"},
    "_current": GROUND | {"_keys"},
    "_draws": GROUND | {"_keys"},
    "_keying": GROUND | {"_keys"},
    "_layout": GROUND | {"_form"},
    **dict.fromkeys(("_fetch", "_work"), GROUND | RULES | CONTRACT),  # a task is an `Indices`
    **dict.fromkeys(ENGINE_ROOM, GROUND | RULES | ENGINE_ROOM),
    **dict.fromkeys(CONTRACT, GROUND),
    **dict.fromkeys(QUIET_ROOMS, CONTRACT | GROUND | RULES),
    "_ahead": CONTRACT | GROUND | {"_pump"},
    **dict.fromkeys(BUSY_ROOMS, AHEAD | CONTRACT | GROUND | RULES | ENGINE_ROOM),
    "_saved": CONTRACT | GROUND,
    "_loader": CONTRACT | GROUND | {"_cycle", "_build", "_saved"},  # _build for type checkers only: the front door hangs from_dataset in
    "_build": BUILD,
    "_cached": GROUND | RULES | ENGINE_ROOM,
    "_resident": BUILD | {"_build"},
    "_ranks": CONTRACT | GROUND | {"_loader"},
    "": BUILD | {"_build", "_cached", "_ranks", "_resident"},  # the front door, penstock/__init__.py
    "testing": {""},
}
INTEGRATIONS = {"integrations.accelerate", "integrations.lightning", "integrations.transformers"}
MAY_IMPORT |= {name: {""} for name in INTEGRATIONS} | {"integrations": set()}

CONCURRENCY = ("_thread", "asyncio", "concurrent", "multiprocessing", "subprocess", "threading", "torch.multiprocessing")
ONLY_IN = {
    **dict.fromkeys(CONCURRENCY, ENGINE_ROOM | {"testing", "_pool"}),
    "torchdata": CONTRACT,
    "torch.distributed": {"_build", "_ranks", "_shard"},
    "accelerate": {"integrations.accelerate"},
    "lightning": {"integrations.lightning"},
    "pytorch_lightning": {"integrations.lightning"},
    "transformers": {"integrations.transformers"},
}
FOR_ALL = {"numpy", "torch"}


def faults(package: Path) -> list[str]:
    """Every import under ``package`` (the folder ``penstock``) that the table does not allow, in words."""
    return sorted(fault for file in package.rglob("*.py") for fault in faults_of(file, name_of(file, package)))


def faults_of(file: Path, name: str) -> Iterator[str]:
    if name not in MAY_IMPORT:
        yield f"{name or 'penstock'} stands in no room: give it a row in the table"
        return
    for line, target in imports(ast.parse(file.read_text()), name, is_package=file.name == "__init__.py"):
        if not allowed(name, target):
            yield f"{name or 'penstock'}, line {line}: may not import {target}"


def allowed(name: str, target: str) -> bool:
    if target == "penstock" or target.startswith("penstock."):
        return room_of(target) in MAY_IMPORT[name] | {name}
    for module, owners in ONLY_IN.items():
        if target == module or target.startswith(f"{module}."):
            return name in owners
    top = target.split(".")[0]
    return top in FOR_ALL or top in sys.stdlib_module_names or (name == "testing" and top == "psutil")


def room_of(target: str) -> str:
    """``penstock._node.Node`` -> ``_node``; ``penstock.Node``, which is at the front door -> the empty name."""
    parts = target.split(".")[1:]
    names = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    known = next((name for name in names if name in MAY_IMPORT), "")
    return known or (parts[0] if parts and parts[0].startswith("_") and not parts[0].startswith("__") else "")


def imports(tree: ast.AST, name: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported; ``torch.distributed`` also where it is reached as an attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                parents = f"penstock.{name}".rstrip(".").split(".")[: None if level <= is_package else is_package - level]
                base = ".".join([*parents, module] if module else parents) if level else module
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in aliases)
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed" | "multiprocessing"):
                yield node.lineno, f"torch.{node.attr}"
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module


def name_of(file: Path, package: Path) -> str:
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_import_is_in_the_table() -> None:
    assert faults(PACKAGE) == []


@pytest.mark.parametrize(
    ("name", "code", "fault"),
    [
        ("_errors", "from penstock._stats import Report", "_errors, line 1: may not import penstock._stats.Report"),
        ("_deal", "import penstock._node", "_deal, line 1: may not import penstock._node"),
        ("_deal", "from penstock import Node", "_deal, line 1: may not import penstock.Node"),
        ("_orders", "import threading", "_orders, line 1: may not import threading"),
        ("_keys", "import torch\ntorch.distributed.get_rank()", "_keys, line 2: may not import torch.distributed"),
        ("_keys", "from torch import distributed as dist", "_keys, line 1: may not import torch.distributed"),
        ("_pump", "from penstock._node import Node", "_pump, line 1: may not import penstock._node.Node"),
        ("_cycle", "from torchdata.nodes import BaseNode", "_cycle, line 1: may not import torchdata.nodes.BaseNode"),
        ("_cycle", "def late():\n    import concurrent.futures", "_cycle, line 2: may not import concurrent.futures"),
        ("_shard", "from ._cycle import Cycler", "_shard, line 1: may not import penstock._cycle.Cycler"),
        ("_shard", "from . import _cycle", "_shard, line 1: may not import penstock._cycle"),
        ("_shard", "from penstock._pump import Pump", "_shard, line 1: may not import penstock._pump.Pump"),
        ("_map", "from multiprocessing import get_context", "_map, line 1: may not import multiprocessing.get_context"),
        ("_map", "from torch.multiprocessing import Queue", "_map, line 1: may not import torch.multiprocessing.Queue"),
        (
            "_map",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import penstock._pin",
            "_map, line 3: may not import penstock._pin",
        ),
        ("_loader", "from penstock._sample import Sampler", "_loader, line 1: may not import penstock._sample.Sampler"),
        ("_build", "import penstock.integrations.lightning", "_build, line 1: may not import penstock.integrations.lightning"),
        ("__init__", "from .integrations import lightning", "penstock, line 1: may not import penstock.integrations.lightning"),
        ("__init__", "from importlib import import_module\nimport_module('lightning')", "penstock, line 2: may not import lightning"),
        ("testing", "from penstock._node import Node", "testing, line 1: may not import penstock._node.Node"),
        (
            "integrations/lightning",
            "from penstock._loader import Loader",
            "integrations.lightning, line 1: may not import penstock._loader.Loader",
        ),
        ("integrations/lightning", "import accelerate", "integrations.lightning, line 1: may not import accelerate"),
        ("integrations/lightning", "from .. import _node", "integrations.lightning, line 1: may not import penstock._node"),
        ("_batch", "import pandas", "_batch, line 1: may not import pandas"),
        ("_cellar", "", "_cellar stands in no room: give it a row in the table"),
    ],
)
def test_a_forbidden_import_is_seen(tmp_path: Path, name: str, code: str, fault: str) -> None:
    file = tmp_path / "penstock" / f"{name}.py"
    file.parent.mkdir(parents=True)
    file.write_text(code)
    assert faults(tmp_path / "penstock") == [fault]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("_node", "from torchdata.nodes import BaseNode\nfrom penstock._errors import GraphError"),
        ("_processes", "import multiprocessing.connection\nfrom penstock._zygote import Zygote"),
        ("_map", "from penstock._node import Node\nfrom . import _threads"),
        ("_shard", "import torch\ntorch.distributed.get_rank()"),
        ("__init__", "from ._loader import Loader\nfrom . import _build"),
        ("testing", "import penstock\nfrom penstock import Node"),
        ("integrations/lightning", "import lightning\nfrom penstock import Loader\nfrom .. import Node"),
    ],
)
def test_an_allowed_import_is_let_through(tmp_path: Path, name: str, code: str) -> None:
    file = tmp_path / "penstock" / f"{name}.py"
    file.parent.mkdir(parents=True)
    file.write_text(code)
    assert faults(tmp_path / "penstock") == []


def test_front_door_is_exact_and_sorted() -> None:
    listing = "import penstock; print(*(n for n in vars(penstock) if not n.startswith('_')))"  # before anyone imported a module of it
    named = subprocess.run([sys.executable, "-c", listing], check=True, capture_output=True, text=True).stdout.split()
    assert penstock.__all__ == sorted(named, key=str.casefold)


def test_front_door_and_testing_are_the_only_public_modules() -> None:
    public = {name for file in PACKAGE.rglob("*.py") if not (name := name_of(file, PACKAGE)).startswith("_")}
    assert public - INTEGRATIONS - {"integrations"} <= {"", "testing"}


def test_every_name_of_the_front_door_has_a_docstring() -> None:
    assert [name for name in penstock.__all__ if not (getattr(penstock, name).__doc__ or "").strip()] == []
