"""Trainers that fetch a batch before they train on the one before it: timm's ``PrefetchLoader`` and nanoGPT's loop.

Each resume loses a batch, unless the loop tells the loader by `Loader.commit` what it has trained. timm is not among
the packages for tests, so a wrapper of that shape stands in for its own; where timm is installed, its own runs, too.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock import Loader
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N, B, EPOCHS = 22, 4, 3  # five batches an epoch, under drop_last


class Ahead:
    """A wrapper that hands out a batch once it has the next one."""

    def __init__(self, loader: Loader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following
        yield batch


def timms(loader: Loader[Any]) -> Any:
    """timm's own, on the CPU."""
    module = pytest.importorskip("timm.data.loader")
    return module.PrefetchLoader(loader, device=torch.device("cpu"))


def pictures(items: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch as timm's: pictures, and labels that are the items."""
    return torch.zeros(len(items), 3, 1, 1, dtype=torch.uint8), torch.tensor(items)


def build(state: Any = None, *, commit: bool = True, batch_size: int = B, **options: Any) -> Loader[Any]:
    loader = Loader.from_dataset(
        Tagged(N), batch_size, shuffle=True, seed=3, drop_last=True, collate_fn=pictures, **options
    )
    if commit:
        loader.commit(0)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def train(
    loader: Loader[Any], wrap: Callable[[Loader[Any]], Any], *, commit: bool = True, end: bool = True
) -> tuple[list[list[int]], list[Any], list[Any]]:
    """timm's loop: what it trains, the state after each of its steps, and those after each epoch."""
    trained, inside, between = [], [], []
    with loader:
        for epoch in range(loader.epoch, EPOCHS):
            loader.sampler.set_epoch(epoch)
            for _, labels in wrap(loader):
                trained.append(labels.tolist())
                if commit:
                    loader.commit()
                inside.append(loader.state_dict())
            if end:
                loader.end_epoch()
            between.append(loader.state_dict())
    return trained, inside, between


WRAPPERS = pytest.mark.parametrize("wrap", [Ahead, timms])


@WRAPPERS
def test_each_resume_loses_a_batch_without_commit(wrap: Callable[[Loader[Any]], Any]) -> None:
    """What the pages say of it; if this changes, so must they. Not seen to fail."""
    whole, inside, _ = train(build(commit=False), wrap, commit=False)
    for k in (1, 2, 3, 6):  # the next one has been fetched, unless this was the last of an epoch
        assert train(build(inside[k - 1], commit=False), wrap, commit=False)[0] == whole[k + 1 :]


@WRAPPERS
@pytest.mark.parametrize("workers", [0, 2])
def test_committed_steps_resume_exactly(wrap: Callable[[Loader[Any]], Any], workers: int) -> None:
    """Seen to fail: `commit` that takes the newest of the delivered batches; a state of what was delivered; `end_epoch`
    that leaves what is not committed."""
    options: dict[str, Any] = {"num_workers": workers, "method": "thread"} if workers else {}
    whole, inside, between = train(build(**options), wrap)
    assert [item // 1000 for batch in whole for item in batch] == sorted([0, 1, 2] * 5 * B)
    for k in range(1, len(whole)) if not workers else (1, 7):
        if k % 5:  # not on the last batch of an epoch
            assert train(build(inside[k - 1], **options), wrap)[0] == whole[k:]
    for epoch, state in enumerate(between[:-1]):
        assert train(build(state, **options), wrap)[0] == whole[5 * (epoch + 1) :]


@WRAPPERS
def test_the_end_of_an_epoch_is_the_loops_to_tell(wrap: Callable[[Loader[Any]], Any]) -> None:
    """The wrapper has seen the end before the last batch is committed. Without ``end_epoch`` a state saved behind the
    loop is that of the last batch, whose empty remainder such a wrapper cannot deliver.

    Seen to fail: a state of what was delivered.
    """
    whole, inside, between = train(build(), wrap, end=False)
    assert between == [inside[4], inside[9], inside[14]]
    for state, epoch in ((inside[4], 0), (between[1], 1)):
        loader = build(state)
        assert (loader.epoch, loader.remaining) == (epoch, 0)
        with pytest.raises((UnboundLocalError, RuntimeError)):  # timm's is the first
            list(wrap(loader))
        loader = build(state)
        loader.end_epoch()
        assert train(loader, wrap)[0] == whole[5 * (epoch + 1) :]


def dealt(ranks: list[list[list[int]]]) -> list[int]:
    """The samples of all ranks in the order of the data: sample k of a round went to rank k modulo their number."""
    return [one for hands in zip(*ranks, strict=True) for group in zip(*hands, strict=True) for one in group]


def test_two_ranks_have_one_state_which_one_rank_continues() -> None:
    """Two batches an epoch. Seen to fail: a state of what was delivered, also with `commit`."""
    both = [train(build(rank=rank, world_size=2), Ahead) for rank in (0, 1)]
    (whole, *states), trained = both[0], [rank[0] for rank in both]
    assert states == [*both[1][1:]]
    for k in (1, 3, 5):
        state = states[0][k - 1]
        assert [train(build(state, rank=rank, world_size=2), Ahead)[0] for rank in (0, 1)] == [
            batches[k:] for batches in trained
        ]
        assert dealt([train(build(state, batch_size=2 * B), Ahead)[0]]) == dealt(trained)[2 * B * k :]
    assert len(whole) == 6


def nanogpt(
    loader: Loader[Any], steps: int, done: int = 0, *, micro: int = 2, commit: bool = True
) -> tuple[list[list[int]], dict[int, Any]]:
    """nanoGPT's loop: what it trains, and the checkpoints, which it saves before a step.

    It fetches the first batch before the loop, and the next one while it computes.
    """
    trained, saved = [], {}
    with loader:
        batches = iter(loader)
        tokens = next(batches)
        while done < steps:
            saved[done] = loader.state_dict()
            for _ in range(micro):
                used, tokens = tokens, next(batches)
                trained.append(used.tolist())
            if commit:
                loader.commit(micro)
            done += 1
    return trained, saved


def endless(state: Any = None, *, commit: bool = True, **options: Any) -> Loader[Any]:
    loader = Loader.from_dataset(Tagged(N), B, shuffle=True, seed=3, infinite=True, **options)
    if commit:
        loader.commit(0)
    if state is not None:
        loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("commit", [True, False])
def test_nanogpts_loop(commit: bool) -> None:
    """Through three epochs, with gradients accumulated over two batches. Without `commit` the batch that was fetched
    for the next step is lost. Seen to fail: `commit` that counts one batch whatever it is told."""
    whole, saved = nanogpt(endless(commit=commit), 9, commit=commit)
    for step, state in saved.items():
        rest, _ = nanogpt(endless(state, commit=commit), 9, step, commit=commit)
        assert rest == whole[2 * step :] if commit else rest[:-1] == whole[2 * step + 1 :]


@pytest.mark.slow
def test_killed_with_a_fetched_batch_in_hand(tmp_path: Path, run_program: Callable[..., str]) -> None:
    """Two ranks, killed in step 7; then one rank, from the checkpoint before step 6, into the next epochs. Seen to
    fail: without the line `loader.commit(MICRO)`, and with `commit()` in its place."""
    program = Path(__file__).with_name("look_ahead_killed.py")
    run_program(program, tmp_path, 12, 7, ranks=2, killed=True)
    run_program(program, tmp_path, 12, ranks=1)
    logs = {log.stem: [json.loads(line) for line in log.read_text().splitlines()] for log in tmp_path.glob("*.jsonl")}
    assert [[step for step, _ in log] for log in (logs["2-0"], logs["2-1"], logs["1-0"])] == [
        [*range(8)],
        [*range(8)],
        [*range(6, 12)],
    ]
    batches = {name: [batch for _, trained in log for batch in trained] for name, log in logs.items()}
    before, after = dealt([batches["2-0"], batches["2-1"]]), dealt([batches["1-0"]])
    with Loader.from_dataset(Tagged(44), 8, shuffle=True, seed=3, infinite=True) as loader:
        right = [batch.tolist() for batch in islice(loader, 24)]
    assert before == dealt([right[:16]])
    assert after == dealt([right[12:]])
