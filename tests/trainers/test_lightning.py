"""Lightning's Trainer: every kind of checkpoint, on one rank, on two, and on a changed number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities import CombinedLoader
from sessions import session
from tests.trainers import lightning_cases as cases
from tests.trainers.lightning_cases import CASES, CHANGES, WITH, WITHOUT, Case, exact

from penstock import Loader, StateError
from penstock.integrations.lightning import LightningCallback
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*(does not have many workers|isinstance\\(treespec, LeafSpec\\)|srun|'set_vital' is "
        "deprecated|Starting from v1.9|GPU available|ckpt_path|The dirpath has changed|Checkpoint directory|Counted "
        "has no state_dict)"
    ),
]

PAGE = Path(__file__).parents[2] / "examples" / "measurements" / "trainers_table.md"


def test_the_page_tells_when_the_callback_is_needed() -> None:
    rows = PAGE.read_text()
    for case in CASES:
        without, need = ("exact", "") if case.alone else ("no", "`LightningCallback()`")
        assert f"| Lightning | {case.name} | 1, 2 | {without} | exact | {need} |" in rows


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_one_rank(case: Case, tmp_path: Path) -> None:
    """With the callback all cases are exact; without it, those that the guide lists.

    Seen to fail, with these parts of the callback taken out: commit (24 cases), restoring before the first fetch rather
    than at the start of training (11), handing on to reloaded loaders (4), end_epoch (3), putting back what was fetched
    too early (1), beginning the next epoch under max_steps (1).
    """
    for kind in (WITHOUT, WITH):
        assert exact(case, kind, cases.run(case, kind, tmp_path)) == (kind == WITH or case.alone), kind


def made_alone(folder: Path) -> None:
    """Save the checkpoints of one rank that are resumed on two."""
    for case in CHANGES:
        cases.fit(
            case, WITH, cases.place_of(case, WITH, folder, 1), fails=case.fails and int(case.fails * cases.N // cases.B)
        )


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_two_ranks(every: int, tmp_path: Path, run_program: Callable[..., str]) -> None:
    """Lightning starts both ranks; the batches of every rank are compared. There is a single launch, because starting
    takes longer than all runs.

    Seen to fail: after a change of the number of ranks, Lightning's saved count of batches was not corrected.
    """
    made_alone(tmp_path / "alone")
    run_program(Path(cases.__file__), str(tmp_path), every)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for case in cases.some(every):
        assert all(exact(case, WITH, seen["cases"][case.name], rank, 2) for rank, seen in enumerate(ranks)), case.name
    of_changes([rank["changes"] for rank in ranks], tmp_path)
    for said in [rank["refusals"] for rank in ranks]:
        assert said["unequal"].startswith("0 steps: the ranks have [6, 5] training batches per epoch, and DDP hangs")
        assert said["wrapped"].startswith("0 steps: a penstock.Loader is inside a DataLoader")
    # the guide's first example
    assert [rank["validated"]["exact"] for rank in ranks] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    # it was: one sample counts twice
    assert [rank["validated"]["pad"] for rank in ranks] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 0]]
    for said in [rank["dataloader"] for rank in ranks]:
        assert said["True"].startswith(" Lightning can't inject a (distributed) sampler into your batch sampler")
        assert said["False"] == 20  # every rank trains all of them: no sharding at all


def of_changes(ranks: list[dict[str, Any]], folder: Path) -> None:
    """The samples of all ranks, as one sequence, equal those of an unchanged run, and no validation is skipped."""
    for case in CHANGES:
        steps = cases.N // cases.B
        whole = cases.sequence([cases.right(case, 0, 1)])[int(case.resume * cases.N) :]
        onto_two = [seen[case.name] for seen in ranks]
        place = cases.place_of(case, WITH, folder / "from two", 2)
        onto_one = [cases.again(case, WITH, place, folder / "onto one", steps=int(case.resume * steps / 2), ranks=1)]
        for after in (onto_two, onto_one):
            assert len({len(one["resumed"]) for one in after}) == 1
            assert cases.sequence([one["resumed"] for one in after]) == whole, case.name
            assert {one["validated"] for one in after} == {validations(case)}


def validations(case: Case) -> int:
    """How often a run resumed from the checkpoint validates: after every epoch, or every half epoch."""
    if not case.validated:
        return 0
    return int((3 - case.resume) / case.trainer.get("val_check_interval", 1) + 0.5)


@pytest.mark.soak
def test_ctrl_c_leaves_nobody(tmp_path: Path) -> None:
    """Two ranks with two workers each must all end after a Ctrl-C, which a terminal sends to every process of the
    group.

    Seen to fail: a zygote that never leaves its loop and that `ByZygote.kill` does not kill. (Either alone is made up
    for by the other.)
    """
    output = tmp_path / "output.txt"
    with output.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(Path(cases.__file__).with_name("lightning_interrupted.py"))],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
    try:
        assert process.stdout is not None
        training = list(islice((line for line in process.stdout if line.startswith("training")), 2))
        assert len(training) == 2, output.read_text()
        assert len(session(process.pid)) >= 6
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.close()
        process.wait()
        while left := session(process.pid):  # the test's time-out ends this
            psutil.wait_procs(left, timeout=0.5)
    finally:
        for straggler in session(process.pid):
            os.kill(straggler.pid, signal.SIGKILL)
        process.wait()


class Watched(Tagged):
    """Counts its calls."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.calls = 0

    def __getitem__(self, index: int) -> int:
        self.calls += 1
        return index


