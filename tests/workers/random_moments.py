"""A program that is hit by signals at random moments and must neither hang nor leave anything, for
``test_random_moments.py``.

``random_moments.py interrupted METHOD MOMENTS`` presses Ctrl-C (SIGINT to the whole group) in the middle of a start, of
`next`, `refresh` and `close`, by one start method. ``random_moments.py served MOMENTS`` kills the fork server while
workers are started by it. A moment lies anywhere in the time that the act took when nobody disturbed it. The first
argument after these seeds the moments.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import select
import signal
import struct
import sys
import threading
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

sys.path.append(str(Path(__file__).parents[1] / "support"))
from leaks import no_leaks
from signalled import helpers

from penstock import Loader
from penstock.testing import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N, BATCH = 60, 2
AT_MOST_S = 100
"""Of one moment: a hang is told with the stacks."""
SHOT = struct.Struct("<2q2d")  # to which process, which signal, when, and again when


class Shooter:
    """Another process, which sends signals when it is told to. It is in a session of its own, so that none hits it."""

    def __init__(self) -> None:
        orders, self._order = os.pipe()
        self._heard, heard = os.pipe()
        self._done, done = os.pipe()
        group = os.getpgrp()
        if os.fork() == 0:
            os.setsid()
            os.close(self._order)
            while order := os.read(orders, SHOT.size):
                target, number, *pauses_s = SHOT.unpack(order)
                os.write(heard, b"!")
                for pause_s in pauses_s:
                    if pause_s >= 0:
                        select.select([], [], [], pause_s)
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(target or -group, number)
                os.write(done, b"!")
            os._exit(0)
        for end in (orders, heard, done):
            os.close(end)

    def aim(self, target: int, number: int, after_s: float, again_s: float = -1) -> None:
        """Shoot at a process, or at this group (0), in ``after_s`` seconds, and, unless ``again_s`` is negative, once
        more after as many.

        Returns when it has heard, so that its time begins now.
        """
        os.write(self._order, SHOT.pack(target, number, after_s, again_s))
        select.select([self._heard], [], [])

    def wait(self) -> None:
        """Until it has shot."""
        select.select([self._done], [], [])

    def reload(self) -> None:
        """Make it ready for the next order, once it has shot."""
        os.read(self._heard, 1)
        os.read(self._done, 1)


class Run:
    """One life of a loader, up to the act that is interrupted."""

    def __init__(self, method: str, name: str) -> None:
        self.loader: Loader[Any] = Loader.from_dataset(
            Tagged(N),
            BATCH,
            num_workers=1 if method == "spawn" else 2,
            multiprocessing_context=method,
            prefetch_factor=2,
        )
        self.batches = iter(self.loader)
        self.got: list[list[int]] = []
        if name != "start":
            self.read(3)
        self.act: Callable[[], None] = {
            "start": lambda: self.read(1),
            "next": lambda: self.read(12),
            "refresh": self.loader.refresh,
            "close": self.loader.close,
        }[name]

    def read(self, batches: int) -> None:
        for _ in range(batches):
            self.got.append(next(self.batches).tolist())

    def read_on(self) -> None:
        """The rest of the epoch must come, and nothing else."""
        at = self.loader.position
        assert at in (len(self.got), len(self.got) + 1), "one may have been delivered, and its place in the list not"
        assert [batch.tolist() for batch in self.batches] == [[i, i + 1] for i in range(at * BATCH, N, BATCH)]

    def took_s(self) -> float:
        begin = time.monotonic()
        self.act()
        end = time.monotonic()
        self.loader.close()
        return end - begin


def mask(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0], 16)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Of one moment: no thread, descriptor, child, zombie or blocked signal, and no process in this session. It must
    not hang either."""
    faulthandler.dump_traceback_later(AT_MOST_S, exit=True)
    with no_leaks(AT_MOST_S / 2):
        yield
    assert mask(os.getpid()) == 0
    deadline = time.monotonic() + AT_MOST_S / 2
    while left := helpers():
        assert time.monotonic() < deadline, f"left behind: {[psutil.Process(pid) for pid in left]}"
    faulthandler.cancel_dump_traceback_later()


armed = False


def press(number: int, frame: Any) -> None:
    """An interrupt, but only where somebody awaits one: not in the handler of the one before it."""
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt


def through(act: Callable[[], Any]) -> None:
    """Again, until nobody interrupts it."""
    global armed
    while True:
        try:
            armed = True
            act()
            armed = False
        except KeyboardInterrupt:
            continue
        return


def one_interrupt(method: str, name: str, length_s: float, shooter: Shooter, chance: random.Random) -> bool:
    """Whether it came before the end of the act. A second one may come up to 10 ms later, wherever that is."""
    global armed
    if method == "forkserver" and name == "start" and chance.random() < 0.1:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
    after_s, again_s = chance.uniform(0, length_s), chance.choice([-1, chance.uniform(0, 0.01)])
    ending = chance.choice(["close", "drop"] if name == "close" else ["close", "drop", "read on"])
    run = Run(method, name)
    beside, over = threading.Event(), False
    if chance.random() < 0.5:  # it gets the signals that the main thread holds back
        threading.Thread(target=beside.wait).start()
    struck = False
    try:
        armed = True
        shooter.aim(0, signal.SIGINT, after_s, again_s)
        run.act()
        over = True
        armed = False
    except KeyboardInterrupt:
        struck = not over
    if ending == "close":
        through(run.loader.close)
    through(shooter.wait)
    shooter.reload()
    if ending == "read on":
        run.read_on()
        run.loader.close()
    beside.set()
    return struck


def interrupted(method: str, moments: int, chance: random.Random) -> None:
    signal.signal(signal.SIGINT, press)
    shooter = Shooter()
    lengths = {
        name: min(Run(method, name).took_s() for _ in range(2)) for name in ("start", "next", "refresh", "close")
    }
    longest, came = dict(lengths), Counter[str]()
    for moment in range(moments):
        name = list(lengths)[moment % 4]
        with nothing_left():
            hit = one_interrupt(method, name, lengths[name], shooter, chance)
            gc.collect()
        came[name] += hit
        # the kernel sends late on a busy machine
        lengths[name] = min(1.2 * longest[name], lengths[name] * (1.2 if hit else 0.8))
    print(
        f"{method}: {moments} moments, nothing left; before the end of",
        ", ".join(f"{name} {came[name]}" for name in lengths),
    )


def served(moments: int, chance: random.Random) -> None:
    shooter = Shooter()
    length_s = min(Run("forkserver", "start").took_s() for _ in range(3))
    replaced = 0
    for _ in range(moments):
        with nothing_left():
            server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
            run = Run("forkserver", "start")
            shooter.aim(server, chance.choice([signal.SIGTERM, signal.SIGKILL]), chance.uniform(0, length_s))
            run.act()
            shooter.wait()
            shooter.reload()
            run.read_on()
            run.loader.close()
            forkserver.ensure_running()
            now = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
            assert mask(now) == 0, "the server has the mask of this program"
            replaced += now != server
            del run
    print(f"forkserver: {moments} starts, nothing left; the server was replaced {replaced} times")


def main() -> None:
    what, *words, moments, seed = sys.argv[1:]
    {"interrupted": interrupted, "served": served}[what](*words, int(moments), random.Random(int(seed)))


if __name__ == "__main__":
    main()
