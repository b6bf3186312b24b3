"""Stop a stream with a shuffle buffer in mid-epoch and resume it: is the rest the same?

For loaders with a shuffle buffer. In one process; 100 samples are held.

- *exact*: the same samples in the same order;
- *differs*: other samples, or another order;
- *no state*: there is nothing to save.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from peers import PEERS, Answer, Job, main, taken

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = {
    "penstock": "exact",
    "Hugging Face streaming": "differs",
    "webdataset": "no state",
    "Lhotse": "exact",
    "Energon": "exact",
}


def question(name: str, folder: Path) -> Answer:
    job = Job(held=100, workers=0)
    first = PEERS[name].open(folder, job)
    if first.state is None:
        return "no state", "the loader has no state_dict"
    batches = first.epoch()
    taken(batches, 40)
    state = first.state()
    rest = taken(batches, 400)
    first.close()
    second = PEERS[name].open(folder, job)
    second.load(state)
    found = taken(second.epoch(), 400)
    second.close()
    should, have = (Counter(number for batch in run for number in batch) for run in (rest, found))
    lost, repeated = (should - have).total(), (have - should).total()
    return ("exact" if found == rest else "differs"), f"{lost} of {should.total()} samples missing, {repeated} too many"


if __name__ == "__main__":
    main(CLAIMS, question)
