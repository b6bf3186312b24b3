"""``python -m penstock which``: the samples of some steps, without loading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Ledger, Loader, Mix, Packs
from penstock.__main__ import main
from penstock.formats import jsonl

MODULE = """
from torch.utils.data import IterableDataset
from penstock import Loader, Mix, Packs
from penstock.formats import jsonl

def make_loader(**more):
    files = jsonl("{folder}/*.jsonl")
    return Loader.from_dataset(Mix({{"files": files, "numbers": list(range(30))}}, {{"files": 1, "numbers": 2}}, epoch_size=40), 3, True, seed=4, **more)

def other():
    return Loader.from_dataset(list(range(30)), 3, True, seed=5)

def packs():
    return Loader.from_dataset([[n] * (n + 1) for n in range(6)], 2, groups=Packs(range(1, 7), 4))

def of_rank_2():
    return Loader.from_dataset(list(range(30)), 3, rank=2, world_size=4)

def nothing():
    return [1, 2]

def no_batches():
    return Loader.from_dataset([1, 2], 3, drop_last=True)

def none_left():
    return Loader.from_dataset([1, 2], 3, drop_last=True, skip=[(0, 1)])

class Forward(IterableDataset):
    def __iter__(self):
        return iter([1, 2])

def forward():
    return Loader.from_dataset(Forward(), 3)
