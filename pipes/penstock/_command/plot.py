"""Pictures of measurements; needs matplotlib, which is an extra."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from penstock._command.bench import Measured


def plot_waits(found: Measured, path: str | IO[bytes]) -> None:
    """Draw the wait for each batch of a measurement, with the borders of epochs, and how they are distributed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ImportError("--plot needs matplotlib: pip install matplotlib.") from exc
    loop, step = (found.free, "none") if found.stepped is None else (found.stepped, f"{found.step_s * 1e3:g} ms")
    waits = np.asarray(loop.waits) * 1e3
    ends = np.cumsum(np.asarray(loop.waits) + np.asarray(loop.steps))
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    over_time, spread = figure.subplots(1, 2, width_ratios=[3, 1], sharey=True)
    over_time.plot(ends, waits, ".", markersize=4, color="tab:blue", label="wait for a batch")
    if loop.boundaries:
        at: Any = loop.boundaries
        over_time.plot(ends[at], waits[at], "D", markersize=6, color="tab:orange", label="first batch of an epoch")
    if found.stepped is not None:
        over_time.axhline(found.step_s * 1e3, color="tab:green", linewidth=1, linestyle="--", label="training step")
    over_time.set(
        xlabel="seconds", ylabel="milliseconds", yscale="log", title=f"{found.name}; training step: {step}; stall {loop.stall:.0%}"
    )
    over_time.legend(loc="best")
    over_time.grid(alpha=0.3)
    least = max(waits.min(), 1e-4)
    spread.hist(
        waits.clip(least), bins=np.geomspace(least, max(waits.max(), 1.01 * least), 40).tolist(), orientation="horizontal", color="tab:blue"
    )
    spread.set(xlabel="batches")
    spread.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
