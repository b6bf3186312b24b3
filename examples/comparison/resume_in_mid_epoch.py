"""Stop after 40 batches, resume in a new loader: does the rest of the epoch have the same batches?

Two worker processes, shuffled, no shuffle buffer (shuffle_buffer.py asks about that).

- *exact*: the same samples in the same order;
- *differs*: other samples, or another order;
- *no state*: there is nothing to save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peers import PEERS, Answer, Job, main, taken

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = {
    "penstock": "exact",
    "StatefulDataLoader": "exact",
    "torchdata.nodes": "exact",
    "Grain": "exact",
    "SPDL": "no state",
    "MosaicML Streaming": "exact",
    "LitData": "exact",
    "Hugging Face streaming": "exact",
    "webdataset": "no state",
    "OLMo-core": "exact",
    "Lhotse": "differs",
    "Energon": "exact",
    "Ray Data": "no state",
}


def question(name: str, folder: Path) -> Answer:
    job = Job()
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
    same = sum(a == b for a, b in zip(rest, found, strict=False))
    return ("exact" if found == rest else "differs"), f"{same} of {len(rest)} batches are the same"


if __name__ == "__main__":
    main(CLAIMS, question)
