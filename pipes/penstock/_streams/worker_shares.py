"""WorkerShares: an ``IterableDataset`` that splits itself by worker, as so many workers of a `DataLoader` would read
it.

``Stream(dataset, lanes=…)`` and ``Loader.from_dataset(dataset, lanes=…)`` read it in this form. A *share* is what one
worker yields in one pass: a pure function of (pass, worker, seed), because it is read from a fresh copy that was told
the pass by ``set_epoch``. Who reads it, and where, is of no account.

What must be known of the user's dataset is observed: whether it asks which worker it is, whether it draws, whether it
begins alike twice. What only the loader as a whole can know, its processes write into a common folder.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, final

from torch.utils.data import IterableDataset, IterDataPipe

from penstock._arguments import whole_number
from penstock._errors import GraphError, is_own_error
from penstock._fetch.dataset_copies import DatasetCopies, plain
from penstock._fetch.dataset_facts import DatasetFacts, length
from penstock._fetch.encoding import decoded, encoded
from penstock._fetch.error_policy import annotate
from penstock._fetch.first_items import MOST, FirstItems
from penstock._memory.modes import neutral_modes
from penstock._random.lane_order import MOST_LANES
from penstock._random.sample_rng import epoch_word
from penstock._random.splitmix import GAMMA, mixed
from penstock._streams.retrying import close, iter_with_retries
from penstock._streams.run_folder import RunFolder
from penstock._streams.share_reader import ItemSeeding, Share, ShareReader
from penstock._streams.share_states import LARGEST, Mark, ShareStates, checksum_of_item
from penstock._streams.steps import ShardRun

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from penstock._streams.steps import Step
    from penstock._workers.lifetime import Closing

_logger = logging.getLogger("penstock")

SPLIT: Final = (
    "    info = torch.utils.data.get_worker_info()\n    for item in itertools.islice(items, info.id, None, "
    "info.num_workers):"
)
"""What a dataset lacks that does not split itself."""
CHECKED: Final = 4
"""Items by whose checksums a share, or a state in it, is recognised."""
LARGE_COPY: Final = 25 * 10**6
"""Bytes of the largest pickle of a dataset for each lane that nothing is said about; lists of numbers take four to nine
times as much.
"""
LEAST_S: Final = 1.0
"""Seconds between two marks of a share, at least."""
SHARE_OF_TIME: Final = 0.01
"""The part of the time of a share that its marks may take."""


@final
class WorkerShares:
    """What the processes of one loader know of ``dataset``.

    Args:
        dataset: An ``IterableDataset``, the same on every rank.
        lanes: Workers that it sees, from 1 to 65536.
        endless: Passes follow each other in one stream, so that every worker needs an item in each.
        settings: JSON that identifies the data.
        folder: Where its states are kept from run to run; None: not longer than the loader.
        seed_global_rngs: Whether each item is read with the global generators seeded; see `ItemSeeding`.
        worker_init_fn: Called for each copy of the dataset, with the number of the worker that it is read as.

    Raises:
        TypeError: ``dataset`` is no ``IterableDataset``.
        ValueError: ``lanes`` is out of bounds.
        GraphError: ``dataset`` is known to split itself by rank.
    """

    def __init__(
        self,
        dataset: Any,
        lanes: int,
        *,
        endless: bool,
        settings: Any = None,
        folder: str | None = None,
        seed_global_rngs: bool | Literal["always"] = True,
        worker_init_fn: Callable[[int], Any] | None = None,
    ) -> None:
        facts = DatasetFacts.of(dataset)
        if not isinstance(facts.dataset, IterableDataset):
            raise TypeError(
                f"lanes={lanes!r} reads a torch.utils.data.IterableDataset, as so many workers of a DataLoader would, "
                f"but {facts.name} is none. Leave lanes out."
            )
        if isinstance(facts.dataset, IterDataPipe):
            raise GraphError(
                f"lanes={lanes!r}: {facts.name} is a data pipe, which a DataLoader itself splits among its workers "
                f"(sharding_filter). Leave lanes out, or wrap it in an IterableDataset that splits its items:\n{SPLIT}"
            )
        if facts.splits_itself is not None:
            raise GraphError(
                f"lanes={lanes!r} would give every rank a share of its share: {facts.splits_itself}. Pass the data "
                f"unsplit, the same on every rank; or pass split='own' to Loader.from_dataset, without lanes, and each "
                f"rank reads its own share in the training process."
            )
        self.name = facts.name
        self.lanes = whole_number("lanes", lanes, 1, MOST_LANES + 1)
        self.copies = DatasetCopies(facts.dataset)
        self._endless = endless
        self._binding = {"dataset": self.name, "lanes": self.lanes, "endless": endless, "settings": settings}
        self._run = RunFolder()
        self.folder = folder or (None if self._run.path == os.devnull else self._run.path)
        self.states: ShareStates | None = None
        self.seeding = ItemSeeding(seed_global_rngs)
        self.init = worker_init_fn

    @property
    def dataset(self) -> Any:
        """The dataset itself, of which only copies are read."""
        return self.copies.dataset

    def run(
        self, worker: int, pass_: int, seed: int, closing: Closing, steps: Sequence[Step] = (), retries: int = 3
    ) -> ShardRun:
        """The outputs of ``steps`` over a share."""
        # a step may hold records, which no state of the dataset has
        if self.states is None and self.folder is not None and not steps:
            self.states = ShareStates(self.folder, {**self._binding, "seed": seed, "version": 2})
        self._try(seed)
        if self.copies.are_old() and not callable(getattr(self.dataset, "set_epoch", None)):
            self.warn_once(
                "changed",
                f"{self.name} was changed after its first copy was made, and lanes read copies of what it was then. "
                f"After a change, call loader.refresh(); or change it in set_epoch.",
            )
        records = ShareRecords(self, self.share(pass_, worker, seed), retries, closing)
        run = ShardRun(records, steps, seed=seed, pass_=pass_, shard=worker, given=worker)
        run.differs_by_pass()
        return run

    def share(self, pass_: int, worker: int, seed: int) -> Share:
        """That of a worker in a pass; ``seed`` is that of the order.

        Its own is a number for the pass plus that of the worker, as in an epoch of a `DataLoader`.
        """
        return Share(pass_, worker, self.lanes, (mixed(epoch_word(seed, pass_) + 6 * GAMMA) >> 2) + worker)

    def reader(self, share: Share) -> ShareReader:
        """Reads ``share`` from its beginning."""
        reader = ShareReader(self.copies, share, self.seeding, self.init)
        if self.copies.nbytes > LARGE_COPY:
            self.warn_once(
                "large copies",
                f"each of lanes={self.lanes} reads a copy of {self.name}, of {self.copies.nbytes / 1e6:.0f} MB when "
                f"pickled; Python objects take several times that. Copies share arrays and tensors of more than 64 KB, "
                f"Arrow tables and long strings: hold the data in these, or read it from files in __iter__.",
            )
        return reader

    def label(self, worker: int) -> str:
        """What messages call a worker."""
        return f"worker {worker} of {self.lanes} of {self.name}"

    def marks(self, seed: int, *, again: bool = False) -> tuple[int, ...]:
        """Checksums of the first items of worker 0, to compare with other ranks; empty as long as they are unknown.

        ``again``: of worker 0 begun once more, in this process. See `FirstItems`.
        """
        if again:
            with neutral_modes():
                return self._begun_again(seed)[0]
        found = self._run.read("trial")
        return tuple(json.loads(found)) if found else ()

    def warn_once(self, what: str, text: str) -> None:
        """Log a warning, in one of the loader's processes."""
        if self._run.first(f"said {what}"):
            _logger.warning("%s", text)

    def forget_states(self, why: str, *, share: Share, n: int) -> None:
        """The states of the dataset are of no use."""
        assert self.states is not None
        self.states.used = False
        self.warn_once(
            "states",
            f"the state_dict of {self.name} is not used, because {why} (worker {share.worker}, item {n} of pass "
            f"{share.pass_}). A resumed run reads the data again, exactly. To save that time, let it hold everything "
            f"that decides the next item, such as a shuffle buffer.",
        )

    def begun(self, share: Share, reader: ShareReader, sums: list[str]) -> None:
        """The first items of ``share``, which have these checksums, were read.

        Raises:
            GraphError: The dataset does not split itself.
        """
        if self.lanes > 1 and not reader.asked and not self._is_split_by_init(share, sums):
            never = (
                f"{self.name} never asks for the id of its worker (torch.utils.data.get_worker_info), so each of "
                f"lanes={self.lanes} would yield all of its items"
            )
            if not self.seeding.drew:
                raise GraphError(f"{never}. Split them in its __iter__:\n{SPLIT}\nor pass lanes=1.")
            self.warn_once(
                "never asks", f"{never}, unless it draws with replacement. To split them, in its __iter__:\n{SPLIT}"
            )
        if share.pass_ > 0 or len({*sums}) < 2:
            return
        if share.worker == 0:
            self._compare(sums)
        elif self._run.read("head") == " ".join(sums):
            self.warn_once(
                "equal heads",
                f"workers 0 and {share.worker} of {self.name} begin with the same items. Unless it draws with "
                f"replacement, it asks which worker it is, but does not split by it. In its __iter__:\n{SPLIT}",
            )

    def _is_split_by_init(self, share: Share, sums: list[str]) -> bool:
        """Whether ``worker_init_fn`` seems to have split the dataset, by its argument: with the same seeds, another
        worker begins with other items.
        """
        if self.init is None:
            return False
        # read here, because what another process has noted may come too late
        other = self.reader(share._replace(worker=(share.worker + 1) % self.lanes))
        with neutral_modes():  # the share that is read may have left this thread without gradients
            try:
                return [checksum_of_item(item) for item in islice(other, len(sums))] != sums
            finally:
                other.close()

    def ended(self, share: Share, reader: ShareReader) -> None:
        """``share`` was read to its end.

        Raises:
            GraphError: A stream has a worker without items.
        """
        if self._endless and not reader.n:
            raise GraphError(
                f"{self.label(share.worker)} yields no item in pass {share.pass_}, so its lane would read what another "
                f"one does. Pass lanes= of at most the number of its shards (files); and if it also splits itself by "
                f"rank, take that out, because all ranks share the lanes."
            )
        if (claimed := length(self.dataset)) is not None and share.pass_ == 0 and not self._endless:
            self._run.first(f"items {share.worker}", str(reader.n))
            counts = [self._run.read(f"items {worker}") for worker in range(self.lanes)]
            if all(counts) and (items := sum(map(int, counts))) != claimed:
                self.warn_once(
                    "length",
                    f"{self.name} has a length of {claimed}, but its {self.lanes} workers yielded {items} items. Every "
                    f"item was delivered, but len(loader) is wrong. Make __len__ agree with __iter__, or remove it.",
                )
        if self.copies.changed():
            self.warn_once(
                "changed tensor",
                f"{self.name} changed a tensor of more than 64 KB in place while it was read. All lanes of a process "
                f"share it, so what they yield depends on each other. Copy it in __iter__, before it is changed.",
            )
        if (
            not callable(getattr(reader.data, "set_epoch", None))
            and reader.holder is None
            and plain(reader.data) != reader.attributes
        ):
            self.warn_once(
                "passes alike",
                f"{self.name} changes its own attributes while it is read, perhaps so that its passes differ. Each "
                f"pass reads a fresh copy, so they are all alike. Give it a set_epoch(epoch), which is called before "
                f"each pass.",
            )

    def _try(self, seed: int) -> None:
        """Once per loader, begin worker 0 for comparison: with its real beginning, and with other ranks, most of which
        never read it.
        """
        if self._run.first("trying"):
            try:
                marks, sums = self._begun_again(seed)
            except Exception as exc:
                if not is_own_error(exc):
                    raise
                return  # whoever reads this item will see it
            self._run.first("trial", json.dumps(marks))
            self._compare(sums[:CHECKED])

    def _begun_again(self, seed: int) -> tuple[tuple[int, ...], list[str]]:
        """The marks and checksums of the first items of worker 0."""
        first, sums = FirstItems(), []
        run = ShardRun(self.reader(self.share(0, 0, seed)), (), seed=seed, pass_=0, shard=0, given=0)
        run.differs_by_pass()
        try:
            for item in islice(run, MOST):  # one by one, because it may yield one buffer again and again
                first.add([item], ended=False)
                sums.append(checksum_of_item(item))
        finally:
            run.close()
        first.add([], ended=True)
        return first.marks, sums

    def _compare(self, sums: list[str]) -> None:
        """Worker 0 began with items of these checksums, in any process."""
        if not self._run.first("head", text := " ".join(sums)) and self._run.read("head") not in ("", text):
            self.warn_once(
                "other items",
                f"{self.name} gave other items when worker 0 was begun a second time, so a resumed run will not be the "
                f"same. Seed its draws by an argument or set_epoch, or draw from the global generators (random, "
                f"numpy.random, torch), which are seeded for each item.",
            )


