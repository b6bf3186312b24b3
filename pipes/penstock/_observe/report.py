"""Explains in a few lines what slows a training loop down, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock._arguments import cut
from penstock._fetch.fetch import Fetch
from penstock._workers.limits import cores

if TYPE_CHECKING:
    from penstock._statistics import (
        CopyStatistics,
        Durations,
        LoaderStatistics,
        NodeStatistics,
        WorkerChoice,
        WorkerStatistics,
    )

_STALLED = 0.1
"""If a loop waits for a larger share of its time, the data is the bottleneck."""
_BUSY = 0.6
"""Workers that are busy for a smaller share of their time have spare capacity."""
_CONTENDED = 0.4
_BLOCKED = 0.5
"""The share of the loading time in which the worker neither computes nor waits for a core."""
_BURSTS = 4
"""Work comes in bursts if its mean is so many times its median."""
_TINY_S = 1e-3
"""For a batch with less work than this, sending it to a worker and back costs about as much."""
_STRAGGLES = 5
"""A sample is a straggler if it takes this many times as long as 19 of 20 others."""


class Names(NamedTuple):
    """The user's names for the parts of the graph."""

    load: str
    transform: str
    collate: str
    source: str
    instead: str = "__getitem__ or transform"
    """Where the source's work could move."""

    @classmethod
    def of(cls, root: Any) -> Names:
        """Those of the graph that ends with ``root``."""
        *_, first = nodes = list(root.chain())
        map_fn = next((node.map_fn for node in nodes if hasattr(node, "map_fn")), None)
        inner = next(
            (
                found
                for word in ("sampler", "iterable", "order", "dataset")
                if (found := _part(first, word)) is not None
            ),
            None,
        )
        source = type(first).__name__ if inner is None else f"{type(inner).__name__} ({type(first).__name__})"
        if not isinstance(map_fn, Fetch):
            return cls(_name(map_fn), "transform", "collate_fn", source, "transform")
        method = "__getitems__" if map_fn.has_getitems else "__getitem__"
        collate = "default_collate" if map_fn.collate_fn is None else _name(map_fn.collate_fn)
        return cls(f"{type(map_fn.dataset).__name__}.{method}", _name(map_fn.transform), collate, source)


def report(statistics: LoaderStatistics, names: Names) -> str:
    """The verdict on the first line, followed by the figures behind it."""
    waits, steps = statistics.waits, statistics.steps
    lines = [
        _verdict(statistics, names),
        (
            f"batches: {statistics.batches:,} in {time_of(statistics.elapsed_s)}, {statistics.samples_per_s:,.0f} "
            f"samples/s; the first came after {time_of(statistics.first_wait_s)}"
        ),
        f"waits: {_spread(waits)}; at the start of an epoch {_spread(statistics.epoch_start_waits)}",
        f"steps: {_spread(steps)}",
    ]
    for what in ("load", "transform", "collate", "pack", "transfer", "to_device"):
        durations: Durations = getattr(statistics, what)
        if durations.count:
            unit = "sample" if what in ("load", "transform") else "batch"
            lines.append(f"{what}: {_spread(durations)} a {unit}")
    if (c := statistics.copies) is not None:
        lines.append(f"copies: {copies_in(c)}")
    choice = next((node.workers.choice for node in statistics.nodes if node.workers is not None), None)
    if choice is not None:
        lines.append(
            f"workers: {choice.workers}, by num_workers='auto'{'' if choice.settled else ', which still tries'}: "
            f"{choice.why}"
        )
    lines += [
        f"random numbers: {node.workers.draws}"
        for node in statistics.nodes
        if node.workers is not None and node.workers.draws
    ]
    return "\n".join(lines)


def copies_in(c: CopyStatistics) -> str:
    """What was done with copies."""
    return (
        f"{c.hits:,} files were there, {c.fetches:,} were fetched ({size_of(c.fetched_bytes)}), {c.misses:,} had no "
        f"room; {time_of(c.wait_s)} of waiting for them"
    )


