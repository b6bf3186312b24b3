"""One of two worker processes is killed with SIGKILL while it reads a sample: what happens?

- *heals*: every sample of the epoch still comes, once;
- *error*: an exception ends the epoch;
- *loses samples*: the epoch ends without an exception, and without some samples;
- *hangs*: no batch and no exception within 20 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peers import PEERS, Answer, Job, main, numbers, said, watched

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = {
    "penstock": "heals",
    "StatefulDataLoader": "error",
    "torchdata.nodes": "hangs",
    "Grain": "error",
    "SPDL": "hangs",
    "MosaicML Streaming": "error",
    "LitData": "error",
    "Hugging Face streaming": "error",
    "webdataset": "error",
    "OLMo-core": "error",
    "Lhotse": "error",
    "Energon": "error",
    "Ray Data": "heals",
}
WAIT_S = 20


def question(name: str, folder: Path) -> Answer:
    job = Job(fatal=(700, str(folder / "dead")))
    opened = PEERS[name].open(folder, job)
    count = 0
    try:
        for batch in watched(opened.epoch(), WAIT_S):
            count += len(numbers(batch))
    except Exception as error:
        return "error", f"{count} of {job.n} samples, then {said(error)}"
    opened.close()
    return ("heals" if count == job.n else "loses samples"), f"{count} of {job.n} samples"


if __name__ == "__main__":
    main(CLAIMS, question)
