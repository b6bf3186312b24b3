"""Lance datasets: the rows of one version that are not deleted, by index; another version, another dataset and a forked
worker are refused, with the way out."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from format_laws import read

from penstock import Loader, Mix, StateMismatch, formats

pylance = pytest.importorskip("lance", reason="pylance is not installed: pip install --group lance")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def rows(ids: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "text": None if i % 5 == 3 else f"text {i}",
            "image": {"bytes": bytes([i % 256]) * (i % 7), "path": f"{i}.png"},
            "x": [i / 2] * (i % 4),
        }
        for i in ids
    ]


def write(uri: Path, ids: Any, mode: str = "create") -> Any:
    return pylance.write_dataset(pa.Table.from_pylist(rows(ids)), uri, mode=mode, max_rows_per_file=10)


@pytest.fixture(scope="module", autouse=True)
def started(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lance's threads and what they have open stay until the process ends; so they begin before the first test, which
    would leave them behind."""
    write(tmp_path_factory.mktemp("lance") / "rows.lance", range(3)).to_table()


@pytest.fixture
def uri(tmp_path: Path) -> Path:
    """Version 2: rows 0 to 39 without every tenth, in four files."""
    write(tmp_path / "rows.lance", range(40)).delete("id % 10 = 3")
    return tmp_path / "rows.lance"


LEFT = [i for i in range(40) if i % 10 != 3]


def ids(data: Any, **words: Any) -> list[int]:
    return [row["id"] for row in read(data, **words)[0]]


def test_rows_are_those_of_lance(uri: Path) -> None:
    """Without the deleted ones, one by one, in batches in any order, twice in one, and by negative index; only the
    columns asked for, in their order."""
    data = formats.lance(uri)
    assert len(data) == 36
    assert repr(read(data)) == repr([rows(LEFT)]), "the types are the same, too"
    assert data.__getitems__([35, 0, 3, 35, -1]) == rows([39, 0, 4, 39, 39])
    assert [data[-36], data[3]] == rows([0, 4])
    for outside in (36, -37):
        with pytest.raises(IndexError, match=f"index {outside} is out of bounds for a dataset of 36 samples"):
            data[outside]
    assert [list(row.items()) for row in formats.lance(uri, ["x", "id"]).__getitems__([2])] == [
        [("x", [1.0, 1.0]), ("id", 2)]
    ]
    with Loader.from_dataset(formats.lance(uri, ["id"]), batch_size=5, shuffle=True, seed=1) as loader:
        assert sorted(value for batch in loader for value in batch["id"].tolist()) == LEFT


def test_a_filter_keeps_the_order_of_the_rows(uri: Path) -> None:
    """Also with an index. Seen to fail: row ids, which count deleted rows, in place of row numbers."""
    passing = [i for i in LEFT if i % 4 != 1 and i > 6]
    assert ids(formats.lance(uri, filter="id % 4 != 1 AND id > 6")) == passing
    write(uri, [5, 90, 7, 6], "append")
    pylance.dataset(uri).create_scalar_index("id", "BTREE")
    data = formats.lance(uri, ["text", "id"], filter="id >= 6 AND id < 100")
    assert ids(data) == ids(pickle.loads(pickle.dumps(data))) == [*LEFT[5:], 90, 7, 6]
    assert list(data[-1]) == ["text", "id"]


# Versions.


def saved(data: Any) -> dict[str, Any]:
    with Loader.from_dataset(data, batch_size=4, shuffle=True) as loader:
        next(iter(loader))
        return loader.state_dict()


def loaded(data: Any, state: dict[str, Any]) -> list[list[int]]:
    with Loader.from_dataset(data, batch_size=4, shuffle=True) as loader:
        loader.load_state_dict(state)
        return [batch["id"].tolist() for batch in loader]


