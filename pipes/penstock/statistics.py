"""The classes that `penstock.Loader.statistics` returns, and `trace`, which records where time goes."""

from __future__ import annotations

from penstock._observe.trace import trace as trace
from penstock._statistics import CopyStatistics as CopyStatistics
from penstock._statistics import Durations as Durations
from penstock._statistics import FailureStatistics as FailureStatistics
from penstock._statistics import LoaderStatistics as LoaderStatistics
from penstock._statistics import NodeStatistics as NodeStatistics
from penstock._statistics import PinStatistics as PinStatistics
from penstock._statistics import WorkerChoice as WorkerChoice
from penstock._statistics import WorkerStatistics as WorkerStatistics

__all__ = [
    "CopyStatistics",
    "Durations",
    "FailureStatistics",
    "LoaderStatistics",
    "NodeStatistics",
    "PinStatistics",
    "trace",
    "WorkerChoice",
    "WorkerStatistics",
]
