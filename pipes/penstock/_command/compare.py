"""``python -m penstock bench --compare``: the same data inline, in threads, in processes and on Ray, and with the given loader, each in a separate process.

All candidates are alive at once and take turns of a few seconds, so other load on the machine affects all of them.
Output printed by the user's code goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from dataclasses import dataclass, field
from multiprocessing import get_context
from statistics import median
from typing import TYPE_CHECKING, Any, Final, final

from torch.utils.data import DataLoader

from penstock._command.bench import Reader, time_of
from penstock._command.memory import memory_of_processes
from penstock._command.target import TargetError, built, with_workers
from penstock._loader.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

ROUNDS: Final = 5
_ALIKE: Final = 0.95
"""A candidate with at least this fraction of the fastest one's throughput counts as equally fast."""


@final
@dataclass(slots=True)
class Candidate:
    """One way to load the data, and its results.

    Attributes:
        method: ``"given"``, ``"inline"``, ``"thread"``, ``"process"`` or ``"ray"``.
        num_workers: Number of workers.
        name: A description.
        error: Why it could not be measured; empty if it could.
        first_s: Seconds to its first batch.
        rates: Samples per second in each turn.
        stalls: The fraction of the time that the loop waited, in each turn.
        memory: Bytes.
    """

    method: str
    num_workers: int
    name: str
    error: str = ""
    first_s: float = 0.0
    rates: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    memory: int = 0


def compare(target: str, seconds: float, step_s: float, num_workers: int | None, batch_size: int) -> list[Candidate]:
    """Measure every candidate.

    Args:
        target: See `built`.
        seconds: Per candidate, over all its turns.
        step_s: Seconds for a training step; 0: none.
        num_workers: Number of threads or processes; None: as many as the given loader has, or one per CPU.
        batch_size: Batch size for a dataset.

    Raises:
        TargetError: There is nothing to compare.
    """
    with contextlib.ExitStack() as ends:
        given, *ours = (ends.enter_context(_Child(method)) for method in ("given", "inline", "thread", "process"))
        said = given.ask(_described, target, batch_size)
        if said is None:
            raise TargetError(given.found.error)
        measured, has_cluster, given.found.num_workers, given.found.name = said
        ours += [ends.enter_context(_Child("ray"))] * has_cluster
        workers = num_workers or given.found.num_workers or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0])
        for child, kind in zip(ours, ("no workers", f"{workers} threads", f"{workers} processes", f"{workers} Ray workers"), strict=False):
            child.found.num_workers, child.found.name = workers * (child is not ours[0]), f"penstock, {kind}"
        children = [given, *ours] if measured else ours
        for child in children:  # one after another, so that each can start undisturbed
            found = child.found
            found.first_s = child.ask(_first, target, found.method, found.num_workers, batch_size) or 0.0
        for number in range(ROUNDS):
            for child in children if number % 2 else reversed(children):
                if (turn := child.ask(_turn, seconds / ROUNDS, step_s)) is not None:
                    rate, stall, memory = turn
                    child.found.rates.append(rate)
                    child.found.stalls.append(stall)
                    child.found.memory = max(child.found.memory, memory)
        return [child.found for child in children]


def text_of(candidates: list[Candidate], step_s: float) -> str:
    """The comparison as a table, with a recommendation."""
    width = max(len(one.name) for one in candidates)
    stall = f"{'stall':>8}" if step_s else ""
    lines = [f"{'':{width}}  {'samples/s':>12}  {'from-to':>19}{stall}  {'first batch':>12}  {'memory':>9}"]
    for one in candidates:
        if one.error:
            lines.append(f"{one.name:{width}}  {one.error}")
            continue
        spread = f"{min(one.rates):,.0f}-{max(one.rates):,.0f}"
        stall = f"{median(one.stalls):>8.0%}" if step_s else ""
        memory = f"{one.memory / 1e6:,.0f} MB" if one.memory else "?"
        lines.append(f"{one.name:{width}}  {median(one.rates):>12,.0f}  {spread:>19}{stall}  {time_of(one.first_s):>12}  {memory:>9}")
    return "\n".join([*lines, "", *_advice(candidates, step_s)])


