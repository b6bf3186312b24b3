"""What loaders.py concludes from its rows, as Markdown: who is ahead, by how much, and where the time of a batch goes.

A row is one turn of one loader. Two loaders are compared turn by turn: the median of the ratios, and the interval of
their order statistics that holds the true median in 95 % of all cases, whatever the distribution (in fewer than 6 turns
no interval does: then the whole range is printed, and nothing is concluded).
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from loader_peers import INDEX_LEVEL, LOAD_ONLY, NO_LOADER, NOTHING, OURS, REFERENCE, WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

METHODS = ("inline", "threads", "processes")
AHEAD = 1.02  # a lead by less is called a tie
LEAST = 6  # turns, for an interval of 95 %
BEGIN, END = "<!-- written by loaders.py -->", "<!-- end of what loaders.py wrote -->"


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median."""
    values, count, tail, left_out = sorted(values), len(values), 0.0, 0
    while (tail := tail + math.comb(count, left_out) / 2**count) <= 0.025:
        left_out += 1
    left_out = max(left_out - 1, 0)
    return values[left_out], values[count - 1 - left_out]


def verdict(ratios: list[float]) -> str:
    """In words."""
    if not ratios:
        return "-"
    low, high = interval(ratios)
    middle = statistics.median(ratios)
    word = "ahead" if low > 1 and middle >= AHEAD else "behind" if high < 1 else "tie"
    word = word if len(ratios) >= LEAST else "unclear"
    return f"{word} {middle:.2f} ({low:.2f} to {high:.2f})"


