"""Mix, through the loader: what comes of each source, who knows where it came from, what is saved, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from resumable import Resumable
from torch.utils.data import ConcatDataset, DistributedSampler, TensorDataset
from ways import NAMED

import penstock
from penstock import Loader, Mix, Packs
from penstock._nodes.index_node import index_of

WEIGHTS = {"a": 0.7, "b": 0.2, "c": 0.1}


class Named:
    """Sample i of the source ``name`` is ``(name, i)``, as a dict of numbers or in words."""

    def __init__(self, name, n, first=0):
        self.name = name
        self.n = n
        self.first = first

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if not 0 <= index < self.n:
            raise IndexError(index)
        assert penstock.sample().source.split("/")[-1] == self.name
        return self.first + index


class Broken(Named):
    def __getitem__(self, index):
        raise ValueError("broken")


def three(lengths=(50, 990, 300)):
    return {name: Named(name, n, 10_000 * k) for k, (name, n) in enumerate(zip("abc", lengths, strict=True))}


def mix(**rest):
    return Mix(three(), rest.pop("weights", WEIGHTS), **{"epoch_size": 600, **rest})


def read(dataset, epochs=1, **words):
    """The samples of each epoch."""
    with Loader.from_dataset(dataset, **{"batch_size": 20, "seed": 1, **words}) as loader:
        return [[value for batch in loader for value in batch.tolist()] for _ in range(epochs)]


class TestWhatComes:
    def test_sources_of_one_length_are_not_shuffled_alike(self):
        two = {name: Named(name, 500, 10_000 * k) for k, name in enumerate("ab")}
        stream = read(Mix(two, {"a": 1, "b": 1}), shuffle=True)[0]
        first, second = ([value % 10_000 for value in stream if value // 10_000 == k][:400] for k in (0, 1))
        assert first != second

    def test_does_not_depend_on_the_order_of_the_sources(self):
        backwards = dict(reversed(three().items()))
        assert read(Mix(backwards, WEIGHTS, epoch_size=600), shuffle=True) == read(mix(), shuffle=True)

    def test_stop_says_what_epoch_0_shows_and_later_epochs_continue(self):
        """The figures of docs/data/mixing.md. Seen to fail: without `stop`."""
        two = {name: Named(name, n, 10_000 * k) for k, (name, n) in enumerate({"a": 20, "b": 10}.items())}
        epochs = read(Mix(two, {"a": 1, "b": 1}, stop="all"), epochs=2, seed=0)
        assert [(len(epoch), len({*epoch})) for epoch in epochs] == [(39, 30), (39, 28)]


def _with_source(value):
    return int(value), penstock.sample().source


def _hundred(first):
    return range(first, first + 100)


class TestWhoKnowsTheSource:
    def test_the_sample(self):
        """Named asserts it; a mix of mixes gives a path, and a sample that was asked for before the source is known
        learns of it."""

        class Around(list):
            def __getitem__(self, index):
                before = penstock.sample()
                value = outer[index]
                return before.source, value, penstock.sample().source, before is penstock.sample()

        outer = Mix({"in": Mix({"x": Named("x", 4)}, {"x": 1})}, {"in": 1})
        with Loader.from_dataset(Around(range(4)), batch_size=None) as loader:
            assert list(loader) == [["in/x", k, "in/x", True] for k in range(4)]
        with pytest.raises(RuntimeError, match="only while a sample is being loaded"):
            outer[0]

    @pytest.mark.parametrize("words", [{}, NAMED["thread"], NAMED["process"]], ids=str)
    def test_a_tag(self, words):
        class Dicts(Named):
            def __getitem__(self, index):
                return {"x": super().__getitem__(index)}

        sources = {name: Dicts(name, 100, 10_000 * k) for k, name in enumerate("abc")}
        with Loader.from_dataset(Mix(sources, WEIGHTS, tag="of"), batch_size=30, **words) as loader:
            for batch in loader:
                assert ["abc"[value // 10_000] for value in batch["x"].tolist()] == batch["of"]

    @pytest.mark.parametrize(("sample", "what"), [(3, "is of type int"), ({"of": 1}, "already has it")])
    def test_a_tag_has_no_place_elsewhere(self, sample, what):
        with (
            Loader.from_dataset(Mix({"a": [sample]}, {"a": 1}, tag="of")) as loader,
            pytest.raises(TypeError, match=f"one of the source 'a' {what}"),
        ):
            next(iter(loader))

    def test_an_error(self):
        dataset = Mix({"good": Named("good", 30), "worse": Broken("worse", 30)}, {"good": 1, "worse": 1})
        with Loader.from_dataset(dataset, batch_size=10) as loader, pytest.raises(ValueError, match="broken") as caught:
            next(iter(loader))
        assert "in the source 'worse' of a mix, at its index 0" in caught.value.__notes__

    def test_what_replaces_a_failed_sample(self):
        seen = []

        def instead(exc, index, epoch, position):
            seen.append(penstock.sample().source)
            return 7

        with Loader.from_dataset(Mix({"a": Broken("a", 3)}, {"a": 1}), batch_size=3, on_error=instead) as loader:
            assert next(iter(loader)).tolist() == [7, 7, 7]
        assert seen == ["a"] * 3

    @pytest.mark.parametrize(
        "words",
        [{}, {"num_workers": 2, "method": "thread"}, {"num_workers": 2, "method": "process"}, {"batch_size": None}],
        ids=str,
    )
    @pytest.mark.parametrize("kind", ["by index", "streams", "a mix in a mix, and a source without one"])
    def test_the_transform_of_the_loader(self, words, kind, tmp_path):
        """By value: 10,000 for each source. Seen to fail: the name of the row before, and that of the outer mix
        alone."""
        if kind == "streams":
            sources = {
                name: penstock.Stream([10_000 * k], open=_hundred, epoch_size=100) for k, name in enumerate("abc")
            }
        else:
            sources = {name: [10_000 * k + i for i in range(100)] for k, name in enumerate("abc")}
        dataset = Mix(sources, WEIGHTS, epoch_size=200)
        if kind.startswith("a mix"):
            dataset = ConcatDataset([Mix({"in": dataset}, {"in": 1}, epoch_size=300), [40_000 + i for i in range(50)]])
        with Loader.from_dataset(
            dataset, transform=_with_source, collate_fn=list, shuffle=True, seed=1, **{"batch_size": 16, **words}
        ) as loader:
            seen = [pair for batch in loader for pair in ([batch] if words == {"batch_size": None} else batch)]
        names = ["a", "b", "c"] if not kind.startswith("a mix") else ["in/a", "in/b", "in/c", None, None]
        assert [name for _, name in seen] == [names[value // 10_000] for value, _ in seen]
        assert {name for _, name in seen} == set(names)


class TestAsADataset:
    def test_is_the_concatenation_by_name(self):
        dataset = Mix({"b": [3, 4], "a": [0, 1, 2]}, {"a": 1, "b": 1})
        assert [dataset[k] for k in range(-5, 5)] == [*range(5), *range(5)]
        assert isinstance(dataset, ConcatDataset)
        for outside in (5, -6):
            with pytest.raises(IndexError, match=f"index {outside} is out of bounds for 5 samples"):
                dataset[outside]

    def test_keeps_the_weights_that_it_was_given(self):
        weights = dict(WEIGHTS)
        dataset = mix(weights=weights)
        weights["a"] = 100
        assert dataset.report()["a"].items == pytest.approx(420)

    def test_sources_that_are_arrays_are_read_as_arrays(self):
        tables = {
            name: TensorDataset(torch.arange(n) + 10_000 * k)
            for k, (name, n) in enumerate((("a", 50), ("b", 990), ("c", 300)))
        }
        fast = Mix(tables, WEIGHTS, epoch_size=600)
        assert penstock.nodes.Fetch(fast).is_arrays
        with Loader.from_dataset(fast, batch_size=20, shuffle=True, seed=1) as loader:
            assert [[value for batch in loader for value in batch[0].tolist()]] == read(mix(), shuffle=True)
        assert not penstock.nodes.Fetch(Mix(tables, WEIGHTS, tag="of")).is_arrays
        assert not penstock.nodes.Fetch(mix()).is_arrays

    @pytest.mark.parametrize(
        "held", [penstock.Cached, lambda dataset: penstock.Resident(dataset)], ids=["Cached", "Resident"]
    )
    def test_is_still_one_when_it_is_cached_or_resident(self, held):
        """And what has no order still takes a sampler."""
        kept = held(mix())
        assert read(kept, 2, shuffle=True) == read(mix(), 2, shuffle=True)
        plain = held(range(6))
        assert read(plain, sampler=[3, 1, 2], batch_size=3) == [[3, 1, 2]]


class TestReport:
    def test_tells_the_passes(self):
        report = mix().report()
        assert report == {
            "a": (pytest.approx(420), pytest.approx(8.4)),
            "b": (pytest.approx(120), pytest.approx(120 / 990)),
            "c": (pytest.approx(60), pytest.approx(0.2)),
        }
        assert report["b"].passes == pytest.approx(120 / 990)
        assert mix().report(10**6)["c"].items == pytest.approx(10**5)


class TestState:
    def state(self, loader):
        return json.loads(loader.state_dict()["penstock"])

    def test_goes_on_with_other_stages_from_where_it_was_taken(self):
        """Nothing of what was before is lost or comes twice. Seen red with the settings of all stages in the state."""
        plan = [(0, WEIGHTS), (700, {"b": 1})]
        longer = [*plan, (1260, {"a": 1, "c": 1}), (1500, {"c": 1})]
        expected = [value for epoch in read(mix(weights=longer), 4, shuffle=True) for value in epoch]
        with Loader.from_dataset(mix(weights=plan), batch_size=20, shuffle=True, seed=1) as loader:
            read_so_far = [value for _ in range(2) for batch in loader for value in batch.tolist()]
            batches = iter(loader)
            read_so_far += [value for _ in range(3) for value in next(batches).tolist()]
            state = loader.state_dict()
        assert len(read_so_far) == 1260
        with Loader.from_dataset(mix(weights=longer), batch_size=20, shuffle=True, seed=1) as loader:
            loader.load_state_dict(state)
            rest = [value for _ in range(2) for batch in loader for value in batch.tolist()]
            later = loader.state_dict()
        assert read_so_far + rest == expected
        with pytest.raises(penstock.StateMismatch, match="stages was"):
            Loader.from_dataset(mix(weights=plan), batch_size=20, shuffle=True, seed=1).load_state_dict(later)

    def test_does_not_go_on_with_another_past(self):
        with Loader.from_dataset(mix(weights=[(0, WEIGHTS), (40, {"b": 1})]), batch_size=20) as loader:
            batches = iter(loader)
            next(batches)
            next(batches)
            at_40 = loader.state_dict()
            next(batches)
            at_60 = loader.state_dict()
        for plan, fits in (
            ([(0, WEIGHTS)], [True, False]),
            ([(0, WEIGHTS), (39, {"b": 1})], [False, False]),
            ([(0, WEIGHTS), (40, {"b": 1})], [True, True]),
        ):
            loader = Loader.from_dataset(mix(weights=plan), batch_size=20)
            for state, good in zip((at_40, at_60), fits, strict=True):
                if good:
                    loader.load_state_dict(state)
                else:
                    with pytest.raises(penstock.StateMismatch, match="stages was '[0-9a-f]{16}' and is"):
                        loader.load_state_dict(state)

    @pytest.mark.parametrize(
        "inner",
        [
            *(7, [], {}, {"position": "x"}, {"source": {"source": 3}}),
            *({"epoch": epoch, "position": position} for epoch, position in (("x", 1), (0, -1), (0, 10**30))),
        ],
    )
    def test_that_is_damaged_is_refused(self, inner):
        loader = Loader.from_dataset(mix(weights=[(0, WEIGHTS), (40, {"b": 1})]))
        state = self.state(loader)
        state["state"]["source"] = inner
        with pytest.raises(penstock.StateError):
            loader.load_state_dict({"penstock": json.dumps(state)})

    def test_leaves_out_what_check_ranks_compares(self):
        """Ranks must agree on the stages that lie ahead, too."""
        one, same, other = (
            Loader.from_dataset(mix(weights=[(0, WEIGHTS), (start, {"b": 1})])) for start in (4000, 4000, 5000)
        )
        assert one.state_dict() == other.state_dict()
        facts, same_facts, other_facts = (index_of(loader.root).facts.rank_settings for loader in (one, same, other))
        assert facts == same_facts != other_facts


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (lambda: Mix({}, {}), TypeError, "a mix takes a dict of datasets by name"),
        (
            lambda: Mix([[1], [2]], {0: 1}),
            TypeError,
            r"a mix takes a dict of datasets by name, .* not \[\[1\], \[2\]\]",
        ),
        (lambda: Mix({1: [1]}, {1: 1}), TypeError, "a mix takes a dict of datasets by name"),
        (
            lambda: Mix({"a": Resumable(3)}, {"a": 1}),
            TypeError,
            "the source 'a' is a Resumable, which cannot be read by index",
        ),
        (lambda: Mix({"a": iter([])}, {"a": 1}), TypeError, "the source 'a' is a list_iterator"),
        (lambda: mix(weights={**WEIGHTS, "d": 1}), ValueError, "there are weights for 'd'"),
        (lambda: mix(stop="never"), ValueError, "stop='never' must be 'first' or 'all'"),
        (lambda: mix(stop="all"), ValueError, "stop='all' and epoch_size=600 exclude each other"),
        (
            lambda: Loader.from_dataset(mix(), sampler=DistributedSampler(mix(), 2, 0)),
            ValueError,
            "Mix brings its own order, which a sampler would replace",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_built(make, error, why):
    with pytest.raises(error, match=why):
        make()


def test_lengths_in_another_order_than_that_of_the_sources_are_named_with_their_source():
    """Fails if the error says neither which source the sequence is from, nor in which order a mix has its sources."""
    mix = Mix({"web": [[1, 2]] * 3, "code": [[1, 2, 3]] * 3}, {"web": 1, "code": 1})
    by_source = {"web": [2] * 3, "code": [3] * 3}
    with (
        Loader.from_dataset(mix, groups=Packs([*by_source["web"], *by_source["code"]], 6)) as loader,
        pytest.raises(ValueError, match="is 3, but") as caught,
    ):
        next(iter(loader))
    assert "source 'web'" in caught.value.__notes__[0]
    assert "in the order of their names" in caught.value.__notes__[0]
    for groups in (Packs(by_source, 6), Packs(np.concatenate([by_source[name] for name in sorted(by_source)]), 6)):
        with Loader.from_dataset(mix, groups=groups) as loader:
            assert len(list(loader)) == 3
