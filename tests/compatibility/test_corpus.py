"""What every kind of loader gave when the reference was written, it still gives; and the states that it saved then load
and continue.

The reference is ``tests/data/corpus.json.gz``. It is not written anew before the first release.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from corpus import CHUNK, KINDS, STOPS, digests, files, follow, load, walk

SAVED = load()
ON = CHUNK + 2  # tokens that are compared behind a state: some end an epoch
WORKERS = [{"num_workers": 2, "method": "thread"}, {"num_workers": 2, "multiprocessing_context": "fork"}]
ALONE = {
    "shuffled, out of order": "has its worker",
    "resident": "needs none",
    ("draws", "thread"): "global generators are the main process's",
}


def words_of(way: str) -> dict[str, Any]:
    ranks, tail = way.split() if way else ("1", "")
    return {"world_size": int(ranks), "tail": tail} if way else {}


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The kinds that read files."""
    return files(tmp_path_factory.mktemp("corpus"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "every", [pytest.param(6, id="some states"), pytest.param(1, id="all states", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("name", SAVED)
def test_a_loader_gives_what_it_gave_and_its_old_states_continue(name: str, every: int, common: dict[str, Any]):
    """Seen to fail with another key for a shuffle, with a tail that pads from elsewhere, and with a position that was
    read one too far."""
    kind = {**KINDS, **common}.get(name)
    if kind is None:
        pytest.skip("pyarrow is not installed")
    alone: list[str] = []
    for place, (way, saved) in enumerate(SAVED[name].items()):
        if way and place % every != len(name) % every:
            continue
        words = words_of(way)
        ranks = [{**words, "rank": rank} for rank in range(words["world_size"])] if words else [{}]
        reference: list[list[str]] = []
        for rank, here in enumerate(ranks):
            with kind(**here) as loader:
                tokens, _ = follow(loader)
            assert " ".join(digests(tokens)) == saved["digests"][rank], (way, rank)
            reference.append(tokens)
        alone = reference[0] if not words else alone
        # Every rank's states are tried where the law of one state does not hold; otherwise rank 0's, on all ranks by
        # turns.
        bound = words.get("tail") == "exact" or "out of order" in name
        for states, saver in zip(saved["states"], saved["saved_by"], strict=True):
            step = 3 * every if words else every
            for number in range(place % 3 if every > 1 else 0, len(STOPS), step):
                stop, rank = STOPS[number], saver if bound else number % len(ranks)
                with kind(**ranks[rank]) as loader:
                    loader.load_state_dict({"penstock": states[number]})
                    rest = list(islice(walk(loader), ON))
                    assert rest == reference[rank][stop : stop + ON], (way, rank, stop)
    for workers in WORKERS if every == 1 else WORKERS[len(name) % 2 :][:1]:
        if (name, workers.get("method")) not in ALONE and name not in ALONE:
            with kind(**workers) as loader:
                loader.load_state_dict({"penstock": SAVED[name][""]["states"][0][7]})
                assert list(islice(walk(loader), 3 * ON)) == alone[STOPS[7] : STOPS[7] + 3 * ON], workers
