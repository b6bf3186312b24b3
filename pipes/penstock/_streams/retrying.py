"""Reads a shard forward from a source that may fail temporarily, such as a network or a busy disk."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from penstock._errors import is_own_error
from penstock._fetch.error_policy import annotate, describe
from penstock._fetch.reused import OwnMemory
from penstock._files.transfer import may_be_temporary
from penstock._streams.run_cursor import running

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from penstock._workers.lifetime import Closing

_logger = logging.getLogger("penstock")

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
    """The records of a shard, from one of them on.

    After an `OSError`, or a network error, the shard is reopened and read up to the same record.

    A shard that is missing or not readable for lack of permission is an error at once. Whatever was opened is always
    closed.

    Args:
        open: Opens the shard. Must return the same records in the same order every time.
        shard: Its argument.
        label: What messages call the shard.
        retries: How many times to retry without getting one record further.
        pause_s: Seconds to wait before the first retry; doubled before each further one, up to `LONGEST_PAUSE_S`.
        start: The number of the first record wanted.
        seeks: Whether to call ``open(shard, start=number)``, so that it begins with the record wanted. Otherwise the
            records before it are read and discarded.
        closing: Interrupts a pause; the error is then raised.

    Raises:
        OSError: The failure persists, or the shard has fewer records than ``start``, or than it had before an error.
            Every error has a note that names the shard and the record.
    """
    number, tries = start, 0
    while True:
        doing = f"while opening {label}, to continue at record {number}"
        try:
            with contextlib.ExitStack() as stack:
                opened = open(shard, start=number) if seeks else open(shard)
                stack.callback(close, opened, Exception)
                records = iter(opened)
                if records is not opened:
                    stack.callback(close, records, Exception)
                doing = ""
                # Without this check, an early end after an error would be taken for the end of the shard.
                if not seeks and (found := sum(1 for _ in itertools.islice(records, number))) < number:
                    raise OSError(
                        f"{label} ends after {found} records, but should have at least {number}: it was cut short, or "
                        f"has changed."
                    )
                if tries and (run := running()) is not None:
                    # the failed attempt and the discarded records may have drawn from the record's random numbers
                    run.at.made = None
                own = OwnMemory()
                for record in records:
                    yield own(record) if own.watches else record
                    number, tries = number + 1, 0
                return
        except Exception as exc:
            tries += 1
            # a handler may raise a TimeoutError
            gives_up = not may_be_temporary(exc) or tries > retries or not is_own_error(exc)
            if not gives_up:
                # Everything opened is closed by now, so that no useless connection stays open during the pause.
                pause = min(pause_s * 2 ** (tries - 1), LONGEST_PAUSE_S)
                _logger.warning(
                    "%s. Reopening %s at record %d in %g s (%d of %d)",
                    describe(exc),
                    label,
                    number,
                    pause,
                    tries,
                    retries,
                )
                if closing is None:
                    time.sleep(pause)
                else:
                    gives_up = closing.wait(pause)
            if gives_up:
                annotate(
                    exc, (doing or f"in record {number} of {label}") + (f", tried {tries} times" if tries > 1 else "")
                )
                raise


def close(opened: Any, suppress: type[Exception] | None = None) -> None:
    """Call the ``close`` method of what was opened, if it has one."""
    if callable(its := getattr(opened, "close", None)):
        with contextlib.suppress(*([suppress] if suppress else [])):
            its()
