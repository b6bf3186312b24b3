"""``python -m penstock state FILE``: a state, and where it resumes in three sentences; whatever a file holds, nothing
in it runs."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import IterableDataset

from penstock import Buckets, Ledger, Loader, Mix, Packs, Stream
from penstock.__main__ import main

if TYPE_CHECKING:
    from pathlib import Path


class Iterated(IterableDataset):
    def __iter__(self):
        yield from range(20)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def state_after(batches: int, dataset: Any = None, **words: Any) -> dict[str, str]:
    with Loader.from_dataset(list(range(100)) if dataset is None else dataset, **{"batch_size": 8, **words}) as loader:
        taken = 0
        while taken < batches:
            for _ in loader:
                taken += 1
                if taken == batches:
                    break
        return loader.state_dict()


def shown(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["state", str(path)])
    return code, *capsys.readouterr()


def said(state: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    file = tmp_path / "state.json"
    file.write_text(json.dumps(state))
    code, out, err = shown(file, capsys)
    assert (code, err) == (0, "")
    return out


def test_a_state_in_the_middle_of_an_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: the epoch of the cycle, not of the source."""
    state = state_after(18, shuffle=True, seed=7)
    path, where, needs, ranks, *text = said(state, tmp_path, capsys).splitlines()
    assert path == f"{tmp_path}/state.json"
    assert where == "It resumes in epoch 1, after 40 of 100 samples of all ranks together."
    assert (
        needs == "It needs a loader with the same settings: order=shuffled, dataset_length=100, seed=7, sample_seed=7."
    )
    assert ranks == "It loads on any number of ranks, with any number of workers and any batch size."
    assert json.loads("".join(text)) == json.loads(state["penstock"])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_json_as_other_programs_write_it(encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with a byte order mark. Seen to fail: it was taken for neither JSON nor a file of torch."""
    (tmp_path / "state.json").write_text(json.dumps(state_after(1)), encoding=encoding)
    code, out, err = shown(tmp_path / "state.json", capsys)
    assert (code, err) == (0, "")
    assert "dataset_length=100" in out


def test_a_state_at_a_border(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "in epoch 0, after 0 of 100 samples of" in said(state_after(0), tmp_path, capsys)
    assert "in epoch 0, after 100 of 100 samples of" in said(state_after(13), tmp_path, capsys)
    with Loader.from_dataset(list(range(100)), batch_size=8) as loader:
        list(loader)
        state = loader.state_dict()
    assert "in epoch 1, after 0 of 100 samples of" in said(state, tmp_path, capsys)
    ended = {"format": 1, "settings": {}, "state": {"epoch": 4, "source": None}}
    assert "It is at the end of epoch 4, all of which was delivered" in said(
        {"penstock": json.dumps(ended)}, tmp_path, capsys
    )


def test_states_of_other_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(state_after(2, Iterated(), batch_size=2), tmp_path, capsys)
    assert "in epoch 0, after 4 samples of all ranks together" in out
    assert "source=Iterated" in out
    out = said(state_after(2, Mix({"a": [1, 2], "b": [3]}, {"a": 1, "b": 1}, epoch_size=50)), tmp_path, capsys)
    assert "after 16 of 50 samples" in out
    assert "order=mix, dataset_length=3, seed=0" in out
    packs = Packs([5] * 100, 20)
    assert "after 2 packs of all" in said(
        state_after(2, [[1] * 5] * 100, batch_size=1, groups=packs), tmp_path, capsys
    )  # seen to fail: "of 100"
    stream = Stream(2, lambda shard: iter(range(50)), epoch_size=60, lanes=1)
    out = said(state_after(7, stream, batch_size=8, drop_last=True), tmp_path, capsys)
    assert "after 56 of 60 samples of all ranks" in out  # seen to fail: "after 60 of 60 samples"
    out = said(state_after(2, Iterated(), batch_size=2, lanes=1), tmp_path, capsys)
    assert "source=Iterated, lanes=1, batch_size=2, drop_last=false" in out
    # seen to fail: "on any number of ranks" and "any batch size"
    assert "It loads on one rank, with any number of workers." in out
    state = {
        "source": {"epoch": 2, "source": {"epoch": 2, "position": 8}},
        "delivered": [1, 3],
        "rank": 1,
        "world_size": 4,
    }
    out = said({"penstock": json.dumps({"format": 1, "settings": {}, "state": state})}, tmp_path, capsys)
    assert "It loads only as rank 1 of 4 ranks." in out
    # seen to fail: "on any number of ranks", on which it is refused
    out = said(state_after(2, Iterated(), batch_size=2, split="own"), tmp_path, capsys)
    assert "It loads on one rank, with any number of workers." in out
    del state["rank"]
    assert "It loads only on 4 ranks." in said(
        {"penstock": json.dumps({"format": 1, "settings": {}, "state": state})}, tmp_path, capsys
    )


@pytest.mark.parametrize("split", ["items", "within", "own"])
def test_a_batch_sampler_is_counted_in_batches(split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if its batches are called items, or those of one rank are said to be those of all."""
    words = {"batch_size": 1, "batch_sampler": [[0, 1], [2], [3]], "split": split, "rank": 0, "world_size": 1}
    out = said(state_after(2, **words), tmp_path, capsys)
    whose = "the share of the rank that saved it" if split == "own" else "all ranks together"
    assert f"in epoch 0, after 2 batches of {whose}" in out
    assert "items" not in out.splitlines()[1]


def test_states_inside_a_checkpoint_of_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: a search that does not look into lists."""
    file = tmp_path / "checkpoint.pt"
    checkpoint = {
        "model": {"w": torch.zeros(1000, 1000)},
        "step": 5,
        "data": [state_after(3), {"eval": state_after(5)}],
    }
    torch.save(checkpoint, file)
    code, out, _ = shown(file, capsys)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith(str(file))] == [
        f"{file}['data'][0]",
        f"{file}['data'][1]['eval']",
    ]
    assert "after 24 of 100 samples" in out
    assert "after 40 of 100 samples" in out
    torch.save(checkpoint, file, _use_new_zipfile_serialization=False)
    assert shown(file, capsys)[1] == out
    assert main(["state", str(file), "--key", "data.1"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(str(file))] == [
        f"{file}['data'][1]['eval']"
    ]
    assert main(["state", str(file), "--key", "data.2"]) == 1
    assert "has no penstock state at data.2, but at: data.0, data.1.eval." in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_nothing_in_a_file_runs(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: ``torch.load(weights_only=False)``."""
    file, trace = tmp_path / "evil.pt", tmp_path / "it_ran"
    held = {"state": state_after(3), "evil": Evil(trace)}
    if kind == "torch":
        torch.save(held, file)
    else:
        file.write_bytes(pickle.dumps(held))
    code, out, err = shown(file, capsys)
    assert (code, out) == (1, "")
    assert "Save the loader's state in a separate file" in err
    assert not trace.exists()


def test_files_that_hold_no_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content, message in [
        ("other.json", b'{"a": [1, 2]}', "contains no penstock state"),
        ("broken.json", b'{"a": [1, 2', "is neither JSON nor a torch.save file"),
        ("empty", b"", "is neither JSON nor a torch.save file"),
        ("deep.json", b"[" * 100_000 + b"]" * 100_000, "is neither JSON nor a torch.save file"),
        ("nowhere", None, "No such file"),
        (".", None, "Is a directory"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        code, out, err = shown(tmp_path / name, capsys)
        assert (code, out) == (1, "")
        assert message in err


HUGE = json.dumps({"format": 1, "settings": {}, "state": {"epoch": 1, "position": 7, "left": -7}}).replace(
    "7", "9" * 4300
)


@pytest.mark.parametrize("damaged", ["{", HUGE], ids=["text", "epoch"])
def test_a_damaged_state_is_named_and_the_others_are_shown(
    damaged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to fail: a difference of 4301 digits, which Python does not print."""
    file = tmp_path / "two.json"
    file.write_text(json.dumps({"a": {"penstock": damaged}, "b": state_after(3)}))
    code, out, err = shown(file, capsys)
    assert code == 1
    assert f"{file}['a'] is damaged: " in err
    assert damaged != "{" or "the text of this state is not JSON" in err
    assert out.startswith(f"{file}['b']\n")
    assert "after 24 of 100 samples" in out


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": "x", "source": 5},
        {"epoch": True, "source": {"position": None}},
        {"epoch": 1, "source": {"epoch": 1, "position": "\x1b[2J"}},
        {"source": {"source": {"source": {}}}},
        {"delivered": "no", "rank": "\x1b[31m", "world_size": [1] * 10_000, "epoch": 0},
    ],
)
def test_a_state_with_anything_inside_is_shown_in_printable_lines(
    state: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to fail: sentences that are not cut."""
    settings = {
        "order": ["\x1b[31m"],
        "length": "many",
        "seed": {},
        "dataset_length": None,
        "groups": 3,
        "split": "\n",
        "x\x1b": "y" * 9_999,
    }
    out = said({"penstock": json.dumps({"format": 1, "settings": settings, "state": state})}, tmp_path, capsys)
    assert all(line.isprintable() for line in out.splitlines())
    assert all(len(line) < 600 for line in out.splitlines()[:4])


def test_a_checkpoint_that_contains_itself_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop: dict[str, Any] = {"state": state_after(3)}
    loop["again"] = [loop] * 3
    torch.save(loop, tmp_path / "loop.pt")
    assert shown(tmp_path / "loop.pt", capsys)[1].count("It resumes") == 1


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Also without a command. Seen to fail: "the following arguments are required: COMMAND", which names none."""
    for words, expected in [
        ([], "bench"),
        (["bench"], "--step-ms"),
        (["state"], "unpickled"),
        (["index"], "--workers"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"\n    {command} " in shown for command in ("bench", "state", "index", "cache"))


def test_a_ledger_says_what_is_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: it was said to contain no state, with the advice to save the loader's."""
    with Loader.from_dataset(range(100), batch_size=None, infinite=True) as loader, Ledger(loader) as ledger:
        addresses = [next(ledger)[0] for _ in range(10)]
        ledger.done(addresses[3])
        ledger.retire(50)
        state = ledger.state_dict()
    file = tmp_path / "checkpoint.json"
    file.write_text(json.dumps({"data": state}))
    code, out, _ = shown(file, capsys)
    assert code == 0
    assert (
        "It is of a Ledger, for one rank: 9 open, which are served first, and 1 indices retired.\n"
        "It resumes in epoch 0, after 10 of 100"
    ) in out
    # seen to fail: "on any number of ranks, with any number of workers and any batch size"
    assert "It loads on one rank, with any number of workers, and with the batch_size=None" in out
    file.write_text(json.dumps({"data": {"penstock.ledger": "{}"}}))
    code, _, err = shown(file, capsys)
    assert code == 1
    assert "['data'] is damaged: this state of a Ledger is damaged" in err


def test_batches_by_key_keep_their_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: it said "and any batch size", beside a batch size that is needed."""
    with Loader.from_dataset(range(10), groups=Buckets(keys=[0] * 10, batch_size=2)) as loader:
        next(iter(loader))
        out = said(loader.state_dict(), tmp_path, capsys)
    assert (
        "It needs a loader with the same settings: order=sequential, batch_size=2, dataset_length=10, sample_seed=0."
        in out
    )
    assert "It loads on any number of ranks, with any number of workers, at this batch size." in out


def test_a_reader_that_has_read_enough_ends_it(tmp_path: Path) -> None:
    """As ``| head`` does. Seen to fail: a traceback."""
    file = tmp_path / "many.json"
    file.write_text(json.dumps([state_after(1)] * 400))  # more than a pipe holds
    command = [sys.executable, "-m", "penstock", "state", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline()
        running.stdout.close()
        assert (running.stderr.read(), running.wait()) == (b"", 1)
