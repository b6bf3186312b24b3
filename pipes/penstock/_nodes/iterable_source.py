"""IterableSource: a dataset that can only be read from its beginning, in the sampler's place."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, final

from penstock._errors import GraphError, StateError
from penstock._fetch.indices import Indices
from penstock._memory.modes import neutral_modes
from penstock._nodes.encoding import decoded, encoded
from penstock._nodes.node import BaseNode, Node, State, fields
from penstock._nodes.readers import IterableReader, NodeReader, Reader, counts, moved, tells_its_epoch
from penstock._nodes.sampler_traits import length
from penstock._nodes.self_splitting import splits_itself
from penstock._random.global_rng import GlobalRngSnapshot, global_rngs_kept, seed_globals
from penstock._random.orders import checked_seed
from penstock._random.splitmix import GAMMA, mixed
from penstock._workers.reader_thread import reads_ahead

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np

log = logging.getLogger("penstock")


@dataclass
class _Used:
    """What is known of an iterable, or of a node, that a source has begun to read: another source may read it next, in the same process.

    Attributes:
        pristine: Its state before anything was read.
        left: That in which it was left; what stands elsewhere was moved by its owner, and begins where it stands.
        reading: It is being read, or somebody was interrupted in that: where it stands says nothing.
        reader: The source that has begun to read it last.
    """

    pristine: Any
    left: Any
    reading: bool = False
    reader: weakref.ref[Any] | None = None


_used: dict[int, _Used] = {}  # by the iterable's id, as long as that lives: two that are equal are still two


@final
class IterableSource(Node[Indices]):
    """Read an iterable, or a torchdata node, once an epoch, in the consumer's process; under a `Sharder`, on every rank.

    **Epochs.** Where the iterable has ``set_epoch``, that is called before each epoch. One that counts its epochs itself is put at the start of the
    right one by the ``epoch`` in its state. Where its state holds something else that may differ from epoch to epoch, it is made to read the epochs
    before again, which the log says once.

    **State.** Where it has ``state_dict`` and ``load_state_dict`` (a torchdata node always has), they are used to resume; elsewhere resuming reads it
    again up to where it was, and says so in a warning. The state may hold numbers, strings, bytes, tensors and NumPy arrays, in dicts, lists, tuples
    and sets; anything else is refused at the first batch.

    **Ranks.** Under a `Sharder` of several ranks, ``split`` has to say who deals. With ``"own"`` nothing is dealt, so ``tail`` means nothing, and ranks
    may have epochs of different lengths. Without a ``state_dict`` the state is then the number of items read, and loads on any rank of the same world
    size (a rank with a shorter epoch is then at its end); with one it is of this rank only, so every rank has to save its own.

    **Random numbers.** Each item is read with the global generators of ``random``, ``numpy.random`` and torch's CPU seeded from (seed, epoch, position),
    and ``set_epoch`` and ``iter`` with a seed of their own, so that what is drawn does not depend on the number of workers, nor on where a run
    was resumed. Afterwards the caller's generators are as they were, to the bit. It costs 7 us an item and 80 us a block. Nothing of
    this holds in the thread of a `Prefetcher`, `PinMemory` or `ToDevice` downstream: seeding there would disturb what the consumer draws meanwhile, so
    the generators are left alone, and the log says so where the first block is seen to draw. Nor does it reach threads and processes of
    a torchdata node's own.

    Args:
        iterable: An ``IterableDataset``, any iterable that can be read more than once, or a finite torchdata node.
        split: ``"items"``: every rank reads all of it, and the Sharder deals each its share. ``"own"``: it splits itself by rank. None: nobody
            has said, which several ranks refuse.
        seed: Of what it draws.
        seed_samples: False leaves the global generators alone.

    Raises:
        GraphError: ``iterable`` can be read only once, is a node of penstock's, or is known to split itself and ``split="items"``.
        StateError: On reading: its state holds something that cannot be saved.
    """

    def __init__(
        self,
        iterable: Iterable[Any] | BaseNode[Any],
        *,
        split: Literal["items", "own"] | None = None,
        seed: int = 0,
        seed_samples: bool = True,
    ) -> None:
        super().__init__()
        if split not in (None, "items", "own"):
            raise ValueError(f"split={split!r} is neither 'items' (dealt by the Sharder) nor 'own' (it splits itself by rank), nor None.")
        if isinstance(iterable, Node):
            raise GraphError(f"{type(iterable).__name__} is a node of penstock's already. Leave the IterableSource out.")
        if split == "items" and (how := splits_itself(iterable)) is not None:
            raise GraphError(
                f"split='items' would deal every rank a share of its share: {how}. Say split='own', or give it unsplit, the same on every rank."
            )
        self.iterable = iterable
        self.split = split
        self.seed_samples = seed_samples
        self._reader: Reader = NodeReader(iterable) if isinstance(iterable, BaseNode) else IterableReader(iterable)
        self._key = mixed(checked_seed(seed) + 5 * GAMMA)  # not the samples' own: a map_fn under the same seed must draw other numbers
        self._seeds = False  # now
        self._watched = not seed_samples
        self._pristine: list[Any] = []  # its state before anything was read, once that is known
        self._used = _Used(None, None)
        self._follows: int | None = 0  # the epoch that it begins by itself, when it is read anew
        self._resumed = False  # this epoch, by its state
        self._said = False
        self._mislead = False  # its __len__ did not say what came, and that was told
        self._inner: Any = None  # its state, behind the block read last
        self._epoch = 0
        self._position = 0
        self._ended = False

    def reset(self, initial_state: State | None = None) -> None:
        state = self._after_this() if initial_state is None else initial_state
        super().reset(state)
        follows, self._follows = self._follows, None
        self._epoch, self._position, self._ended = state["epoch"], 0, False
        inner = state[self._reader.KEY]
        with neutral_modes(), self._kept():
            if not self._pristine:
                self._seed(0, ~0)
                if self._take_pristine():
                    follows = None
            self._resumed = inner is not None and self._resume(inner, state["ended"])
            if self._resumed or state["ended"]:
                self._position = state["position"]
            else:
                self._begin(self._epoch, follows)
                self._read_again(state["position"])
                inner = self._state_of(self._reader.state())
        self._inner = inner
        self._used.left, self._used.reader = inner, weakref.ref(self)
        if state["ended"] or self._ended:
            self._end()

    def next(self) -> Indices:
        block = self.take(1)
        if not block:
            raise StopIteration
        return block[0]

    def take(self, n: int, *, every: int = 1, first: int = 0) -> Sequence[Indices]:
        taken: list[Indices] = []
        if n == 0 or self._ended:
            return taken
        used = self._checked_reader()
        with neutral_modes(), self._kept(), self._watch():
            used.reading = True
            try:
                for k in range(n * every):
                    item = self._item(self._epoch, self._position)
                    self._position += 1
                    if k % every == first:
                        taken.append(Indices(self._epoch, self._position - 1, item))
            except StopIteration:
                self._end()
                self._compare_length()
            self._inner = self._state_of(self._reader.state())  # Now, so that what cannot be saved is an error of this block.
            used.left, used.reading = self._inner, False
        return taken

    def at(self, positions: np.ndarray) -> Sequence[Indices]:
        raise GraphError(
            f"{type(self.iterable).__name__} cannot be read by position, which tail='pad' needs. Use tail='drop' or tail='exact'."
        )

    def remaining(self, state: State | None = None) -> int | None:
        return 0 if (self._ended if state is None else state["ended"]) else None

    def items_per_epoch(self) -> int | None:
        """What the ``__len__`` of the iterable says, if it has one: nobody but ``len(loader)`` goes by that."""
        return length(self.iterable)

    def settings(self) -> dict[str, Any]:
        return {"source": type(self.iterable).__name__}

    def split_word(self) -> Literal["items", "own"] | None:
        return self.split

    def rank_bound(self) -> bool:
        return self.split == "own" and (self._reader.stateful or self._inner is not None)

    def get_state(self) -> State:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "ended": self._ended,
            self._reader.KEY: self._inner,  # made for each block, and never changed
        }

    def start_of(self, epoch: int) -> State:
        return {"epoch": epoch, "position": 0, "ended": False, self._reader.KEY: None}

    def check(self, state: Any) -> None:
        inner = fields(state, epoch=int, position=int, ended=bool, **{self._reader.KEY: object})[self._reader.KEY]
        if inner is not None and not isinstance(inner, dict):
            raise StateError(f"the state of {type(self.iterable).__name__} must be a dict or null, and {inner!r:.80} came.")
        decoded(inner)

    def origin(self) -> BaseNode[Any]:
        node, upstream = cast("BaseNode[Any]", self), cast("Any", self.iterable)
        while isinstance(upstream, BaseNode):
            if isinstance(upstream, Node):
                return upstream.origin()
            node, upstream = upstream, getattr(upstream, "source", None)
        return node

    def shutdown(self) -> None:
        self._reader.shutdown()

    # Where an epoch begins.

    def _after_this(self) -> State:
        return self.start_of(self._epoch + 1 if self._position or self._ended else self._epoch)

    def _end(self) -> None:
        self._ended = True
        # After a resume torchdata's samplers within one node count on only where they are read again, so that they get out of step.
        self._follows = None if self._resumed and counts(self._pristine[0]) > 1 else self._epoch + 1

    def _compare_length(self) -> None:
        items = self.items_per_epoch()
        if items not in (None, self._position) and not self._mislead:
            self._mislead = True
            warnings.warn(
                f"{type(self.iterable).__name__} has a length of {items}, and epoch {self._epoch} had {self._position} items, so that len(loader) is wrong, "
                f"although every item was delivered. Let __len__ say what __iter__ gives, or leave it out.",
                stacklevel=2,
            )

    def _checked_reader(self) -> _Used:
        """What is known of the iterable, unless another source reads it now, and has moved it."""
        reader = self._used.reader
        if self._reader.exclusive and reader is not None and reader() not in (self, None):
            raise GraphError(
                f"another loader has begun to read this {type(self.iterable).__name__}, which has one place to stand at: they would take each other's items. "
                f"Give each loader one of its own, or begin an epoch of this loader when the other has ended its own."
            )
        return self._used

    def _resume(self, inner: Any, ended: bool) -> bool:
        self._seed(self._epoch, ~0)
        return self._reader.resume(self._epoch, decoded(inner), ended)

    def _take_pristine(self) -> bool:
        """Find out its state before anything was read; whether that was another source's reading, which has left it elsewhere."""
        now = self._state_of(self._reader.pristine())
        used = _used.get(id(self.iterable))
        again = used is not None and (self._reader.IS_NODE or used.reading or used.left == now)
        if used is None:
            used = _Used(now, now)
            with contextlib.suppress(TypeError):  # it cannot be referred to weakly
                weakref.finalize(self.iterable, _used.pop, id(self.iterable), None)
                _used[id(self.iterable)] = used
        elif not again:
            used.pristine = now
        self._pristine, self._used = [used.pristine], used
        return again

    def _begin(self, epoch: int, follows: int | None) -> None:
        """Stand at the start of ``epoch``, whatever was read before."""
        reader = self._reader
        if not reader.stateful or follows == epoch:
            self._start(epoch)
        elif epoch == 0 or reader.told:
            self._start(epoch, self._pristine[0])
        elif not self._moved_to(epoch):
            self._replay(epoch)

    def _moved_to(self, epoch: int) -> bool:
        """Stand at the start of ``epoch`` by its state; whether that is known to be it."""
        pristine = self._pristine[0]
        if counts(pristine) > 1 or not self._reader.plain:
            return False
        expected = moved(pristine, epoch)
        rebuilds = self._reader.IS_NODE and counts(pristine) == 1
        for too_far in (0, 1) if rebuilds else (0,):  # one that reads ahead has begun a pass by the reset, and counts the next one
            self._start(epoch, moved(pristine, epoch - too_far))
            if rebuilds:
                self._start(epoch)
            now = self._state_of(self._reader.state()) if rebuilds else expected
            if tells_its_epoch(pristine, now, expected):
                return True
        return False

    def _replay(self, epoch: int) -> None:
        """Read all the epochs before ``epoch``, of which nothing is used."""
        if not self._said:
            self._said = True
            log.warning(
                "%s does not say in its state how its epochs differ, so it reads %d of them again to stand at the start of epoch %d. "
                "Give it a set_epoch, or one 'epoch' in its state_dict that everything follows from.",
                type(self.iterable).__name__,
                epoch,
                epoch,
            )
        self._start(0, self._pristine[0])
        first = self._state_of(self._reader.state())
        for past in range(epoch):
            self._read_to_its_end(past)
            self._start(past + 1)
            if self._state_of(self._reader.state()) == first:
                return  # It remembers nothing, so that all epochs begin alike.

    def _start(self, epoch: int, state: Any = None) -> None:
        self._seed(epoch, ~0)
        self._reader.start(epoch, decoded(state))

    def _read_to_its_end(self, epoch: int) -> None:
        position = 0
        with contextlib.suppress(StopIteration):
            while True:
                self._item(epoch, position)
                position += 1

    def _read_again(self, position: int) -> None:
        if position == 0:
            return
        warnings.warn(
            f"{type(self.iterable).__name__} has no state_dict and load_state_dict, so resuming reads its first {position} items again. "
            f"Give it both, or index its data.",
            stacklevel=2,
        )
        while self._position < position:
            try:
                self._item(self._epoch, self._position)
            except StopIteration:
                if self.split == "own":  # The state may come from a rank with a longer epoch.
                    self._ended = True
                    return
                raise StateError(
                    f"the state stands behind item {position} of epoch {self._epoch}, and {type(self.iterable).__name__} ended after {self._position}: it has changed."
                ) from None
            self._position += 1

    # What an item is read with.

    def _item(self, epoch: int, position: int) -> Any:
        self._seed(
            epoch, ~0 if position == 0 and self._reader.IS_NODE else position
        )  # A sampler in it may draw its order when it starts, or now.
        return self._reader.next()

    def _seed(self, epoch: int, position: int) -> None:
        if self._seeds:
            seed_globals(self._key, epoch, position)

    def _kept(self) -> contextlib.AbstractContextManager[None]:
        """Leave the caller's generators as they were; where they are somebody else's, too, they are not touched."""
        self._seeds = self.seed_samples and not reads_ahead()
        return global_rngs_kept() if self._seeds else contextlib.nullcontext()

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        """Say so where the first block draws from generators that cannot be seeded. The consumer is waiting for it, so nobody else draws."""
        if self._watched or self._seeds:
            yield
            return
        self._watched = True
        watch = GlobalRngSnapshot()
        before = watch.look()
        yield
        if before is not None and watch.look() != before:
            log.warning(
                "%s draws from the global random numbers and is read in a background thread, where they cannot be seeded without disturbing yours: what it "
                "draws depends on timing. Give it a generator of its own, or leave out the Prefetcher, PinMemory or ToDevice downstream.",
                type(self.iterable).__name__,
            )

    def _state_of(self, state: Any) -> Any:
        return encoded(state, f"the state_dict of {type(self.iterable).__name__}: state")


Node._adapter = IterableSource