class Validated(cases.Model):
    """Keeps the workers of each validation, and the number of dataset calls at the end of each epoch."""

    def __init__(self, dataset: Watched) -> None:
        super().__init__()
        self.dataset = dataset
        self.pids: list[set[int]] = []
        self.calls: list[int] = []

    def on_validation_epoch_end(self) -> None:
        self.pids.append({child.pid for child in psutil.Process().children(recursive=True)})

    def on_train_epoch_end(self) -> None:
        self.calls.append(self.dataset.calls)


@pytest.mark.parametrize("method", ["thread", "process"])
def test_validation_costs_nothing_where_it_is_not_due(method: str) -> None:
    """Nothing is loaded in epochs without a validation, and the second validation has the same workers as the first.

    Seen to fail: with prefetch_next_epoch=True the first batches of the next validation were already loaded.
    """
    dataset = Watched(30)
    model = Validated(dataset)
    with (
        Loader.from_dataset(Tagged(8), batch_size=4) as train,
        Loader.from_dataset(
            dataset, batch_size=4, num_workers=2, method=method, prefetch_next_epoch=False
        ) as validation,
    ):
        trainer = cases.new_trainer(
            1,
            [LightningCallback()],
            max_epochs=6,
            check_val_every_n_epoch=3,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
        )
        trainer.fit(model, train, validation)
    assert [i for batch in model.validated for i in batch] == [*range(30)] * 2
    if method == "thread":
        assert model.calls == [0, 0, 31, 31, 31, 61]  # the first sample is loaded twice, and compared
    else:
        assert model.pids[0] == model.pids[1]
        assert len(model.pids[0]) >= 2


def test_max_steps_in_mid_epoch_and_an_epoch_end_checkpoint(tmp_path: Path) -> None:
    """When Lightning stops, it ends its epoch, but the loader does not: with more steps the run continues in the same
    epoch."""
    stops = Case("stops", cases.EPOCH_END, 1.5, {"max_steps": 1.5})
    goes_on = Case("goes on", cases.EPOCH_END, 1.5, {"max_steps": 2.5})
    before = cases.fit(stops, WITH, tmp_path)
    after = cases.fit(goes_on, WITH, tmp_path / "again", resume=tmp_path / "step=18.ckpt")
    assert before.seen + after.seen == cases.right(goes_on, 0, 1)


