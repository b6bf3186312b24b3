"""Loader: the roof of a graph, and the only iterable.

The graph upstream runs on from epoch to epoch. The loader cuts its stream into epochs, says where it stands (`state_dict`), and decides
where a new iterator starts. It decides that at the iterator's first ``next`` and not before, because trainers call ``iter``,
``load_state_dict`` and ``set_epoch`` in every order there is.
"""

from __future__ import annotations

import json
import operator
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from torch.utils.data import IterableDataset, get_worker_info

from penstock._errors import ClosedError, GraphError, StateError, StateMismatch
from penstock._fetch.indices import Indices
from penstock._loader.canonical_graph import FromDataset
from penstock._loader.state_dict import FORMAT, KEY, differences, epoch_in, parsed, warn_of_start
from penstock._nodes.cycler import Cycler
from penstock._nodes.node import BaseNode, EndOfEpoch, ForeignSource, Node, State, epoch_of
from penstock._workers.lifetime import PATIENCE_S, closing_within

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


T = TypeVar("T", covariant=True)


@final
class Loader(FromDataset, Generic[T]):
    """Iterate over a graph, epoch by epoch: ``for batch in loader`` is one epoch.

    Nothing runs before the first batch is asked for. The workers then live until `close`, or until the loader is collected.

    Args:
        root: The last node of the graph. A finite graph gets a `Cycler` on top.
        endless: ``for batch in loader`` goes on over all epochs, and ``len(loader)`` is unknown.
        restart_on_stop_iteration: What a state saved after the last batch of an epoch resumes to: the start of the next epoch, or
            (False) the empty remainder of the finished one. Which is right depends on how a trainer counts.

    Attributes:
        root: The last node of the graph.
    """

    def __init__(self, root: BaseNode[T], *, endless: bool = False, restart_on_stop_iteration: bool = True) -> None:
        node = root if isinstance(root, Node) else Cycler(root)
        self.root: Node[T] = node if node.endless else Cycler(node)
        self._origin = _origin(self.root)
        self._reader = object()  # not the loader itself: nothing in the graph may keep that alive
        self._endless = endless
        self._restart = restart_on_stop_iteration
        self._settings: dict[str, Any] | None = None
        self._state = self._start_of(0)  # behind the item that next() returned last
        self._fresh = True  # nothing was delivered since the epoch's start, or since a jump
        self._loaded = False  # the state was loaded, and not used yet
        self._gave_up = False  # the state is that of end_epoch, here
        self._came_by_load = False  # the iterator that runs began at a loaded state
        self._requested: int | None = None  # by set_epoch
        self._called: int | None = (
            None  # what the trainer calls the epoch that runs, where it counts otherwise: its next calls are relative to that
        )
        self._stands = False  # the graph stands at the state, or behind the mark after it
        self._mark_read = False
        self._pass_leading_mark = False
        self._run = 0  # counts started iterators and loads: an iterator of an earlier run is dead
        self._given_up = -1  # the run that end_epoch() ended
        self._committed: State | None = None  # None: commit() was never called
        self._uncommitted: deque[State] = deque()
        self._closed = False
        self._owner: int | None = None  # the process in which it was started

    # Iterating.

    def __iter__(self) -> Iterator[T]:
        """An iterator over one epoch. Does nothing else: where it starts is decided by its first ``next``."""
        return _Epoch(self)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank.

        Raises:
            TypeError: That is not known, or the loader is endless.
        """
        batches = None if self._endless else self._batches()
        if batches is None:
            raise TypeError(
                "this loader has no length: "
                + ("it is endless." if self._endless else "its source does not know how many items an epoch has.")
            )
        return batches

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> Any:
        raise TypeError("a Loader cannot be copied or pickled: it has workers. Build another one, and load_state_dict what this one saved.")

    @property
    def endless(self) -> bool:
        """Whether ``for batch in loader`` goes on over all epochs."""
        return self._endless

    def set_epoch(self, epoch: int) -> None:
        """Ask for ``epoch``. Moves nothing: the next iterator to be started starts there.

        If the stream stands at its start already, as after the epoch before, nothing is dropped. A loaded state that stands inside
        ``epoch`` continues.
        """
        try:
            number = -1 if isinstance(epoch, bool) else operator.index(epoch)
        except TypeError:
            number = -1
        if not 0 <= number < 2**62:
            raise ValueError(f"epoch={epoch!r} must be a whole number from 0, and below 2**62.")
        self._requested = number

    def end_epoch(self) -> None:
        """Give up the rest of the epoch, in the state too; for epochs cut short by a limit. The iterator that runs it ends."""
        self._check_open()
        if self.remaining == 0:
            return
        end = self.root.end_of(epoch_of(self._state))
        assert end is not None
        self._adopt(end, loaded=True)
        self._given_up = self._run
        self._gave_up = True

    @property
    def epoch(self) -> int:
        """The epoch of the batch delivered last; where none was since a load or a jump, that of the next one."""
        return epoch_of(self._here())

    @property
    def remaining(self) -> int | None:
        """Batches still to come in this epoch, behind the one delivered last; None where that is unknown."""
        return 0 if self._mark_read else self.root.remaining(self._here())

    @property
    def position(self) -> int | None:
        """Batches of this epoch up to the one delivered last: ``len(loader) - loader.remaining``; None where that is unknown."""
        batches, remaining = self._batches(), self.remaining
        return None if batches is None or remaining is None else batches - remaining

    @property
    def is_last(self) -> bool | None:
        """Whether the batch delivered last ends the epoch; None where that is unknown."""
        remaining = self.remaining
        return None if remaining is None else remaining == 0

    # Saving and loading.

    def state_dict(self) -> dict[str, str]:
        """Where the loader stands, behind the last batch that ``next`` returned (or that was committed): one key, one JSON text.

        The same on every rank, under 1 KB, and never changed afterwards. Starts nothing and asks nobody.
        """
        state = self._state if self._committed is None else self._committed
        try:
            return {KEY: json.dumps({"format": FORMAT, "settings": self._own_settings(), "state": state}, allow_nan=False)}
        except (TypeError, ValueError) as exc:
            raise StateError(
                f"the state of this graph is not JSON ({exc}): a node in it has a state of other types than dict, list, str, int, None."
            ) from exc

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on where ``state_dict`` was taken, with the next iterator to be started. Right at any moment, and again.

        Args:
            state_dict: What `state_dict` returned, on any rank of any number of them.
            strict: If False, a state of other settings (another dataset, say) is accepted with a warning, and the epoch after its own
                is started: a position in another order means nothing.

        Raises:
            StateError: It is not a state of this library, or damaged. The loader stays as it was.
            StateMismatch: It was saved under other settings; names each, with both values. The loader stays as it was.
            ClosedError: After `close`.
        """
        self._check_open()
        state = parsed(state_dict)
        changed = differences(state["settings"], self._own_settings())
        if changed and strict:
            raise StateMismatch(
                "this state was saved under other settings: " + "; ".join(changed) + ". Load it with the settings it was saved under, "
                "or with strict=False to start the next epoch under the new ones."
            )
        if changed:
            inner = self._start_of(epoch_in(state["state"]) + 1)
            warn_of_start(changed, epoch_of(inner))
        else:
            inner = state["state"]
            self.root.check(inner)
        self._adopt(inner, loaded=True)

    def commit(self, n: int = 1) -> None:
        """Let `state_dict` mean the last *committed* batch, for trainers that look ahead or may fail in mid-step.

        Args:
            n: How many more of the delivered batches were trained, oldest first; 0 only switches this on.
        """
        if isinstance(n, bool) or not isinstance(n, int) or (self._committed is None and n != 0):
            raise ValueError(
                f"commit({n!r}): call commit(0) once before the first batch; from then on state_dict() means the last committed one."
            )
        if self._committed is None:
            self._committed = self._state
        if not 0 <= n <= len(self._uncommitted):
            raise ValueError(f"commit({n!r}): {len(self._uncommitted)} batches were delivered and are not committed.")
        for _ in range(n):
            self._committed = self._uncommitted.popleft()

    # Life.

    def refresh(self) -> None:
        """Hand the dataset to the workers anew, after it was changed in this process; its length must stay.

        Worker processes are ended, and new ones start with the next batch. What was loaded ahead is loaded again; the place in the
        epoch, the state and the iterator that runs stay as they are.
        """
        self._check_open()
        for node in self.root.chain():
            if callable(anew := getattr(node, "refresh", None)):
                anew()
        if self._stands:
            self._check_graph()
            self.root.reset(self._state)
            self._mark_read = False

    def close(self, timeout: float = PATIENCE_S) -> None:
        """End the workers and give back all they held, within ``timeout`` seconds. `state_dict` still works. Again, does nothing.

        A thread that is stuck in user code cannot be stopped: it is named in the log and left behind, and its result is dropped.
        """
        self._closed = True
        self._run += 1
        if self._owner is not None and os.getpid() != self._owner:
            return  # a fork: the workers are another process's
        with closing_within(timeout):
            self.root.shutdown()

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def statistics(self) -> tuple[Any, ...]:
        """One frozen object for each node that does work, from the source to the root."""
        return self.root.statistics()

    # What an iterator asks of its loader.

    def _start(self) -> int:
        """Stand where a new iterator starts; returns its run."""
        self._check_open()
        worker, (rank, world_size) = get_worker_info(), self.root.ranks()
        if (
            worker is not None
            and isinstance(worker.dataset, IterableDataset)
            and (world_size % worker.num_workers or rank % worker.num_workers != worker.id)
        ):
            raise GraphError(
                f"this loader is read inside a DataLoader, and each of its {worker.num_workers} workers would deliver every batch. A Loader takes the DataLoader's "
                f"place: iterate over it directly, and give it the workers."
            )
        requested, self._requested = self._requested, None
        self._owner = os.getpid()
        self._came_by_load = self._loaded and not self._gave_up
        if self._gave_up:
            self._jump(self._start_of(epoch_of(self._state) + 1 if requested is None else requested))
        elif self._loaded:
            self._start_from_loaded(requested)
        else:
            if requested is not None and self._called is not None:
                requested, self._called = max(0, epoch_of(self._state) + requested - self._called), requested
            self._start_from_stream(requested)
        self._run += 1
        self._forget_uncommitted()
        return self._run

    def _start_from_loaded(self, requested: int | None) -> None:
        epoch, complete, self._called = epoch_of(self._state), self.root.remaining(self._state) == 0, None
        if requested == epoch:
            self._jump(self._state)  # Also into an empty remainder, so that the end of the user's epoch runs.
            self._pass_leading_mark = self._endless
        elif requested is None or self._endless or self.root.items_per_epoch() is None:
            self._jump(self._state)
            self._pass_leading_mark = self._restart or self._endless
            self._called = requested
        elif complete and requested == epoch + 1:
            self._jump(self._start_of(requested))
        else:
            raise StateError(
                f"set_epoch({requested}) was called, and the loaded state stands in epoch {self.epoch}. Start your loop at loader.epoch, "
                f"or do not load the state."
            )

    def _start_from_stream(self, requested: int | None) -> None:
        epoch, complete = epoch_of(self._state), self.remaining == 0
        if not self._stands:
            self._jump(self._state if requested is None else self._start_of(requested))
        elif self._fresh and not self._mark_read and requested in (None, epoch):
            pass
        elif complete and (self._mark_read or not self._fresh) and requested in (None, epoch + 1):
            self._pass_mark()
        elif requested is None and self._endless:
            pass
        else:
            self._jump(self._start_of(epoch + 1 if requested is None else requested))

    def _advance(self) -> T:
        """The next item of this epoch; ``StopIteration`` at its end."""
        self._check_open()
        self._check_graph()
        if self._mark_read:
            raise StopIteration
        while True:
            try:
                item = self.root.next()
            except BaseException as exc:
                self._follow(delivered=False)
                if self._fresh:  # Nothing came of where it began: a new iterator begins there again.
                    self._stands, self._loaded = False, self._came_by_load
                if isinstance(exc, StopIteration):
                    self._check_open()  # a signal's handler may have closed it meanwhile
                    raise GraphError(
                        "StopIteration came out of the graph: a node downstream of the Cycler ended, or a function in one raised it."
                    ) from exc
                raise
            if not isinstance(item, EndOfEpoch):
                self._follow(delivered=True)
                return item.plain() if isinstance(item, Indices) else item
            if item.epoch != epoch_of(self._state):
                raise GraphError(
                    f"{item} came in epoch {epoch_of(self._state)}: a node downstream of the Cycler lost or mangled the mark before it."
                )
            if not (self._pass_leading_mark or self._endless):
                self._mark_read = True
                raise StopIteration
            if self._endless and self._fresh and not self._pass_leading_mark:
                raise ValueError(
                    f"epoch {item.epoch} has no batch on this rank, so an endless loader would spin. Use a larger dataset, or tail='pad'."
                )
            self._behind_mark()

    def _follow(self, *, delivered: bool) -> None:
        """Let the state be the root's. One that the root has after an error is that of what came before."""
        state = self.root.get_state()
        if epoch_of(state) != epoch_of(self._state):
            if not delivered:
                return
            raise GraphError(
                f"a batch of epoch {epoch_of(state)} came, but EndOfEpoch({epoch_of(self._state)}) did not: a node downstream of the Cycler lost it. "
                f"A node of your own must hand on marks; penstock.Node does."
            )
        self._state = state
        if delivered:
            self._fresh = self._pass_leading_mark = False
            if self._committed is not None:
                self._uncommitted.append(state)

    def _pass_mark(self) -> None:
        """Take the mark behind a finished epoch, if that has not been done, and stand at the start of the next one."""
        self._check_graph()
        if not self._mark_read:
            item = self.root.next()
            if item != EndOfEpoch(epoch_of(self._state)):
                raise GraphError(
                    f"EndOfEpoch({epoch_of(self._state)}) was due, and something else came: a node downstream of the Cycler lost the mark, or len() is wrong."
                )
        self._behind_mark()

    def _behind_mark(self) -> None:
        self._state = self.root.get_state()
        self._fresh = True
        self._mark_read = self._pass_leading_mark = False

    def _jump(self, state: State) -> None:
        """Let the graph stand at ``state``; what is in flight is dropped, the workers stay."""
        self._stands = False
        self._origin._read_by = self._reader
        self.root.reset(state)
        self._adopt(state, loaded=False)
        self._stands = True

    def _adopt(self, state: State, *, loaded: bool) -> None:
        """Take ``state`` for where the loader stands; a loaded one kills the iterators that were started."""
        self._state = state
        self._fresh = True
        self._loaded = loaded
        self._gave_up = False
        self._mark_read = self._pass_leading_mark = False
        self._run += loaded
        self._forget_uncommitted()

    def _forget_uncommitted(self) -> None:
        self._uncommitted.clear()
        if self._committed is not None:
            self._committed = self._state

    def _here(self) -> State:
        """The state, or the start of the next epoch where that is what a loaded one of a finished epoch means."""
        if self._loaded and not self._gave_up and self._restart and self.root.remaining(self._state) == 0:
            return self._start_of(epoch_of(self._state) + 1)
        return self._state

    def _batches(self) -> int | None:
        """Batches of a whole epoch, the one it stands in: their number may change from epoch to epoch."""
        return self.root.remaining(self._start_of(self.epoch))

    def _start_of(self, epoch: int) -> State:
        state = self.root.start_of(epoch)
        if not isinstance(state, dict) or epoch_in(state) != epoch:
            raise GraphError(f"{type(self.root).__name__}.start_of({epoch}) is {state!r}: it must nest its source's state under 'source'.")
        return state

    def _own_settings(self) -> dict[str, Any]:
        if self._settings is None:
            self._settings = json.loads(json.dumps(self.root.settings()))
        return self._settings

    def _check_graph(self) -> None:
        if getattr(self._origin, "_read_by", None) is not self._reader:
            raise GraphError(
                "another Loader has begun to read this graph, so this one does not know any more where it stands. Build a graph for each Loader."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this loader was closed; build a new one.")
        if self._owner is not None and os.getpid() != self._owner:
            raise ClosedError(f"this loader was started in process {self._owner}, of which this one is a fork. Build a new loader here.")


def _origin(node: Any) -> Any:
    """The first node of a graph, which has no source; torchdata's own where it begins with those."""
    upstream = node.node if isinstance(node, ForeignSource) else node._source if isinstance(node, Node) else getattr(node, "source", None)
    return _origin(upstream) if isinstance(upstream, BaseNode) else node


class _Epoch(Generic[T]):
    """One pass over an epoch of a `Loader`. Belongs to the loader's run that its first ``next`` began."""

    __slots__ = ("_ended", "_loader", "_run")

    def __init__(self, loader: Loader[T]) -> None:
        self._loader = loader
        self._run: int | None = None
        self._ended = False

    def __iter__(self) -> _Epoch[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        loader = self._loader
        if self._run is None:
            self._run = loader._start()
        elif loader._given_up == loader._run and self._run == loader._run - 1:
            self._ended = True
            raise StopIteration
        elif self._run != loader._run:
            loader._check_open()
            raise RuntimeError(
                "this iterator has ended, because a newer one of the same loader was started, or a state was loaded. Iterate over the newer one."
            )
        try:
            return loader._advance()
        except StopIteration:
            self._ended = True
            raise
