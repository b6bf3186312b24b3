"""Shards of uneven lengths, a filter, 4 ranks: do all ranks get the same number of batches?

If they do not, DistributedDataParallel hangs at the end of the epoch: some ranks wait for gradients of others that have
no batch. Ranks are processes; the shards are dealt to them as each loader deals shards. MosaicML Streaming, LitData and
OLMo-core have no filter, and get all samples.

- *equal*: every rank has as many batches;
- *uneven*: not.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from peers import PEERS, Answer, Job, energon, main, on_ranks, taken, third

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = {
    "penstock": "equal",
    "StatefulDataLoader": "uneven",
    "torchdata.nodes": "uneven",
    "Grain": "uneven",
    "MosaicML Streaming": "equal",
    "LitData": "equal",
    "Hugging Face streaming": "uneven",
    "webdataset": "uneven",
    "OLMo-core": "equal",
    "Lhotse": "equal",
    "Energon": "equal",
}


def question(name: str, folder: Path) -> Answer:
    job = Job(ranks=4, kept=None if name in ("MosaicML Streaming", "LitData", "OLMo-core") else third)
    PEERS[name].open(folder, Job())  # writes the data, before there are ranks
    open_ = functools.partial(energon, epoch=50) if name == "Energon" else PEERS[name].open
    counts = on_ranks(job, lambda mine: len(taken(open_(folder, mine).epoch(), 1000)))
    return ("equal" if len(set(counts)) == 1 else "uneven"), f"{', '.join(map(str, counts))} batches"


if __name__ == "__main__":
    main(CLAIMS, question)
