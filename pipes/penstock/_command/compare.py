"""``python -m penstock bench --compare``: the same data inline, in threads and in processes, and as it was given, each in a process of its own.

The candidates are all alive at once and take turns of a few seconds, so what else the machine does in the meantime falls on all of them. The
parent talks to each through two pipes, one line of JSON at a time; what the user's code prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from statistics import median
from typing import IO, TYPE_CHECKING, Any, Final, final

from torch.utils.data import DataLoader

from penstock._command.bench import Reader, time_of
from penstock._command.memory import memory_of_processes
from penstock._command.target import TargetError, built, with_workers
from penstock._loader.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS: Final = 5
_ALIKE: Final = 0.95
"""A candidate that delivers this share of the fastest one's samples is as good."""


@final
@dataclass(slots=True)
class Candidate:
    """One way to load the data, and what came of it.

    Attributes:
        method: ``"given"``, ``"inline"``, ``"thread"`` or ``"process"``.
        num_workers: How many there are.
        name: In words.
        error: Why it could not be measured, or an empty text.
        first_s: Seconds to its first batch.
        rates: Samples per second, for each turn.
        stalls: The share of the time that the loop waited, for each turn.
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
        seconds: For each candidate, all its turns together.
        step_s: A training step; 0: none.
        num_workers: For threads and processes; None: as many as the given loader has, or one for each CPU.
        batch_size: If a dataset was given.

    Raises:
        TargetError: There is nothing to compare.
    """
    with _Child(target, "given", 0, batch_size) as given:
        hello = given.ask({})
        if "error" in hello:
            raise TargetError(hello["error"])
        workers = num_workers or hello["num_workers"] or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0])
        ours = [("inline", 0), ("thread", workers), ("process", workers)]
        children = [*([given] if hello["measured"] else []), *(_Child(target, method, n, batch_size) for method, n in ours)]
        try:
            return _measured(children, {given: hello}, seconds, step_s)
        finally:
            for child in children:
                child.close()


def _measured(children: list[_Child], said: dict[_Child, Any], seconds: float, step_s: float) -> list[Candidate]:
    found: dict[_Child, Candidate] = {}
    for child in children:  # one after another, so that each start has the machine to itself
        hello = said.get(child) or child.ask({})
        found[child] = Candidate(
            child.method, hello.get("num_workers", child.num_workers), hello.get("name", child.name), hello.get("error", "")
        )
    for number in range(-1, ROUNDS):
        for child in children if number % 2 else reversed(children):
            one = found[child]
            if one.error:
                continue
            answer = child.ask({"seconds": seconds / ROUNDS, "step_s": step_s, "first": number < 0})
            if "error" in answer:
                one.error = answer["error"]
            elif number < 0:
                one.first_s = answer["first_s"]
            else:
                one.rates.append(answer["rate"])
                one.stalls.append(answer["stall"])
                one.memory = max(one.memory, answer["memory"])
    return list(found.values())


def text_of(candidates: list[Candidate], step_s: float) -> str:
    """The comparison as a table, and what to use."""
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
    """The simplest of ours that is as fast as the fastest of ours; None if none could be measured."""
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
        yield f"The training step still waits {median(best.stalls):.0%} of the time: more workers, or less work for each sample."
    if best.method == "thread":
        yield "Threads share the global random generators: a dataset that draws from them must use penstock.sample().rng, or processes."


@final
class _Child:
    """A process that measures one candidate when it is asked to."""

    def __init__(self, target: str, method: str, num_workers: int, batch_size: int) -> None:
        self.method = method
        self.num_workers = num_workers
        kind = {"thread": f"{num_workers} threads", "process": f"{num_workers} processes"}.get(method, "no workers")
        self.name = f"penstock, {kind}"
        questions, self._questions = os.pipe()
        self._answers, answers = os.pipe()
        words = {"target": target, "method": method, "num_workers": num_workers, "batch_size": batch_size}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock", "bench", "--child", json.dumps(words), f"{questions},{answers}"],
                pass_fds=(questions, answers),
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
            )
        finally:
            os.close(questions)
            os.close(answers)
        self._out: IO[str] = os.fdopen(self._questions, "w")
        self._in: IO[str] = os.fdopen(self._answers)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question and wait for the answer."""
        try:
            self._out.write(json.dumps(question) + "\n")
            self._out.flush()
            line = self._in.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"error": f"its process ended with exit code {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        for pipe in (self._out, self._in):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has_fileno(stream: Any) -> bool:
    try:
        return isinstance(stream.fileno(), int)
    except (OSError, AttributeError, ValueError):
        return False


def answer_questions(words: dict[str, Any], questions: int, answers: int) -> None:
    """What a child does: build its candidate, then measure when asked, until the pipe is closed."""
    reader: Reader | None = None
    with os.fdopen(questions) as asked, os.fdopen(answers, "w") as out:
        try:
            for line in asked:
                try:
                    question = json.loads(line)
                    if not question:
                        loader, answer = _built(words)
                    elif question["first"]:
                        reader = Reader(loader)
                        answer = {"first_s": reader.first_s}
                    else:
                        assert reader is not None
                        answer = _turn(reader, question["seconds"], question["step_s"])
                except TargetError as exc:
                    answer = {"error": str(exc)}
                except Exception as exc:
                    traceback.print_exc()
                    answer = {"error": f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"[:200]}
                out.write(json.dumps(answer) + "\n")
                out.flush()
        except BrokenPipeError:
            pass
        finally:
            if reader is not None:
                reader.close()


def _built(words: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = built(words["target"])
    if words["method"] == "given":
        num_workers = _workers_of(given) if isinstance(given, Loader) else getattr(given, "num_workers", 0)
        with_workers(given, 0, "thread", words["batch_size"]).close()  # refuses what cannot be compared
        measured = isinstance(given, DataLoader)  # a loader of ours is one of the others
        name = f"{type(given).__name__} as given, {f'{num_workers} processes' if num_workers else 'no workers'}"
        return given, {"measured": measured, "num_workers": num_workers, "name": name}
    method = "thread" if words["method"] == "inline" else words["method"]
    return with_workers(given, words["num_workers"], method, words["batch_size"]), {}


def _workers_of(loader: Loader[Any]) -> int:
    """0 also if it looks for their number itself, and has not begun."""
    return max((getattr(node, "num_workers", 0) for node in loader.root.chain() if not getattr(node, "auto", False)), default=0)


def _turn(reader: Reader, seconds: float, step_s: float) -> dict[str, Any]:
    loop = reader.run(seconds, step_s)
    memory = memory_of_processes()
    return {"rate": loop.samples_per_s, "stall": loop.stall, "memory": 0 if memory is None else memory[0]}