class RestoresLate(SingleDeviceStrategy):
    """Like FSDP and DeepSpeed: callbacks get their states after the loaders were asked for their length."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True


@pytest.mark.parametrize("loader", ["sized", "unsized"])
def test_a_strategy_that_restores_late(loader: str, tmp_path: Path) -> None:
    """Seen to fail: without fetching again, the load had invalidated the iterator of the un-sized loader."""
    StrategyRegistry.register("late", RestoresLate, device="cpu", override=True)
    case = Case(
        "late", cases.MID, 1.5, {"strategy": "late", "max_steps": 3.0, "max_epochs": 9}, loader=loader, estimated=True
    )
    assert exact(case, WITH, cases.run(case, WITH, tmp_path))


class Both(cases.Model):
    """Trains on the batches of two loaders, or of the one that still has batches."""

    def training_step(self, batch: dict[str, torch.Tensor | None]) -> torch.Tensor:
        given = {name: one for name, one in batch.items() if one is not None}
        self.seen.append([name for one in batch.values() for name in ([-1] if one is None else one.tolist())])
        return self.layer(next(iter(given.values())).float().unsqueeze(1)).mean() / 1000


def combined(
    mode: str, folder: Path, callbacks: list[LightningCallback], resume: Path | None = None
) -> list[list[int]]:
    """Three epochs over six and three batches together, with a checkpoint after every step."""
    model = Both()
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    with (
        Loader.from_dataset(Tagged(24), batch_size=4, shuffle=True, seed=1) as long,
        Loader.from_dataset(Tagged(9), batch_size=3, shuffle=True, seed=2) as short,
    ):
        both = CombinedLoader({"long": long, "short": short}, mode)
        cases.new_trainer(1, [saver, *callbacks], max_epochs=3).fit(model, both, ckpt_path=resume)
    return model.seen


MODES = {
    # (epoch, batch) of the short loader in each step of the first two epochs of Lightning
    "max_size": [(0, 0), (0, 1), (0, 2), None, None, None, (1, 0), (1, 1), (1, 2), None, None, None],
    "max_size_cycle": [(e, k) for e in (0, 1, 2, 3) for k in (0, 1, 2)],
    "min_size": [(e, k) for e in (0, 1, 2) for k in (0, 1, 2)],
}


@pytest.mark.parametrize("mode", MODES)
def test_several_loaders_resume_behind_the_end_of_the_short_one(mode: str, tmp_path: Path) -> None:
    """From every step on, by value, with None once a loader has ended before the other.

    Seen to fail: under the rule that a finished epoch resumes to the next one, the short loader started its next epoch
    too early in max_size; when Lightning's epoch number decided, a short loader that restarts repeated its previous
    epoch.
    """
    whole = combined(mode, tmp_path, [LightningCallback()])
    with Loader.from_dataset(Tagged(9), batch_size=3, shuffle=True, seed=2) as short:
        epochs = [[batch.tolist() for batch in short] for _ in range(6)]
    expected = [[-1] if place is None else epochs[place[0]][place[1]] for place in MODES[mode]]
    assert [step[4:] for step in whole[: len(expected)]] == expected
    for step in range(1, len(whole)):
        assert (
            combined(mode, tmp_path / "again", [LightningCallback()], tmp_path / f"step={step}.ckpt") == whole[step:]
        ), step


class Pairs:
    """Batches without a length, or with a wrong one."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([first, first + 1] for first in range(0, 14, 2))


class WrongLength(Pairs):
    def __len__(self) -> int:
        return 5


class Keys:
    def __iter__(self) -> Iterator[int]:
        yield from range(14)