def size_of(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


def _verdict(s: LoaderStatistics, names: Names) -> str:
    if not s.steps.count:
        return "data: there is nothing to report before the loop has read a few batches."
    mapper = next((node for node in reversed(s.nodes) if node.workers is not None), None)
    workers = None if mapper is None else mapper.workers
    share = f"the training step waited {s.stall_share:.0%} of the time"
    if s.stall_share < _STALLED:
        spare = (
            workers is not None
            and workers.method != "inline"
            and workers.choice is None
            and workers.busy_share < _BUSY / 2
        )
        advice = (
            f" The workers are {workers.busy_share:.0%} busy: fewer are enough."
            if spare and workers is not None
            else ""
        )
        return (
            f"training step: the loop waited {s.stall_share:.0%} of the time for data, and a step takes "
            f"{time_of(s.steps.p50_s)}: make the step faster.{advice}"
        )
    if mapper is None or workers is None:
        return f"data: {share}, reading {names.source}: put the work into a ParallelMapper."
    device = next((node for node in s.nodes if node.name in ("PinMemory", "ToDevice")), None)
    device_s = 0.0 if device is None else device.work_s
    source_s = mapper.source_wait_s / max(1, s.batches)
    if workers.method != "inline" and source_s + _typical_s(s) < _TINY_S and device_s < workers.wait_s:
        return (
            f"data: {share}; a batch is only {time_of(_typical_s(s))} of work, and sending it to a worker and back "
            f"costs as much: use num_workers=0, or larger batches."
        )
    most = max(mapper.source_wait_s, workers.wait_s, device_s)
    if most == mapper.source_wait_s:
        return _slow_source(s, share, mapper, names)
    if device is not None and most == device_s:
        return (
            f"data: {share}; {time_of(s.to_device.mean_s)} per batch are spent in {device.name}, copying to the "
            f"device: copy less (smaller types, such as uint8 instead of float32, converted on the device), or use "
            f"smaller batches."
        )
    return f"data: {share}; " + _slow_work(s, mapper, workers, names)


def _slow_source(s: LoaderStatistics, share: str, mapper: NodeStatistics, names: Names) -> str:
    upstream = s.nodes[: s.nodes.index(mapper)]
    slowest = max(upstream, key=lambda node: node.work_s, default=None)
    what = names.source if slowest is None or slowest is upstream[0] else slowest.name
    each = time_of(mapper.source_wait_s / max(1, s.batches))
    return (
        f"data: {share}; {each} per batch are spent reading {what} one item at a time, which workers cannot speed up: "
        f"make it cheaper, or move its work into {names.instead}, which runs in the workers."
    )


def _slow_work(s: LoaderStatistics, mapper: NodeStatistics, workers: WorkerStatistics, names: Names) -> str:
    per_batch = s.samples / max(1, s.batches)
    inline = workers.method == "inline"
    if s.copies is not None and s.copies.wait_s > (s.waits.total_s + s.epoch_start_waits.total_s) / 2:
        return (
            f"the network is the bottleneck: readers have waited {time_of(s.copies.wait_s)} for copies, and "
            f"{size_of(s.copies.fetched_bytes)} were fetched: use a larger ahead=, more room (max_cache_size=), or a "
            f"closer store."
        )
    slow = s.load if s.load.max_s >= s.transform.max_s else s.transform
    if slow.max_s > _STRAGGLES * slow.p95_s and slow.max_s > _TINY_S and _late_share(s) > 0.5:
        name = names.load if slow is s.load else names.transform
        return (
            f"most of that for a few slow samples: index {cut(repr(slow.slowest), 80)} took {time_of(slow.max_s)} in "
            f"{name}, but 19 of 20 take less than {time_of(slow.p95_s)}: check that sample, or load further ahead "
            f"(prefetch_factor)."
        )
    if inline and _typical_s(s) < _TINY_S:
        many = f", or {names.load[:-2]}s__" if names.load.endswith(".__getitem__") else ""
        return (
            f"a batch is only {time_of(_typical_s(s))} of work, which workers would not speed up: larger batches{many}."
        )
    if not inline and s.transfer.total_s > workers.wait_s / 2:
        return (
            f"{time_of(s.transfer.mean_s)} per batch are spent rebuilding it from the worker process: return tensors "
            f"or arrays, or use method='thread'."
        )
    if not inline and workers.busy_share < _BUSY:
        return (
            f"but the workers are only {workers.busy_share:.0%} busy: too little is loaded ahead for steps or samples "
            f"that vary this much. Use a larger prefetch_factor (now {mapper.depth} batches ahead)."
        )
    some = {0: "workers are", 1: "one worker is"}.get(workers.workers, f"{workers.workers} workers are")
    who = "there are no workers" if inline else f"the {some} {workers.busy_share:.0%} busy"
    if workers.method != "process" and not inline and (s.lock_wait_share or 0) > _CONTENDED:
        return (
            f"{who}, but they wait for each other: Python's lock was taken {s.lock_wait_share:.0%} of the times that "
            f"{names.load} wanted it: use method='process'."
        )
    return f"{who}: " + _stage(s, per_batch, names, inline, workers.choice)


def _stage(s: LoaderStatistics, per_batch: float, names: Names, inline: bool, choice: WorkerChoice | None) -> str:
    seconds = (s.load.mean_s, s.transform.mean_s, s.collate.mean_s / max(1.0, per_batch))
    mine, whole = max(seconds), sum(seconds)
    stage = seconds.index(mine)  # not by their names: two may be called <lambda>
    where = f"{time_of(mine)} of {time_of(whole)} a sample are in {(names.load, names.transform, names.collate)[stage]}"
    more = "num_workers=2 or more" if inline else "more workers"
    if choice is not None and choice.settled:
        return f"{where}: cheaper work there; num_workers='auto' adds no workers: {choice.why}."
    if stage < 2 and s.load_cpu_share is not None and s.load_cpu_share < 1 - _BLOCKED:
        return (
            f"{where}, which waits {1 - s.load_cpu_share:.0%} of that for a disk or a network instead of computing: "
            f"{more} (they may be more than cores), or data that is read faster (a local disk, larger files, "
            f"penstock.Cached)."
        )
    last, usable = s.nodes[-1], cores()
    if not inline and usable <= last.depth and last.workers is not None and last.workers.workers >= usable:
        return f"{where}: cheaper work there, because {usable:g} cores have no room for more workers."
    return f"{where}: {more}, or cheaper work there."


def _typical_s(s: LoaderStatistics) -> float:
    """The typical work in a batch, without the hiccups of a busy machine."""
    return (_usual_s(s.load) + _usual_s(s.transform)) * s.samples / max(1, s.batches) + _usual_s(s.collate)


def _usual_s(durations: Durations) -> float:
    """The median; or where the work comes in bursts, as behind a `Pack`, the mean without the longest hundredth, which
    are hiccups.
    """
    left = kept = durations.count - durations.count // 100 - 1
    total = 0.0
    for number, n in enumerate(durations.counts):
        total += min(n, left) * _bin_s(number)
        left -= min(n, left)
    mean = total / kept if kept > 0 else 0.0
    return mean if mean > _BURSTS * durations.p50_s else durations.p50_s


def _bin_s(number: int) -> float:
    """The middle of a bin of ``Durations.counts``."""
    return float((4.5 + number % 4) * 2.0 ** (number // 4 + 1) / 1e9)


def _late_share(s: LoaderStatistics) -> float:
    """The share of all waiting that is in waits much longer than others, and of at least a quarter of the longest
    sample.
    """
    late = whole = 0.0
    bound = max(s.load.max_s / 4, s.transform.max_s / 4, 4 * s.waits.p50_s)
    for durations in (s.waits, s.epoch_start_waits):
        for number, n in enumerate(durations.counts):
            seconds = n * _bin_s(number)
            whole += seconds
            late += seconds if n and seconds / n >= bound else 0.0
    return late / whole if whole else 0.0


def _part(node: Any, word: str) -> Any:
    found = getattr(node, word, getattr(node, f"_{word}", None))
    return None if callable(found) and not hasattr(found, "__iter__") and not hasattr(found, "__len__") else found


def _name(function: Any) -> str:
    try:
        name = function.__qualname__
    except Exception:  # of a user's __getattr__
        name = None
    return name if isinstance(name, str) and name else type(function).__name__


def _spread(durations: Durations) -> str:
    if not durations.count:
        return "none"
    at = "" if durations.slowest is None else f" (index {cut(repr(durations.slowest), 80)})"
    return f"p50 {time_of(durations.p50_s)}, p95 {time_of(durations.p95_s)}, max {time_of(durations.max_s)}{at}"


def time_of(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError
