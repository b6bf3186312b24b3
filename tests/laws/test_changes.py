"""A run that changes while it runs: sources, weights, skipped ranges, batch sizes. Each is arithmetic on the position,
so every chain of lives gives what one life does.

Sample i of source s is ``1000 * s + i``, and sources are read in order, so that a value names where it came from.
"""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import zlib
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import penstock
from penstock import Loader, Mix, StateError, StateMismatch
from penstock.__main__ import main as command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
    """The next step of ``samples`` from ``at``, and where it ends: an epoch's rest that fills no step is left out, with
    the last one that does."""
    if EPOCH - at % EPOCH < samples:  # the ranks are others now
        at += EPOCH - at % EPOCH
    end = at + samples
    return sequence[at:end], end + (EPOCH - end % EPOCH if EPOCH - end % EPOCH < samples else 0)


def test_a_run_that_changes_nothing_loads_nothing_of_it() -> None:
    """Through an epoch, a state and a resume. Seen to fail: with the import at the head of `Loader`'s file."""
    code = """
import sys, penstock
loader = penstock.Loader.from_dataset(list(range(8)), batch_size=2, shuffle=True)
next(iter(loader))
state = loader.state_dict()
list(loader)
loader.load_state_dict(state)
assert len(list(loader)) == 3
loaded = {name for name in sys.modules if name.startswith("penstock.")}
print(sorted(name for name in loaded if "_changing" in name or "growth" in name or "mix_" in name))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("[]\n", "")


class TestWeights:
    @pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (3, 4, 5))])
    def test_changed_in_every_life(self, seed: int) -> None:
        """As if the stages had been written down from the beginning. Each life has other ranks and workers, and weights
        change in some of its steps.

        Seen fail: a stage of an earlier call that came back behind a later one; stages that begin where the delivered
        batch ends (with workers), a `Sampler` that keeps the block that it had computed ahead, and a state without
        stages.
        """
        draw = random.Random(seed)
        start = {"code": 1, "math": 1}
        given, seen, state, at = [(0, start)], [], None, 0
        for _ in range(4):
            world_size, workers = draw.choice([1, 2, 3]), draw.choice([0, 0, 2])
            words = (
                {"num_workers": workers, "method": "thread", "prefetch_factor": draw.choice([1, 2])} if workers else {}
            )
            fleet = Fleet(mixed({**start, "web": 0}, **words), world_size, state)
            for _ in range(draw.randrange(1, 9)):
                if draw.random() < 0.4:
                    weights = {name: draw.choice([0, 1, draw.random()]) for name in LENGTHS}
                    weights["web"] += not any(weights.values())
                    begins = fleet.all(lambda loader, weights=weights: loader.reweight(weights))
                    given = [*(one for one in given if one[0] < begins), (begins, weights)]
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
        """A state of a run without it loads, wherever its name is sorted; and what had been delivered is what the
        larger mix gives, too.

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

    @pytest.mark.parametrize("plan", ["a stage", "reweight"])
    def test_a_source_is_ended(self, plan: str) -> None:
        """Its data are gone, and it stays as its length alone: nothing of it is read, and the others go on where they
        were. Grain's tests leave it out.

        Seen to fail: with a source that keeps a share.
        """
        first, then = {"code": 2, "math": 1, "web": 3, "new": 0}, {"code": 3, "new": 2}

        class Gone:
            def __len__(self) -> int:
                return LENGTHS["web"]

            def __getitem__(self, index: int) -> int:
                raise FileNotFoundError(index)

        sources: dict[str, Any] = {**SOURCES, "new": range(3000, 3030)}
        with mixed(first, sources)() as loader:
            batches = iter(loader)
            seen = [value for _ in range(10) for value in next(batches).tolist()]
            state = loader.state_dict()
        stages = [(0, first), (40, then)] if plan == "a stage" else first
        with mixed(stages, {**sources, "web": Gone()})() as loader:
            loader.load_state_dict(state)
            if plan == "reweight":
                assert loader.reweight(then) == 40
            seen += [value for _, batch in zip(range(20), loader, strict=False) for value in batch.tolist()]
        whole = straight([(0, first), (40, then)], sources)
        assert seen == [*whole[:48], *whole[50:98], *whole[100:]][: len(seen)]
        for number, n in ((0, 40), (3, 30)):
            own = [value - 1000 * number for value in whole if value // 1000 == number]
            assert own == [place % n for place in range(len(own))]
        without = {name: source for name, source in sources.items() if name != "web"}
        with (
            mixed({"code": 3, "new": 2, "math": 0}, without)() as loader,
            pytest.raises(StateMismatch, match="the weight 0 in a new stage ends"),
        ):
            loader.load_state_dict(state)

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
        """With workers the change begins behind the fullest queue that there may be, which all ranks know. Seen fail:
        without the check of ``at``."""
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

    def test_the_last_call_wins(self) -> None:
        """A life with workers planned a stage far ahead, and the next one, without, an earlier one. Those of the plan
        stay."""
        plan = [(0, {"web": 1, "code": 0, "math": 0}), (40, {"web": 1})]
        with mixed(plan, num_workers=1, method="thread")() as loader:
            next(iter(loader))
            assert loader.reweight({"math": 1}) == 36
            state = loader.state_dict()
        with mixed(plan)() as loader:
            loader.load_state_dict(state)
            assert loader.reweight({"code": 1}) == 4
            sources = [value // 1000 for _, batch in zip(range(11), loader, strict=False) for value in batch.tolist()]
            assert sources == [0] * 36 + [2] * 8

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

    @pytest.mark.parametrize("weight", [1e308, 1e-308, 10**400], ids=["large", "small", "huge"])
    def test_a_state_with_weights_that_are_damaged(self, weight: Any) -> None:
        """Seen to fail: an OverflowError of the arithmetic."""
        with mixed({"web": 1, "code": 1, "math": 1})() as loader:
            next(iter(loader))
            loader.reweight({"web": 0.5, "code": 0.5})
            state = json.loads(loader.state_dict()["penstock"])
        stages = state["changes"]["stages"]
        assert stages[0][1].keys() == {"web", "code"}
        stages[0][1]["web"] = weight
        with mixed({"web": 1, "code": 1, "math": 1})() as loader:
            before = loader.state_dict()
            with pytest.raises(StateError, match=r"which is 1 item in [0-9.]+e\+"):
                loader.load_state_dict({"penstock": json.dumps(state)})
            assert loader.state_dict() == before

    def test_weights_that_are_too_far_apart(self) -> None:
        """Seen to fail: an OverflowError of the arithmetic."""
        with pytest.raises(ValueError, match=r"which is 1 item in 1e\+308"):
            mixed({"web": 1e308, "code": 1e-308, "math": 1})()

    def test_only_a_mix_has_weights(self) -> None:
        with (
            Loader.from_dataset(range(9)) as loader,
            pytest.raises(ValueError, match=r"weights of a penstock.Mix, but .* 'sequential'"),
        ):
            loader.reweight({"a": 1})
        with mixed({"web": 1, "code": 0, "math": 0})() as loader:
            loader.reweight({"code": 1}, at=8)
            state = loader.state_dict()
        without = {"web": SOURCES["web"], "math": SOURCES["math"]}
        with (
            mixed({"web": 1, "math": 0}, without)() as loader,
            pytest.raises(StateMismatch, match=r"had changed .*weights .* for 'code'"),
        ):
            loader.load_state_dict(state)
        whole = json.loads(state["penstock"])
        for damaged in (
            "x",
            7,
            {"stages": [[1]]},
            {"stages": 3},
            {"stages": [[8, ["web"]]]},
            {"stages": [["8", {"web": 1}]]},
            {"skip": [[1]]},
            {"skip": [[1, True]]},
            {"skip": {}},
            {"epochs": [[0, 0, 0]]},
            {"epochs": [[0, 0, 50], [2, 90, 60]]},
            {"epochs": [[0, 0, 50.0]]},
            {"epochs": [[1, 50, 50]]},
            {"weights": [[1, "x", "y"]]},
            {"weights": [[0, None, None], [1, None, None]]},
            base64.b85encode(zlib.compress(b"[" * 10**5)).decode(),
        ):
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
                    4,
                    lambda shard, k=k: range(10**6 * k + 1000 * shard, 10**6 * k + 1000 * shard + 300),
                    lanes=2,
                    epoch_size=9,
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
        documents = {
            name: [[1000 * k + i] * (i % 5 + 1) for i in range(n)] for k, (name, n) in enumerate(LENGTHS.items())
        }
        lengths = [len(document) for name in sorted(documents) for document in documents[name]]

        def build(plan: Any) -> Loader[Any]:
            groups = penstock.Packs(lengths, 8, block=16, pad=-1)
            return Loader.from_dataset(
                Mix(documents, plan, epoch_size=EPOCH), batch_size=2, seed=3, groups=groups, infinite=True
            )

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


def skipping(ranges: list[tuple[int, int]], sequence: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [pair for at, pair in enumerate(sequence) if not any(begin <= at < end for begin, end in ranges)]


class Numbers:
    """Sample i, with its address."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> np.ndarray:
        sample = penstock.sample()
        return np.array([1000 * sample.epoch + sample.position, index])


def epochs_of(order: Any, n: int, ranges: Any, *, epochs: int) -> list[list[list[int]]]:
    """The oracle: for each epoch the samples that are not skipped, as `Numbers` has them. Shares no code with the
    node."""
    found = []
    for epoch in range(epochs):
        indices = order.indices(epoch, np.arange(n)).tolist()
        found.append(
            [
                [1000 * epoch + at, index]
                for at, index in enumerate(indices)
                if not any(begin <= epoch * n + at < end for begin, end in ranges)
            ]
        )
    return found


def dealt(
    epoch: list[Any], n: int, number: int, taken: int, sizes: Any, world_size: int, tail: str, drop_last: bool
) -> Any:
    """The oracle: the rounds of the rest of an epoch of which ``taken`` samples were delivered, each as a list of the
    batches of the ranks."""
    rest = epoch[taken:]
    while rest:
        at = rest[0][0] % 1000 + number * n
        size = [size for start, size in sizes if start <= at][-1]
        rounds, rest = rest[: size * world_size], rest[size * world_size :]
        batches = [rounds[rank::world_size] for rank in range(world_size)]
        short = len(rounds) % world_size
        if short and tail == "drop":
            batches = [batch[: len(rounds) // world_size] for batch in batches]
        if short and tail == "pad":
            for k, rank in enumerate(range(short, world_size)):
                position, index = n + k, epoch[k % len(epoch)][1]
                batches[rank].append([1000 * number + position, index])
        if drop_last and len(batches[0]) < size:
            return
        if any(batches):
            yield batches, len(rounds)


class TestSchedules:
    @pytest.mark.parametrize("seed", range(12))
    def test_skips_and_ramps_in_every_life(self, seed: int) -> None:
        """Each life has other ranks and workers, and every batch of every rank is what a list of all samples gives; so
        are ``remaining`` and the addresses.

        Seen fail: ranges counted from where the life begins; a rest that counts what is skipped; padding that begins
        with the skipped samples; a size chosen by the batches of a rank.
        """
        draw = random.Random(seed)
        n = draw.choice([1, 7, 23, 40])
        cuts = sorted(draw.sample(range(6 * n + 2), min(6 * n + 2, 2 * draw.randrange(4))))
        ranges = list(zip(cuts[::2], cuts[1::2], strict=False))
        sizes = [
            (0, draw.randrange(1, 4)),
            *(
                (start, draw.randrange(1, 6))
                for start in sorted(draw.sample(range(1, 7 * n), min(n, draw.randrange(3))))
            ),
        ]
        order = penstock.orders.ShuffledOrder(n, 5) if draw.random() < 0.5 else penstock.orders.SequentialOrder(n)
        epochs = epochs_of(order, n, ranges, epochs=8)
        tail, drop_last = draw.choice([("pad", False), ("drop", True), ("drop", False), ("pad", True)])
        number, taken, state = 0, 0, None
        for _ in range(4):
            world_size, workers = draw.choice([1, 2, 3]), draw.choice([0, 0, 2])
            words = {
                "batch_size": penstock.Ramp(sizes),
                "skip": ranges,
                "order": order,
                "tail": tail,
                "drop_last": drop_last,
            }
            words |= {"num_workers": workers, "method": "thread"} if workers else {}
            loaders = [
                Loader.from_dataset(Numbers(n), rank=rank, world_size=world_size, **words) for rank in range(world_size)
            ]
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            left = draw.randrange(1, 9)
            while left and number < len(epochs):
                expected = list(dealt(epochs[number], n, number, taken, sizes, world_size, tail, drop_last))
                iterators = [iter(loader) for loader in loaders]
                for at, (batches, many) in enumerate(expected):
                    if not left:
                        break
                    came = [next(iterator).tolist() for iterator in iterators]
                    assert came == batches
                    assert {loader.remaining for loader in loaders} == {len(expected) - at - 1}
                    assert [loader.load(loader.last).tolist() for loader in loaders] == batches
                    left, taken = left - 1, taken + many
                else:
                    assert [next(iterator, None) for iterator in iterators] == [None] * world_size
                    number, taken = number + 1, 0
                    continue
                break
            states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
            assert all(other == states[0] for other in states)
            state = states[0]
            for loader in loaders:
                loader.close()

    def test_a_round_is_padded_with_the_first_samples_that_are_kept(self) -> None:
        """On the last of four ranks; and the padding is found again by its address. Seen to fail: with the first
        samples, which are skipped."""
        for epoch, skip in ((0, (0, 3)), (1, (9, 13))):
            kept = [n for n in range(9) if not skip[0] <= 9 * epoch + n < skip[1]]
            ranks = [Loader.from_dataset(range(9), None, rank=rank, world_size=4, skip=[skip]) for rank in range(4)]
            for loader in ranks:
                loader.set_epoch(epoch)
            came = [list(loader) for loader in ranks]
            padded = [*kept, *kept][: -(-len(kept) // 4) * 4]
            assert came == [padded[rank::4] for rank in range(4)]
            assert [loader.load(loader.last) for loader in ranks] == [one[-1] for one in came]
            for loader in ranks:
                loader.close()

    def test_a_whole_epoch_and_more(self) -> None:
        """An endless loader goes on behind them; a loop over a skipped epoch is empty. Seen fail: the error for an
        epoch without a batch."""
        with Loader.from_dataset(range(10), batch_size=4, skip=[(8, 31)], infinite=True) as loader:
            iterator = iter(loader)
            assert [next(iterator).tolist() for _ in range(5)] == [
                [0, 1, 2, 3],
                [4, 5, 6, 7],
                [1, 2, 3, 4],
                [5, 6, 7, 8],
                [9],
            ]
            assert loader.last == penstock.Address(3, (9,))
        with Loader.from_dataset(range(10), batch_size=4, skip=[(8, 31)], num_workers=1, method="thread") as loader:
            assert [[batch.tolist() for batch in loader] for _ in range(4)] == [
                [[0, 1, 2, 3], [4, 5, 6, 7]],
                [],
                [],
                [[1, 2, 3, 4], [5, 6, 7, 8], [9]],
            ]

    def test_an_endless_stream(self) -> None:
        stream = [
            penstock.Stream([0, 1000], lambda first: range(first, first + 500), epoch_size=50, lanes=2)
            for _ in range(2)
        ]
        with Loader.from_dataset(stream[0], batch_size=None) as loader:
            plain = [value for _ in range(4) for value in loader]
        with Loader.from_dataset(
            stream[1], batch_size=penstock.Ramp([(0, 5), (100, 10)]), skip=[(20, 24), (70, 140)]
        ) as loader:
            assert [[len(batch) for batch in loader] for _ in range(4)] == [[5] * 9 + [1], [5] * 4, [10], [10] * 5]
        with Loader.from_dataset(stream[1], batch_size=4, skip=[(20, 24), (70, 140)]) as loader:
            assert [value for _ in range(4) for batch in loader for value in batch.tolist()] == [
                *plain[:20],
                *plain[24:70],
                *plain[140:],
            ]

    def test_batches_that_grow_in_worker_processes(self) -> None:
        with Loader.from_dataset(
            Numbers(40), batch_size=penstock.Ramp([(0, 3), (10, 8), (30, 1)]), num_workers=2
        ) as loader:
            batches = [batch[:, 1].tolist() for batch in loader]
            assert [len(batch) for batch in batches] == [3, 3, 3, 3, 8, 8, 8, 1, 1, 1, 1]
            assert [value for batch in batches for value in batch] == [*range(40)]

    def test_a_size_that_starts_inside_a_round_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(2):
            with Loader.from_dataset(
                range(40), batch_size=penstock.Ramp([(0, 3), (6, 4), (11, 2)]), rank=0, world_size=2
            ) as loader:
                list(loader)
        said = [record.message for record in caplog.records]
        assert (
            said
            == [
                "batch_size=2 starts at sample 11, inside a round, which is not cut: it begins with the next round, at "
                "sample 14."
            ]
            * 2
        )

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            ({"skip": [(5, 5)]}, r"skip=\[5, 5\]: a range is its first sample and the one after its last"),
            ({"skip": [(1, 5), (4, 9)]}, r"the ranges \[1, 5\] and \[4, 9\] of skip overlap. Join them into \[1, 9\]"),
            ({"skip": [(-1, 5)]}, "skip=-1"),
            ({"skip": [(1, 5)], "sampler": [1, 2]}, "but a sampler does not"),
            ({"skip": [(1, 5)], "groups": penstock.Packs([1] * 9, 3)}, "but groups does not"),
            ({"batch_size": penstock.Ramp([(0, 1)]), "sampler": [1, 2]}, "but SamplerWrapper does not"),
            ({"batch_size": penstock.Ramp([(0, 1)]), "groups": penstock.Packs([1] * 9, 3)}, "but Grouper does not"),
        ],
    )
    def test_what_cannot_be_scheduled_is_refused(self, words: dict[str, Any], why: str) -> None:
        with pytest.raises((ValueError, penstock.GraphError), match=why):
            Loader.from_dataset([[0]] * 9, **words)

    @pytest.mark.parametrize("stages", [[], [(1, 2)], [(0, 2), (0, 3)], [(0, 0)], [(0, "x")]])
    def test_a_ramp_ascends_from_0(self, stages: Any) -> None:
        with pytest.raises(ValueError, match="start at|must be a whole number"):
            penstock.Ramp(stages)

    def test_what_lies_behind_a_state_must_match(self) -> None:
        """Seen fail: without the ranges in the settings."""
        with Loader.from_dataset(range(10), batch_size=4, skip=[(2, 4), (6, 9), (11, 12)]) as loader:
            assert next(iter(loader)).tolist() == [0, 1, 4, 5]
            state = loader.state_dict()
        for skip, why in (
            (
                [(6, 8)],
                (
                    r"skip\[0\] was \[2, 4\] and is missing|skip was \[\[2, 4\]\] and is 'missing'|skip was \[\[2, "
                    r"4\]\] and is missing"
                ),
            ),
            (
                [(2, 5)],
                (
                    r"skip\[0\]\[1\] was 4 and is 5.* The state is at sample 6 of training, and this loader has skip "
                    r"\[\[2, 5\]\]"
                ),
            ),
            ([(1, 2), (2, 4)], r"The state is at sample 6"),
        ):
            with (
                Loader.from_dataset(range(10), batch_size=4, skip=skip) as loader,
                pytest.raises(StateMismatch, match=why),
            ):
                loader.load_state_dict(state)
        # what lies ahead may change
        with Loader.from_dataset(range(10), batch_size=4, skip=[(2, 4), (7, 8)]) as loader:
            loader.load_state_dict(state)
            assert [batch.tolist() for batch in loader] == [[6, 8, 9]]


class TestRuns:
    """A `Mix` with ``run=`` fills each batch from one source. What is scheduled must not shift the runs."""

    @staticmethod
    def build(**words: Any) -> Loader[Any]:
        sources = {name: range(10_000 * k, 10_000 * k + 1000) for k, name in enumerate("abc")}
        mix = Mix(sources, {"a": 0.5, "b": 0.3, "c": 0.2}, epoch_size=480, run=8)
        return Loader.from_dataset(mix, shuffle=True, seed=1, **{"batch_size": 8, **words})

    @staticmethod
    def sources(loader: Loader[Any], epochs: int = 2) -> list[int]:
        """For each batch the number of its sources."""
        return [len({x // 10_000 for x in batch.tolist()}) for _ in range(epochs) for batch in loader]

    @pytest.mark.parametrize(
        ("skip", "said", "remedy"),
        [
            ([(83, 121)], "83", [(80, 128)]),
            ([(8, 16), (80, 121)], "121", [(8, 16), (80, 128)]),
            ([(500, 504)], "500", [(496, 504)]),
        ],
    )
    def test_a_range_to_skip_is_of_whole_runs(self, skip: Any, said: str, remedy: Any) -> None:
        """Seen to fail: all batches behind the range mixed their sources, without a word."""
        with pytest.raises(ValueError, match=rf"skip.*multiple of run=8.* \({remedy[-1][0]}, {remedy[-1][1]}\)"):
            self.build(skip=skip)
        for batch_size, world_size in ((8, 1), (4, 2), (2, 1), (1, 8)):
            for rank in range(world_size):
                with self.build(skip=remedy, batch_size=batch_size, rank=rank, world_size=world_size) as loader:
                    assert {*self.sources(loader)} == {1}

    @pytest.mark.parametrize(("start", "remedy"), [(100, 104), (4, 8), (484, 488)])
    def test_a_larger_batch_begins_with_a_run(self, start: int, remedy: int) -> None:
        """Seen to fail: all batches from there on mixed their sources, without a word."""
        with pytest.raises(ValueError, match=rf"{start}, which is not a multiple of run=8.*[Mm]ake it {remedy}"):
            self.build(batch_size=penstock.Ramp([(0, 4), (start, 8)]))
        with self.build(batch_size=penstock.Ramp([(0, 4), (remedy, 8)]), skip=[(160, 240)]) as loader:
            assert {*self.sources(loader, 3)} == {1}

    def test_a_state_brings_whole_runs_only(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The command looks at the run in the state; a state that was written by hand is refused when it is loaded."""
        with self.build() as loader:
            next(iter(loader))
            state = loader.state_dict()
        path, new = tmp_path / "run.json", tmp_path / "new.json"
        path.write_text(json.dumps(state))
        assert command(["state", str(path), "--skip", "83:121", "--output", str(new)]) == 1
        assert "multiple of run=8" in capsys.readouterr().err
        assert command(["state", str(path), "--skip", "80:128", "--output", str(new)]) == 0
        with self.build() as loader:
            loader.load_state_dict(json.loads(new.read_text()))
            assert {*self.sources(loader)} == {1}
        whole = {**json.loads(state["penstock"]), "changes": {"skip": [[83, 121]]}}
        with self.build() as loader:
            with pytest.raises(StateMismatch, match="skip.*multiple of run=8"):
                loader.load_state_dict({"penstock": json.dumps(whole)})
            assert {*self.sources(loader)} == {1}

    def test_weights_change_between_runs(self) -> None:
        with self.build() as loader:
            iterator = iter(loader)
            next(iterator)
            assert loader.reweight({"b": 1, "c": 1}, at=83) == 88
            assert {len({x // 10_000 for x in batch.tolist()}) for batch in iterator} == {1}

    def test_without_runs_any_sample_will_do(self) -> None:
        """A mix of single samples, and one of streams, whose stages begin at a multiple of the lanes."""
        mix = Mix({"a": range(100), "b": range(100)}, {"a": 1, "b": 1})
        streams = {
            name: penstock.Stream(4, lambda shard: range(1000 * shard, 1000 * shard + 300), lanes=2, epoch_size=9)
            for name in "ab"
        }
        for data in (mix, Mix(streams, {"a": 1, "b": 1}, epoch_size=100)):
            with Loader.from_dataset(data, penstock.Ramp([(0, 4), (13, 8)]), skip=[(3, 10)]) as loader:
                assert len(next(iter(loader))) == 4


class TestStories:
    def test_a_job_is_started_again_with_another_blend(self) -> None:
        """What people restart for: three data sets, and at 40 % of the run the shares are others, and a fourth one
        joins. By hand they edit the list and lose the position.

        Every sample that was read before the restart is counted once: a source goes on at its next sample, and what was
        read is not read again in its pass.
        """
        shuffled = {"shuffle": True, "batch_size": 5}  # which divides an epoch
        first = {"code": 0.3, "math": 0.1, "web": 0.6}
        with mixed(first, **shuffled)() as loader:
            batches = iter(loader)
            before = [int(value) for _ in range(20) for value in next(batches)]
            state = loader.state_dict()
        new = {**SOURCES, "books": range(5000, 5060)}
        with mixed({**first, "books": 0}, new, **shuffled)() as loader:
            loader.load_state_dict(state)
            begins = loader.reweight({"web": 0.5, "books": 0.4, "code": 0.1})
            assert begins >= len(before)
            batches = iter(loader)
            after = [int(value) for _ in range(20) for value in next(batches)]
        for k, n in [(0, 40), (2, 90), (5, 60)]:
            own = [value for value in before + after if value // 1000 == k]
            assert len({*own[:n]}) == min(n, len(own))  # no sample comes twice within a pass
        assert not any(value // 1000 == 1 for value in after)
        assert abs(sum(value // 1000 == 5 for value in after) - 0.4 * len(after)) < 6

    def test_the_blend_changes_within_a_run_that_is_saved_and_killed(self) -> None:
        """With workers that read ahead: the same samples with and without the restart, whenever it comes."""

        def life(state: Any, steps: int, reweight_at: int, workers: int) -> tuple[list[int], Any]:
            words = {"num_workers": workers, "method": "thread", "prefetch_factor": 2} if workers else {}
            with mixed({"code": 1, "math": 1, "web": 1}, **words)() as loader:
                if state is not None:
                    loader.load_state_dict(state)
                seen, batches = [], iter(loader)
                for step in range(steps):
                    if step == reweight_at:
                        loader.reweight({"code": 1, "web": 5}, at=80)
                    seen += next(batches).tolist()
                return seen, loader.state_dict()

        whole, last = life(None, 30, 3, 2)
        for stop in (4, 8, 19, 20, 21):
            seen, state = life(None, stop, 3, 2)
            rest, state = life(state, 30 - stop, -1, 0)
            assert (seen + rest, state) == (whole, last)


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str]:
        code = command([*map(str, words)])
        return code, "".join(capsys.readouterr())

    @pytest.mark.parametrize("kind", ["json", "torch"])
    def test_a_job_is_restarted_behind_a_spike(
        self, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The script stays as it is, and later states keep the range. Seen fail: a range that the next state has
        forgotten."""
        file, new = tmp_path / "run.pt", tmp_path / "again.pt"

        def save(loader: Loader[Any]) -> None:
            whole = (
                {"model": torch.ones(3), "data": loader.state_dict()}
                if kind == "torch"
                else {"data": loader.state_dict()}
            )
            torch.save(whole, file) if kind == "torch" else file.write_text(json.dumps(whole))

        def read(path: Path) -> Any:
            return (torch.load(path) if kind == "torch" else json.loads(path.read_text()))["data"]

        def build() -> Loader[Any]:
            return Loader.from_dataset(Numbers(20), batch_size=2, shuffle=True, seed=4)

        with build() as loader:
            whole = [row for _ in range(2) for batch in loader for row in batch.tolist()]
        with build() as loader:
            next(iter(loader))
            save(loader)
        code, said = self.run(capsys, "state", file, "--skip", "7:11", "--skip", "23:28", "--output", new)
        assert (code, said) == (0, f"{new}: 1 state that will skip 7 to 11, 23 to 28.\n")
        with build() as loader:
            loader.load_state_dict(read(new))
            iterator = iter(loader)
            seen = next(iterator).tolist()
            state = loader.state_dict()
        with build() as loader:
            loader.load_state_dict(state)
            seen += [row for _ in range(2) for batch in loader for row in batch.tolist()]
        assert seen == [*whole[2:7], *whole[11:23], *whole[28:]]
        assert self.run(capsys, "state", file, "--skip", "7:11", "--output", new)[1].endswith(
            "again.pt exists. Name a new file with --output.\n"
        )
        assert (
            "begins at sample 1, but the state is at sample 2" in self.run(capsys, "state", file, "--skip", "1:11")[1]
        )
        assert "overlap" in self.run(capsys, "state", file, "--skip", "5:11", "--skip", "9:12")[1]
        assert not (tmp_path / "run.pt.skip").exists()

    def test_a_ledgers_state(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "run.json"

        def build() -> Loader[Any]:
            return Loader.from_dataset(range(50), batch_size=None, infinite=True)

        with build() as loader, penstock.Ledger(loader) as ledger:
            taken = [next(ledger) for _ in range(5)]
            ledger.done(taken[1][0])
            file.write_text(json.dumps(ledger.state_dict()))
        assert self.run(capsys, "state", file, "--skip", "6:9")[0] == 0
        with build() as loader, penstock.Ledger(loader) as ledger:
            ledger.load_state_dict(json.loads((tmp_path / "run.json.skip").read_text()))
            assert [int(next(ledger)[1]) for _ in range(7)] == [0, 2, 3, 4, 5, 9, 10]

    def test_of_torchs_former_format(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Seen to fail: it was taken for JSON."""
        file = tmp_path / "run.pt"
        with Loader.from_dataset(range(50), batch_size=2) as loader:
            checkpoint = {"model": torch.ones(2), "loader": loader.state_dict()}
            torch.save(checkpoint, file, _use_new_zipfile_serialization=False)
            assert self.run(capsys, "state", file, "--skip", "2:6")[0] == 0
            loader.load_state_dict(torch.load(f"{file}.skip")["loader"])
            assert [batch.tolist() for batch in islice(loader, 2)] == [[0, 1], [6, 7]]

    def test_a_sampler_counts_no_samples(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "run.json"
        with Loader.from_dataset(range(50), sampler=[3, 1, 2]) as loader:
            file.write_text(json.dumps(loader.state_dict()))
        assert (
            "does not count the samples since the start of training"
            in self.run(capsys, "state", file, "--skip", "6:9")[1]
        )


class TestDrawWeights:
    N = 30

    @staticmethod
    def weights(epoch: int) -> list[float]:
        return [random.Random(1000 * epoch + i).random() ** 4 for i in range(TestDrawWeights.N)]

    def drawn(self, epoch: int, by: int) -> list[list[int]]:
        """The oracle: an order that never had other weights."""
        order = penstock.orders.WeightedOrder(self.weights(by), self.N, seed=2)
        return [[1000 * epoch + at, index] for at, index in enumerate(order.indices(epoch, np.arange(self.N)).tolist())]

    @pytest.mark.parametrize("seed", range(8))
    def test_updated_between_epochs_in_every_life(self, seed: int) -> None:
        """Each epoch is drawn by the weights that it began with, on any ranks; a life that resumes inside one finishes
        it.

        Seen fail: an update that changes the epoch that runs; a next epoch that was loaded ahead by the weights before;
        weights that a resume at the start of an epoch forgets.
        """
        draw = random.Random(seed)
        epoch, taken, by, state = 0, 0, 0, None
        for _ in range(4):
            world_size, workers = draw.choice([1, 3]), draw.choice([0, 2])
            words = {"num_workers": workers, "method": "thread"} if workers else {}
            orders = [penstock.orders.WeightedOrder(self.weights(by), self.N, seed=2) for _ in range(world_size)]
            loaders = [
                Loader.from_dataset(
                    Numbers(self.N), order=order, batch_size=2, rank=rank, world_size=world_size, **words
                )
                for rank, order in enumerate(orders)
            ]
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            left = draw.randrange(1, 40)
            while left:
                if not taken and draw.random() < 0.5:
                    by = epoch + 100 * draw.randrange(3)
                    for order in orders:
                        order.update(self.weights(by))
                iterators = [iter(loader) for loader in loaders]
                expected = self.drawn(epoch, by)
                while left and taken < self.N:
                    came = [next(iterator).tolist() for iterator in iterators]
                    rows = [row for rows in zip(*came, strict=True) for row in rows]
                    assert rows[: self.N - taken] == expected[taken : taken + 2 * world_size]
                    assert [loader.load(loader.last).tolist() for loader in loaders] == came
                    taken, left = min(self.N, taken + 2 * world_size), left - 1
                if taken == self.N and left:
                    assert [next(iterator, None) for iterator in iterators] == [None] * world_size
                    epoch, taken = epoch + 1, 0
            states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
            assert all(other == states[0] for other in states)
            state = states[0]
            if taken == self.N:
                for loader in loaders:
                    loader.load_state_dict(state)
                    loader.end_epoch()
                state, epoch, taken = loaders[0].state_dict(), epoch + 1, 0
            for loader in loaders:
                loader.close()

    @pytest.mark.parametrize("workers", [0, 2])
    def test_an_update_within_an_epoch_waits_for_the_next(self, workers: int) -> None:
        """Seen to fail: an update that changes the epoch that runs."""
        order = penstock.orders.WeightedOrder(self.weights(0), self.N, seed=2)
        words: dict[str, Any] = {"num_workers": workers, "method": "thread"} if workers else {}
        with Loader.from_dataset(Numbers(self.N), order=order, batch_size=3, **words) as loader:
            rows = []
            for number, batch in enumerate(loader):
                rows += batch.tolist()
                if number == 4:
                    order.update(self.weights(1))
            assert rows == self.drawn(0, 0)
            assert [row for batch in loader for row in batch.tolist()] == self.drawn(1, 1)

    def test_what_was_loaded_ahead_is_loaded_again(self) -> None:
        """Epoch 1 is in progress before the update, because the sampler is read a whole epoch ahead of the last batch
        of epoch 0."""
        order = penstock.orders.WeightedOrder(self.weights(0), self.N, seed=2)
        with Loader.from_dataset(
            Numbers(self.N), order=order, batch_size=10, num_workers=1, method="thread", prefetch_factor=4
        ) as loader:
            assert len(list(loader)) == 3
            order.update(self.weights(1))
            assert [row for batch in loader for row in batch.tolist()] == self.drawn(1, 1)
            assert [row for batch in loader for row in batch.tolist()] == self.drawn(2, 1)

    def build(self, by: int) -> tuple[Any, Loader[Any]]:
        order = penstock.orders.WeightedOrder(self.weights(by), self.N, seed=2)
        return order, Loader.from_dataset(Numbers(self.N), order=order, batch_size=10)

    def test_others_are_refused(self) -> None:
        """In the middle of an epoch when the state is loaded, at its start when it begins: the loop may update them
        until then. Seen fail: without `begin`'s look."""
        order, loader = self.build(0)
        list(loader)
        order.update(self.weights(1))
        next(iter(loader))
        inside = loader.state_dict()
        loader.end_epoch()
        start = loader.state_dict()
        loader.close()
        said = [penstock.orders.WeightedOrder(self.weights(by), self.N).settings()["weights"] for by in (0, 1)]
        order, loader = self.build(0)
        with pytest.raises(StateMismatch, match=f"weights was '{said[1]}' and is '{said[0]}'"):
            loader.load_state_dict(inside)
        loader.load_state_dict(start)
        with pytest.raises(StateMismatch, match=f"the checksum {said[1]}, but those of this order have {said[0]}"):
            next(iter(loader))
        order.update(self.weights(2))
        assert [row for batch in loader for row in batch.tolist()] == self.drawn(2, 2)
        with pytest.raises(penstock.GraphError, match="epoch 0 was drawn by other weights"):
            loader.load(penstock.Address(0, 3))
        loader.close()
        order, loader = self.build(1)
        loader.load_state_dict(inside)
        with pytest.raises(penstock.GraphError, match="epoch 0 was drawn by other weights"):
            loader.locate(penstock.Address(0, 3))
        assert [row for batch in loader for row in batch.tolist()] == self.drawn(1, 1)[10:]
        assert [row for batch in loader for row in batch.tolist()] == self.drawn(2, 1)
        loader.close()

    def test_an_update_that_no_epoch_has_used_yet_counts_too(self) -> None:
        order, loader = self.build(0)
        next(iter(loader))
        order.update(self.weights(1))
        state = loader.state_dict()
        loader.close()
        order, loader = self.build(0)
        loader.load_state_dict(state)
        assert [row for batch in loader for row in batch.tolist()] == self.drawn(0, 0)[10:]
        with pytest.raises(StateMismatch, match="epoch 1 by the weights"):
            next(iter(loader))
        order.update(self.weights(1))
        assert [row for batch in loader for row in batch.tolist()] == self.drawn(1, 1)
        loader.close()

    def test_wrong_ones_are_refused(self) -> None:
        order, loader = self.build(0)
        for weights, why in (
            (self.weights(0)[1:], "there are 29 weights, but the order was built with 30"),
            ([0] * self.N, "all 30 weights are 0"),
            ([-1] * self.N, "is -1"),
        ):
            with pytest.raises(ValueError, match=why):
                order.update(weights)
        assert [row for batch in loader for row in batch.tolist()] == self.drawn(0, 0)
        loader.close()
