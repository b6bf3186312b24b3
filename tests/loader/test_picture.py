"""`Loader.plot`: the picture of a loader's statistics, whatever has been measured so far."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Loader
from penstock._observe.picture import draw
from penstock.statistics import Durations, LoaderStatistics, NodeStatistics, WorkerStatistics

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("fonts")


@pytest.fixture
def texts_of(tmp_path: Path) -> Any:
    """A function that draws, and gives back every text in the picture."""
    import matplotlib as mpl

    def texts(statistics: LoaderStatistics) -> list[str]:
        with mpl.rc_context({"svg.fonttype": "none"}):
            draw(statistics, "Loader of X", tmp_path / "picture.svg")
        return [
            "".join(one.itertext()).strip()
            for one in ET.parse(tmp_path / "picture.svg").iter("{http://www.w3.org/2000/svg}text")
        ]

    return texts


def test_a_loader_draws_itself_at_any_time(tmp_path: Path) -> None:
    with Loader.from_dataset(list(range(40)), 4, shuffle=True, num_workers=2, method="thread") as loader:
        loader.plot(tmp_path / "before.png")
        for _ in range(2):
            list(loader)
        loader.plot(str(tmp_path / "in.png"))
    loader.plot(tmp_path / "after.png")
    with Loader.from_dataset(list(range(40)), 4, shuffle=True) as loader:
        list(loader)
        loader.plot(tmp_path / "inline.png")
    for name in ("before", "in", "after", "inline"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_shares_are_those_of_the_statistics(texts_of: Any) -> None:
    """Seen to fail: waits at epoch boundaries counted twice; the workers' idle time that of one worker."""
    mapper = NodeStatistics(
        "ParallelMapper", consumer_wait_s=1.5, ready_mean=3.0, depth=8, workers=WorkerStatistics("process", workers=2)
    )
    statistics = LoaderStatistics(
        nodes=(NodeStatistics("Sampler"), mapper),
        batches=10,
        samples=12_340,
        elapsed_s=10.0,
        first_wait_s=1.0,
        waits=Durations(10, 3.0, 0.1, 0.2, 1.0),
        epoch_start_waits=Durations(2, 1.0, 0.5, 0.5, 0.6),
        steps=Durations(12, 5.0, 0.4, 0.5, 0.6),
        load=Durations(100, 6.0, 0.06, 0.1, 0.2),
        collate=Durations(10, 1.0, 0.1, 0.1, 0.1),
    )
    texts = texts_of(statistics)
    assert "1,234 samples/s, stall 44%" in texts
    shares = [text for text in texts if "%" in text and ":" in text]
    assert shares == [
        "training steps: 5 s, 50%",
        "waits: 3 s, 30%",
        "waits at epoch boundaries: 1 s, 10%",
        "first wait: 1 s, 10%",
        "load: 6 s, 60%",
        "collate: 1 s, 10%",
        "workers idle: 3 s, 30%",
    ]
    assert "ParallelMapper" in texts
    assert "Sampler" not in texts


def test_statistics_of_nothing_are_drawn(texts_of: Any) -> None:
    assert "nothing is read ahead" in texts_of(LoaderStatistics())
