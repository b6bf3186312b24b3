"""Two asynchronous loops of reinforcement learning, killed in mid-flight again and again: a program for
test_ledger_loops.

    python ledger_loops.py FOLDER LOOP KEEPER KILLS

It forks one life after another, kills each with SIGKILL after a random number of its events, and has the next resume
from the last checkpoint. The loops have the shapes in which prompts were lost, or trained twice, in public: TRL's
asynchronous GRPO (huggingface/trl#7274), and OpenRLHF's oversampling (OpenRLHF/OpenRLHF#1322). A keeper decides what a
checkpoint has of the data: a `Ledger`, or what those trainers saved.

The last life saves, and ends. What its checkpoint says was trained and dropped, over all lives, is compared with what a
loader that resumes from it still serves: a prompt that is in neither is lost; one that is in both, or was trained two
times, is trained twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from itertools import islice
from pathlib import Path
from queue import Queue
from typing import Any

from penstock import Address, Ledger, Loader

N = 40
STALE = 4
"""A rollout of a policy so many versions old is dropped."""


def build() -> Loader[Any]:
    return Loader.from_dataset(range(N), batch_size=None, shuffle=True, seed=3, infinite=True, collate_fn=int)


class Position:
    """A loader alone: a checkpoint has its position, which is past all that is in flight."""

    def __init__(self, loader: Loader[Any]) -> None:
        self.loader = loader
        self.iterator = iter(loader)
        self.room = threading.Semaphore(16)
        self.returned: list[tuple[Address, Any]] = []

    def __next__(self) -> tuple[Address, Any]:
        self.room.acquire()
        return self._again() or self._new()

    def _again(self) -> tuple[Address, Any] | None:
        return self.returned.pop(0) if self.returned else None

    def _new(self) -> tuple[Address, Any]:
        prompt = next(self.iterator)
        return self.loader.last, prompt  # type: ignore[return-value]

    def __aiter__(self) -> Position:
        return self

    async def __anext__(self) -> tuple[Address, Any]:
        while not self.room.acquire(blocking=False):
            await asyncio.sleep(0)
        return self._new()

    def done(self, at: Address) -> None:
        self.room.release()

    def drop(self, at: Address) -> None:
        self.room.release()

    def again(self, at: Address) -> None:
        self.returned.append((at, self.loader.load(at)))
        self.room.release()

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class FirstUntrained(Position):
    """As TRL: a checkpoint has the position before the first prompt that was not trained. One that was dropped never
    is."""

    def __init__(self, loader: Loader[Any]) -> None:
        super().__init__(loader)
        self.untrained: dict[Address, Any] = {}

    def _new(self) -> tuple[Address, Any]:
        before = self.loader.state_dict()
        at, prompt = super()._new()
        self.untrained[at] = before
        return at, prompt

    def done(self, at: Address) -> None:
        del self.untrained[at]
        super().done(at)

    def state_dict(self) -> Any:
        return next(iter(self.untrained.values()), None) or super().state_dict()


KEEPERS: dict[str, Any] = {
    "ledger": lambda loader: Ledger(loader, 16, timeout=60),
    "position": Position,
    "first untrained": FirstUntrained,
}


class Run:
    """One life: what a trainer has besides its model, and the pipe on which it says that something happened."""

    def __init__(self, folder: Path, keeper: Any, say: int) -> None:
        self.file, self.keeper, self.say = folder / "checkpoint.json", keeper, say
        self.version = 0
        self.trained: list[list[Any]] = []
        self.dropped: list[list[Any]] = []
        if self.file.exists():
            saved = json.loads(self.file.read_text())
            self.version, self.trained, self.dropped = saved["version"], saved["trained"], saved["dropped"]
            keeper.load_state_dict(saved["data"])

    def event(self) -> None:
        os.write(self.say, b".")

    def step(self, group: list[tuple[Address, Any]]) -> None:
        """Train on ``group``, and settle it."""
        self.version += 1
        self.trained += [[at.json(), prompt] for at, prompt in group]
        for at, _ in group:
            self.keeper.done(at)
        self.event()

    def drop(self, at: Address, prompt: Any) -> None:
        self.dropped.append([at.json(), prompt])
        self.keeper.drop(at)

    def save(self) -> None:
        """Weights and data of one moment, as a whole or not at all."""
        saved = {
            "version": self.version,
            "trained": self.trained,
            "dropped": self.dropped,
            "data": self.keeper.state_dict(),
        }
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(saved))
        os.replace(new, self.file)
        self.event()


def trl(run: Run, steps: int) -> None:
    """An event loop: a rollouter starts a task for each prompt, they finish out of order, and a trainer takes groups.
    Too old a one is dropped."""

    async def main() -> None:
        finished: asyncio.Queue[Any] = asyncio.Queue()

        async def rollout(at: Address, prompt: Any) -> None:
            version = run.version
            for _ in range(200 if prompt % 10 == 0 else 1 + prompt * 7 % 12):
                await asyncio.sleep(0)
            run.event()
            await finished.put((at, prompt, version))

        async def rollouter() -> None:
            tasks = set()  # an event loop has only weak references to tasks
            async for at, prompt in run.keeper:
                tasks.add(task := asyncio.ensure_future(rollout(at, prompt)))
                task.add_done_callback(tasks.discard)

        serving = asyncio.ensure_future(rollouter())
        while run.version < steps:
            group: list[Any] = []
            while len(group) < 4:
                at, prompt, version = await finished.get()
                if run.version - version > STALE:
                    run.drop(at, prompt)
                else:
                    group.append((at, prompt))
            run.step(group)
            if run.version % 2 == 0:
                run.save()
        serving.cancel()

    asyncio.run(main())


def openrlhf(run: Run, steps: int) -> None:
    """Threads: twice as many rollouts are in progress as a step trains on, and what is finished waits in a buffer. A
    sync of the weights gives some back."""
    asked: Queue[Any] = Queue()
    buffer: Queue[Any] = Queue()

    def generate() -> None:
        while (taken := asked.get()) is not None:
            at, prompt = taken
            tokens = sum(k % 7 for k in range(20_000 if prompt % 10 == 0 else 200))
            run.event()
            buffer.put((at, prompt, tokens))

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    given: set[Any] = set()
    ahead = 0
    while run.version < steps:
        while ahead < 8:
            asked.put(next(run.keeper))
            ahead += 1
        group = []
        while len(group) < 4:
            at, prompt, _ = buffer.get()
            ahead -= 1
            if prompt % 9 == 0 and at not in given:  # interrupted: it comes again, and is finished then
                given.add(at)
                run.keeper.again(at)
                asked.put(next(run.keeper))
                ahead += 1
            else:
                group.append((at, prompt))
        run.step(group)
        run.save()
    for _ in threads:
        asked.put(None)
    for thread in threads:
        thread.join()


LOOPS = {"trl": trl, "openrlhf": openrlhf}


def live(folder: Path, loop: str, keeper: str, say: int, steps: int) -> None:
    """One life: ``steps`` more than the last checkpoint has, unless it is killed."""
    with build() as loader:
        run = Run(folder, KEEPERS[keeper](loader), say)
        LOOPS[loop](run, run.version + steps)
    os._exit(0)


def left(saved: Any, keeper: str) -> tuple[list[Any], int]:
    """What a resumed loader serves again, and how many samples are before the first that it has not served."""
    with build() as loader:
        kept = KEEPERS[keeper](loader)
        kept.load_state_dict(saved)
        opened = [at.json() for at in kept.open] if keeper == "ledger" else []
        for _ in opened:
            next(kept)
        first, _ = next(kept)
        return opened, first.epoch * N + first.position


def main(folder: Path, loop: str, keeper: str, kills: int) -> None:
    rng = random.Random(5)
    for life in range(kills + 1):
        last = life == kills
        hear, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(hear)
            live(folder, loop, keeper, say, 12 if last else 10**6)
        os.close(say)
        events = 10**6 if last else rng.randrange(30, 100)  # it is killed by events, not by the clock
        while events and os.read(hear, 1):
            events -= 1
        if not last:
            os.kill(pid, signal.SIGKILL)
        os.close(hear)
        assert os.waitpid(pid, 0)[1] == (0 if last else signal.SIGKILL)
    saved = json.loads((folder / "checkpoint.json").read_text())
    opened, frontier = left(saved["data"], keeper)
    trained = Counter(number(at) for at, _ in saved["trained"])
    dropped, waiting = {number(at) for at, _ in saved["dropped"]}, {number(at) for at in opened}
    with build() as loader:
        sequence = list(islice(loader, max(frontier, *trained) + 1))
    assert all(prompt == sequence[number(at)] for at, prompt in saved["trained"] + saved["dropped"])
    lost = {*range(frontier)} - {*trained} - dropped - waiting
    twice = [at for at, times in trained.items() if times > 1 or at in waiting or at >= frontier]
    print(
        json.dumps(
            {
                "trained": len(trained),
                "dropped": len(dropped),
                "open": len(waiting),
                "lost": len(lost),
                "twice": len(twice),
            }
        )
    )


def number(at: Any) -> int:
    epoch, position = at
    return int(epoch * N + position)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
