"""`make check` runs the tests of what has changed, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.project.check import ALWAYS, ROOT, selected

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "tests/random/test_orders.py": "",
    "tests/workers/test_thread_pool.py": "import gates",
    "tests/trainers/test_lightning.py": "from penstock.integrations.lightning import LightningCallback",
    "tests/project/test_docs.py": "",
    "tests/project/test_examples.py": "",
    "tests/support/gates.py": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "own"),
    [
        (["pipes/penstock/_random/orders.py"], ["tests/random"]),
        (["pipes/penstock/_random/orders.py", "tests/random/test_orders.py"], ["tests/random"]),
        (["pipes/penstock/_workers/processes/zygote.py"], ["tests/workers"]),
        (["pipes/penstock/integrations/lightning.py"], ["tests/trainers/test_lightning.py"]),
        (["pipes/penstock/__init__.py"], []),
        (["tests/workers/test_thread_pool.py"], ["tests/workers/test_thread_pool.py"]),
        (["tests/support/gates.py"], ["tests/workers/test_thread_pool.py"]),
        (["docs/design.md"], ["tests/project/test_docs.py", "tests/project/test_examples.py"]),
        (["Makefile", "docs/design.md"], ["tests/project"]),
        (["tests/random/test_deleted.py"], []),
    ],
)
def test_what_has_changed_is_tested(root: Path, files: list[str], own: list[str]) -> None:
    assert selected(files, root)[0] == own


def test_the_laws_come_along_with_a_change_of_the_package() -> None:
    assert selected(["pipes/penstock/_nodes/cycler.py"], ROOT) == (["tests/nodes"], ALWAYS)
    assert selected(["README.md"], ROOT)[1] == []
    assert all((ROOT / test).exists() for test in ALWAYS)


def test_every_room_has_its_tests() -> None:
    """So that a change in it is tested at all. Seen to fail: a room without a folder of tests."""
    rooms = [
        room.name
        for room in (ROOT / "pipes" / "penstock").iterdir()
        if room.is_dir() and room.name.startswith("_") and room.name != "__pycache__"
    ]
    assert [room for room in rooms if not (ROOT / "tests" / room.removeprefix("_")).is_dir()] == []
