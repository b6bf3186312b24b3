"""Stop on 2 ranks, continue with 3: does each sample of the epoch come once?

A rank of the second run gets the state of rank 0, as from a checkpoint that rank 0 has written. Ranks are processes.
Shuffled, 2 workers each.

- *each once*: no sample is lost or repeated, but for up to a batch per rank at the end of the epoch, which is cut or
  filled up;
- *lost or repeated*: some are;
- *error*: the state is refused;
- *no state*: there is nothing to save.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from peers import PEERS, Answer, Job, main, on_ranks, taken

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = {
    "penstock": "each once",
    "StatefulDataLoader": "lost or repeated",
    "torchdata.nodes": "lost or repeated",
    "Grain": "each once",
    "SPDL": "no state",
    "MosaicML Streaming": "each once",
    "LitData": "each once",
    "Hugging Face streaming": "error",
    "webdataset": "no state",
    "OLMo-core": "each once",
    "Lhotse": "error",
    "Energon": "error",
    "Ray Data": "no state",
}


def run(name: str, folder: Path, job: Job, state: Any, most: int) -> tuple[list[int], Any]:
    opened = PEERS[name].open(folder, job)
    if state is not None:
        opened.load(state)
    found = [number for batch in taken(opened.epoch(), most) for number in batch]
    state = opened.state()
    opened.close()
    return found, state


def question(name: str, folder: Path) -> Answer:
    opened = PEERS[name].open(folder, Job())  # also writes the data, before there are ranks
    if opened.state is None:
        return "no state", "the loader has no state_dict"
    before = on_ranks(Job(ranks=2), lambda job: run(name, folder, job, None, 40))
    after = on_ranks(Job(ranks=3), lambda job: run(name, folder, job, before[0][1], 200))
    seen = Counter(number for found, _ in before + after for number in found)
    lost, repeated = Job().n - len(seen), sum(seen.values()) - len(seen)
    why = f"{lost} lost and {repeated} repeated of {Job().n}"
    return ("each once" if max(lost, repeated) <= 3 * Job().batch_size else "lost or repeated"), why


if __name__ == "__main__":
    main(CLAIMS, question)
