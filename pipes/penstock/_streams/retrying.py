"""Reads a shard forward from a place that may fail for a while, such as a network or a disk under load."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from penstock._fetch.error_policy import annotate, describe
from penstock._streams.run_cursor import running

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from penstock._workers.lifetime import Closing

_logger = logging.getLogger("penstock")

FINAL: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""What does not pass by waiting."""

NETWORK: Final = frozenset(
    {
        ("aiohttp", "ClientError"),
        ("botocore", "ConnectionError"),
        ("botocore", "HTTPClientError"),
        ("botocore", "IncompleteReadError"),
        ("http", "HTTPException"),
        ("httpx", "TransportError"),
        ("httpx2", "TransportError"),
        ("urllib3", "HTTPError"),
    }
)
"""What the libraries under fsspec raise when an answer breaks off: package and class. These are no subclasses of `OSError`, though they should be."""

LONGEST_PAUSE_S: Final = 60.0


def iter_with_retries(
    open: Callable[..., Iterable[Any]],
    shard: Any,
    label: str,
    *,
    retries: int = 3,
    pause_s: float = 0.5,
    start: int = 0,
    seeks: bool = False,
    closing: Closing | None = None,
) -> Generator[Any]:
    """The records of a shard, from one of them on. After an `OSError`, or an error of a network, the shard is opened again, and read up to the same record.

    A missing shard, or one that may not be read, is an error at once. What was opened is closed, whatever happens.

    Args:
        open: Opens the shard. Must return the same records in the same order every time.
        shard: Its argument.
        label: What messages call the shard.
        retries: How often to try again without getting one record further.
        pause_s: Seconds to wait before the first of these; twice as long before each further one, up to `LONGEST_PAUSE_S`.
        start: The number of the first record wanted.
        seeks: Whether to call ``open(shard, start=number)``, so that it begins with the record wanted. Otherwise the records before it are read, and thrown away.
        closing: Ends a pause; the error is raised then.

    Raises:
        OSError: It lasted, or the shard has fewer records than ``start``, or than it had before an error. Whatever is raised has a note that names the shard
            and the record.
    """
    number, tries = start, 0
    while True:
        doing = f"while opening {label}, to read on from record {number}"
        try:
            with contextlib.ExitStack() as stack:
                opened = open(shard, start=number) if seeks else open(shard)
                stack.callback(close, opened, Exception)
                records = iter(opened)
                if records is not opened:
                    stack.callback(close, records, Exception)
                doing = ""
                # Else an end that comes too early, behind an error, would be taken for that of the shard.
                if not seeks and (found := sum(1 for _ in itertools.islice(records, number))) < number:
                    raise OSError(
                        f"{label} ends after {found} records, and should have at least {number}: it was cut short, or has changed."
                    )
                if tries and (run := running()) is not None:
                    run.at.made = None  # the failed attempt and what was thrown away may have drawn from the record's random numbers
                for record in records:
                    yield record
                    number, tries = number + 1, 0
                return
        except Exception as exc:
            tries += 1
            gives_up = not may_pass(exc) or tries > retries
            if not gives_up:
                # What was opened is closed by now: a connection that is of no use is not kept for the length of the pause.
                pause = min(pause_s * 2 ** (tries - 1), LONGEST_PAUSE_S)
                _logger.warning(
                    "%s. Opening %s again at record %d, in %g s (%d of %d)", describe(exc), label, number, pause, tries, retries
                )
                if closing is None:
                    time.sleep(pause)
                else:
                    gives_up = closing.wait(pause)
            if gives_up:
                annotate(exc, (doing or f"in record {number} of {label}") + (f", tried {tries} times" if tries > 1 else ""))
                raise


def may_pass(exc: Exception) -> bool:
    """Whether an error may be one of a disk or a network that comes back."""
    if isinstance(exc, OSError):
        return not isinstance(exc, FINAL)
    return any((kind.__module__.partition(".")[0], kind.__name__) in NETWORK for kind in type(exc).__mro__)


def close(opened: Any, suppress: type[Exception] | None = None) -> None:
    """Call the ``close`` of what was opened, if it has one."""
    if callable(its := getattr(opened, "close", None)):
        with contextlib.suppress(*([suppress] if suppress else [])):
            its()
