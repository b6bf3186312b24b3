"""Plots a loader's statistics; needs matplotlib, which is an extra."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from penstock._statistics import Durations, LoaderStatistics

_STAGES = ("load", "transform", "collate", "pack", "transfer", "to_device")


def draw(statistics: LoaderStatistics, title: str, file: str | os.PathLike[str] | IO[bytes]) -> None:
    """Plot where the time of the loop and of the workers went, how long the waits were, and how full the queues were.

    Args:
        statistics: Of a loader that has delivered batches.
        title: The title of the figure.
        file: Where to write the image; the file extension sets its format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ImportError("the plot needs matplotlib: pip install matplotlib.") from exc
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(
        f"{title}\n{statistics.samples_per_s:,.0f} samples/s, stall {statistics.stall_share:.0%}", fontsize=11
    )
    loop, stages, waits, queues = figure.subplots(4, 1, height_ratios=[1, 1, 1.6, 1.6])
    _bar(
        loop,
        "the loop",
        {
            "training steps": statistics.steps.total_s,
            "waits": statistics.waits.total_s,
            "waits at epoch boundaries": statistics.epoch_start_waits.total_s,
            "first wait": statistics.first_wait_s,
        },
    )
    idle_s = sum(node.workers.workers * node.consumer_wait_s for node in statistics.nodes if node.workers is not None)
    work = {
        stage: part.total_s
        for stage in _STAGES
        if (part := getattr(statistics, stage, None)) is not None and part.count
    }
    _bar(stages, "the work", {**work, "workers idle": idle_s})
    _waits(
        waits,
        {
            "waits": statistics.waits,
            "at epoch\nboundaries": statistics.epoch_start_waits,
            "training\nsteps": statistics.steps,
        },
    )
    _queues(queues, [(node.name, node.ready_mean, node.depth) for node in statistics.nodes if node.depth])
    figure.savefig(file, dpi=110)


def _bar(axes: Any, name: str, parts: dict[str, float]) -> None:
    """One bar of seconds, stacked."""
    whole, left = sum(parts.values()) or 1.0, 0.0
    for number, (part, seconds) in enumerate(parts.items()):
        if seconds > 0:
            axes.barh(
                [name],
                [seconds],
                left=left,
                color=f"C{number}",
                label=f"{part}: {seconds:.3g} s, {seconds / whole:.0%}",
            )
            left += seconds
    axes.set(xlabel="seconds")
    if left:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
        axes.set_xlim(0, left)


def _waits(axes: Any, kinds: dict[str, Durations]) -> None:
    """Median, 95th percentile and maximum of each kind, on a logarithmic scale."""
    shown = {name: one for name, one in kinds.items() if one.count}
    for number, one in enumerate(shown.values()):
        marks = [max(1e-3, 1e3 * seconds) for seconds in (one.p50_s, one.p95_s, one.max_s)]
        axes.plot([marks[0], marks[2]], [number, number], color="0.7", linewidth=2, zorder=1)
        for mark, shape, color in zip(marks, "o|D", ("C0", "C1", "C3"), strict=True):
            axes.plot([mark], [number], shape, color=color, markersize=14 if shape == "|" else 7, markeredgewidth=2)
    for shape, color, label in (("o", "C0", "median"), ("|", "C1", "95th percentile"), ("D", "C3", "longest")):
        axes.plot([], [], shape, color=color, label=label, linestyle="none", markeredgewidth=2)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.set(xlabel="milliseconds", xscale="log", ylim=(len(shown) - 0.5, -0.5) if shown else (0, 1))
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def _queues(axes: Any, queues: list[tuple[str, float, int]]) -> None:
    """Average number of items ready, out of the number that a node reads ahead."""
    for number, (_, ready, depth) in enumerate(queues):
        axes.barh([number], [depth], color="0.9", label="room" if not number else None)
        axes.barh([number], [ready], color="C2", label="ready, on average" if not number else None)
    axes.set_yticks(range(len(queues)), [name for name, _, _ in queues])
    axes.set(xlabel="items ahead", ylim=(len(queues) - 0.5, -0.5) if queues else (0, 1))
    if queues:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "nothing is read ahead", ha="center", va="center", transform=axes.transAxes)