@pytest.mark.parametrize(
    "samplers",
    [{"batch_sampler": Pairs()}, {"batch_sampler": WrongLength()}, {"batch_size": 2, "sampler": Keys()}],
    ids=["none", "wrong", "keys"],
)
@pytest.mark.filterwarnings("ignore:WrongLength has a length of 5")
def test_a_sampler_whose_length_shows_in_the_epoch(samplers: dict[str, Any], tmp_path: Path) -> None:
    """Lightning counts an epoch by what it asked before. Seen to fail: the epoch's last batch was not trained after a
    resume.

    With a length that is too small, Lightning ends the epoch there, whatever the loader; it resumes as if it had not
    been stopped.
    """

    def once(folder: Path, resume: Path | None = None) -> list[list[int]]:
        model = cases.Model()
        saver = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        with Loader.from_dataset(range(14), **samplers) as train:
            cases.new_trainer(1, [saver, LightningCallback()], max_epochs=2).fit(model, train, ckpt_path=resume)
        return model.seen

    whole = once(tmp_path)
    assert whole[:5] == [[first, first + 1] for first in range(0, 10, 2)]
    for step in range(1, len(whole)):
        assert once(tmp_path / "again", tmp_path / f"step={step}.ckpt") == whole[step:], step


@pytest.mark.parametrize("loader", ["sized", "unsized", "endless"])
@pytest.mark.filterwarnings("error:You requested to overfit")
def test_overfit_batches_are_the_same_in_every_epoch(loader: str, tmp_path: Path) -> None:
    """They are those of epoch 0, also after a resume, and if the loader was in another epoch. Seen to fail: other
    batches in each epoch."""

    def once(folder: Path, resume: Path | None = None, *, used: bool = False) -> cases.Model:
        model = cases.Model()
        saver = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        with (
            cases.new_loader(Case("", {}, 0, loader=loader)) as train,
            Loader.from_dataset(Tagged(20), batch_size=4, shuffle=True, seed=4) as validation,
        ):
            if used:
                next(iter(train))
                train.set_epoch(2)
                next(iter(train))
            trainer = cases.new_trainer(
                1, [saver, LightningCallback()], max_epochs=3, overfit_batches=2, num_sanity_val_steps=0
            )
            trainer.fit(model, train, validation, ckpt_path=resume)
        return model

    whole = once(tmp_path)
    with cases.new_loader(Case("", {}, 0, loader=loader)) as train:
        assert whole.seen == [batch.tolist() for batch in islice(train, 2)] * 3
    with Loader.from_dataset(Tagged(20), batch_size=4, shuffle=True, seed=4) as validation:
        assert whole.validated == [batch.tolist() for batch in islice(validation, 2)] * 3
    assert once(tmp_path / "used", used=True).seen == whole.seen
    for step in range(1, 6):
        assert once(tmp_path / "again", tmp_path / f"step={step}.ckpt").seen == whole.seen[step:], step


def test_overfit_batches_leave_the_loaders_of_the_user_alone() -> None:
    """The CombinedLoader that was passed is not changed, so a later run gets all of its epochs."""
    with Loader.from_dataset(Tagged(24), batch_size=4, shuffle=True) as loader:
        both = CombinedLoader({"one": loader}, "max_size")
        trainer = cases.new_trainer(
            1, [LightningCallback()], max_epochs=2, overfit_batches=1, enable_checkpointing=False
        )
        trainer.fit(OfOne(), both)
        assert both.flattened == [loader]
        model = OfOne()
        cases.new_trainer(1, [LightningCallback()], max_epochs=2, enable_checkpointing=False).fit(model, both)
        assert [i // 1000 for batch in model.seen for i in batch] == [0] * 24 + [1] * 24


class OfOne(cases.Model):
    """Trains on the batches of one loader in a dict."""

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().training_step(batch["one"])


def test_a_checkpoint_of_other_loaders_is_refused() -> None:
    callback = LightningCallback()
    with Loader.from_dataset(Tagged(8)) as loader:
        callback.load_state_dict({"loaders": [loader.state_dict()] * 2})
        # until then, what was loaded is what is saved
        assert callback.state_dict() == {"loaders": [loader.state_dict()] * 2}
        with pytest.raises(StateError, match="states of 2 penstock loaders, but there are 1"):
            callback._seen(loader)