def test_a_dataset_stays_at_its_version(uri: Path) -> None:
    """Though others are written and this one is opened again. Seen to fail: `__getstate__` with the version that was
    asked for, which is None."""
    data = formats.lance(uri, ["id"])
    expected = read(data, shuffle=True)
    write(uri, range(40, 50), "append")
    assert data.version == 2
    for same in (data, pickle.loads(pickle.dumps(data)), formats.lance(uri, ["id"], version=2)):
        assert read(same, shuffle=True) == expected
        same.close()
        assert read(same, shuffle=True) == expected
    assert ids(formats.lance(uri)) == [*LEFT, *range(40, 50)]
    assert ids(formats.lance(uri, version=1)) == [*range(40)]
    pylance.dataset(uri).tags.create("run", 2)
    assert formats.lance(uri, version="run").version == 2


@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_is_refused_over_another_version_and_says_which_it_wants(uri: Path, mixed: bool) -> None:
    """Also if it has as many rows. Seen to fail: without the files in `shard_names`, over a dataset that was deleted
    and written anew."""

    def build(**words: Any) -> Any:
        data = formats.lance(uri, ["id"], **words)
        return Mix({"rows": data}, {"rows": 1}, epoch_size=36) if mixed else data

    state = saved(build())
    expected = loaded(build(version=2), state)
    pylance.dataset(uri).update({"id": "id + 100"}, where="id = 7")
    with pytest.raises(StateMismatch, match=r"shard_names was 'version=2 \w+' and is 'version=3 \w+' \("):
        loaded(build(), state)
    assert loaded(build(version=2), state) == expected
    shutil.rmtree(uri)
    write(uri, range(40)).delete("id % 10 = 3")
    with pytest.raises(StateMismatch, match=r"shard_names was 'version=2 (\w+)' and is 'version=2 (?!\1)\w+' \("):
        loaded(build(), state)


def test_a_state_is_refused_over_a_copy_of_which_other_rows_were_deleted(uri: Path, tmp_path: Path) -> None:
    """Of the same version, with the same files. Seen to fail: without `deletion_file`."""
    shutil.copytree(uri, tmp_path / "copy.lance")
    for number, place in enumerate((uri, tmp_path / "copy.lance")):
        pylance.dataset(place).delete(f"id = {38 + number}")
    state = saved(formats.lance(uri, ["id"]))
    with pytest.raises(StateMismatch, match=r"shard_names was 'version=3 (\w+)' and is 'version=3 (?!\1)\w+' \("):
        loaded(formats.lance(tmp_path / "copy.lance", ["id"]), state)


def test_a_state_is_refused_with_another_filter_of_as_many_rows(uri: Path) -> None:
    state = saved(formats.lance(uri, ["id"], filter="id < 20"))
    assert loaded(formats.lance(uri, ["id"], filter="NOT id >= 20"), state)
    with pytest.raises(StateMismatch, match=r"shard_names was 'version=2 (\w+)' and is 'version=2 (?!\1)\w+' \("):
        loaded(formats.lance(uri, ["id"], filter="id >= 20"), state)


# Processes.


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_forked_worker_is_refused_with_both_ways_out(uri: Path, on_error: Any) -> None:
    """Lance says that it is not fork-safe, and often works, so a hang would come once in a while. Seen to fail: without
    `_check_process`."""
    words = {"num_workers": 2, "multiprocessing_context": "fork", "on_error": on_error}
    with pytest.raises(
        Exception, match=r"not fork-safe\. Pass method='thread', or multiprocessing_context='spawn' \(or 'forkserver'\)"
    ):
        read(formats.lance(uri), **words)


