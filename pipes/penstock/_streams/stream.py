"""Stream: an ``IterableDataset``, or shards whose lengths are unknown or whose records are filtered, split or joined
during reading. Endless, cut into epochs of a fixed size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Unpack, cast, final

import numpy as np
from torch.utils.data import IterableDataset

from penstock._arguments import shortened, whole_number
from penstock._fetch.error_policy import mark_of_stream
from penstock._random.growth import GrowingDeal, GrowingLanes, Growth
from penstock._random.lane_order import Deal, InterleavedOrder
from penstock._random.orders import SequentialOrder, ShuffledOrder
from penstock._random.shard_order import usual_lanes
from penstock._streams.bookmarks import Bookmarks, default_folder
from penstock._streams.forward_reader import Unreadable
from penstock._streams.lanes import Lanes
from penstock._streams.open_shards import has_start
from penstock._streams.retrying import iter_with_retries
from penstock._streams.schedule import schedule_of
from penstock._streams.shard_keys import ShardKeys
from penstock._streams.sharded import FileOptions, FormatOptions, Sharded, StreamOptions
from penstock._streams.shards import Shards
from penstock._streams.share_reader import ItemSeeding
from penstock._streams.step_identity import code_hash, step_settings, step_values
from penstock._streams.steps import ShardRun
from penstock._streams.worker_shares import WorkerShares, shares_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterator, Sequence

    import numpy.typing as npt

    from penstock._random.order import Order
    from penstock._random.orders import PlainOrder
    from penstock._streams.schedule import Schedule
    from penstock._streams.steps import Step
    from penstock._workers.lifetime import Closing


@final
class Stream(Sharded):
    """An endless stream over an ``IterableDataset``, or over shards whose records are filtered, split or joined on the
    way (``steps``), or whose number is unknown.

    Pass it to `Loader.from_dataset` or `Mix`.

    **An IterableDataset**, ``Stream(dataset, lanes=…, epoch_size=…)``, must split itself by
    ``torch.utils.data.get_worker_info``. Its shards are what ``lanes`` workers of a `DataLoader` would yield: in pass
    p, lane k reads worker ``(k + p) mod lanes``, from a fresh copy of the dataset that was told the pass by its
    ``set_epoch(p)``, if it has one. So the items of the first pass, until the first worker has no more, are those of
    ``DataLoader(dataset, num_workers=lanes, batch_size=None)``, with any number of real workers and ranks. Each item is
    read with the global generators seeded by (seed, pass, worker, number). If the dataset, or its iterator, has
    ``state_dict`` and ``load_state_dict``, a resume need not read the pass again up to its position: in the folder
    ``bookmarks``, such a state is kept together with checksums of the items that came next, and used only if it leads
    to them. With ``steps``, which hold records, states are not used.

    Each of the ``lanes`` reads whole shards, one after another, pass after pass, and the lanes yield items in turn; see
    `InterleavedOrder`. Every record appears once per pass. The boundary between two passes depends on the lengths, so
    an epoch is a fixed number of items and continues where the previous epoch stopped. On resume, each lane rereads its
    current shard up to its position. Bookmarks record how many outputs earlier shards had, so that those are skipped;
    without bookmarks they are read as well. The sequence is the same with any number of workers and ranks, and after
    any resume.

    Each open shard is used by one thread at a time, so what ``open`` returns need not be thread-safe. A process has one
    shard per lane open, and with a `Shuffle` the next one.

    Args:
        shards: See `Shards`; or an ``IterableDataset``, without ``open``.
        open: See `Shards`; what it returns is iterated over.
        epoch_size: Items in an epoch, over all ranks, from 1 to 2**56.
        steps: Functions from an iterator to an iterator, applied to the records of a shard one after another: `Filter`,
            `Shuffle`, `Pack`, or your own generator functions. They must be deterministic. The iterator ends at the end
            of the shard.
        lanes: At most the number of shards; the default is that of `ShardOrder`, shuffled or not. For a large job
            choose a multiple of the number of ranks, and at least as many lanes per rank as it has workers, to keep
            them all busy. Required for an ``IterableDataset``: the number of workers that it sees, at most the number
            of its own shards.
        most_lanes: See `Shards`.
        name: See `Shards`.
        settings: JSON that must match when a state is loaded, in addition to the steps.
        transform: See `Shards`. It comes after the steps.
        bookmarks: A folder that records how many outputs each shard had; True: a folder in the user's cache, unless the
            shards are numbers, which do not identify their contents; False: none. For an ``IterableDataset``, only a
            folder lasts longer than the stream: it keeps the lengths of the shares, and states of the dataset. Without
            one, a resume reads all passes again. Ranks on several machines, and runs that are resumed elsewhere, need a
            shared folder, next to the checkpoints. Bookmarks affect only how long a resume takes.
        retries: How many times in a row to reopen a shard after an ``OSError``, with growing pauses.
        on_error: ``"skip"`` skips records that cannot be read, and the rest of a shard from its first error on (all of
            it, if it is missing), with a warning.
        grow: A state that was saved when there were fewer shards loads, if they were the first of these. Each lane
            reads its share of the pass that it has begun, and goes on with all shards, whose passes are counted from 0
            again. Requires ``lanes``, and a list of shards.
        **files: ``storage_options``, ``cache_dir``, ``max_cache_size``, ``ahead``: see `Shards`.

    Raises:
        ValueError: An argument is out of bounds. On reading: the steps yield nothing.
        TypeError: ``shards`` is a single path; ``open`` or a step is not callable; or an argument is unknown, or one of
            `Shards`.
        GraphError: An ``IterableDataset`` is known to split itself by rank. On reading: it cannot be copied, or does
            not split itself by worker.
        StateMismatch: On reading: the number of outputs of a shard has changed.
    """

    __module__ = "penstock"

    refused: ClassVar = {
        "counts": (
            "With an epoch_size= the records are not counted. Drop counts=; or count them, as Shards: an epoch is then "
            "all records, without epoch_size= and steps=."
        ),
        "window": "It needs counts=. Without them, shuffle within the shards: steps=[penstock.Shuffle(…)].",
    }

    def __init__(
        self,
        shards: Sequence[Any] | int | IterableDataset[Any],
        open: Callable[..., Any] | None = None,
        *,
        epoch_size: int,
        steps: Sequence[Step] = (),
        lanes: int | None = None,
        most_lanes: int | None = None,
        name: str = "shard",
        settings: dict[str, Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        bookmarks: str | os.PathLike[str] | bool = True,
        retries: int = 3,
        on_error: Literal["raise", "skip"] = "raise",
        grow: bool = False,
        **files: Unpack[FileOptions],
    ) -> None:
        self._shares: WorkerShares | None = None
        if open is None or isinstance(shards, IterableDataset):
            self._shares = shares = shares_of(
                shards, lanes, bookmarks, settings, {"open": open, "most_lanes": most_lanes, **files}
            )
            shards, open, settings = shares.lanes, shares.run, {"dataset": shares.name, **(settings or {})}
        super().__init__(cast("Any", shards), open, name, settings, transform, files)
        if callable(steps):
            raise TypeError(f"steps={steps!r:.80} is a single step, but must be a list of steps: steps=[…].")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r} must be 'raise' or 'skip'.")
        self._steps = list(steps)
        self._bookmarks = bookmarks
        self._retries = retries
        self._skips = on_error == "skip"
        if self._shares is None or self._steps or transform is not None:
            self.__getitems__ = None  # type: ignore[method-assign,assignment]
        self._seeks = has_start(self._opener)
        self._keys = ShardKeys(self.shards, getattr(self._opener, "by_fsspec", False))
        self._deal: Deal | GrowingDeal = Deal(
            len(self.shards), usual_lanes(len(self.shards), most_lanes) if lanes is None else lanes
        )
        if grow and self._shares is not None:
            raise ValueError(
                f"grow=True is for a list of shards, but {self._shares.name} is read as it is. Leave it out, or pass "
                f"shards and open."
            )
        self.grows = self._check_grow(grow, lanes)
        self._taken_by: object = None
        self._told: dict[str, Any] | None = None  # by the first loader
        self._growth = Growth(len(self.shards), "shards", self._said) if grow else None
        self.forward_lanes = self._deal.lanes  # tells the loader to give each lane to one worker
        self._length = len(InterleavedOrder(self._deal.lanes, epoch_size))
        # The shard that an index refers to depends on the order, so there is only one order, and nothing can be read
        # before it is set.
        self._ordered = False
        self._code = (
            # what bookmarks are bound to; computed once, so that it is the same in all workers, whatever the steps hold
            # by then
            ""
        )
        self._read_by: dict[str, Lanes] = {}  # one entry, or none before the first item is read
        self._schedule: Schedule | None = None

    @classmethod
    def of(
        cls,
        dataset: Any,
        piece: int,
        *,
        epoch_size: int,
        pieces_seed: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> Stream:
        """Cut a map-style dataset into shards, for ``steps`` that filter, split or join its samples.

        Args:
            dataset: Has ``__len__`` and ``__getitem__``, or ``__getitems__``.
            piece: Samples per shard. Steps end at the end of a shard, so it should be much larger than what they hold:
                a `Shuffle` window, a pack.
            epoch_size: Items in an epoch, over all ranks.
            pieces_seed: Shuffle the dataset with this seed before cutting, the same way in every pass. None: adjacent
                samples form a shard.
            **options: ``steps``, ``lanes``, ``transform``, ``bookmarks``, ``retries``, ``on_error``: as above.

        Raises:
            ValueError: An argument is out of bounds.
        """
        length = len(dataset)
        order = SequentialOrder(length) if pieces_seed is None else ShuffledOrder(length, pieces_seed)
        open = PieceOpener(dataset, whole_number("piece", piece, 1), order)
        settings = {**order.settings(), "piece": piece}
        return cls(-(-length // piece), open, epoch_size=epoch_size, name="piece", settings=settings, **options)

    def details(self) -> dict[str, Any]:
        what = {"shards": len(self.shards)} if self._shares is None else {"dataset": self._shares.name}
        return {**what, "epoch_size": self._length, "lanes": self.forward_lanes}

    @property
    def sets_worker_info(self) -> bool:
        """See `DatasetLike`."""
        return self._shares is not None

    def seed_items(self, seed_global_rngs: bool | Literal["always"], worker_init_fn: Any = None) -> None:
        """See `DatasetLike`."""
        assert self._shares is not None
        told = {"seed_global_rngs": seed_global_rngs, "worker_init_fn": worker_init_fn}
        for name, value in (self._told or told).items():
            if value != told[name]:
                raise ValueError(
                    f"{name}={told[name]!r:.80}: this Stream is already used by a loader with {name}={value!r:.80}. "
                    f"Create a separate Stream for another loader."
                )
        self._told = told
        self._shares.seeding, self._shares.init = ItemSeeding(seed_global_rngs), worker_init_fn

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: int) -> Any:
        """Item ``item`` of the stream, counted from the beginning of training."""
        if item < 0:
            raise IndexError(
                f"index {item}: a stream has no last item to count back from. Only Shards accept negative indices."
            )
        if not self._ordered:
            raise TypeError(
                f"this stream has no order yet. A Stream is read by Loader.from_dataset(stream) or as a source of a "
                f"Mix: anything else that requests samples by index, such as a Subset, a DataLoader or another order=, "
                f"would return the first {self._length} items again in every epoch. Use steps= to select records, or "
                f"count the shards."
            )
        lanes = self._read_by.get("lanes")
        if lanes is None:  # threads that arrive first together all use the same object
            lanes = self._read_by.setdefault(
                "lanes", Lanes(self._deal, self._run, self._known(), skips=self._skips, label=self._label)
            )
        try:
            record = lanes.read(item)
        except Exception as exc:
            mark_of_stream(exc)
            raise
        return self._transformed(record)

    def __getitems__(self, items: Sequence[int]) -> list[Any]:
        """Several items of an ``IterableDataset``, which cost less together. None with steps or a transform, which may
        draw, and for shards.
        """
        assert self._shares is not None
        return self._shares.seeding.several(lambda: [self[item] for item in items])

    def order(self, *, shuffle: bool, seed: int) -> PlainOrder:
        """The order of the items; see `DatasetLike`.

        A stream can be read in only one order, because it determines what an index refers to.
        """
        if shuffle and self._shares is not None:
            raise ValueError(
                f"shuffle=True cannot shuffle {self._shares.name}, which is read from its beginning. Leave it out, and "
                f"shuffle in the dataset (by set_epoch), or with steps=[penstock.Shuffle(…)]."
            )
        said = {"steps": step_settings(self._steps), "shuffle": shuffle, "seed": seed}
        if self._steps:
            said["held"] = shortened(step_values(self._steps))
        if self._settings is not None:
            said["data"] = self._settings
        take = functools.partial(self._take, shuffle, seed, object())
        if self._growth is not None:
            return GrowingLanes(self.forward_lanes, self._length, said, take, self._growth, self._dealt)
        note = None if self._shares is None else functools.partial(self._shares.marks, seed)
        return InterleavedOrder(self.forward_lanes, self._length, {"shards": len(self.shards), **said}, take, note)

    def _take(self, shuffle: bool, seed: int, by: object) -> None:
        if self._growth is not None and by is not (self._taken_by or by):
            raise ValueError(
                "this Stream with grow=True is already used by a loader, whose state says which shards it reads. "
                "Create a separate Stream for another loader; they share their bookmarks."
            )
        self._taken_by = by
        if not self._ordered:
            self._deal = Deal(self._deal.shards, self._deal.lanes, shuffle=shuffle, seed=seed)
            self._ordered = True
            self._dealt()
            # A named shard is bound to its file by its key; for a numbered shard, `open` must be the same.
            self._code = code_hash(self._steps if self._is_numbered else [*self._steps, inspect.unwrap(self._opener)])
        elif (shuffle, seed) != (self._deal.shuffle, self._deal.seed):
            raise ValueError(
                f"shuffle={shuffle}, seed={seed}: this Stream is already used by a loader with "
                f"shuffle={self._deal.shuffle}, seed={self._deal.seed}, and both determine which record an index "
                f"refers to. Create a separate Stream for another loader; they share their bookmarks."
            )

    def _dealt(self) -> None:
        """Read by the deal as it is now."""
        if self._growth is not None:
            self._deal = GrowingDeal(
                self._growth.eras, self._deal.lanes, shuffle=self._deal.shuffle, seed=self._deal.seed
            )
        stale: list[Any] = [*self._read_by.values(), self._schedule]
        self._schedule = (
            None if self._shares is not None else schedule_of(self.shards, self._deal.opens, self._deal.lanes)
        )
        self._read_by = {}  # after the deal, because threads may be reading, and the next one takes what it finds
        for one in filter(None, stale):
            one.close()

    def close(self) -> None:
        for lanes in self._read_by.values():
            lanes.close()
        if self._shares is not None:
            self._shares.copies.forget()
        if self._schedule is not None:
            self._schedule.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read_by": {}}

    def _run(self, shard: int, pass_: int, closing: Closing) -> ShardRun:
        if self._shares is not None:
            return self._shares.run(shard, pass_, self._deal.seed, closing, self._steps, self._retries)
        if self._schedule is not None:
            self._schedule.opening(pass_, shard)
        # The version that this process saw first: formats read no other, if the store can be asked for a version.
        seen = self._keys.stamp(shard)
        open = (
            functools.partial(self._opener, expected=seen)
            if self._keys.by_fsspec and seen is not None
            else self._opener
        )
        records = iter_with_retries(
            open, self.shards[shard], self._label(shard), retries=self._retries, seeks=self._seeks, closing=closing
        )
        readable = _readable(records, self._skips, functools.partial(self._keys.check, shard))
        return ShardRun(readable, self._steps, seed=self._deal.seed, pass_=pass_, shard=shard, given=self.shards[shard])

    def _label(self, shard: int) -> str:
        return f"{self._name} {self.shards[shard]}" if self._shares is None else self._shares.label(shard)

    @property
    def _is_numbered(self) -> bool:
        """Every dataset has a shard 3, so bookmarks of numbered shards are kept only in a folder given by the user."""
        return isinstance(self.shards[0], int)

    def _known(self) -> Bookmarks:
        if self._bookmarks is True:
            folder: Any = (
                default_folder() if not self._is_numbered else None if self._shares is None else self._shares.folder
            )
        else:
            folder = None if self._bookmarks is False else self._bookmarks
        binding = {"steps": self._code, "name": self._name, "data": self._settings}
        return Bookmarks(folder, binding, self._keys, self._deal.seed, skips=self._skips)


def _readable(records: Generator[Any], skips: bool, check: Callable[[], None]) -> Iterator[Any]:
    """The records of one version of the file, which is checked before the first record and after the last.

    Otherwise a file that is replaced during reading would yield some old and some new records, and their number would
    become a bookmark of the new file.
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


