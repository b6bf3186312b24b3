"""A shard that fails for a while is read on as if nothing had happened; one that keeps failing is named, with the
record."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._streams import retrying
from penstock._streams.retrying import iter_with_retries

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDS = list(range(1000, 1012))
DOWN = "the disk is gone"


class Flaky:
    """An ``open`` that raises: each time after the next of ``faults`` records; never, if that is None; if it is -1, it
    does not even open."""

    def __init__(self, *faults: int | None, error: type[Exception] = ConnectionResetError) -> None:
        self.faults = iter(faults)
        self.error = error
        self.starts: list[int] = []
        self.open = 0

    def __call__(self, shard: Any, start: int = 0) -> Iterator[int]:
        assert shard == "a.tar"
        self.starts.append(start)
        good = next(self.faults, None)
        if good == -1:
            raise self.error(DOWN)
        return self._records(start, good)

    def _records(self, start: int, good: int | None) -> Iterator[int]:
        self.open += 1
        try:
            for given, record in enumerate(RECORDS[start:]):
                if given == good:
                    raise self.error(DOWN)
                yield record
        finally:
            self.open -= 1


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, in seconds; none of them is waited for."""
    made: list[float] = []
    monkeypatch.setattr(retrying.time, "sleep", made.append)
    return made


def read(open: Any, **words: Any) -> Iterator[Any]:
    return iter_with_retries(open, "a.tar", "tar file a.tar", **words)


def outcome(records: Iterator[Any]) -> tuple[list[Any], OSError | None]:
    """The records, and the error that ended them."""
    found: list[Any] = []
    try:
        found.extend(records)
    except OSError as exc:
        return found, exc
    return found, None


@settings(deadline=None)
@given(st.lists(st.integers(-1, 13), max_size=8), st.integers(0, 12), st.booleans())
def test_whatever_fails_every_record_comes_once_or_the_error(faults: list[int], start: int, seeks: bool) -> None:
    """Seen to fail: reading on from one record later, from the first, and from the number of records since the last
    error."""
    flaky = Flaky(*faults)
    found, error = outcome(read(flaky, start=start, seeks=seeks))
    if error is None:
        assert found == RECORDS[start:]
    else:
        assert found == RECORDS[start : start + len(found)]
        assert f"record {start + len(found)}" in error.__notes__[-1]
        assert error.__notes__[-1].endswith("tried 4 times")
    assert flaky.open == 0
    if not seeks:
        assert set(flaky.starts) == {0}


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_record(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Seen to fail: retries counted over the whole shard."""
    assert list(read(Flaky(2, 2, 1, 3, -1, 3), pause_s=0.25)) == RECORDS  # the fourth attempt comes one record further
    assert pauses == [0.25, 0.5, 1.0, 0.25, 0.5, 1.0]
    assert (
        "ConnectionResetError: the disk is gone. Reopening tar file a.tar at record 2 in 0.25 s (1 of 3)"
        in caplog.messages
    )
    pauses.clear()
    assert list(read(Flaky(*[-1] * 10), retries=10)) == RECORDS
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]


class HTTPError(Exception):
    """Of the name of one that passes, and from elsewhere."""


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, EOFError, HTTPError],
)
def test_what_does_not_pass_is_raised_at_once(error: type[Exception], pauses: list[float]) -> None:
    """Seen to fail: a missing shard that was looked for four times."""
    with pytest.raises(error) as caught:
        list(read(Flaky(-1, error=error)))
    assert caught.value.__notes__ == ["while opening tar file a.tar, to continue at record 0"]
    with pytest.raises(error) as caught:
        list(read(Flaky(4, error=error)))
    assert caught.value.__notes__ == ["in record 4 of tar file a.tar"]
    assert pauses == []


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("aiohttp", "ClientPayloadError"),
        ("aiohttp", "ServerDisconnectedError"),
        ("botocore.exceptions", "ConnectionClosedError"),
        ("botocore.exceptions", "EndpointConnectionError"),
        ("http.client", "IncompleteRead"),
        ("http.client", "RemoteDisconnected"),
        ("httpx2", "ReadError"),
        ("requests", "ConnectionError"),
        ("urllib3.exceptions", "ProtocolError"),
    ],
)
def test_errors_of_a_network_pass_though_they_are_no_oserrors(module: str, error: str) -> None:
    """Seen to fail: only an OSError retried. An answer of S3 that breaks off raises the first of these."""
    kind = getattr(pytest.importorskip(module), error)
    words = {"endpoint_url": "http://127.0.0.1"} if module.startswith("botocore") else {}
    raised = [kind(**words) if words else kind(b"")]

    def open(_: str) -> Iterator[int]:
        yield from RECORDS[:5]
        if raised:
            raise raised.pop()
        yield from RECORDS[5:]

    assert list(read(open)) == RECORDS
    assert raised == []


def test_a_shard_that_has_become_shorter_is_not_a_shard_that_ends(pauses: list[float]) -> None:
    """Seen to fail: an end before the record at which reading failed, taken for the end of the shard."""

    def truncated(_: str) -> Iterator[int]:
        yield from RECORDS[:3]
        if not pauses:
            yield from RECORDS[3:5]
            raise OSError(DOWN)

    with pytest.raises(
        OSError,
        match="tar file a.tar ends after 3 records, but should have at least 5: it was cut short, or has changed",
    ):
        list(read(truncated))
    with pytest.raises(OSError, match="ends after 3 records, but should have at least 4"):
        list(read(truncated, start=4))
    assert list(read(truncated, start=3)) == []


def test_a_shard_that_was_short_for_a_moment_is_read_on() -> None:
    lengths = iter([12, 3, 12])

    def open(_: str) -> Iterator[int]:
        length = next(lengths)
        for number, record in enumerate(RECORDS[:length]):
            if length == 12 and number == 5 and not failed:
                failed.append(True)
                raise OSError(DOWN)
            yield record

    failed: list[bool] = []
    assert list(read(open)) == RECORDS


class Opened:
    """What may be opened: it is iterated by an object of its own, and both have to be closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def __iter__(self) -> Iterator[int]:
        try:
            yield from RECORDS
        finally:
            self.closed.append("iterator")

    def close(self) -> None:
        self.closed.append("opened")
        raise OSError("already gone")  # says nothing about the records


def test_what_was_opened_is_closed_in_the_middle_at_the_end_and_never_before_it_was_opened() -> None:
    """Seen to fail: only what was opened closed, and only at the end of the shard."""
    for taken in (0, 1, 5, 12, 13):
        opened = Opened()
        records = read(lambda _, opened=opened: opened)
        assert len(list(itertools.islice(records, taken))) == min(taken, 12)
        assert opened.closed == (["iterator", "opened"] if taken == 13 else [])
        records.close()
        assert opened.closed == (["iterator", "opened"] if taken else [])


def test_what_failed_is_closed_before_it_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the pause made before closing, so that a connection that is of no use is kept for its length."""
    flaky, seen = Flaky(3, 3), []
    monkeypatch.setattr(retrying.time, "sleep", lambda _: seen.append(flaky.open))
    assert list(read(flaky)) == RECORDS
    assert seen == [0, 0]
