"""Ten batches are taken, all but the third and the fifth are finished, and the run stops: does it get these two again,
and nothing twice?

As when rollouts are generated for batches and are done in any order. Two worker processes, shuffled. Loaders that
cannot be told which batches are finished save their state after the tenth.

- *each once*: the samples of the two batches come again within the next hundred batches, and none of the others;
- *loses samples*: some of the two batches do not;
- *no state*: there is nothing to save.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from peers import PEERS, SEED, Answer, ByIndex, Job, main, numbers, plain, taken

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = {
    "penstock": "each once",
    "StatefulDataLoader": "loses samples",
    "torchdata.nodes": "loses samples",
    "Grain": "loses samples",
    "SPDL": "no state",
    "MosaicML Streaming": "loses samples",
    "LitData": "loses samples",
    "Hugging Face streaming": "loses samples",
    "webdataset": "no state",
    "OLMo-core": "loses samples",
    "Lhotse": "loses samples",
    "Energon": "loses samples",
    "Ray Data": "no state",
}
TAKEN, UNFINISHED = 10, (2, 4)


def with_ledger(job: Job) -> tuple[list[list[int]], list[list[int]]]:
    """A `Ledger` is told which batches are finished."""
    import penstock

    def ledger() -> penstock.Ledger[Any]:
        words: dict[str, Any] = {
            "shuffle": True,
            "seed": SEED,
            "num_workers": job.workers,
            "collate_fn": plain,
            "infinite": True,
        }
        return penstock.Ledger(penstock.Loader.from_dataset(ByIndex(job), job.batch_size, **words))

    with ledger() as first:
        before = list(itertools.islice(first, TAKEN))
        for number, (at, _) in enumerate(before):
            if number not in UNFINISHED:
                first.done(at)
        state = first.state_dict()
    with ledger() as second:
        second.load_state_dict(state)
        after = list(itertools.islice(second, 100))
    return [numbers(batch) for _, batch in before], [numbers(batch) for _, batch in after]


def question(name: str, folder: Path) -> Answer:
    job = Job()
    if name == "penstock":
        before, after = with_ledger(job)
    else:
        first = PEERS[name].open(folder, job)
        if first.state is None:
            return "no state", "the loader has no state_dict"
        before = taken(first.epoch(), TAKEN)
        state = first.state()
        first.close()
        second = PEERS[name].open(folder, job)
        assert second.load is not None
        second.load(state)
        after = taken(second.epoch(), 100)
        second.close()
    unfinished = {number for place in UNFINISHED for number in before[place]}
    finished = {number for batch in before for number in batch} - unfinished
    again = {number for batch in after for number in batch}
    lost, repeated = len(unfinished - again), len(finished & again)
    why = f"{lost} of {len(unfinished)} unfinished samples lost, {repeated} of {len(finished)} finished ones repeated"
    return ("loses samples" if lost else "repeats samples" if repeated else "each once"), why


if __name__ == "__main__":
    main(CLAIMS, question)
