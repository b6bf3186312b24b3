"""Loader: the end of a graph, and the only object that users iterate over.

The graph upstream runs continuously across epochs. The loader cuts its stream into epochs, reports its position
(`state_dict`), and decides where a new iterator starts. It decides at the iterator's first ``next`` and no earlier,
because trainers call ``iter``, ``load_state_dict`` and ``set_epoch`` in every possible order.

`EpochCursor` tracks the position, and is pure. `GraphReader` reads the graph. `EpochIterator` keeps both consistent if
``next`` fails.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, final, overload

from torch.utils.data import IterableDataset, get_worker_info

from penstock._arguments import LONGEST_S, seconds, whole_number
from penstock._errors import GraphError, StateError, StateMismatch
from penstock._loader.address import Address
from penstock._loader.built_again import say_if_anew
from penstock._loader.canonical_graph import FromDataset
from penstock._loader.dataloader_words import EpochView, check_epoch, check_root, refuse_assignment, refuse_discarding
from penstock._loader.epoch_iterator import EpochIterator, Runs
from penstock._loader.graph_reader import GraphReader
from penstock._loader.positions import Positions
from penstock._loader.state_dict import FORMAT, KEY, changes, epoch_in, parsed, warn_of_start
from penstock._loader.title import title
from penstock._nodes.cycler import Cycler
from penstock._nodes.index_node import index_of
from penstock._nodes.node import BaseNode, Node, epoch_of
from penstock._nodes.rank_checks import warn_if_all_read_everything
from penstock._nodes.sharder import ranks_of
from penstock._observe.loop_clock import LoopClock
from penstock._workers.lane_info import LaneInfo
from penstock._workers.lifetime import PATIENCE_S, closing_within

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from penstock._changing.run_changes import RunChanges
    from penstock._fetch.indices import Indices
    from penstock._nodes.graph import Graph
    from penstock._statistics import LoaderStatistics


T = TypeVar("T", covariant=True)
log = logging.getLogger("penstock")


@final
class Loader(FromDataset, Generic[T]):
    """Iterate over a graph; each ``for batch in loader`` is one epoch. For a dataset, call `from_dataset`.

    Nothing runs until the first batch is requested. From then on the workers live until `close`, or until the loader is
    garbage-collected.

    Args:
        root: The last node of the graph. A finite graph is wrapped in a `Cycler`.
        infinite: ``for batch in loader`` continues across epochs, and ``len(loader)`` is undefined.
        restart_on_stop_iteration: Where the state of a finished epoch resumes: at the start of the next epoch (True),
            or at the empty remainder of the finished one (False). None: at the next epoch if the loop saw the end, by
            ``StopIteration`` or `end_epoch`; otherwise at the empty remainder, so that the code after the loop still
            runs.
        misplaced: Not accepted: arguments of `from_dataset` go there.
        dataset_words: Not accepted either.

    Attributes:
        root: The last node of the graph.
        saved_by: The name of what saves this loader's position, with more that belongs to it; None: `state_dict` does.
    """

    __module__ = "penstock"

    @overload
    def __init__(
        self: Loader[Any],
        root: BaseNode[Indices],
        *,
        infinite: bool = False,
        restart_on_stop_iteration: bool | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self, root: BaseNode[T], *, infinite: bool = False, restart_on_stop_iteration: bool | None = None
    ) -> None: ...

    def __init__(
        self,
        root: Any = None,
        *misplaced: Any,
        infinite: bool = False,
        restart_on_stop_iteration: bool | None = None,
        **dataset_words: Any,
    ) -> None:
        check_root(root, misplaced, dataset_words)
        node = root if isinstance(root, Node) else Cycler(root)
        self.root: Node[T] = node if index_of(node).facts.infinite else Cycler(node)
        positions = Positions(self.root)
        if positions.facts.carries_over_epochs and restart_on_stop_iteration is False:
            raise GraphError(
                f"restart_on_stop_iteration=False returns to the end of an epoch, but {type(positions.first).__name__} "
                f"cannot go back. Leave the argument out: a state saved on an epoch's last batch resumes with the "
                f"empty remainder of that epoch anyway."
            )
        self._clock = LoopClock(self.root)
        self._reader = GraphReader(
            self.root, positions, self._clock, infinite=infinite, restart=restart_on_stop_iteration
        )
        self._infinite = infinite
        self.saved_by: str | None = None
        self._settings: dict[str, Any] | None = None
        self._said: tuple[int, int | None] = (-1, None)  # the last epoch of which the length was asked, and the answer
        self._runs = Runs(self._reader)
        self._unseeded: str | None = None  # where it was built, if it shuffles with the default seed
        self._built_for: int | None = None  # len(dataset) when the default order was made

    # Iterating.

    def __iter__(self) -> Iterator[T]:
        """Return an iterator over one epoch. Starts nothing; the iterator's first ``next`` decides where it begins.

        Raises:
            TypeError: The loader is to resume within an epoch, and ignite's ``DeterministicEngine`` would discard its
                first batches.
            GraphError: It has a `Ledger`.
        """
        self._check_alone()
        refuse_discarding(self)
        return EpochIterator(self)

    def __len__(self) -> int:
        """Batches in the whole of `epoch` on this rank. With `Packs` or `Buckets`, epochs differ.

        For a stream this comes from its ``__len__``, and does not affect delivery.

        Raises:
            TypeError: The number is unknown, or the loader is infinite.
        """
        batches = self._length()
        if batches is None:
            raise TypeError(f"this loader has no length: {self._why_unsized}") from self._reader.positions.unsized()
        self._runs.lengths.add(batches)
        return batches

    def count_batches(self, epochs: int | Iterable[int]) -> int:
        """Batches on this rank in several epochs together, for a schedule: ``len(loader) * epochs`` is wrong if epochs
        differ in length, as with `Packs`. Moves nothing, and does not depend on the position.

        Args:
            epochs: How many epochs, from epoch 0 on; or which, such as ``range(2, 5)``.

        Raises:
            TypeError: The number is unknown, or the loader is infinite. The length that a stream only claims does not
                count.
        """
        numbers = epochs if isinstance(epochs, Iterable) else range(whole_number("epochs", epochs, 0))
        counts = [self._batches(check_epoch(epoch)) for epoch in numbers]
        if self._infinite or None in counts:
            raise TypeError(
                f"the batches of this loader cannot be counted in advance: {self._why_unsized}"
            ) from self._reader.positions.unsized()
        return sum(filter(None, counts))

    @property
    def _why_unsized(self) -> str:
        return "it is infinite." if self._infinite else "its source does not know how many items an epoch has."

    def __bool__(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        if self._reader.owner is not None or self._reader.closed:
            raise TypeError(
                "a Loader that was started or closed cannot be copied or pickled, because it has workers. Build a new "
                "one, and pass this one's state_dict() to its load_state_dict."
            )
        return {**vars(self), "saved_by": None}  # a copy has no ledger

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "a shallow copy of a Loader would read the same graph. Call copy.deepcopy before it starts, or build a new "
            "one, with another seed= if its order and random numbers are to differ."
        )

    @property
    def infinite(self) -> bool:
        """Whether ``for batch in loader`` continues across epochs."""
        return self._infinite

    def set_epoch(self, epoch: int) -> None:
        """Make the next iterator start at ``epoch``. Takes effect when that iterator starts.

        Until then only `epoch`, ``len``, `position`, `remaining` and `is_last` answer for that start, and not even they
        while an iterator is inside an epoch. `state_dict` does not change.

        If the loader is already at the start of ``epoch``, as it is after the previous epoch, no batch in flight is
        dropped. A loaded state inside ``epoch`` resumes there; a loaded state that has completed ``epoch`` yields its
        empty remainder.
        """
        self._reader.request(check_epoch(epoch))

    @property
    def sampler(self) -> EpochView:
        """An object with ``set_epoch``, for trainers that look for one here.

        Not the user's sampler. Exists only if the loader has a length.
        """
        if self._length() is None:
            raise AttributeError(
                "this loader has no sampler, because it has no length and trainers cannot count its epochs. Call "
                "loader.set_epoch(epoch)."
            )
        return EpochView(self._reader.request)

    @sampler.setter
    def sampler(self, value: Any) -> NoReturn:
        refuse_assignment("sampler")

    @property
    def batch_sampler(self) -> None:
        """Always None. Exists only if `sampler` does, because trainers check both."""
        if self._length() is None:
            raise AttributeError(
                "this loader has no batch_sampler, because its graph makes the batches. To inspect the graph, use "
                "loader.root."
            )

    @batch_sampler.setter
    def batch_sampler(self, value: Any) -> NoReturn:
        refuse_assignment("batch_sampler")

    def end_epoch(self) -> None:
        """Skip the rest of the epoch, in the state too.

        For epochs cut short by a limit, and for loops that count their batches.

        After the last batch, this records that the loop saw the end: a state saved from then on resumes at the next
        epoch. Idempotent.
        """
        self._reader.check_open()
        self._check_alone()
        self._runs.roll_back()
        rest = self._runs.rest()
        if self._reader.end_epoch():
            self._runs.given_up = self._runs.end()
        self._runs.tell(rest)
        self._reader.commits.forget(self._reader.cursor.state)

    @property
    def epoch(self) -> int:
        """The epoch of the last delivered batch; once the loop saw its end, and after a load, a jump or `set_epoch`,
        that of the next batch.
        """
        return epoch_of(self._here)

    @property
    def remaining(self) -> int | None:
        """Batches left in this epoch after the last delivered one; None if unknown."""
        here, cursor = self._here, self._reader.cursor
        return cursor.remaining if here == cursor.here else self._reader.positions.remaining(here)

    @property
    def position(self) -> int | None:
        """Batches of this epoch up to the last delivered one: ``len(loader) - loader.remaining``; None if unknown."""
        batches, remaining = self._batches(self.epoch), self.remaining
        return None if batches is None or remaining is None else batches - remaining

    @property
    def is_last(self) -> bool | None:
        """Whether the last delivered batch ends the epoch; None if unknown."""
        remaining = self.remaining
        return None if remaining is None else remaining == 0

    # Any batch again.

    @property
    def last(self) -> Address | None:
        """The address of the last delivered batch, with the indices of its samples, those included that
        ``on_error="skip"`` left out.

        None before the first batch, after a load, and downstream of a node that overrides ``next``. It stays at the end
        of an epoch.
        """
        unfinished = self._runs.unfinished  # of a `next` that was interrupted: it has delivered nothing
        last = self._reader.cursor.last if unfinished is None else unfinished[2]["last"]
        return None if last is None else Address.of(last, with_indices=last.values is not None)

    def load(self, address: Address) -> T:
        """The batch or sample at ``address`` once more, bit for bit, on any rank. Moves nothing, and counts nothing.

        It is made by the workers, if there are any, from the dataset as they have it. Call it in the thread that
        iterates, between two batches.

        Args:
            address: Such as `last`, of this loader or of another one with the same data, order and seed. If it has
                indices, they are compared.

        Raises:
            TypeError: It is not an `Address`.
            IndexError: Its position is not in the epoch.
            GraphError: The data can only be read from its beginning, or a node downstream overrides ``next``.
            StateMismatch: It has other indices: it is of another loader, or the data has changed.
            Exception: What loading raises, as it did then.
        """
        self._check_address(address)
        if address.position == ():
            raise ValueError(f"{address} is an address of no samples, so there is nothing to load.")
        with self._runs.turn:
            self._runs.roll_back()
            made: T = self._reader.again(address)
            return made

    def load_ahead(self, addresses: Sequence[Address]) -> None:
        """Begin to load ``addresses`` in the workers, as many as they may have in progress, because `load` is about to
        ask for them. No effect without workers.
        """
        with self._runs.turn:
            self._runs.roll_back()
            self._reader.begin_again(addresses)

    def locate(self, address: Address) -> Address:
        """``address`` with the indices of its samples. Loads nothing, and raises what `load` does before it loads."""
        self._check_address(address)
        with self._runs.turn:
            self._runs.roll_back()
            return Address.of(self._reader.at([address])[0], with_indices=True)

    def _check_address(self, address: Any) -> None:
        self._reader.check_open()
        if not isinstance(address, Address):
            raise TypeError(
                f"{address!r:.80} is not an Address, such as loader.last or penstock.Address(epoch, position)."
            )

    # Saving and loading.

    @property
    def here(self) -> Any:
        """The position after the last batch that ``next`` returned, as a value that never changes, for `state_dict`."""
        return self._reader.cursor.state

    def state_dict(self, here: Any = None) -> dict[str, str]:
        """Return the position after the last batch that ``next`` returned (or that was committed), as one key with one
        JSON string.

        The state is the same on every rank (see `Sharder` for the exception, ``tail="exact"``), under 1 KB, and never
        modified afterwards. Starts nothing and does not wait.

        Args:
            here: An earlier value of `here`; None: now.

        Raises:
            StateError: Somebody else saves this loader's position, such as a `Ledger`, or a node's state is not JSON.
        """
        if here is None and self.saved_by is not None:
            raise StateError(
                f"this loader's state alone would skip what is open. Save {self.saved_by}.state_dict(), and load it "
                f"there."
            )
        state = self._runs.state if here is None else here
        try:
            endless = {"infinite": True} if self._infinite else {}
            settings = self._settings_at(state)
            whole = {"format": FORMAT, **endless, "settings": settings, "state": state, **self._saved_changes()}
            return {KEY: json.dumps(whole, allow_nan=False)}
        except (TypeError, ValueError) as exc:
            raise StateError(
                f"the state of this graph is not JSON ({exc}). In get_state of your own nodes, return only dict, list, "
                f"str, int, float, bool and None."
            ) from exc

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Make the next iterator continue where ``state_dict`` was taken. May be called at any time, and repeatedly.

        That iterator looks up its rank and world size again, because the process group may have been recreated.

        Args:
            state_dict: The result of `state_dict`, from any rank and any world size.
            strict: If False, accept a state saved under other settings (another dataset, for example) with a warning,
                and start the epoch after it, because a position is meaningless in another order.

        Raises:
            StateError: Not a state of this library, or damaged. The loader is unchanged.
            StateMismatch: Saved under other settings; the message names each one with both values. The loader is
                unchanged.
            GraphError: The loader has a `Ledger`.
            ClosedError: After `close`.
        """
        self._check_alone()
        self._resume(state_dict, strict)

    def _resume(self, state_dict: Any, strict: bool | None = None) -> None:
        """`load_state_dict`, also under a ledger, which has no ``strict``."""
        self._reader.check_open()
        self._runs.roll_back()
        state = parsed(state_dict)
        may_change = "changes" in state or self._reader.positions.first.changing is not None
        adopted = self._changes.adopted(state, strict=strict is not False) if may_change else nullcontext(list[str]())
        with adopted as refused:
            changed = [*refused, *changes(state["settings"], self._settings_at(state["state"]))]
            if changed and strict is not False:
                way = "" if strict is None else ", or pass strict=False to start the next epoch under the new ones"
                raise StateMismatch(
                    f"this state was saved under other settings: {'; '.join(changed)}. Load it with the settings it "
                    f"was saved under{way}.{self._changes.told(state['state']) if may_change else ''}"
                )
            if changed:
                inner = self._reader.positions.start_of(epoch_in(state["state"]) + 1)
                warn_of_start(changed, epoch_of(inner))
            else:
                inner = state["state"]
                self.root.check(inner)
            if may_change:
                self._changes.resume_at(inner)
        self._reader.load(inner)
        self._said = -1, None  # there may be other ranks now
        self._runs.end()
        if state.get("infinite") and not self._infinite and self._reader.cursor.begun:
            left = "batches" if self.remaining is None else f"{self.remaining} batches"
            log.warning(
                f"this state was saved by a loader with infinite=True, in epoch {epoch_of(inner)}. This one has "
                f"epochs, so its next loop has only the {left} that are left of that epoch. To go on without end, pass "
                f"infinite=True."
            )

    def _check_alone(self) -> None:
        if self.saved_by is not None:
            raise GraphError(
                f"this loader is read by its {self.saved_by}, which would lose what moves it beside. Use the "
                f"{self.saved_by}, or close it first."
            )

    def commit(self, n: int = 1) -> None:
        """Make `state_dict` refer to the last *committed* batch, for trainers that prefetch or may fail in the middle
        of a step.

        Args:
            n: How many more delivered batches were trained on, oldest first; 0 only enables this mode.
        """
        self._reader.commits.commit(n, self._reader.cursor.state)

    # Changing the run.

    @cached_property
    def _changes(self) -> RunChanges:
        from penstock._changing.run_changes import RunChanges

        return RunChanges(self._reader)

    def _saved_changes(self) -> dict[str, Any]:
        return {} if self._reader.positions.first.changing is None else self._changes.saved()

    def reweight(self, weights: Mapping[str, Any], at: int | None = None) -> int:
        """Give the sources of a `Mix` other weights from a later sample on, as a stage that starts there would.

        What is in progress is delivered first.

        The stage is in the state. It lasts until the next one of the plan; those of earlier calls that start later are
        dropped. All ranks must call it in the same step, with the same weights; `check_ranks` compares them.

        Args:
            weights: See `Mix`. A source that is left out gets none.
            at: The sample at which they begin, counted from the start of training, over all ranks; rounded up to a
                ``run``, or to a multiple of the lanes. Default: the first one that may not be in progress, however full
                the queues are: so all ranks find the same one.

        Returns:
            The sample at which they begin.

        Raises:
            ValueError: The weights are invalid; ``at`` is in the past; or the loader is not over a `Mix`.
            GraphError: ``at`` is needed, because ranks may be at different samples.
        """
        self._reader.check_open()
        with self._runs.turn:
            self._runs.roll_back()
            return self._changes.reweight(weights, at)

    # Life.

    def refresh(self) -> None:
        """Give the workers new copies of the dataset, ``transform`` and ``collate_fn``.

        Call it after changing any of them in this process.

        Worker processes end, and new ones start with the next batch. Batches loaded ahead are loaded again. The
        position in the epoch, the state and the running iterator are unaffected. The length of the dataset must not
        change.
        """
        self._reader.check_open()
        self._runs.roll_back()
        self._reader.refresh()

    def close(self, timeout: float = PATIENCE_S) -> None:
        """End the workers and release everything they held, within ``timeout`` seconds.

        `state_dict` still works. Idempotent.

        A thread stuck in user code cannot be stopped. It is abandoned, its result is dropped, and the log names it. If
        Ctrl-C interrupts this call, the next call finishes the work, or garbage collection of the loader does.
        """
        patience = seconds("timeout", timeout) or (0.0 if timeout == 0 else LONGEST_S)
        self._reader.closed = True
        self._runs.end()
        if self._reader.owner is not None and os.getpid() != self._reader.owner:
            return  # a fork: the workers belong to another process
        closing_within(patience, self.root.shutdown)
        for check in self._reader.checks:
            check.closed()

    def __enter__(self) -> Loader[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What it is.

    def __repr__(self) -> str:
        return f"<penstock.{title(self)}>"

    @property
    def graph(self) -> Graph:
        """The current graph, for inspection: ``print(loader.graph)``. Starts nothing and loads nothing."""
        from penstock._nodes.graph import Graph

        return Graph(title(self), self.root, self.epoch)

    def _repr_html_(self) -> str:
        return self.graph._repr_html_()

    def statistics(self) -> LoaderStatistics:
        """Where time went so far, as a frozen object.

        May be called at any time, even after `close`. Not part of the state.
        """
        return self._clock.statistics()

    def plot(self, file: str | os.PathLike[str] | IO[bytes]) -> None:
        """Plot `statistics` to an image such as ``"loader.png"``: where time went, how long the waits were, how full
        the queues. Needs matplotlib.
        """
        from penstock._observe.picture import draw

        draw(self.statistics(), title(self), file)

    def report(self) -> str:
        """Explain in a few lines what slows the loop down, and what to do about it.

        The first line begins with ``data:`` if the loop waits for batches a tenth of its time or more, otherwise with
        ``training step:``. May be called at any time.
        """
        from penstock._observe.report import Names, report

        return report(self.statistics(), Names.of(self.root))

    def report_every(self, every_s: float) -> None:
        """Every ``every_s`` seconds, log the first line of `report` for the time since the previous log line; 0 stops.

        The level is ``INFO``, or ``WARNING`` if the logger drops ``INFO``.
        """
        self._clock.report_every(seconds("every_s", every_s, zero="stops the log lines") or 0.0)

    # For `EpochIterator`.

    @property
    def _is_inside(self) -> bool:
        """Whether the loader is in the middle of an epoch."""
        return not self._reader.closed and self._reader.cursor.begun and self._reader.cursor.remaining != 0

    @property
    def _here(self) -> Any:
        """The position that the loader's numbers are about: where the next iterator starts, if an epoch was requested
        for it, and otherwise the cursor's.
        """
        cursor = self._reader.cursor
        return cursor.here if self._runs.is_inside else cursor.bound_for(self._reader.asked())

    def _start(self) -> int:
        """Move to where a new iterator starts. Returns the number of its run."""
        self._reader.check_open()
        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, IterableDataset):
            rank, world_size = ranks_of(self.root)
            if world_size % worker.num_workers or rank % worker.num_workers != worker.id:
                if isinstance(worker, LaneInfo):
                    raise GraphError(
                        f"this loader is read in each of the {worker.num_workers} lanes of another one, so each would "
                        f"deliver every batch. Build it in __iter__, with rank=info.id and "
                        f"world_size=info.num_workers, where info = torch.utils.data.get_worker_info()."
                    )
                raise GraphError(
                    f"this loader is read inside a DataLoader, whose {worker.num_workers} workers would each deliver "
                    f"every batch. A Loader replaces the DataLoader: iterate over it directly, and pass num_workers to "
                    f"it."
                )
        self._check_length()
        if not self._runs.number and not self._reader.cursor.pending:
            say_if_anew(self)
        if not self._runs.number:
            warn_if_all_read_everything(self.root)
        rest = self._runs.rest()
        self._reader.start()
        self._runs.tell(rest)
        return self._runs.end()

    def _length(self) -> int | None:
        """Batches in a whole epoch; for a stream, according to its ``__len__``.

        What was said of an epoch holds until it ends.
        """
        if self._infinite:
            return None
        reader, here = self._reader, self._here
        epoch, begun = epoch_of(here), reader.cursor.begun and here == reader.cursor.here
        # a trainer counts by it, even if a plan has shown by now that it is wrong
        if begun and self._said[0] == epoch:
            return self._said[1]
        claimed = None if begun else reader.positions.claimed(epoch)
        batches = self._batches(epoch) if claimed is None else claimed
        self._said = epoch, reader.positions.claimed(epoch) if batches is None else batches
        return self._said[1]

    def _batches(self, epoch: int) -> int | None:
        """Batches in the whole of ``epoch``; the number may differ between epochs."""
        return self._reader.positions.items(epoch, self._reader.cursor.state)

    def _settings_at(self, state: Any) -> dict[str, Any]:
        """The settings that ``state`` depends on. Later stages of a mix may still change."""
        if self._settings is None:
            self._settings = json.loads(json.dumps(self._reader.positions.settings()))
        # None: a setting that is not compared here, because it may change yet
        here = self._reader.positions.settings_at(state)
        return {
            name: value for name, value in {**self._settings, **here}.items() if value is not None or name not in here
        }

    def _check_length(self) -> None:
        items = self._built_for if self._built_for is None else len(self.dataset)
        if items != self._built_for:
            raise GraphError(
                f"{type(self.dataset).__name__} had {self._built_for} samples when this loader was built, and has "
                f"{items} now, but the order of an epoch was made for {self._built_for}. Build a new loader once the "
                f"dataset is complete, or after each change of its length, and call its set_epoch or pass another "
                f"seed=: otherwise it begins with epoch 0 again, with the same random numbers."
            )
