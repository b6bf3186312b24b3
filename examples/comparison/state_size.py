"""How many bytes has a state, and does it grow with the data?

Pickled, after 40 batches, with two worker processes; for 2,400 and for 47,000 samples in 24 shards.

- *constant*: the second is at most a quarter larger;
- *grows*: it is;
- *no state*: there is nothing to save.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from peers import PEERS, Answer, Job, main, taken

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = {
    "penstock": "constant",
    "StatefulDataLoader": "constant",
    "torchdata.nodes": "constant",
    "Grain": "constant",
    "SPDL": "no state",
    "MosaicML Streaming": "constant",
    "LitData": "constant",
    "Hugging Face streaming": "constant",
    "webdataset": "no state",
    "OLMo-core": "constant",
    "Lhotse": "constant",
    "Energon": "constant",
    "Ray Data": "no state",
}


def question(name: str, folder: Path) -> Answer:
    sizes = []
    for scale in (1, 20):
        opened = PEERS[name].open(folder, Job(scale=scale))
        if opened.state is None:
            return "no state", "the loader has no state_dict"
        batches = opened.epoch()
        taken(batches, 40)
        sizes.append(len(pickle.dumps(opened.state())))
        opened.close()
    return ("constant" if sizes[1] <= 1.25 * sizes[0] else "grows"), f"{sizes[0]:,} and {sizes[1]:,} bytes"


if __name__ == "__main__":
    main(CLAIMS, question)
