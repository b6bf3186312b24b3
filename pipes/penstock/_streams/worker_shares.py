"""WorkerShares: an ``IterableDataset`` that splits itself by worker, as so many workers of a `DataLoader` would read it.

``Stream(dataset, lanes=…)`` and ``Loader.from_dataset(dataset, lanes=…)`` read it in this form. A *share* is what one worker yields in one pass: a pure function of
(pass, worker, seed), because it is read from a fresh copy that was told the pass by ``set_epoch``. Who reads it, and where, is of no account.

What must be known of the user's dataset is observed: whether it asks which worker it is, whether it draws, whether it begins alike twice. What only the
loader as a whole can know, its processes write into a common folder.
"""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any, Final, final

from torch.utils.data import IterableDataset

from penstock._arguments import whole_number
from penstock._errors import GraphError
from penstock._fetch.dataset_copies import DatasetCopies
from penstock._fetch.dataset_facts import DatasetFacts
from penstock._fetch.first_items import MOST, FirstItems
from penstock._random.lane_order import MOST_LANES
from penstock._random.sample_rng import epoch_word
from penstock._streams.retrying import close, iter_with_retries
from penstock._streams.run_folder import RunFolder
from penstock._streams.share_reader import ItemSeeding, Share, ShareReader
from penstock._streams.share_states import CHECKED, ShareStates, checksum
from penstock._streams.steps import ShardRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock._streams.steps import Step
    from penstock._workers.lifetime import Closing

_logger = logging.getLogger("penstock")

SPLIT: Final = "    info = torch.utils.data.get_worker_info()\n    for item in itertools.islice(items, info.id, None, info.num_workers):"
"""What a dataset lacks that does not split itself."""


@final
class WorkerShares:
    """What the processes of one loader know of ``dataset``.

    Args:
        dataset: An ``IterableDataset``, the same on every rank.
        lanes: Workers that it sees, from 1 to 65536.
        endless: Passes follow each other in one stream, so that every worker needs an item in each.
        settings: JSON that identifies the data.
        folder: Where its states are kept from run to run; None: not longer than the loader.
        seed_global_rngs: Whether each item is read with the global generators seeded.

    Raises:
        TypeError: ``dataset`` is no ``IterableDataset``.
        ValueError: ``lanes`` is out of bounds.
        GraphError: ``dataset`` is known to split itself by rank.
    """

    def __init__(self, dataset: Any, lanes: int, *, endless: bool, settings: Any = None, folder: str | None = None, seed_global_rngs: bool = True) -> None:
        facts = DatasetFacts.of(dataset)
        if not isinstance(facts.dataset, IterableDataset):
            raise TypeError(
                f"lanes={lanes!r} reads a torch.utils.data.IterableDataset, as so many workers of a DataLoader would, but {facts.name} is none. Leave lanes out."
            )
        if facts.splits_itself is not None:
            raise GraphError(
                f"lanes={lanes!r} would give every rank a share of its share: {facts.splits_itself}. Pass the data unsplit, the same on every rank; or pass split='own' "
                f"to Loader.from_dataset, without lanes, and each rank reads its own share in the training process."
            )
        self.name = facts.name
        self.lanes = whole_number("lanes", lanes, 1, MOST_LANES + 1)
        self.told = facts.is_told
        self.copies = DatasetCopies(facts.dataset)
        self._endless = endless
        self._binding = {"dataset": self.name, "lanes": self.lanes, "endless": endless, "settings": settings}
        self._run = RunFolder()
        self.folder = self._run.path if folder is None else folder
        self.states: ShareStates | None = None
        self.seeding = ItemSeeding(seed_global_rngs)

    @property
    def dataset(self) -> Any:
        """The dataset itself, of which only copies are read."""
        return self.copies.dataset

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "seeding": ItemSeeding(self.seeding.on)}

    def run(self, worker: int, pass_: int, seed: int, closing: Closing, steps: Sequence[Step] = (), retries: int = 3) -> ShardRun:
        """The outputs of ``steps`` over a share."""
        if self.states is None and not steps:  # with steps, the records that they hold would be missing
            self.states = ShareStates(self.folder, {**self._binding, "seed": seed})
        self._try(seed)
        records = ShareRecords(self, Share(pass_, worker, epoch_word(seed, worker) >> 1), retries, closing)
        run = ShardRun(records, steps, seed=seed, pass_=pass_, shard=worker, given=worker)
        run.differs_by_pass()
        return run

    def label(self, worker: int) -> str:
        """What messages call a share."""
        return f"worker {worker} of {self.lanes} of {self.name}"

    def warn_once(self, what: str, text: str) -> None:
        """Log a warning, in one of the loader's processes."""
        if self._run.first(f"said {what}"):
            _logger.warning("%s", text)

    def marks(self) -> tuple[int, ...]:
        """Checksums of the first items of worker 0, to compare with other ranks; empty as long as they are unknown. See `FirstItems`."""
        found = self._run.read("trial")
        return tuple(json.loads(found)["marks"]) if found else ()

    # Called while a share is read.

    def begun(self, reader: ShareReader, sums: list[str]) -> bool:
        """A share has so far begun with items of these checksums. Returns whether that is enough.

        Raises:
            GraphError: The dataset does not split itself.
        """
        if len(sums) < CHECKED:
            return False
        self._check_split(reader)
        pass_, worker, _ = reader.share
        if pass_ == 0:
            if worker == 0 and (found := self._run.read("trial")) and json.loads(found)["sums"] != sums:
                self.warn_once(
                    "other items",
                    f"{self.name} gave other items when worker 0 was begun a second time, so a resumed run will not be the same. Seed its draws by an argument or set_epoch, or "
                    f"draw from the global generators (random, numpy.random, torch), which are seeded for each item.",
                )
            if len({*sums}) > 1 and not self._run.first(f"begins {' '.join(sums)}", str(worker)) and (other := self._run.read(f"begins {' '.join(sums)}")) != str(worker):
                self.warn_once(
                    "equal heads",
                    f"workers {other} and {worker} of {self.name} begin with the same items. Unless it draws with replacement, it asks which worker it is, but does not split by it. "
                    f"In its __iter__:\n{SPLIT}",
                )
        return True

    def ended(self, reader: ShareReader, data: Any, sums: list[str] | None) -> None:
        """A share has ended; ``data`` is the copy, and ``sums`` are of its items, if they are few.

        Raises:
            GraphError: The dataset does not split itself.
            ValueError: A stream has a worker without items.
        """
        if sums:
            self._check_split(reader)
        if self._endless and not reader.n:
            raise ValueError(
                f"{self.label(reader.share.worker)} yields no item in pass {reader.share.pass_}, so its lane would read what another one does. Pass lanes= of at most the number of "
                f"its shards (files)."
            )
        if self.copies.changed():
            self.warn_once(
                "changed tensor",
                f"{self.name} changed a tensor of more than 64 KB in place while it was read. All lanes of a process share it, so what they yield depends on each other. Copy it "
                f"in __iter__, before it is changed.",
            )
        if not self.told and not reader.has_state and _plain(data) != _plain(self.dataset):
            self.warn_once(
                "passes alike",
                f"{self.name} changes its own attributes while it is read, perhaps so that its passes differ. Each pass reads a fresh copy, so they are all alike. Give it a "
                f"set_epoch(epoch), which is called before each pass.",
            )

    def _check_split(self, reader: ShareReader) -> None:
        if self.lanes > 1 and not reader.asked and not self.seeding.drew:
            raise GraphError(
                f"{self.name} never asks for the id of its worker (torch.utils.data.get_worker_info), so each of lanes={self.lanes} would yield all of its items. Split them in its "
                f"__iter__:\n{SPLIT}\nor pass lanes=1."
            )

    def _try(self, seed: int) -> None:
        """Once per loader, begin worker 0 for comparison: with its real beginning, and with other ranks, most of which never read it."""
        if not self._run.first("trying"):
            return
        first, sums = FirstItems(), []
        reader = ShareReader(self, Share(0, 0, epoch_word(seed, 0) >> 1), trial=True)
        for item in reader:
            first.add([item], ended=False)
            sums.append(checksum(item))
            if len(sums) == MOST:
                break
        first.add([], ended=True)
        reader.close()
        self._run.first("trial", json.dumps({"sums": sums[:CHECKED], "marks": first.marks}))


