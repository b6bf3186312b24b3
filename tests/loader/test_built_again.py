"""The line of code that builds a loader; what is said of it is in test_nothing_lost_in_silence.py."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from penstock._loader import built_again
from penstock._loader.built_again import FRAMES, place_in_the_code

if TYPE_CHECKING:
    import pytest


def places(count: int) -> list[str]:
    return [place_in_the_code() for _ in range(count)]


def test_a_place_in_the_code_is_a_line_and_its_callers() -> None:
    """Without folders, which may differ between hosts. Seen to fail with whole paths."""
    one = places(2)
    other = places(1)
    assert one[0] == one[1] != other[0]
    assert "/" not in one[0]
    assert "test_built_again.py" in one[0]
    assert len(one[0].split(", ")) == FRAMES


def test_a_place_in_the_code_has_no_frames_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless all code is installed. Seen to fail: threading.py was in it, and installed code had no place."""
    found: list[str] = []
    for is_library_file in (built_again.is_library_file, lambda _: True):
        monkeypatch.setattr(built_again, "is_library_file", is_library_file)
        thread = threading.Thread(target=lambda: found.append(place_in_the_code()))
        thread.start()
        thread.join()
    assert [place.count(", ") for place in found] == [0, FRAMES - 1]
    assert all(place.startswith("test_built_again.py") for place in found)