class Run:
    """The rows of one run, by workload and loader."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.turns: dict[str, dict[str, dict[tuple[int, int | None], dict[str, float]]]] = {}
        for row in data["rows"]:
            self.turns.setdefault(row["workload"], {}).setdefault(row["loader"], {})[row["round"], row["turn"]] = row
        self.workloads = [name for name in self.turns if name != NOTHING]

    def median(self, workload: str, loader: str, key: str) -> float | None:
        """Over all turns."""
        values = [row[key] for row in self.turns.get(workload, {}).get(loader, {}).values() if key in row]
        return statistics.median(values) if values else None

    def batch_us(self, workload: str, loader: str | None) -> float | None:
        """CPU time per batch, over all turns together: a batch may be made in one turn and delivered in the next."""
        rows = [row for row in self.turns.get(workload, {}).get(loader or "", {}).values() if "batch_us" in row]
        return (
            sum(row["batch_us"] * row["batches"] for row in rows) / sum(row["batches"] for row in rows)
            if rows
            else None
        )

    def ratios(self, workload: str, one: str | None, other: str | None) -> list[float]:
        """Of speed, turn by turn."""
        ours, theirs = (self.turns[workload].get(name or "", {}) for name in (one, other))
        pairs = ((ours[at], theirs[at]) for at in ours.keys() & theirs.keys())
        return [
            a["samples_per_s"] / b["samples_per_s"] for a, b in pairs if "samples_per_s" in a and "samples_per_s" in b
        ]

    def ratio(self, workload: str, one: str | None, other: str | None) -> str:
        """The median ratio."""
        ratios = self.ratios(workload, one, other)
        return f"{statistics.median(ratios):.2f}" if ratios else "-"

    def cpu_ratio(self, workload: str, one: str | None, other: str | None) -> str:
        """CPU time of the one, divided by that of the other."""
        ours, theirs = (self.batch_us(workload, name) for name in (one, other))
        return f"{ours / theirs:.2f}" if ours and theirs else "-"

    def fastest(self, workload: str, names: Iterable[str]) -> str | None:
        """Among these loaders."""
        speeds = {name: self.median(workload, name, "samples_per_s") for name in names}
        known = {name: speed for name, speed in speeds.items() if speed}
        return max(known, key=known.__getitem__) if known else None

    def ours(self, workload: str) -> str | None:
        """Our fastest method."""
        return self.fastest(workload, (f"{OURS}, {method}" for method in METHODS))

    def limit(self, workload: str) -> str | None:
        """The work alone, by its faster method."""
        return self.fastest(workload, (f"{NO_LOADER}, {method}" for method in METHODS))

    def peer(self, workload: str, method: str = "") -> str | None:
        """The fastest other loader, with this method."""
        names = (name for name in self.turns[workload] if name.split(", ")[0] not in (OURS, NO_LOADER, LOAD_ONLY))
        return self.fastest(workload, (name for name in names if name.endswith(method)))

    def verdict(self, workload: str, method: str = "") -> str:
        """Our fastest method against the fastest peer, or a method against the fastest peer with the same one."""
        ours = f"{OURS}, {method}" if method else self.ours(workload)
        return verdict(self.ratios(workload, ours, self.peer(workload, method)))

    def load(self, workload: str) -> str:
        """Cores that others kept busy: the median, and the most."""
        cores = self.data["load"][workload]
        return f"{statistics.median(cores):.1f} to {max(cores):.1f}"


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def number(value: float | None, times: float = 1) -> str:
    """With three digits, or a dash."""
    if value is None:
        return "-"
    value *= times
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def verdicts(run: Run) -> str:
    """Who is ahead, and of what is possible at all, how much is reached."""
    head = [
        "",
        "no loader, samples/s",
        OURS,
        "of no loader",
        "best peer",
        "of no loader",
        f"{OURS} / best peer",
        "CPU time",
        "others' load",
    ]
    rows = []
    for name in run.workloads:
        ours, peer, limit = run.ours(name), run.peer(name), run.limit(name)
        speed = number(run.median(name, limit, "samples_per_s")) + f", {limit.split(', ')[1]}" if limit else "-"
        method = ours.split(", ")[1] if ours else "-"
        shares = [run.ratio(name, one, limit) for one in (ours, peer)]
        rows.append(
            [
                WORKLOADS[name].title,
                speed,
                method,
                shares[0],
                peer or "-",
                shares[1],
                run.verdict(name),
                run.cpu_ratio(name, ours, peer),
                run.load(name),
            ]
        )
    return table(head, rows)


def by_method(run: Run) -> str:
    """Each method against the best peer with the same one."""

    def cell(workload: str, method: str) -> str:
        peer = run.peer(workload, method)
        said = run.verdict(workload, method)
        if peer is None or said == "-":
            return "-"
        return f"{said}, CPU time {run.cpu_ratio(workload, f'{OURS}, {method}', peer)}, {peer.split(', ')[0]}"

    return table(
        ["", *METHODS], ([WORKLOADS[name].title, *(cell(name, method) for method in METHODS)] for name in run.workloads)
    )


def everything(run: Run, cell: Callable[[str, str], str]) -> str:
    """All loaders on all workloads, with what ``cell`` says of (workload, loader)."""
    rows = []
    for name in dict.fromkeys(
        name for workload in run.workloads for name in run.turns[workload] if not name.startswith(LOAD_ONLY)
    ):
        cells = ((cell(workload, name), run.data["failed"].get(workload, {}).get(name)) for workload in run.workloads)
        rows.append([name, *("failed" if failure and said == "-" else said for said, failure in cells)])
    return table(["", *run.workloads], rows)


def costs(run: Run) -> str:
    """Where the CPU time of a batch goes, by what is saved if stages are left out."""
    index = run.batch_us(NOTHING, f"{INDEX_LEVEL}, inline")
    empty = {method: run.batch_us(NOTHING, f"{OURS}, {method}") for method in METHODS}
    head = [
        "",
        "method",
        "index",
        "iterator",
        "load",
        "collate",
        "hand-over",
        "the rest",
        "sum",
        "time",
        "wake-ups",
        "choose",
    ]
    rows = []
    for name in run.workloads:
        load = run.batch_us(name, f"{LOAD_ONLY}, inline")
        total = {method: run.batch_us(name, f"{OURS}, {method}") for method in METHODS}
        if None in (index, load, *empty.values(), *total.values()):
            continue
        collate = total["inline"] - empty["inline"] - load
        best = chosen(run, name)
        for method in METHODS:
            over = empty[method] - empty["inline"]
            rest = total[method] - empty[method] - load - collate
            parts = [index, empty["inline"] - index, load, collate, over, rest]
            parts = [*parts[:4], None, None] if method == "inline" else parts
            loader = f"{OURS}, {method}"
            time_us = 1e6 * WORKLOADS[name].batch_size / run.median(name, loader, "samples_per_s")
            cells = [
                *map(number, parts),
                number(total[method]),
                number(time_us),
                f"{run.median(name, loader, 'switches'):.1f}",
            ]
            rows.append(
                [WORKLOADS[name].title if method == "inline" else "", method, *cells, "yes" if method == best else ""]
            )
    return table(head, rows) if rows else ""


def chosen(run: Run, workload: str) -> str:
    """The method to choose: the fastest, or one that is almost as fast and takes less CPU time."""
    fastest = run.median(workload, run.ours(workload) or "", "samples_per_s") or 0
    fast = [
        method
        for method in METHODS
        if (run.median(workload, f"{OURS}, {method}", "samples_per_s") or 0) >= 0.95 * fastest
    ]
    return min(fast, key=lambda method: run.batch_us(workload, f"{OURS}, {method}") or math.inf)


def page(data: dict[str, Any]) -> str:
    """All tables."""
    run = Run(data)
    machine, options = data["machine"], data["options"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    parts = [
        f"{data['date']} UTC, {machine['cores']} cores, {versions}; {options['rounds']} rounds of {options['turns']} "
        f"turns of {options['seconds']} s, {options.get('workers', 2)} workers, {data['took_s'] / 60:.0f} minutes. "
        f"*Others' load*: the cores that other programs kept busy, median and most.",
        (
            "Our fastest method and the fastest peer; *CPU time* is ours divided by theirs, and depends less on what "
            "else the machine does:"
        ),
        verdicts(run),
        "Each method, and the fastest peer with the same method:",
        by_method(run),
        f"All loaders, times `{REFERENCE}` with worker processes:",
        everything(run, lambda workload, name: run.ratio(workload, name, f"{REFERENCE}, processes")),
        "CPU time of all processes together, in us per sample:",
        everything(
            run, lambda workload, name: number(run.batch_us(workload, name), 1 / WORKLOADS[workload].batch_size)
        ),
        "The first batch, in ms after the loader is built:",
        everything(run, lambda workload, name: number(run.median(workload, name, "first_ms"))),
    ]
    model = costs(run)
    if model:
        parts += [
            "Where the CPU time of a batch goes, in us. Each part is what leaving it out saves: *index* computes which "
            "samples are next, *iterator* delivers and keeps the state (both from a dataset of nothing), *load* calls "
            "the dataset, *collate* is what the loader without workers takes beyond that, with seeding, and the "
            "consumer's copy of large batches (below 0 where writing each sample straight into the batch saves the "
            "memory of a list of samples), *hand-over* passes an empty batch, *the rest* is data that another core has "
            "in its cache, memory, and waiting for Python's lock. *Time* is from batch to batch. A wake-up costs about "
            f"{machine['wake_up_us']:.1f} us.",
            model,
        ]
    failures = [
        f"- {workload}, {name}: {why}" for workload, failed in data["failed"].items() for name, why in failed.items()
    ]
    return "\n\n".join(parts + (["Failed:\n\n" + "\n".join(failures)] if failures else [])) + "\n"


def summary(runs: list[dict[str, Any]]) -> str:
    """Whether several runs come to the same conclusions."""
    known = [Run(data) for data in runs]
    rows = []
    for name in WORKLOADS:
        for method in ("", *METHODS):
            verdicts = [run.verdict(name, method) if name in run.workloads else "-" for run in known]
            if set(verdicts) == {"-"}:
                continue
            words = [verdict.split()[0] for verdict in verdicts if verdict != "-"]
            agree = "no" if {"ahead", "behind"} <= {*words} else "yes" if len({*words}) == 1 else "but for ties"
            rows.append([name, method or "best", *verdicts, agree if len(words) > 1 else "-"])
    return table(["", "method", *(data["date"] for data in runs), "agree"], rows)


def write(file: Path, data: dict[str, Any]) -> None:
    """Put the tables between the markers of a page."""
    before, found, rest = file.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(
            f"{file} lacks a line {BEGIN!r} with a line {END!r} below it: add them where the tables belong"
        )
    file.write_text(f"{before}{BEGIN}\n\n{page(data)}\n{END}{after}")
