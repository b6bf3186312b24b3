"""A run that changes while it runs: sources, weights, skipped ranges, batch sizes. Each is arithmetic on the position, so every chain of lives gives what one life does.

Sample i of source s is ``1000 * s + i``, and sources are read in order, so that a value names where it came from.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import Loader, Mix, StateMismatch

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = {"code": 40, "math": 7, "web": 90}
SOURCES = {name: range(1000 * k, 1000 * k + n) for k, (name, n) in enumerate(LENGTHS.items())}
EPOCH = 50


class Fleet:
    """The ranks of one life, in step. Each step gives the samples of all ranks, in the order of the sequence."""

    def __init__(self, build: Callable[..., Loader[Any]], world_size: int, state: Any = None) -> None:
        self.ranks = [build(rank=rank, world_size=world_size) for rank in range(world_size)]
        for loader in self.ranks:
            if state is not None:
                loader.load_state_dict(state)
        self.iterators = [iter(loader) for loader in self.ranks]

    def step(self) -> list[int]:
        batches = [next(iterator).tolist() for iterator in self.iterators]
        assert len({len(batch) for batch in batches}) == 1
        return [value for row in zip(*batches, strict=True) for value in row]

    def all(self, call: Callable[[Loader[Any]], Any]) -> Any:
        """What each rank returns, which must be the same."""
        first, *others = [call(loader) for loader in self.ranks]
        assert all(other == first for other in others)
        return first

    def state(self) -> Any:
        return self.all(lambda loader: json.loads(json.dumps(loader.state_dict())))

    def close(self) -> None:
        for loader in self.ranks:
            loader.close()


def mixed(plan: Any, sources: Any = SOURCES, **words: Any) -> Callable[..., Loader[Any]]:
    def build(**ranks: Any) -> Loader[Any]:
        mix = Mix(sources, plan, epoch_size=words.pop("epoch_size", EPOCH) if "epoch_size" in words else EPOCH)
        given = {"batch_size": 4, "seed": 3, "infinite": True, "drop_last": True, "tail": "drop", **words}
        return Loader.from_dataset(mix, **given, **ranks)

    return build


def straight(plan: list[tuple[int, dict[str, float]]], sources: Any = SOURCES, epochs: int = 40) -> list[int]:
    """Every sample of training, one by one, as a run with this plan from the beginning gives them, in one process."""
    with Loader.from_dataset(Mix(sources, plan, epoch_size=EPOCH), batch_size=None, seed=3) as loader:
        return [int(value) for _ in range(epochs) for value in loader]


def walk(sequence: list[int], at: int, samples: int) -> tuple[list[int], int]:
    """The next step of ``samples`` from ``at``, and where it ends: an epoch's rest that fills no step is left out."""
    if EPOCH - at % EPOCH < samples:
        at += EPOCH - at % EPOCH
    return sequence[at : at + samples], at + samples


