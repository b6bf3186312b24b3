"""At the end of an epoch, before the next one is asked for: has its loading begun?

Two worker processes, which stay between epochs where that is an option. After the last batch of an epoch, the program
waits and counts the samples that have been read.

- *loads ahead*: samples of the next epoch are read before anybody asks;
- *waits*: nothing is read within 4 s, so that the first batch of every epoch is waited for.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from peers import PEERS, Answer, Job, energon, grain_repeated, main, patiently, taken

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = {
    "penstock": "loads ahead",
    "StatefulDataLoader": "waits",
    "torchdata.nodes": "waits",
    "Grain": "loads ahead",
    "SPDL": "loads ahead",
    "MosaicML Streaming": "waits",
    "LitData": "waits",
    "Hugging Face streaming": "waits",
    "webdataset": "waits",
    "OLMo-core": "waits",
    "Lhotse": "waits",
    "Energon": "loads ahead",
    "Ray Data": "waits",
}


def question(name: str, folder: Path) -> Answer:
    job = dataclasses.replace(Job(persistent=True), reads=str(folder / "reads"))
    batches = -(-job.n // job.batch_size)
    special = {"Grain": grain_repeated, "Energon": functools.partial(energon, epoch=batches)}
    opened = special.get(name, PEERS[name].open)(folder, job)
    for _ in range(2):
        seen = sum(map(len, taken(opened.epoch(), 2 * batches)))
    ahead = patiently(lambda: job.count() > 2 * job.n + job.batch_size, 4)
    why = f"{job.count() - 2 * job.n} samples of the epoch after the next read, {seen} in an epoch"
    opened.close()
    return ("loads ahead" if ahead else "waits"), why


if __name__ == "__main__":
    main(CLAIMS, question)
