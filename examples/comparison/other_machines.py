"""Workers are actors on a Ray cluster: is the order that of any number of workers, what if one is killed, and does an
epoch go on from its middle?

- *exact*: the same batches with 2 and 3 workers, and when a worker is killed; and the rest of an epoch, resumed in the
  middle with 3 workers after 2;
- *no state*: it cannot be resumed in the middle;
- *differs*: something else came.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from peers import PEERS, Answer, Job, main, numbers, taken

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = {"penstock": "exact", "Ray Data": "no state"}


def question(name: str, folder: Path) -> Answer:
    job = Job(elsewhere=True)

    def epoch(job: Job) -> list[list[int]]:
        opened = PEERS[name].open(folder, job)
        found = [numbers(batch) for batch in opened.epoch()]
        opened.close()
        return found

    expected = epoch(job)
    others = epoch(replace(job, workers=3))
    fatal = epoch(replace(job, fatal=(700, str(folder / "dead"))))
    came = sum(map(len, fatal))
    told = [
        f"with 3 workers {'the same order' if others == expected else 'another order'}",
        (
            f"after a worker was killed {came} of {job.n} samples, "
            f"{'in the same order' if fatal == expected else 'in another order'}"
        ),
    ]
    opened = PEERS[name].open(folder, job)
    found = taken(opened.epoch(), 40)
    if opened.state is None or opened.load is None:
        return "no state", "; ".join([*told, "no state"])
    state = opened.state()
    opened.close()
    resumed = PEERS[name].open(folder, replace(job, workers=3))
    assert resumed.load is not None
    resumed.load(state)
    found += [numbers(batch) for batch in resumed.epoch()]
    resumed.close()
    told.append(f"resumed with 3 workers, {'the same rest' if found == expected else 'another rest'}")
    return "exact" if expected == others == fatal == found else "differs", "; ".join(told)


if __name__ == "__main__":
    main(CLAIMS, question)