"""  # noqa: E501


@pytest.fixture
def module(tmp_path: Path, capsys: Any) -> Path:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"record": f"{name}{k}"}) + "\n" for k in range(10)))
    assert main(["index", f"{tmp_path}/*.jsonl"]) == 0
    capsys.readouterr()
    file = tmp_path / f"making_{tmp_path.name}.py"
    file.write_text(MODULE.format(folder=tmp_path))
    return file


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 3)])
def test_it_says_what_a_rank_gets(module: Path, capsys: Any, monkeypatch: Any, rank: int, world_size: int) -> None:
    """Over the border of an epoch. Seen to fail: with the steps of the first epoch only."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    files = jsonl(f"{module.parent}/*.jsonl")
    mix = Mix({"files": files, "numbers": list(range(30))}, {"files": 1, "numbers": 2}, epoch_size=40)
    want = []
    with Loader.from_dataset(mix, 3, True, seed=4, rank=rank, world_size=world_size, collate_fn=list) as loader:
        for _ in range(3):
            for batch in loader:
                assert loader.last is not None
                want.append((loader.last, batch))
        state = loader.state_dict()
    (module.parent / "state.json").write_text(json.dumps(state))
    begin, end = 2, len(want) // 3 + 4
    words = ["--steps", f"{begin}:{end}", "--rank", str(rank), "--world-size", str(world_size)]
    assert main(["which", f"{module}:make_loader", str(module.parent / "state.json"), *words]) == 0
    found = lines(capsys.readouterr().out)
    samples = [
        (step, at.epoch, position, index, sample)
        for step, (at, batch) in list(enumerate(want))[begin:end]
        for position, index, sample in zip(at.position, at.indices, batch, strict=True)  # type: ignore[arg-type]
    ]
    assert [(one["step"], one["epoch"], one["position"], one["index"]) for one in found] == [
        sample[:4] for sample in samples
    ]
    for one, (*_, sample) in zip(found, samples, strict=True):
        source, _, rest = one["where"].partition(", ")
        if source == "files":
            name, number = sample["record"][0], sample["record"][1:]
            assert rest.endswith(f"{name}.jsonl, record {number}")
        else:
            assert rest == f"index {sample}"


def test_a_state_in_a_checkpoint(module: Path, capsys: Any, monkeypatch: Any) -> None:
    """Under any key, of a loader or of its ledger, if there is one only, or by ``--key``. Seen to fail: the whole
    checkpoint had to be a state."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    def states(seed: int) -> tuple[Any, Any]:
        with Loader.from_dataset(list(range(30)), 3, True, seed=seed, infinite=True) as loader:
            state = loader.state_dict()
            with Ledger(loader) as ledger:
                next(ledger)
                return state, ledger.state_dict()

    (good, taken), (wrong, _) = states(5), states(6)
    file = module.parent / "run.pt"
    words = ["which", f"{module}:other", str(file), "--steps", "3"]
    model = {"weight": torch.ones(3)}
    for checkpoint, more in (
        ({"model": model, "loader": good}, []),
        ({"model": model, "ledger": taken}, []),
        ({"model": model, "trainer": {"loader": good}, "validation": wrong}, ["--key", "trainer.loader"]),
        ({"model": model, "trainer": {"a.b": [wrong, good]}}, ["--key", "trainer.a.b.1"]),
    ):
        torch.save(checkpoint, file)
        assert main([*words, *more]) == 0
        assert len(lines(capsys.readouterr().out)) == 3
    for checkpoint, more, message in (
        (
            {"loader": good, "validation": [wrong]},
            [],
            "holds several states. Choose one with --key: loader, validation.0.",
        ),
        ({"loader": good}, ["--key", "loade"], "has no penstock state at loade, but at: loader."),
        (good, ["--key", "loader"], "has no penstock state at loader, but at: its top level."),
        (
            {"model": model, "step": 3},
            ["--key", "loader"],
            "contains no penstock state. Its keys are ['model', 'step'].",
        ),
        ({"loader": wrong}, [], "seed was 6 and is 5"),
        ({"loader": good, "model": Path("x")}, [], "are not unpickled"),
    ):
        torch.save(checkpoint, file)
        assert main([*words, *more]) == 1
        assert message in capsys.readouterr().err


def test_a_pack_is_a_list_of_its_documents(module: Path, capsys: Any, monkeypatch: Any) -> None:
    """And so it is for `Loader.last`. Seen to fail: five lists, of which the first has the indices."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["which", f"{module}:packs", "--steps", "0:4"]) == 0
    found = lines(capsys.readouterr().out)
    assert [(one["step"], one["epoch"], one["position"]) for one in found[:3]] == [(0, 0, 0), (0, 0, 1), (1, 0, 2)]
    with Loader.from_dataset([[n] * (n + 1) for n in range(6)], 2, groups=Packs(range(1, 7), 4)) as loader:
        seen: list[Any] = []
        for batch in loader:
            assert loader.last is not None
            seen += loader.last.indices
            for documents, tokens in zip(loader.last.indices, batch["tokens"].tolist(), strict=True):
                assert tokens[: sum(one.length for one in documents)] == [
                    one.index for one in documents for _ in range(one.length)
                ]
    assert json.loads(json.dumps(seen[1])) == [[index, start, length] for index, start, length in seen[1]]
    for one, documents in zip(found, seen, strict=False):
        assert one["documents"] == [
            {"index": index, "start": start, "length": length} for index, start, length in documents
        ]


def test_what_it_cannot_say(module: Path, capsys: Any, monkeypatch: Any) -> None:
    """Seen to fail: with `IterableSource.has_indices`."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with Loader.from_dataset(list(range(30)), 3, True, seed=6) as loader:
        (module.parent / "state.json").write_text(json.dumps(loader.state_dict()))
    for words, message in (
        # Seen to fail: it answered.
        (["of_rank_2"], "builds the loader of rank 2 of 4, whatever is asked for. Pass --rank 2 --world-size 4"),
        (["nothing"], "returns a list, but only a penstock.Loader"),
        (["other", str(module.parent / "state.json")], "seed was 6 and is 5"),
        (["other", str(module.parent / "none.json")], "No such file"),
        (["forward"], "only reading it shows"),
        (["no_batches"], "has no batch on this rank"),
        (["none_left"], "has no batch on this rank"),  # seen to fail: it looked forever
    ):
        assert main(["which", f"{module}:{words[0]}", *words[1:], "--steps", "3"]) == 1
        assert message in capsys.readouterr().err
    for steps in ("", "a", "5:5", "7:3", "-1", "1:2:3"):
        with pytest.raises(SystemExit):
            main(["which", f"{module}:other", f"--steps={steps}"])