@final
class ShareRecords(Iterable[Any]):
    """The items of a share, read again after an ``OSError``.

    Can `seek` while nothing was read. Takes marks as often as that pays.
    """

    def __init__(self, of: WorkerShares, share: Share, retries: int, closing: Closing) -> None:
        self._of = of
        self._share = share
        self._options: Any = {"retries": retries, "closing": closing, "seeks": True}
        self._items: Iterable[Any] | None = None
        self._reader: ShareReader | None = None
        self._sought: ShareReader | None = None  # stands where reading begins
        self._first: list[str] | None = []  # checksums of the first items, until they are enough
        self._taken: tuple[int, bool, str] | None = None  # a state, as in a `Mark`
        self._sums: list[str] = []  # of the items since
        self._due = time.perf_counter() + LEAST_S

    def seek(self, n: int) -> int:
        """Move as near to item ``n`` as a state of the dataset allows, and not beyond.

        Returns the number of the next item.
        """
        self._sought = self._nearest(n)
        if self._sought is None:
            return 0
        self._first = None
        return self._sought.n

    def __iter__(self) -> Generator[Any]:
        of, share, label = self._of, self._share, self._of.label(self._share.worker)
        start = 0 if self._sought is None else self._sought.n
        items = self._items = iter_with_retries(self._opened, share.worker, label, start=start, **self._options)
        states = of.states
        try:
            for item in items:
                if self._first is not None:
                    self._first.append(checksum_of_item(item))
                    if len(self._first) == CHECKED:
                        self._begun()
                if states is not None and states.used and (self._taken or time.perf_counter() >= self._due):
                    self._mark(states, item)
                yield item
        except ValueError as exc:
            if "read-only" in str(exc):
                annotate(
                    exc,
                    "all lanes of a process share arrays of more than 64 KB: copy one in __iter__, before it is "
                    "changed",
                )
            raise
        self._begun()
        assert self._reader is not None
        of.ended(share, self._reader)

    def _begun(self) -> None:
        sums, self._first = self._first, None
        if sums:
            assert self._reader is not None
            self._of.begun(self._share, self._reader, sums)

    def close(self) -> None:
        """Close what is open."""
        opened = self._items, self._reader, self._sought
        self._reader = self._sought = None
        for one in opened:
            close(one)

    def _opened(self, worker: int, start: int) -> ShareReader:
        sought, self._sought, self._taken = self._sought, None, None
        self._reader = reader = sought or self._nearest(start) or self._of.reader(self._share)
        while reader.n < start:
            next(reader)
        return reader

    def _nearest(self, n: int) -> ShareReader | None:
        states = self._of.states
        mark = next(iter(states.before(self._share.worker, self._share.pass_, n)), None) if states is not None else None
        return None if mark is None else self._at(mark)

    def _at(self, mark: Mark) -> ShareReader | None:
        """A reader that stands at ``mark``; None if its state does not lead to the items that came."""
        for late in (False, True):
            reader = self._of.reader(self._share)
            if reader.goes_to(mark.n, mark.drew, decoded(json.loads(mark.state)), mark.sums, late=late):
                return reader
            reader.close()
        self._of.forget_states("loaded into a copy it did not lead to the same next items", share=self._share, n=mark.n)
        return None

    def _mark(self, states: ShareStates, item: Any) -> None:
        began = time.perf_counter()
        if self._taken is None:
            assert self._reader is not None
            self._sums, self._taken = [], self._state(self._reader)
        else:
            self._sums.append(checksum_of_item(item))
            if len(self._sums) == CHECKED:
                mark, self._taken = Mark(self._share.pass_, *self._taken, self._sums), None
                if len({*self._sums}) < 2:  # equal items prove nothing: a state that is off by one leads to them too
                    return
                if not states.proved:
                    states.proved = True
                    with neutral_modes():  # as a resumed run reads it, whatever this share has left
                        close(self._at(mark))
                if states.used:
                    try:
                        states.add(self._share.worker, mark)
                    except OSError as exc:
                        states.used = False
                        self._of.warn_once(
                            "folder", f"{exc}. No states of the dataset are kept, which costs only time."
                        )
        self._due = max(self._due, began + LEAST_S) + (time.perf_counter() - began) / SHARE_OF_TIME

    def _state(self, reader: ShareReader) -> tuple[int, bool, str] | None:
        try:
            state = reader.state()
            text = json.dumps(encoded(state, "it"))
        except Exception as exc:
            if not is_own_error(exc):
                raise
            self._of.forget_states(f"{type(exc).__name__}: {exc}", share=self._share, n=reader.n)
            return None
        if len(text) > LARGEST:
            self._of.forget_states(
                f"it has {len(text) / 2**20:.0f} MiB as JSON, which is too much to keep", share=self._share, n=reader.n
            )
            return None
        return None if state is None else (reader.n, reader.drew, text)