def recommended(candidates: list[Candidate]) -> Candidate | None:
    """The simplest penstock candidate that is as fast as the fastest one; None if none could be measured."""
    ours = [one for one in candidates if one.method != "given" and not one.error]
    fastest = max((median(one.rates) for one in ours), default=0.0)
    return next((one for one in ours if median(one.rates) >= _ALIKE * fastest), None)


def _advice(candidates: list[Candidate], step_s: float) -> Iterator[str]:
    best = recommended(candidates)
    if best is None:
        yield "Nothing could be measured."
        return
    words = "num_workers=0" if best.method == "inline" else f'num_workers={best.num_workers}, method="{best.method}"'
    yield f"Use penstock with {words}."
    others = [one for one in candidates if one not in (best, *(one for one in candidates if one.error))]
    for one in others:
        ratio = median(best.rates) / max(median(one.rates), 1e-9)
        alike = "as fast as" if _ALIKE <= ratio <= 1 / _ALIKE else f"{ratio:.2f} times as fast as"
        yield f"It is {alike} {one.name}."
    if step_s and median(best.stalls) >= 0.05:
        yield f"The training step still waits {median(best.stalls):.0%} of the time. Use more workers, or do less work per sample."
    if best.method == "thread":
        yield "Threads share the global random generators: a dataset that draws from them must use penstock.sample().rng, or processes."


@final
class _Child:
    """A process that measures one candidate on request.

    Attributes:
        found: The results so far.
    """

    def __init__(self, method: str) -> None:
        self.found = Candidate(method, 0, method)
        context = get_context("spawn")
        self._questions, questions = context.Pipe()
        self._process = context.Process(target=_answer, args=(questions,))
        self._process.start()
        questions.close()
        self.ask(os.getpid)  # once it has started, it does not disturb the others

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``function`` in that process; None after an error, which is then in `found`."""
        if self.found.error:
            return None
        try:
            self._questions.send((function, arguments))
            answer, self.found.error = self._questions.recv()
        except (EOFError, OSError):
            self._process.join()
            answer, self.found.error = None, f"its process ended with exit code {self._process.exitcode}"
        return answer

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._questions.close()
        self._process.join(20)
        self._process.kill()
        self._process.join()


# Functions that run in a child.

_readers: list[Reader] = []


def _answer(questions: Connection) -> None:
    """Answer requests until the pipe is closed."""
    os.dup2(2, 1)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            function, arguments = questions.recv()
            value, error = None, ""
            try:
                value = function(*arguments)
            except TargetError as exc:
                error = str(exc)
            except Exception as exc:
                traceback.print_exc()
                error = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"[:200]
            questions.send((value, error))
    for reader in _readers:
        reader.close()


def _described(target: str, batch_size: int) -> tuple[bool, bool, int, str]:
    """Whether to measure the given object, whether there is a Ray cluster, how many workers it has, and its name."""
    given = built(target)
    # Also 0 for a loader that determines the number itself and has not started.
    nodes = [node for node in given.root.chain() if not getattr(node, "auto", False)] if isinstance(given, Loader) else [given]
    num_workers = max(getattr(node, "num_workers", 0) for node in nodes)
    with_workers(given, 0, "thread", batch_size).close()  # raises if the target cannot be compared
    name = f"{type(given).__name__} as given, {f'{num_workers} processes' if num_workers else 'no workers'}"
    ray = sys.modules.get("ray")
    has_cluster = "RAY_ADDRESS" in os.environ or (ray is not None and ray.is_initialized())
    return isinstance(given, DataLoader), has_cluster, num_workers, name  # a penstock loader equals one of the other candidates


def _first(target: str, method: str, num_workers: int, batch_size: int) -> float:
    given = built(target)
    kind = "thread" if method == "inline" else method
    _readers.append(Reader(given if method == "given" else with_workers(given, num_workers, kind, batch_size)))
    return _readers[0].first_s


def _turn(seconds: float, step_s: float) -> tuple[float, float, int]:
    loop, memory = _readers[0].run(seconds, step_s), memory_of_processes()
    return loop.samples_per_s, loop.stall_share, 0 if memory is None else memory[0]