PROGRAM = """
import os, pickle, sys
data = pickle.load(open(sys.argv[1], "rb"))
pid = os.fork()
print(len(data), data[3]["id"], "child" if pid == 0 else "parent", flush=True)
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.soak
def test_what_was_not_opened_before_a_fork_may_be_opened_after(
    uri: Path, tmp_path: Path, run_script: Callable[..., str]
) -> None:
    """As by a worker on another machine that forks."""
    (tmp_path / "data").write_bytes(pickle.dumps(formats.lance(uri)))
    (tmp_path / "program.py").write_text(PROGRAM)
    assert sorted(run_script(tmp_path / "program.py", tmp_path / "data").splitlines()) == ["36 4 child", "36 4 parent"]


def test_a_copy_is_small_and_opens_the_same_dataset_or_none(uri: Path) -> None:
    """Seen to fail: without comparing the files."""
    pickled = pickle.dumps(formats.lance(uri, storage_options={"key": "value"}))
    assert len(pickled) < 1000
    assert ids(pickle.loads(pickled)) == LEFT
    shutil.rmtree(uri)
    write(uri, range(40)).delete("id % 10 = 3")
    with pytest.raises(
        ValueError,
        match=r"rows\.lance is not the dataset that was opened before: its version=2 has other files\. Make the same",
    ):
        pickle.loads(pickled)[0]


# What is wrong is said.


def test_what_makes_no_sense_is_refused_when_it_is_built(uri: Path, tmp_path: Path) -> None:
    def why(message: str, place: Path = uri, **words: Any) -> None:
        with pytest.raises(ValueError, match=message):
            formats.lance(place, **words)

    why(
        r"rows\.lance is no Lance dataset, cannot be reached, or has no version=9: .*Pass None for the latest version",
        version=9,
    )
    why(r"rows\.lance is no Lance dataset, cannot be reached, or has no version='run': ", version="run")
    why(r"none\.lance is no Lance dataset, cannot be reached, or has no version=None: ", tmp_path / "none.lance")
    why(r"rows\.lance has no column 'lable', only 'id', 'text', ", columns=["lable"])
    why(r"has no column 'image\.path', only ", columns=["image.path"])
    why("must be a list of names", columns="id")
    why(
        r"filter='lable > 1' is no condition over .*rows\.lance, whose columns are id, text, image, x: ",
        filter="lable > 1",
    )
    why(r"filter='id \+ 1' is no condition over ", filter="id + 1")
    why(r"rows\.lance has no row that satisfies filter='id = 3' in version=2, of 36\. Pass another", filter="id = 3")
    pylance.dataset(uri).delete("true")
    why(r"rows\.lance has no rows in version=3, of 0\. Pass another one", uri)


def test_a_blob_is_refused(tmp_path: Path) -> None:
    """Seen to fail: a sample that says where it lies in place of what it is."""
    blob = pa.field("video", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    table = pa.table({"video": [b"abc"], "id": [1]}, schema=pa.schema([blob, pa.field("id", pa.int64())]))
    pylance.write_dataset(table, tmp_path / "rows.lance")
    with pytest.raises(
        ValueError, match=r"the column 'video' of .*rows\.lance holds blobs, of which Lance gives only where they lie"
    ):
        formats.lance(tmp_path / "rows.lance")
    assert read(formats.lance(tmp_path / "rows.lance", ["id"])) == [[{"id": 1}]]


@pytest.mark.parametrize("how", ["cut short", "gone", "damaged"])
def test_a_file_that_cannot_be_read_is_an_error_with_the_dataset_and_its_version(uri: Path, how: str) -> None:
    data = formats.lance(uri)
    for file in (uri / "data").iterdir():
        content = file.read_bytes()
        file.unlink()
        if how != "gone":
            file.write_bytes(content[: len(content) // 2] if how == "cut short" else bytes(len(content)))
    with pytest.raises(Exception) as caught:  # noqa: PT011  Lance's own, or ours
        read(data)
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(r"rows\.lance, version=2, ", said)
    assert isinstance(caught.value, OSError | ValueError)


def test_a_panic_of_lance_is_an_error(uri: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no `Exception`, so that a loader would take it for an interrupt. Seen to fail: without the name."""
    panic = type("PanicException", (BaseException,), {})

    class Panicking:
        def take(self, *_: Any) -> Any:
            raise panic("called `Result::unwrap()` on an `Err` value")

    data = formats.lance(uri)
    monkeypatch.setattr(data, "_data", Panicking())
    with pytest.raises(ValueError, match=r"rows\.lance, version=2, is damaged: called "):
        data[0]


def test_without_pylance_it_says_what_to_install(uri: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(ImportError, match=r"penstock\.formats\.lance needs the package pylance: pip install 'pylance'"):
        formats.lance(uri)


def test_a_relative_path_is_that_of_now(uri: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(uri.parent)
    data = pickle.loads(pickle.dumps(formats.lance("rows.lance")))
    os.chdir("/")
    assert data[0]["id"] == 0
