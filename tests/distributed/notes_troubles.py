"""What could make notes wait, or speak of another job: a store whose process is stopped, and groups and ranks that
begin again. See `main`."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from ranks import RANK, WORLD_SIZE, error, gathered
from torch.distributed import distributed_c10d

from penstock import Loader
from penstock._loader import rank_notes
from penstock.testing import Tagged

N = 96


class Drawn:
    """A sampler of which nothing but the indices tells the seed."""

    def __init__(self, seed):
        self.seed = seed

    def __len__(self):
        return N

    def __iter__(self):
        return iter(random.Random(self.seed).sample(range(N), N))


def loader(seed) -> Loader:
    return Loader.from_dataset(Tagged(N), batch_size=2, sampler=Drawn(seed))


def told(folder: Path, name: str, pid: int = 0) -> None:
    (folder / f"{name}.new").write_text(str(pid))
    (folder / f"{name}.new").rename(folder / name)


def waited_for(folder: Path, name: str) -> int:
    while not (folder / name).exists():  # the ranks cannot use the store here
        time.sleep(0.005)
    return int((folder / name).read_text())


def stopped(folder: Path) -> None:
    """Rank 0 has the store and is stopped, while the others read three epochs of three loaders, two of them new; then
    it reads too. The store is waited for once."""
    if RANK == 0:
        store = dist.TCPStore("127.0.0.1", 0, WORLD_SIZE, is_master=True, wait_for_workers=False)
        told(folder, "port", store.port)
    else:
        store = dist.TCPStore("127.0.0.1", waited_for(folder, "port"), WORLD_SIZE, is_master=False)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE, timeout=timedelta(seconds=200))
    rank_notes.PATIENCE_S = 100.0
    before = loader(1)
    list(before)
    rank_notes.PATIENCE_S = 0.5
    said: list[str] = []
    log = logging.getLogger("penstock")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: said.append(record.getMessage()) is None)
    told(folder, f"ready{RANK}", os.getpid())
    if RANK == 0:
        waited_for(folder, "done1")
    else:
        pid = waited_for(folder, "ready0")
        if RANK == 1:
            for other in range(2, WORLD_SIZE):  # which may still be asking the store, with the longer patience
                waited_for(folder, f"ready{other}")
            os.kill(pid, signal.SIGSTOP)
            told(folder, "stopped")
        waited_for(folder, "stopped")
        try:
            for seed in (None, 1, 2):
                one = before if seed is None else loader(seed)
                for _ in range(3):
                    assert len(list(one)) == N // WORLD_SIZE // 2
                one.close()
        finally:
            told(folder, f"done{RANK}")
            if RANK == 1:
                for other in range(1, WORLD_SIZE):
                    waited_for(folder, f"done{other}")
                os.kill(pid, signal.SIGCONT)
        assert len([one for one in said if "not answered within 0.5 s" in one]) == len(said) == 1, said
        sys.stdout.write("9 epochs beside a store that was stopped\n")
    list(before if RANK == 0 else loader(1))
    dist.barrier()
    dist.destroy_process_group()


def remade(folder: Path) -> None:
    """Three groups of the same processes, one after another, and a store that outlives them, as torchrun's does. Each
    has another order of the data.

    (gloo itself sometimes takes the addresses of the group before for its own in such a store, so here each group has a
    store, and the notes another.)

    Rank 1 reads nothing in the first group, and is the first to read in the second, where it would compare itself with
    rank 0 of the first group. In the third, the ranks differ. Seen to fail: without the numbers of groups.
    """
    lives = dist.FileStore(str(folder / "notes"), -1)
    distributed_c10d._get_default_store = lambda: lives
    for number, readers in enumerate([(0,), (1, 0), ()]):
        dist.init_process_group("gloo", init_method=f"file://{folder}/group{number}", rank=RANK, world_size=2)
        with loader(number if readers else RANK) as one:
            for reader in readers:
                if reader == RANK:
                    assert len(list(one)) == N // 4
                dist.barrier()
            said = gathered("no error" if readers else error(lambda: list(one)))
        assert any(text.startswith("StateMismatch: Drawn yields other items") for text in said) is (not readers), said
        dist.destroy_process_group()


def restarted(folder: Path) -> None:
    """One life of a job, whose notes are still there in the next life, which has another order of the data. The ranks
    do not take leave.

    Seen to fail: with notes that have no time.
    """
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)  # started again by hand
    dist.init_process_group("gloo", init_method=f"file://{folder}/{sys.argv[3]}", rank=RANK, world_size=2)
    lives = dist.FileStore(str(folder / "notes"), -1)
    distributed_c10d._get_default_store = lambda: lives
    with loader(int(sys.argv[3])) as one:
        for rank in (0, 1):
            if rank == RANK:
                assert len(list(one)) == N // 4
            dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    {"stopped": stopped, "remade": remade, "restarted": restarted}[sys.argv[1]](Path(sys.argv[2]))