class TestWeights:
    @pytest.mark.parametrize("seed", range(6))
    def test_changed_in_every_life(self, seed: int) -> None:
        """As if the stages had been written down from the beginning. Each life has other ranks and workers, and weights change in some of its steps.

        Seen fail: stages that begin where the delivered batch ends (with workers), a `Sampler` that keeps the block that it had computed ahead, and a state without stages.
        """
        draw = random.Random(seed)
        start = {"code": 1, "math": 1}
        given, seen, state, at = [(0, start)], [], None, 0
        for _ in range(4):
            world_size, workers = draw.choice([1, 2, 3]), draw.choice([0, 0, 2])
            words = {"num_workers": workers, "method": "thread", "prefetch_factor": draw.choice([1, 2])} if workers else {}
            fleet = Fleet(mixed({**start, "web": 0}, **words), world_size, state)
            for _ in range(draw.randrange(1, 9)):
                if draw.random() < 0.4:
                    weights = {name: draw.choice([0, 1, draw.random()]) for name in LENGTHS}
                    weights["web"] += not any(weights.values())
                    begins = fleet.all(lambda loader, weights=weights: loader.reweight(weights))
                    given = [*(one for one in given if one[0] != begins), (begins, weights)]
                step = fleet.step()
                assert fleet.all(lambda loader: len(loader.last.positions)) == 4
                seen.append((world_size * 4, step))
            state = fleet.state()
            fleet.close()
        sequence = straight(given)
        for samples, step in seen:
            expected, at = walk(sequence, at, samples)
            assert step == expected
        for k, n in enumerate(LENGTHS.values()):  # and whatever the weights, each source goes on where it was
            own = [value - 1000 * k for value in sequence if value // 1000 == k]
            assert own == [number % n for number in range(len(own))]

    @pytest.mark.parametrize("new", ["a new one", "zzz"])
    def test_a_source_is_added(self, new: str) -> None:
        """A state of a run without it loads, wherever its name is sorted; and what had been delivered is what the larger mix gives, too.

        Seen fail: a checksum of all sources; a layout that numbers all sources, and not those in use.
        """
        sources = {**SOURCES, new: range(9000, 9011)}
        plan = [(0, {"code": 1, "math": 0.5, "web": 2}), (20, {"code": 1, "web": 1})]
        longer = [*plan, (44, {"web": 0.6, new: 0.4})]
        sequence = straight(longer, sources)
        assert sequence[:44] == straight(plan)[:44]
        for stop in range(12):
            fleet = Fleet(mixed(plan), 1)
            before = [value for _ in range(stop) for value in fleet.step()]
            state = fleet.state()
            fleet.close()
            with mixed(longer, sources)() as loader:
                loader.load_state_dict(state)
                iterator = iter(loader)
                after = [value for _ in range(12) for value in next(iterator).tolist()]
            assert before + after == [*sequence[:48], *sequence[50:98]][: len(before) + 48]

    def test_a_source_that_was_used_must_stay(self) -> None:
        """Also with the same number of samples in all. Seen fail: sources compared by their sum."""
        plan = [(0, {"code": 1, "web": 1, "math": 0}), (30, {"math": 1})]
        with mixed(plan)() as loader:
            iterator = iter(loader)
            next(iterator)
            early = loader.state_dict()
            for _ in range(9):
                next(iterator)
            late = loader.state_dict()
        shrunk = {**SOURCES, "math": range(1000, 1006)}
        with mixed(plan, shrunk)() as loader:
            loader.load_state_dict(early)  # nothing of it was used
            with pytest.raises(StateMismatch, match="dataset_length was 137 and is 136"):
                loader.load_state_dict(late)
            moved = {**SOURCES, "math": range(1000, 1008), "web": range(2000, 2089)}
        with mixed(plan, moved)() as loader, pytest.raises(StateMismatch, match="sources was"):
            loader.load_state_dict(late)

    def test_a_thousand_changes_are_small_and_loaded_at_once(self) -> None:
        draw = random.Random(0)
        with mixed({"code": 1, "math": 1, "web": 1})() as loader:
            iterator, given = iter(loader), [(0, {"code": 1, "math": 1, "web": 1})]
            for _ in range(1000):
                next(iterator)
                weights = {name: draw.random() for name in LENGTHS}
                given.append((loader.reweight(weights), weights))
            state = loader.state_dict()
            rest = [value for _ in range(20) for value in next(iterator).tolist()]
        assert len(json.dumps(state)) < 64_000
        with mixed({"code": 1, "math": 1, "web": 1})() as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            iterator = iter(loader)
            assert [value for _ in range(20) for value in next(iterator).tolist()] == rest
        with mixed(given)() as loader:  # as written down
            iterator = iter(loader)
            for _ in range(1000):
                next(iterator)
            assert [value for _ in range(20) for value in next(iterator).tolist()] == rest

    def test_what_is_in_progress_is_delivered_first(self) -> None:
        """With workers the change begins behind the fullest queue that there may be, which all ranks know. Seen fail: without the check of ``at``."""
        with mixed({"web": 1, "code": 0, "math": 0}, num_workers=2, method="thread", prefetch_factor=3)() as loader:
            assert loader.reweight({"web": 1}) == 0  # nothing is planned
            iterator = iter(loader)
            next(iterator)
            assert loader.reweight({"code": 1}) == 4 + 6 * 4
            assert loader.reweight({"math": 1}, at=30) == 30
            with pytest.raises(ValueError, match="at=27 is in the past: the samples before item 28"):
                loader.reweight({"math": 1}, at=27)
            seen = [value // 1000 for _ in range(9) for value in next(iterator).tolist()]
            assert seen == [2] * 24 + [0] * 2 + [1] * 10

    @pytest.mark.parametrize(
        ("weights", "why"),
        [
            ({"wob": 1}, "there are weights of the stage at 4 for 'wob', but the sources are 'code', 'math', 'web'"),
            ({"web": 0}, "all weights of the stage at 4 are 0"),
            ({"web": -1}, "the weight of 'web' of the stage at 4 is -1"),
            (3, "the weights of the stage at 4 are a int"),
        ],
    )
    def test_bad_weights_change_nothing(self, weights: Any, why: str) -> None:
        with mixed({"web": 1, "code": 1, "math": 1})() as loader:
            next(iter(loader))
            state = loader.state_dict()
            with pytest.raises(ValueError, match=why):
                loader.reweight(weights)
            assert loader.state_dict() == state

    def test_only_a_mix_has_weights(self) -> None:
        with Loader.from_dataset(range(9)) as loader, pytest.raises(ValueError, match=r"weights of a penstock.Mix, but .* 'sequential'"):
            loader.reweight({"a": 1})
        with mixed({"web": 1, "code": 0, "math": 0})() as loader:
            loader.reweight({"code": 1}, at=8)
            state = loader.state_dict()
        without = {"web": SOURCES["web"], "math": SOURCES["math"]}
        with mixed({"web": 1, "math": 0}, without)() as loader, pytest.raises(StateMismatch, match=r"had changed .*weights .* for 'code'"):
            loader.load_state_dict(state)
        whole = json.loads(state["penstock"])
        for damaged in ("x", 7, {"stages": [[1]]}, {"stages": 3}, {"stages": [[8, ["web"]]]}, {"stages": [["8", {"web": 1}]]}):
            with mixed({"web": 1, "code": 0, "math": 0})() as loader:
                before = loader.state_dict()
                with pytest.raises(penstock.StateError):
                    loader.load_state_dict({"penstock": json.dumps({**whole, "changes": damaged})})
                assert loader.state_dict() == before

    def test_ranks_that_may_differ_need_a_number(self) -> None:
        build = mixed({"web": 1, "code": 0, "math": 0}, infinite=False, drop_last=False, tail="exact")
        loader = build(rank=0, world_size=2)
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(penstock.GraphError, match="Pass at=, the same item on every rank"):
            loader.reweight({"code": 1})
        assert loader.reweight({"code": 1}, at=20) == 20
        assert [value // 1000 for _ in range(4) for value in next(iterator).tolist()] == [2] * 6 + [0] * 10
        loader.close()

    @pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "method": "thread"}], ids=["inline", "threads"])
    def test_lanes_of_streams(self, workers: dict[str, Any]) -> None:
        """A mix with streams is mixed in each lane: a change begins at the same item of each."""

        def build(plan: Any) -> Loader[Any]:
            streams = {
                name: penstock.Stream(
                    4, lambda shard, k=k: range(10**6 * k + 1000 * shard, 10**6 * k + 1000 * shard + 300), lanes=2, epoch_size=9
                )
                for k, name in enumerate("ab")
            }
            return Loader.from_dataset(
                Mix({**streams, "c": range(50)}, plan, epoch_size=EPOCH), batch_size=5, seed=3, infinite=True, **workers
            )

        first = {"a": 1, "c": 1, "b": 0}
        with build(first) as loader:
            iterator = iter(loader)
            seen = [value for _ in range(3) for value in next(iterator).tolist()]
            begins = loader.reweight({"a": 1, "b": 3})
            assert begins % 2 == 0
            state = loader.state_dict()
        with build(first) as loader:
            loader.load_state_dict(state)
            iterator = iter(loader)
            seen += [value for _ in range(40) for value in next(iterator).tolist()]
            assert loader.last is not None
        with build([(0, first), (begins, {"a": 1, "b": 3})]) as loader:
            iterator = iter(loader)
            assert seen == [value for _ in range(43) for value in next(iterator).tolist()]

    def test_packs(self) -> None:
        """A block of documents is packed as a whole, so a change begins behind the last block that was begun."""
        documents = {name: [[1000 * k + i] * (i % 5 + 1) for i in range(n)] for k, (name, n) in enumerate(LENGTHS.items())}
        lengths = [len(document) for name in sorted(documents) for document in documents[name]]

        def build(plan: Any) -> Loader[Any]:
            groups = penstock.Packs(lengths, 8, block=16, pad=-1)
            return Loader.from_dataset(Mix(documents, plan, epoch_size=EPOCH), batch_size=2, seed=3, groups=groups, infinite=True)

        first = {"web": 1, "code": 0, "math": 0}
        with build(first) as loader:
            iterator = iter(loader)
            seen = [next(iterator)["tokens"].tolist() for _ in range(2)]
            begins = loader.reweight({"code": 1, "math": 1})
            assert begins == 16
            seen += [next(iterator)["tokens"].tolist() for _ in range(30)]
            address = loader.last
        with build([(0, first), (begins, {"code": 1, "math": 1})]) as loader:
            iterator = iter(loader)
            assert seen == [next(iterator)["tokens"].tolist() for _ in range(32)]
            assert loader.load(address)["tokens"].tolist() == seen[-1]

    def test_a_ledger_and_addresses(self) -> None:
        """What was open before a change is served again as it was, also by a loader of another life."""
        plan = {"web": 1, "code": 0, "math": 0}
        with mixed(plan, batch_size=None, drop_last=False)() as loader, penstock.Ledger(loader) as ledger:
            taken = [next(ledger) for _ in range(10)]
            loader.reweight({"code": 1})
            taken += [next(ledger) for _ in range(10)]
            assert [int(value) // 1000 for _, value in taken] == [2] * 10 + [0] * 10
            state = ledger.state_dict()
        with mixed(plan, batch_size=None, drop_last=False)() as loader, penstock.Ledger(loader) as ledger:
            ledger.load_state_dict(state)
            assert [next(ledger) for _ in range(20)] == taken
            assert [int(loader.load(at)) for at, _ in taken] == [int(value) for _, value in taken]
            assert next(ledger)[1] == 10
