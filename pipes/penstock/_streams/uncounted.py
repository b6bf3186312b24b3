"""Shards of unknown lengths, or whose records are filtered, split or joined during reading: an endless stream, cut into epochs of a fixed size."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, Literal, TypedDict, final

from penstock._arguments import shortened
from penstock._fetch.error_policy import mark_of_stream
from penstock._random.lane_order import Deal, InterleavedOrder
from penstock._streams.bookmarks import KnownOutputs, default_folder
from penstock._streams.forward_reader import Unreadable
from penstock._streams.lanes import Lanes
from penstock._streams.open_shards import has_start
from penstock._streams.retrying import iter_with_retries
from penstock._streams.schedule import schedule_of
from penstock._streams.shard_keys import ShardKeys
from penstock._streams.step_identity import code_hash, step_settings, step_values
from penstock._streams.steps import ShardRun

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterator, Sequence

    from penstock._random.orders import PlainOrder
    from penstock._streams.schedule import Schedule
    from penstock._streams.steps import Step
    from penstock._workers.lifetime import Closing


class ShardOptions(TypedDict, total=False):
    """The keyword arguments that formats pass on to `Shards`."""

    transform: Callable[[Any], Any] | None
    epoch_size: int | None
    steps: Sequence[Step]
    bookmarks: str | os.PathLike[str] | bool
    retries: int
    on_error: Literal["raise", "skip"]


@final
class RecordStream:
    """The items of `Shards` without counts. It takes the same arguments; ``options`` has all but ``transform`` and ``epoch_size``.

    Raises:
        ValueError: See `Shards`.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        open: Callable[..., Any],
        epoch_size: int,
        lanes: int,
        name: str,
        settings: dict[str, Any] | None,
        options: ShardOptions,
    ) -> None:
        self._shards = shards
        self._open = open
        self._seeks = has_start(open)
        self._steps = list(options["steps"])
        self._bookmarks = options["bookmarks"]
        self._retries = options["retries"]
        self._skips = options["on_error"] == "skip"
        self._name = name
        self._settings = settings
        self._keys = ShardKeys(shards, getattr(open, "by_fsspec", False))
        self._deal = Deal(len(shards), lanes)
        self._length = len(InterleavedOrder(self._deal.lanes, epoch_size))
        # The shard that an index refers to depends on the order, so there is only one order, and nothing can be read before it is set.
        self._ordered = False
        self._code = (
            ""  # what bookmarks are bound to; computed once, so that it is the same in all workers, whatever the steps hold by then
        )
        self._read_by: dict[str, Lanes] = {}  # one entry, or none before the first item is read
        self._schedule: Schedule | None = None

    @property
    def lanes(self) -> int:
        """How many shards are read in turn."""
        return self._deal.lanes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> Any:
        if item < 0:
            raise IndexError(
                f"index {item}: a stream has no last item to count back from. Only Shards with counts accept negative indices."
            )
        if not self._ordered:
            raise TypeError(
                f"this stream has no order yet. Shards without counts are read by Loader.from_dataset(shards) or as a source of a Mix: anything else that requests "
                f"samples by index, such as a Subset, a DataLoader or another order=, would return the first {self._length} items again in every epoch. Use steps= to select "
                f"records, or count the shards."
            )
        lanes = self._read_by.get("lanes")
        if lanes is None:  # threads that arrive first together all use the same object
            lanes = self._read_by.setdefault("lanes", Lanes(self._deal, self._run, self._known(), skips=self._skips, label=self._label))
        try:
            return lanes.read(item)
        except Exception as exc:
            mark_of_stream(exc)
            raise

    def order(self, *, shuffle: bool, seed: int) -> PlainOrder:
        """See `Shards.order`."""
        said = {"shards": len(self._shards), "steps": step_settings(self._steps), "shuffle": shuffle, "seed": seed}
        if self._steps:
            said["held"] = shortened(step_values(self._steps))
        if self._settings is not None:
            said["data"] = self._settings
        return InterleavedOrder(self.lanes, self._length, said, functools.partial(self._take, shuffle, seed))

    def _take(self, shuffle: bool, seed: int) -> None:
        if not self._ordered:
            self._deal = Deal(self._deal.shards, self._deal.lanes, shuffle=shuffle, seed=seed)
            self._schedule = schedule_of(self._shards, self._deal.opens, self._deal.lanes)
            self._ordered = True
            # A named shard is bound to its file by its key; for a numbered shard, `open` must be the same.
            self._code = code_hash(self._steps if self._is_numbered else [*self._steps, inspect.unwrap(self._open)])
        elif (shuffle, seed) != (self._deal.shuffle, self._deal.seed):
            raise ValueError(
                f"shuffle={shuffle}, seed={seed}: these Shards are already used by a loader with shuffle={self._deal.shuffle}, seed={self._deal.seed}, and both determine which "
                f"record an index refers to. Create separate Shards for another loader; they share their bookmarks."
            )

    def close(self) -> None:
        """See `Shards.close`."""
        for lanes in self._read_by.values():
            lanes.close()
        if self._schedule is not None:
            self._schedule.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read_by": {}}

    def _run(self, shard: int, pass_: int, closing: Closing) -> ShardRun:
        if self._schedule is not None:
            self._schedule.opening(pass_, shard)
        # The version that this process saw first: formats read no other, if the store can be asked for a version.
        seen = self._keys.stamp(shard)
        open = functools.partial(self._open, expected=seen) if self._keys.by_fsspec and seen is not None else self._open
        records = iter_with_retries(
            open, self._shards[shard], self._label(shard), retries=self._retries, seeks=self._seeks, closing=closing
        )
        readable = _readable(records, self._skips, functools.partial(self._keys.check, shard))
        return ShardRun(readable, self._steps, seed=self._deal.seed, pass_=pass_, shard=shard, given=self._shards[shard])

    def _label(self, shard: int) -> str:
        return f"{self._name} {self._shards[shard]}"

    @property
    def _is_numbered(self) -> bool:
        """Every dataset has a shard 3, so bookmarks of numbered shards are kept only in a folder given by the user."""
        return isinstance(self._shards[0], int)

    def _known(self) -> KnownOutputs:
        if self._bookmarks is True:
            folder: Any = None if self._is_numbered else default_folder()
        else:
            folder = None if self._bookmarks is False else self._bookmarks
        binding = {"steps": self._code, "name": self._name, "data": self._settings}
        return KnownOutputs(folder, binding, self._deal.seed, self._keys, skips=self._skips)


def _readable(records: Generator[Any], skips: bool, check: Callable[[], None]) -> Iterator[Any]:
    """The records of one version of the file, which is checked before the first record and after the last.

    Otherwise a file that is replaced during reading would yield some old and some new records, and their number would become a bookmark of the new file.
    """
    check()
    with contextlib.closing(records):  # closed now, not when the traceback of an error releases it
        for record in records:
            if not isinstance(record, Unreadable):
                yield record
            elif not skips:
                check()  # raises if the file has changed, which explains the error
                raise record.error
    check()