def shares_of(dataset: Any, lanes: int | None, bookmarks: Any, settings: Any, others: dict[str, Any]) -> WorkerShares:
    """The shares of a `Stream` over ``dataset``, whose ``others`` are arguments for shards only.

    Raises:
        TypeError: An argument is missing, or is none of such a stream.
    """
    name = type(dataset).__name__
    if not isinstance(dataset, IterableDataset):
        raise TypeError(
            f"a Stream is made of shards and a function that opens one, Stream(shards, open, epoch_size=…), or of a "
            f"torch.utils.data.IterableDataset, and {name} is none. To cut a map-style dataset into shards: "
            f"Stream.of(dataset, piece, epoch_size=…)."
        )
    if given := [word for word, value in others.items() if value is not None]:
        raise TypeError(f"{given[0]}= is about shards that penstock opens, but {name} opens its own. Leave it out.")
    if lanes is None:
        raise TypeError(
            f"a Stream over {name} needs lanes=: by how many workers it is to be split, whoever reads them. At most "
            f"the number of its shards (files), and for a large job a multiple of the number of ranks."
        )
    return WorkerShares(
        dataset,
        lanes,
        endless=True,
        settings=settings,
        folder=None if isinstance(bookmarks, bool) else os.path.abspath(bookmarks),
    )
