"""Resume after 10, 30, 50, 70 and 90 % of an epoch: does it take longer, the further the epoch is?

In one process, shuffled. Measured are the CPU time from building the loader to the first batch, the least of three,
which depends little on what else the machine does; and how many samples are read before that batch. Loaders that read
by index get a million samples, the others 47,000 (Grain 95,000, Lhotse 9,500), in 24 shards.

- *constant*: the position does not matter;
- *parts of shards*: as before, but the open shards are read again up to where they were: over 500 samples;
- *grows*: each of the five takes longer than the one before, and the last 10 ms longer than the second;
- *reads again*: there is no state, and a run that goes on reads all that it has read before.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING, Any

from peers import PEERS, Answer, Job, main

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = {
    "penstock": "constant",
    "StatefulDataLoader": "grows",
    "torchdata.nodes": "grows",
    "Grain": "constant",
    "SPDL": "reads again",
    "MosaicML Streaming": "constant",
    "LitData": "constant",
    "Hugging Face streaming": "parts of shards",
    "webdataset": "reads again",
    "OLMo-core": "constant",
    "Lhotse": "grows",
    "Energon": "constant",
}
SCALES = {
    "penstock": 400,
    "StatefulDataLoader": 400,
    "torchdata.nodes": 400,
    "Grain": 40,
    "Lhotse": 4,
}  # Grain takes two minutes to walk through a million; Lhotse chooses each batch again, up to the position


def resumed(name: str, folder: Path, job: Job, place: int, state: Any) -> float:
    """Seconds of CPU time."""
    start = time.process_time()
    opened = PEERS[name].open(folder, job)
    if state is None:
        next(itertools.islice(opened.epoch(), place, None))
    else:
        opened.load(state)
        next(iter(opened.epoch()))
    took = time.process_time() - start
    opened.close()
    return took


def question(name: str, folder: Path) -> Answer:
    job = Job(workers=0, scale=SCALES.get(name, 20))
    places = [int(job.n * part / job.batch_size) for part in (0.1, 0.3, 0.5, 0.7, 0.9)]
    opened = PEERS[name].open(folder, job)
    states: list[Any] = []
    if opened.state is None:
        states = [None] * len(places)
    else:
        batches, done = opened.epoch(), 0
        for place in places:
            next(itertools.islice(batches, place - done - 1, None))
            done = place
            states.append(opened.state())
    opened.close()
    times = [
        min(resumed(name, folder, job, place, state) for _ in range(3))
        for place, state in zip(places, states, strict=True)
    ]
    reads = []
    for number, (place, state) in enumerate(zip(places, states, strict=True)):
        counting = dataclasses.replace(job, reads=str(folder / f"reads {number}"))
        resumed(name, folder, counting, place, state)
        reads.append(max(counting.count() - job.batch_size, 0))
    why = (
        f"{', '.join(f'{1000 * took:.1f}' for took in times)} ms of CPU time to the first batch; "
        f"{', '.join(f'{count:,}' for count in reads)} samples read before it"
    )
    if opened.state is None:
        return "reads again", why
    if times == sorted(times) and times[-1] > times[1] + 0.01:
        return "grows", why
    return ("parts of shards" if max(reads) > 500 else "constant"), why


if __name__ == "__main__":
    main(CLAIMS, question)