@final
class PieceOpener:
    """Opens a piece of a map-style dataset: ``piece`` consecutive samples of an order."""

    def __init__(self, dataset: Any, piece: int, order: Order) -> None:
        self._dataset = dataset
        self._piece = piece
        self._order = order

    def __call__(self, shard: int) -> Iterator[Any]:
        """The samples of a piece."""
        places = np.arange(shard * self._piece, min((shard + 1) * self._piece, len(self._order)))
        indices: list[int] = self._order.indices(0, places).tolist()
        many = getattr(self._dataset, "__getitems__", None)
        if not callable(many):
            yield from map(self._dataset.__getitem__, indices)
            return
        for begin in range(0, len(indices), _AT_ONCE):
            yield from many(indices[begin : begin + _AT_ONCE])


_AT_ONCE: Final = 64
"""Samples requested together from a dataset that can load many at once."""


def over(
    shards: Sequence[Any] | int,
    open: Callable[..., Any],
    counts: npt.ArrayLike | None,
    options: FormatOptions,
    **more: Any,
) -> Shards | Stream:
    """What a format returns: a `Stream` with an ``epoch_size``, otherwise `Shards`.

    ``more``: arguments of the format's own.
    """
    given: dict[str, Any] = {**more, **options}
    if given.pop("epoch_size", None) is None:
        return Shards(shards, open, counts=counts, **given)
    if counts is not None:
        given["counts"] = counts
    return Stream(shards, open, epoch_size=options["epoch_size"], **given)  # type: ignore[arg-type]
