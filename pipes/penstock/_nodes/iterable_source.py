"""IterableSource: a dataset that can only be read from its beginning, in place of a sampler.

The difficult part is to begin epoch e without reading the epochs before it. `_begin` knows three rules:

1. If the iterable has no state between passes, or its next pass is epoch e anyway (`_follows`): start that pass.
2. If it has a ``set_epoch``, or e is 0: load its *pristine* state, the one before anything was read, and start.
3. Otherwise epoch e begins where epoch e - 1 ends: in the saved state at that end (``after``), or after reading the
   epochs in between. The log says so once.

Another loader, or the user, may have moved the same iterable in between. So `_used` records for each iterable its
pristine state and the state in which we left it. If an iterable is in another state when a new source begins to read,
its owner moved it, and that state counts as pristine.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from penstock._errors import GraphError, Once, StateError, StateMismatch, first_time
from penstock._fetch.dataset_copies import DatasetCopies
from penstock._fetch.dataset_facts import DatasetFacts, length, loses_buffer
from penstock._fetch.encoding import decoded, encoded
from penstock._fetch.first_items import MOST, FirstItems
from penstock._fetch.indices import Indices
from penstock._fetch.reused import OwnMemory
from penstock._fetch.told_parts import ToldParts
from penstock._nodes.index_node import Facts, FirstNode
from penstock._nodes.node import BaseNode, Node, State, fields
from penstock._nodes.readers import IterableReader, NodeReader, Reader
from penstock._nodes.stream_rng import START, StreamRng
from penstock._random.orders import checked_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

log = logging.getLogger("penstock")


@dataclass
class _Used:
    """What is known of an iterable or node that a source in this process has begun to read, for the next source that
    reads it.

    Attributes:
        pristine: The state before anything was read.
        left: The state in which we left it. If it is in another state, its owner has moved it, and it begins there.
        reading: A source is reading it, or was interrupted while reading, so its position is meaningless.
        reader: The source that last began to read it.
        gave: It has yielded an item.
    """

    pristine: Any
    left: Any
    reading: bool = False
    reader: weakref.ref[Any] | None = None
    gave: bool = False

    @classmethod
    def of(cls, iterable: Any, now: Any, *, is_node: bool) -> tuple[_Used, bool]:
        """The record of ``iterable``, which is in the state ``now``, and whether another source has read it since its
        pristine state.
        """
        used = _used.get(id(iterable))
        if used is None:
            used = cls(now, now)
            with contextlib.suppress(TypeError):  # it does not support weak references
                weakref.finalize(iterable, _used.pop, id(iterable), None)
                _used[id(iterable)] = used
            return used, False
        again = is_node or used.reading or used.left == now
        if not again:  # its owner has moved it
            used.pristine = now
        return used, again

    def check_reader(self, source: IterableSource) -> None:
        """Refuse ``source`` if another one has begun to read the iterable, and so has moved it."""
        if self.reader is not None and self.reader() not in (source, None):
            raise GraphError(
                f"another loader has begun to read this {type(source.iterable).__name__}, which has only one position, "
                f"so the two would take each other's items. Give each loader its own copy, or start an epoch of this "
                f"loader only after the other has finished its epoch."
            )


_used: dict[int, _Used] = {}  # by id, while the iterable lives: two iterables that compare equal are still two


@final
class IterableSource(FirstNode[Indices]):
    """Read an iterable, or a torchdata node, once per epoch, in the consumer's process.

    Upstream of a `Sharder`, every rank reads it.

    **Epochs.** If the iterable has a ``set_epoch``, it is called before each epoch, and nothing is read of an epoch
    before the loop asks for it (unless it keeps the epoch in shared memory, as those of Hugging Face do). If it has a
    state but no ``set_epoch``, an epoch begins in the state in which the previous one ended, also after a resume. To
    jump to an epoch, the epochs before it are read to their ends, and the log says so once.

    **State.** If it has ``state_dict`` and ``load_state_dict`` (a torchdata node always does), they are used to resume.
    Otherwise a resume reads the items up to the saved position again, with a warning. The state may hold numbers,
    strings, bytes, tensors and NumPy arrays, in dicts, lists, tuples and sets; anything else is refused at the first
    batch.

    **Ranks.** Upstream of a `Sharder` with several ranks, ``split`` is required. With ``"own"`` the iterable splits
    itself, so ``tail`` has no effect, and epochs may differ in length between ranks. Without a ``state_dict``, the
    state is the number of items read, and loads on any rank at the same world size if all shares are equally long. If
    they are not, every rank must save its own state, and a state that counts more items than this rank's share has is
    refused. With a ``state_dict``, every rank must always save its own state.

    **Random numbers.** Each item is read with the global generators of ``random``, ``numpy.random`` and torch's CPU
    seeded from (seed, epoch, position); ``set_epoch`` and ``iter`` get a separate seed. The generators that the
    iterable holds (``self.rng``) are seeded too, each by its path, unless it has a ``state_dict`` and
    ``load_state_dict``. So the iterable's draws do not depend on the number of workers or on where a run was resumed.
    Afterwards the caller's generators are restored exactly. This costs 7 us per item and 80 us per block. It does not
    apply in the thread of a `Prefetcher`, `PinMemory` or `ToDevice` downstream, because seeding there would disturb the
    consumer's own draws; the log says so if the first block draws. Nor does it apply in the threads and processes of a
    torchdata node. In such a node, a sampler that has its own ``generator`` gets a new one for each epoch: in epoch 0
    in the state of the one that it was given, later seeded by it and the epoch.

    Args:
        iterable: An ``IterableDataset``, any iterable that can be read more than once, or a finite torchdata node. Or
            ``DatasetFacts`` of one.
        split: ``"items"``: every rank reads everything and keeps its share. ``"own"``: the iterable splits itself by
            rank. None: undecided, which is an error with several ranks.
        seed: Seeds its random numbers.
        seed_global_rngs: False leaves the global generators alone.

    Raises:
        GraphError: ``iterable`` can be read only once, is one of penstock's nodes, or is known to split itself although
            ``split="items"``.
        StateMismatch: While reading, after a reset to a state: the state counts more items than this rank's share has.
        StateError: While reading: the iterable's state holds a value that cannot be saved.
    """

    __module__ = "penstock.nodes"

    has_indices = False

    def __init__(
        self,
        iterable: Iterable[Any] | BaseNode[Any] | DatasetFacts,
        *,
        split: Literal["items", "own"] | None = None,
        seed: int = 0,
        seed_global_rngs: bool = True,
    ) -> None:
        if split not in (None, "items", "own"):
            raise ValueError(
                f"split={split!r} must be 'items' (every rank reads everything and keeps its share), 'own' (the "
                f"iterable splits itself by rank) or None."
            )
        if isinstance(iterable, Node):
            raise GraphError(f"{type(iterable).__name__} is already a penstock node. Leave the IterableSource out.")
        facts = DatasetFacts.of(iterable)
        if split == "items" and facts.splits_itself is not None:
            raise GraphError(
                f"split='items' would give every rank a share of its share: {facts.splits_itself}. Use split='own', or "
                f"pass the data unsplit, the same on every rank."
            )
        self.iterable = facts.dataset
        self.split = split
        self.seed_global_rngs = seed_global_rngs
        self._seed = checked_seed(seed)
        self._reader: Reader = (
            NodeReader(self.iterable) if isinstance(self.iterable, BaseNode) else IterableReader(facts)
        )
        # what is told where it is read is left out
        self._parts = ToldParts(None if self._reader.told else self.iterable)
        self._is_told = bool(self._parts) or self._reader.told
        # The state of an iterable with a state_dict decides what it draws next; a node has its own rule.
        self._rng = StreamRng(facts, seed, seed_global_rngs, held=not self._reader.stateful)
        self._pristine: list[Any] = []  # its state before anything was read, once known
        self._used = _Used(None, None)
        self._follows: int | None = 0  # the epoch of its next pass; None if unknown
        self._resumed = False  # this epoch was resumed from a state of the iterable
        self._once = Once()
        self._own = OwnMemory()
        self._stands: State | None = None  # where the iterable is, compared by identity; None if unknown
        self._inner: Any = None  # its state after the block read last
        self._epoch = self._position = 0
        self._ended = False
        self._first = self._noted = FirstItems()  # of the pass that is read, and of the one that is compared
        super().__init__(Facts({"source": facts.name}, sharded_by=split))

    @property
    def watched(self) -> Sequence[Any]:
        return [self.iterable] if self._reader.told else ()

    @property
    def runs_ahead(self) -> bool:
        # Reading it ahead would tell it an epoch that the loop has not begun. That was tried for streams that keep it
        # in shared memory, as Hugging Face's do: a thread that reads ahead may overwrite the number that the loop sets.
        return not self._is_told

    def tell(self, epoch: int) -> None:
        self._parts.tell(epoch, inline=True)

    def settle(self, epoch: int) -> bool:
        return self._parts.begin(epoch)

    def _seeds(self) -> dict[str, Any]:
        inside = self._reader.seeds()
        return {"stream_seed": [self._seed, *inside] if inside else self._seed}

    def details(self) -> dict[str, Any]:
        return {"iterable": self.iterable, "split": self.split}

    def start(self, epoch: int, after: State | None = None) -> State:
        start: State = {"epoch": epoch, "position": 0, "ended": False, self._reader.KEY: None}
        if not self.looks_back or after is None:
            return start
        if after[self._reader.KEY] is None:  # itself a start
            after = after.get("after")
        if after is not None and after["epoch"] < epoch:
            start["after"] = {key: value for key, value in after.items() if key != "after"}
        return start

    def left(self, place: State) -> int | None:
        return 0 if place["ended"] else None

    def read(self, place: State, n: int, every: int = 1, first: int = 0) -> tuple[Sequence[Indices], State]:
        taken: list[Indices] = []
        if n == 0 or place["ended"]:
            return taken, place
        if place is not self._stands:
            self._go(place)
        used = self._used
        if self._reader.exclusive:
            used.check_reader(self)
        self._stands = None
        with self._rng.kept(), self._rng.watched():
            used.reading = True
            try:
                for k in range(n * every):
                    item = self._item(self._epoch, self._position)
                    if k % every == first:
                        item = self._own(item) if self._own.watches else item
                        taken.append(Indices(self._epoch, self._position, item))
                    # last: Ctrl-C at the jump of an `if` could skip what restores the modes (python/cpython#130279)
                    self._position += 1
            except StopIteration:
                self._check_given()
                self._end()
                self._compare_length()
            used.gave = used.gave or self._position > 0
            # now, so that a state that cannot be saved raises at this block
            self._inner = self._state_of(self._reader.state())
            used.left, used.reading = self._inner, False
        if self.compared is not None and every == 1:
            self._first.add([item.values for item in taken], ended=self._ended)
        place = {"epoch": self._epoch, "position": self._position, "ended": self._ended, self._reader.KEY: self._inner}
        self._stands = place
        return taken, place

    def peek(self, place: State, positions: np.ndarray) -> Sequence[Indices]:
        raise GraphError(f"{type(self.iterable).__name__} cannot be read by position")

    def check(self, state: Any) -> None:
        said = {"after": object} if isinstance(state, dict) and "after" in state else {}
        key = self._reader.KEY
        inner = fields(state, epoch=int, position=int, ended=bool, **{key: object, **said})[key]
        if inner is not None and not isinstance(inner, dict):
            raise StateError(f"the state of {type(self.iterable).__name__} must be a dict or null, not {inner!r:.80}.")
        decoded(inner)
        if said:
            self.check(state["after"])
            if not state["after"]["epoch"] < state["epoch"]:
                raise StateError(
                    f"this state is damaged: epoch {state['after']['epoch']} is not before epoch {state['epoch']}."
                )

    @property
    def looks_back(self) -> bool:
        return self._reader.stateful and not self._reader.told

    def claimed(self, epoch: int) -> int | None:
        """The ``__len__`` of the iterable, if it has one."""
        return length(self.iterable)

    def state_is_per_rank(self) -> bool:
        return self.split == "own" and (self._reader.stateful or self._inner is not None)

    def seek(self, place: State) -> State:
        if place["position"] or place["ended"] or place[self._reader.KEY] is not None:
            self._go(place)
        else:
            self._stands = None  # at the first read, because moving to a start may read earlier epochs
        return place

    def note(self, place: State, *, again: bool = False) -> tuple[int, ...]:
        if again:
            copy = IterableSource(
                DatasetCopies(self.iterable)(),
                split=self.split,
                seed=self._seed,
                seed_global_rngs=self.seed_global_rngs,
            )
            copy._pristine, copy._follows = self._pristine, None
            copy.compared = place
            try:
                copy.read(place, MOST)
                return copy.note(place)
            finally:
                copy.shutdown()
        return self._noted.marks

    def shutdown(self) -> None:
        with self._rng.kept():  # a generator may end here
            self._reader.shutdown()

    # Where an epoch begins.

    def _go(self, state: State) -> None:
        """Move the iterable to ``state``."""
        self._stands = None
        follows, self._follows = self._follows, None
        self._epoch, self._position, self._ended = state["epoch"], 0, False
        inner = state[self._reader.KEY]
        with self._rng.kept(anew=True):
            if not self._pristine:
                self._rng.seed(0, START)
                pristine = self._state_of(self._reader.pristine())
                if loses_buffer(self.iterable) and first_time("buffer", type(self.iterable)):
                    log.warning(
                        "%s shuffles with a buffer, which its state_dict leaves out, so a resumed run gets other items "
                        "than this one. Pass lanes= to Loader.from_dataset, which resumes it exactly, with any number.",
                        type(self.iterable).__name__,
                    )
                self._used, again = _Used.of(self.iterable, pristine, is_node=self._reader.IS_NODE)
                self._pristine = [self._used.pristine]
                if again:
                    follows = None  # the epoch of its next pass is unknown
            self._resumed = inner is not None and self._resume(state)
            if self._resumed or state["ended"]:
                self._position = state["position"]
            else:
                self._begin(self._epoch, follows, state.get("after"))
                self._read_again(state["position"])
                inner = self._state_of(self._reader.state())
        self._inner = inner
        self._used.left, self._used.reader = inner, weakref.ref(self)
        if state["ended"]:
            self._end()
        self._first, begins = FirstItems(), (self._epoch, self._position)
        if self.compared is not None and begins == (self.compared["epoch"], self.compared["position"]):
            self._noted = self._first
        self._stands = state

    def _end(self) -> None:
        self._ended = True
        self._follows = None if self._resumed and self._reader.counts_apart else self._epoch + 1

    def _compare_length(self) -> None:
        items = self.claimed(self._epoch)
        if items not in (None, self._position) and self._once("length"):
            warnings.warn(
                f"{type(self.iterable).__name__} has a length of {items}, but epoch {self._epoch} had {self._position} "
                f"items. Every item was delivered, but len(loader) is wrong. Make __len__ agree with __iter__, or "
                f"remove it.",
                stacklevel=2,
            )

    def _check_given(self) -> None:
        """Refuse an empty epoch of an iterable that has yielded items before, unless it may legitimately yield none.

        Raises:
            GraphError: The epoch would be lost silently.
        """
        if self._used.gave and not self._position and not self._reader.stateful and not self._reader.told:
            raise GraphError(
                f"{type(self.iterable).__name__} yielded no item in epoch {self._epoch}, although it has yielded some "
                f"before: it can be read only once, but every epoch and every loader reads it from the beginning. "
                f"Create its iterator in __iter__. If it is meant to yield none, give it a set_epoch."
            )

    def _resume(self, state: State) -> bool:
        for _ in range(2):
            self._rng.seed(state["epoch"], START)
            resumed = self._reader.resume(state["epoch"], decoded(state[self._reader.KEY]), state["ended"])
            if not self._rng.made_one():
                break
        return resumed

    def _begin(self, epoch: int, follows: int | None, after: State | None) -> None:
        """Move to the start of ``epoch``, regardless of what was read before; see the top of this file.

        Args:
            epoch: The epoch.
            follows: The epoch of the next pass, if known.
            after: A state in an earlier epoch, if one is known.
        """
        reader = self._reader
        after = None if reader.counts_apart else after
        if not reader.stateful or follows == epoch:
            self._start(epoch)
        elif epoch == 0 or reader.told:
            self._start(epoch, self._pristine[0])
        elif after is not None and after["ended"] and after["epoch"] == epoch - 1:
            self._resume(after)
            self._start(epoch)
        else:
            self._replay(epoch, after)

    def _replay(self, epoch: int, after: State | None) -> None:
        """Read to the ends of the epochs before ``epoch``, from ``after`` on, and drop the items."""
        begin, position = (0, 0) if after is None else (after["epoch"], after["position"])
        ended = after is not None and after["ended"]
        if self._once("replay"):
            log.warning(
                "%s has a state but no set_epoch, so reaching the start of epoch %d means reading from epoch %d on and "
                "dropping those items. Give it a set_epoch, or (if it is endless) pass infinite=True.",
                type(self.iterable).__name__,
                epoch,
                begin,
            )
        if after is None:
            self._start(0, self._pristine[0])
        else:
            self._resume(after)
        first = self._state_of(self._reader.state()) if after is None else None
        for past in range(begin, epoch):
            with contextlib.suppress(StopIteration):
                while not ended:
                    self._item(past, position)
                    position += 1
            ended, position = False, 0
            self._start(past + 1)
            if first is not None and self._state_of(self._reader.state()) == first:
                return  # its state is back at the first one, so all epochs begin alike

    def _start(self, epoch: int, state: Any = None) -> None:
        self._rng.seed(epoch, START)
        self._reader.start(epoch, decoded(state))

    def _read_again(self, position: int) -> None:
        if position == 0:
            return
        warnings.warn(
            f"{type(self.iterable).__name__} has no state_dict and load_state_dict, so resuming reads its first "
            f"{position} items again. Implement both, or index the data.",
            stacklevel=2,
        )
        while self._position < position:
            try:
                self._item(self._epoch, self._position)
            except StopIteration:
                if self.split == "own":
                    # By this count, this rank might be in a later epoch than the rank that saved the state, or wait at
                    # the end of this one.
                    raise StateMismatch(
                        f"this state was saved after {position} items of epoch {self._epoch}, but here "
                        f"{type(self.iterable).__name__} ends after {self._position}: the state is from a rank with a "
                        f"longer share, or the data has changed. Without a state_dict, a state counts the items of the "
                        f"rank that saved it. If shares differ in length, load the state that this rank saved; or load "
                        f"none, and start another epoch with loader.set_epoch."
                    ) from None
                raise StateError(
                    f"the state was saved after {position} items of epoch {self._epoch}, but "
                    f"{type(self.iterable).__name__} now ends after {self._position}: the data has changed. Load the "
                    f"state with the data of the saved run; or load none, and start another epoch with "
                    f"loader.set_epoch."
                ) from None
            self._position += 1

    def _item(self, epoch: int, position: int) -> Any:
        # A sampler in a node may draw its order when the pass starts, or only at the first item, so both get the same
        # seed.
        self._rng.seed(epoch, START if position == 0 and self._reader.IS_NODE else position)
        item = self._reader.next()
        if position == 0 and self._rng.made_one():
            self._start(epoch)
            self._rng.seed(epoch, position)
            item = self._reader.next()
            self._rng.made_one()  # it may be another one
        return item

    def _state_of(self, state: Any) -> Any:
        return encoded(state, f"the state_dict of {type(self.iterable).__name__}: state")