@final
class ShareRecords:
    """The items of a share, read again after an ``OSError``. An iterator that can `seek` while nothing was read."""

    def __init__(self, of: WorkerShares, share: Share, retries: int, closing: Closing) -> None:
        self._of = of
        self._share = share
        self._begun: ShareReader | None = None  # at the item with which reading begins
        self._start = 0
        self._options: Any = {"retries": retries, "closing": closing}
        self._items: Iterator[Any] | None = None

    def seek(self, n: int) -> int:
        """Move as near to item ``n`` as a state of the dataset allows, and not beyond. Returns the number of the next item."""
        if (found := self._nearest(n)) is not None:
            self._begun, self._start = found, found.n
        return self._start

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._items is None:
            self._items = iter_with_retries(self._open, self._share.worker, self._of.label(self._share.worker), start=self._start, seeks=True, **self._options)
        return next(self._items)

    def close(self) -> None:
        """Close what is open."""
        for one in (self._items, self._begun):
            close(one)

    def _open(self, worker: int, start: int) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        reader = begun or self._nearest(start) or ShareReader(self._of, self._share)
        while reader.n < start:
            next(reader)
        return reader

    def _nearest(self, n: int) -> ShareReader | None:
        states = self._of.states
        for mark in states.before(self._share.worker, self._share.pass_, n) if states is not None else ():
            reader = ShareReader(self._of, self._share)
            if (found := reader.again(mark)) is not None:
                states.proved = True
                return found
            states.used = False
            reader.say("false state", "its state_dict did not lead back to the same items")
            break
        return None


def shares_of(dataset: Any, lanes: int | None, bookmarks: Any, settings: Any, others: dict[str, Any]) -> WorkerShares:
    """The shares of a `Stream` over ``dataset``, whose ``others`` are arguments for shards only.

    Raises:
        TypeError: An argument is missing, or is none of such a stream.
    """
    name = type(dataset).__name__
    if not isinstance(dataset, IterableDataset):
        raise TypeError(
            f"a Stream is made of shards and a function that opens one, Stream(shards, open, epoch_size=…), or of a torch.utils.data.IterableDataset, and {name} is none. To cut a "
            f"map-style dataset into shards: Stream.of(dataset, piece, epoch_size=…)."
        )
    if given := [word for word, value in others.items() if value is not None]:
        raise TypeError(f"{given[0]}= is about shards that penstock opens, but {name} opens its own. Leave it out.")
    if lanes is None:
        raise TypeError(
            f"a Stream over {name} needs lanes=: by how many workers it is to be split, whoever reads them. At most the number of its shards (files), and for a large job a multiple "
            f"of the number of ranks."
        )
    return WorkerShares(dataset, lanes, endless=True, settings=settings, folder=None if isinstance(bookmarks, bool) else os.path.abspath(bookmarks))


def _plain(data: Any) -> dict[str, Any]:
    """What a pass may change to make the next one differ."""
    return {name: value for name, value in getattr(data, "__dict__", {}).items() if isinstance(value, int | float | str | None)}
