"""Lightning's Trainer: every kind of checkpoint it makes, on one rank and on two, and on another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lightning")

from trainers import lightning_cases as cases
from trainers.lightning_cases import CASES, CHANGES, DATALOADER, KINDS, PEERS, WITH, WITHOUT, Case, exact
from trainers.table import WRITING, record

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|isinstance\\(treespec, LeafSpec\\)|srun|Starting from v1.9|GPU available|ckpt_path|The dirpath has changed|Checkpoint directory|Counted has no state_dict)"),
]

EXACT = {True: "exact", False: "no"}
IMPOSSIBLE = "avoid it: save at the last batch, or use `max_epochs`"


def need(case: Case) -> str:
    return IMPOSSIBLE if not case.possible else "" if case.alone else "`PenstockCallback()`"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_one_rank(case: Case, tmp_path: Path) -> None:
    """With the callback all are exact; without it, those that the guide names. The rest are Lightning's own."""
    for kind in KINDS if WRITING and case.loader != "endless" else (WITHOUT, WITH):
        result = exact(case, kind, cases.run(case, kind, tmp_path))
        record("Lightning", case.name, "1", kind, EXACT[result], need(case))
        if kind not in PEERS:
            assert result == (case.possible if kind == WITH else case.alone), kind


def made_alone(folder: Path) -> None:
    """The checkpoints of one rank that are to be resumed on two."""
    for case in CHANGES:
        for kind in (WITH, WITHOUT):
            cases.fit(case, kind, cases.place_of(case, kind, folder, 1), fails=None if case.fails is None else int(case.fails * cases.N // cases.B))


@pytest.mark.timeout(240)
def test_two_ranks(tmp_path: Path, run_script: Callable[..., str]) -> None:
    """Lightning starts both; every rank's batches are judged. One launch for all of it, because starting takes longer than all the runs."""
    made_alone(tmp_path / "alone")
    run_script(Path(cases.__file__), str(tmp_path), *(["peers"] if WRITING else []), timeout_s=230)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    of_cases([rank["cases"] for rank in ranks])
    of_changes([rank["changes"] for rank in ranks], tmp_path)
    of_streams([rank["streams"] for rank in ranks])
    for said in [rank["refusals"] for rank in ranks]:
        assert said["unequal"].startswith("0 steps: the ranks have [6, 5] training batches an epoch, and DDP hangs")
        assert said["wrapped"].startswith("0 steps: a penstock.Loader stands inside a DataLoader")
    for said in [rank["dataloader"] for rank in ranks]:
        assert said["True"].startswith(" Lightning can't inject a (distributed) sampler into your batch sampler")
        assert said["False"] == 20  # every rank trains all of them: no sharding at all


def of_cases(ranks: list[dict[str, Any]]) -> None:
    for case in CASES:
        for kind in ranks[0][case.name]:
            result = all(exact(case, kind, seen[case.name][kind], rank, 2) for rank, seen in enumerate(ranks))
            record("Lightning", case.name, "2", kind, EXACT[result], need(case))
            if kind not in PEERS:
                assert result == (case.possible if kind == WITH else case.alone), (case.name, kind)


def of_changes(ranks: list[dict[str, Any]], folder: Path) -> None:
    """The samples of all ranks, in one sequence, are those of a run that never changed; and no validation is left out."""
    for case in CHANGES:
        steps = cases.N // cases.B
        whole = cases.sequence([cases.right(case, 0, 1)])[int(case.resume * cases.N) :]
        for kind in (WITH, WITHOUT):
            onto_two = [seen[f"{case.name} {kind}"] for seen in ranks]
            place = cases.place_of(case, kind, folder / "from two", 2)
            onto_one = [cases.again(case, kind, place, folder / "onto one", steps=int(case.resume * steps / 2), ranks=1)]
            for change, after in (("1 → 2", onto_two), ("2 → 1", onto_one)):
                lengths = {len(one["resumed"]) for one in after}
                result = len(lengths) == 1 and cases.sequence([one["resumed"] for one in after]) == whole
                result = result and {one["validated"] for one in after} == {validations(case)}
                record("Lightning", case.name, change, kind, EXACT[result], need(case))
                if kind == WITH:
                    assert result, (case.name, change, after, whole)


def validations(case: Case) -> int:
    """How often a run that goes on from the checkpoint validates: behind every epoch, or every half of one."""
    if not case.validated:
        return 0
    return int((3 - case.resume) / case.trainer.get("val_check_interval", 1) + 0.5)


def of_streams(ranks: list[dict[str, Any]]) -> None:
    for name, (make, _, at) in cases.STREAMS.items():
        for seen in ranks:
            assert seen[name]["resumed"] == seen[name]["whole"][at:], name
        epochs = [[[i for i in batch if i // 1000 == e] for rank in ranks for batch in rank[name]["whole"]] for e in (0, 1)]
        for e, batches in enumerate(epochs):
            values = sorted(i - 1000 * e for batch in batches for i in batch)
            if name == "classes":
                assert sorted({(k, cases.LABELS[i - 1000 * e]) for k, batch in enumerate(batches) for i in batch}, key=lambda pair: pair[1])
                assert [sum(cases.LABELS[i] == label for i in values) for label in range(12)] == [2] * 12
                continue
            primaries = make().primary
            counts = [values.count(i) for i in primaries]
            if name in ("divides", "within", "exact"):
                assert counts == [1] * 20, name
            elif name == "drop":
                assert sorted(counts) == [0, 0] + [1] * 16
            else:
                assert sorted(counts) == [1] * 16 + [2] * 2
            assert all(sum(i - 1000 * e in primaries for i in batch) == len(batch) // 2 for batch in batches), "the streams stay mixed"
        if name == "divides":
            sampler = make()
            for e in (0, 1):
                sampler.set_epoch(e)
                expected = [[1000 * e + i for i in batch] for batch in sampler]
                assert [rank[name]["whole"][5 * e : 5 * e + 5] for rank in ranks] == [expected[0::2], expected[1::2]]
