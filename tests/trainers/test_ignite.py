"""ignite: its Engine is exact with a loaded loader, and its DeterministicEngine, which would skip a second time, is
refused.

ignite is not among the packages for tests. What matters is which module asks for the iterator, so a function of that
name stands in for it; with ignite installed, its own engines run.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from penstock import Loader


class _Sized(IterableDataset):
    """A stream that states its length."""

    def __iter__(self) -> Any:
        return iter(range(40))

    def __len__(self) -> int:
        return 40


def _loader() -> Loader[Any]:
    return Loader.from_dataset(range(40), 4, shuffle=True, seed=3)


def _discarding() -> Any:
    """What ``DeterministicEngine`` does to begin after ``iteration`` batches."""
    module = types.ModuleType("ignite.engine.deterministic")
    exec(
        "def begin(data, iteration):\n    it = iter(data)\n    [next(it) for _ in range(iteration % len(data))]\n    "
        "return it",
        vars(module),
    )
    return module.begin


def test_an_engine_that_discards_what_a_state_has_skipped_is_refused() -> None:
    """Fails if a resumed run of DeterministicEngine loses batches without a word."""
    begin = _discarding()
    with _loader() as whole, _loader() as loader:
        batches = [batch.tolist() for batch in whole]
        iterator = begin(loader, 0)
        seen = [next(iterator).tolist() for _ in range(3)]
        state = loader.state_dict()
        loader.load_state_dict(state)
        with pytest.raises(TypeError, match=r"DeterministicEngine would read and discard.*begins after them"):
            begin(loader, 3)
        assert seen + [batch.tolist() for batch in loader] == batches
        iterator = begin(loader, 0)  # the next epoch, with nothing to discard
        seen = [next(iterator).tolist() for _ in range(10)]
        loader.load_state_dict(loader.state_dict())  # saved on the last batch
        begin(loader, 10)
        assert [batch.tolist() for batch in loader] not in (seen, batches)


@pytest.mark.filterwarnings("ignore:_Sized has no state_dict")
def test_a_stream_is_refused_too() -> None:
    """Its position is unknown even if it has a length. Seen to fail: batches 3 to 5 were discarded."""
    begin = _discarding()
    with Loader.from_dataset(_Sized(), 4) as loader:
        iterator = begin(loader, 0)
        seen = [value for _ in range(3) for value in next(iterator).tolist()]
        loader.load_state_dict(loader.state_dict())
        assert loader.position is None
        with pytest.raises(TypeError, match="DeterministicEngine would read and discard"):
            begin(loader, 3)
        assert seen + [value for batch in loader for value in batch.tolist()] == list(range(40))


@pytest.mark.parametrize("at", [3, 10, 13])
def test_ignites_engine_resumes_exactly(at: int) -> None:
    engine = pytest.importorskip("ignite.engine")

    def run(state: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
        seen: list[Any] = []
        saved: dict[str, Any] = {}
        with _loader() as loader:
            trainer = engine.Engine(lambda _, batch: seen.append(batch.tolist()))

            @trainer.on(engine.Events.ITERATION_COMPLETED(once=at))
            def save(trainer: Any) -> None:
                saved.update(engine=dict(trainer.state_dict()), loader=loader.state_dict())

            if state is not None:
                loader.load_state_dict(state["loader"])
                trainer.load_state_dict(state["engine"])
            trainer.run(loader, max_epochs=2)
        return seen, saved

    whole, saved = run()
    assert run(saved)[0] == whole[at:]
