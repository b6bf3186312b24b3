"""1 -> 2 -> 3 -> 2 ranks in living processes: the group is destroyed and made again, and the loaders live on. Run on 3
processes.

The streams read epochs, of which three are left early: each begins with the item after the last that any rank got in
the one before.

torchrun's own numbers (``RANK``) only name the processes here. A process that joins has a new loader.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from penstock import GraphError, Loader, Stream, check_ranks
from penstock.nodes import Prefetcher
from penstock.orders import TorchOrder
from penstock.testing import Tagged

N = 40
LIVES = ([0], 3), ([0, 1], 4), ([2, 0, 1], 4), ([1, 2], 9)
"""The processes of each group, in the order of their ranks, and how many batches of 2 each rank reads. In all that is
two epochs."""

STREAMS = {f"epochs of {size}": (size, 8, None) for size in (100, 125, 250, 104, 200)} | {
    f"{leave} after 5 items": (40, 4, leave) for leave in ("break", "end_epoch", "set_epoch")
}
"""The size of an epoch, the lanes, and how an epoch is left after a batch of 5."""
EPOCHS = 4
"""Of each stream and life."""


def new_stream(epoch_size: int, lanes: int, batch_size: int = 5, **options) -> Loader:
    """40 shards of 25 records."""
    data = Stream(
        40, lambda shard: iter(range(25 * shard, 25 * shard + 25)), epoch_size=epoch_size, lanes=lanes, bookmarks=False
    )
    return Loader.from_dataset(data, batch_size, **options)


def epochs_of(loader: Loader, leave: str | None) -> list[int]:
    """What this rank gets in the next epochs."""
    read = []
    for k in range(EPOCHS):
        if k and leave == "end_epoch":
            loader.end_epoch()
        if k and leave == "set_epoch":
            loader.set_epoch(loader.epoch + 1)
        read += [value for batch in islice(loader, leave and 1) for value in batch.tolist()]
    return read


def new_loader(**options) -> Loader:
    order = {} if "sampler" in options else {"order": TorchOrder(N, seed=5)}
    return Loader.from_dataset(Tagged(N), batch_size=2, **order, **options)


def new_loaders() -> dict[str, Loader]:
    return {
        "inline": new_loader(),
        "threads": new_loader(num_workers=2, method="thread"),
        "processes": new_loader(num_workers=2),
        "prefetcher": Loader(Prefetcher(new_loader().root)),
        "sampler": new_loader(sampler=DistributedSampler(range(N), seed=5)),
    }


def over_and_over(loader: Loader):
    while True:
        yield from loader


def refused(batches, now: str) -> None:
    said = "a batch of the old shares was handed out"
    try:
        next(batches)
    except GraphError as exc:
        said = str(exc)
    assert f"torch.distributed now says {now}." in said, said


def gathered(mine):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def main(folder: Path) -> None:
    name = int(os.environ["RANK"])
    loaders, streams, running, sequence = {}, {}, {}, {}
    for number, (living, steps) in enumerate(LIVES):
        if name not in living:
            continue
        rank, world_size = living.index(name), len(living)
        store = f"file://{folder}/group{number}"  # whoever joins waits in there for the others
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=400)
        )
        loaders = loaders or new_loaders()
        for way, loader in loaders.items():
            state = loader.state_dict()
            if way in running:
                refused(running[way], now := f"rank {rank} of {world_size}")
                refused(over_and_over(loader), now)  # nothing but a loaded state ends it
            sequence[way], state = max(gathered((sequence.get(way, []), state)), key=lambda known: len(known[0]))
            loader.load_state_dict(state)
            check_ranks(loader)
            assert len(loader) == -(-N // world_size // 2)
            running[way] = over_and_over(loader)
            hands = gathered([value for _ in range(steps) for value in next(running[way]).tolist()])
            sequence[way] += [value for place in zip(*hands, strict=True) for value in place]
            states = gathered(loader.state_dict())
            assert states == states[:1] * world_size
        streams = streams or {
            way: new_stream(size, lanes, num_workers=2, method="thread") for way, (size, lanes, _) in STREAMS.items()
        }
        for way, loader in streams.items():
            sequence[way], state = max(
                gathered((sequence.get(way, []), loader.state_dict())), key=lambda known: len(known[0])
            )
            loader.load_state_dict(state)
            hands = gathered(epochs_of(loader, STREAMS[way][2]))
            sequence[way] += [value for place in zip(*hands, strict=True) for value in place]
            states = gathered(loader.state_dict())
            assert states == states[:1] * world_size
        dist.destroy_process_group()
    if name == LIVES[-1][0][0]:
        folder.joinpath("sequences.json").write_text(json.dumps(sequence))
    for loader in (loaders | streams).values():
        loader.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
