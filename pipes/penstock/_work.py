"""What a worker does with one task: load samples by their addresses, make a batch of them, and give errors an address too.

Nothing here knows of threads or processes. A task is an `Indices` or any other item, or a `Part` of a batch; a sample's random
numbers are keyed by (seed, epoch, position), so that a task can be done anywhere, and again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

from penstock._current import Loading, current
from penstock._errors import GraphError
from penstock._fetch import Fetch, Listed, changing
from penstock._keying import CALM, Keying
from penstock._node import Indices
from penstock._pool import IDLE, afresh
from penstock._tolerance import SKIP, Fault, Marred

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence, Sequence

    from penstock._layout import Collation
    from penstock._pool import Allocate
    from penstock._tolerance import OnError


class Part(NamedTuple):
    """Some rows of a batch, whose samples are wanted as they are: they are collated where all of them are."""

    indices: Indices


@final
class MapWork:
    """`Work` that applies a ``map_fn``, sample by sample where that is a `Fetch`.

    Args:
        map_fn: A `Fetch`, or any callable: it is handed plain values, without their address.
        seed: Of the random numbers of the samples.
        rekey: Key the global generators of ``random``, ``numpy.random`` and torch anew for each sample; see `Keying`.
        on_error: What becomes of a sample that raises an ``Exception``, where ``map_fn`` is a `Fetch`.

    Attributes:
        changing: The datasets that want to be told of an epoch: their ``set_epoch`` is called when a task is of another one than
            the task before.
    """

    def __init__(self, map_fn: Callable[[Any], Any], seed: int, rekey: bool | Literal["always"], on_error: OnError = "raise") -> None:
        if rekey not in (True, False, "always"):
            raise ValueError(f"rekey={rekey!r} is neither True nor False nor 'always'.")
        self.map_fn = map_fn
        self.seed = seed
        self.on_error = on_error
        self.changing = changing(self.dataset)
        self._epoch: int | None = None  # that `changing` were told last, in this process
        self._keying = Keying(seed, bool(rekey), calm=None if rekey == "always" else CALM)

    @property
    def dataset(self) -> Any:
        """What ``get_worker_info().dataset`` shows in a worker process."""
        return self.map_fn.dataset if isinstance(self.map_fn, Fetch) else None

    def __call__(self, task: Any, cell: MutableSequence[int], allocate: Allocate = afresh, *, inline: bool = False) -> Any:
        token = current.set(None)
        try:
            if isinstance(self.map_fn, Fetch):
                return self._fetched(self.map_fn, task, cell, allocate, inline)
            with self._keying.kept(inline):
                if not isinstance(task, Indices):
                    return self.map_fn(task)
                position = int(task.positions[0]) if task.is_batch else task.positions
                self._begin(Loading(self.seed, task.epoch, [position], [task.plain()], [IDLE]), position)
                return self.map_fn(task.plain())
        except BaseException as exc:
            annotate(exc, f"while loading {self.name(task, cell[0])}")
            raise
        finally:
            current.reset(token)

    def inline(self, task: Any, allocate: Allocate = afresh) -> Any:
        """The task done in the caller's own process, whose global generators are left as they were."""
        return self(task, [IDLE], allocate, inline=True)

    def name(self, task: Any, row: int) -> str:
        """``task`` in words."""
        if isinstance(task, Part):
            task = task.indices
        if not isinstance(task, Indices):
            return f"the item {task!r:.80}"
        if task.is_batch and row != IDLE:
            task = task[row]
        if task.is_batch and not len(task):
            return f"an empty batch (epoch {task.epoch})"
        if task.is_batch:
            indices = task.plain()
            shown = f"[{', '.join(map(str, indices[:8]))}{', …' if len(indices) > 8 else ''}]"
            return f"the batch of dataset indices {shown} (epoch {task.epoch}, positions {task.positions[0]} to {task.positions[-1]})"
        return f"dataset index {task.values} (epoch {task.epoch}, position {task.positions})"

    # A batch that several workers load together.

    def parts(self, task: Any, n: int, *, here: bool = True) -> list[Part]:
        """``task`` in up to ``n`` parts; none where it is not loaded sample by sample.

        Unless workers are ``here``, in this process, a ``collate_fn`` of the user's belongs where the samples are loaded: it may make
        something of them that can be pickled, or ask for its worker.
        """
        fetch = self.map_fn
        if not isinstance(fetch, Fetch) or fetch.has_getitems or fetch.is_arrays or not isinstance(task, Indices) or not task.is_batch:
            return []
        if fetch.collate_fn is not None and not here:
            return []
        size = -(-len(task) // n)
        return [Part(task[start : start + size]) for start in range(0, len(task), size)] if size < len(task) else []

    def together(self, task: Indices, parts: Sequence[Part], values: Sequence[Any], allocate: Allocate) -> Any:
        """The batch of ``task``, from the values of its parts; in the caller's own process."""
        fetch = self.map_fn
        assert isinstance(fetch, Fetch)
        faults: list[Fault] = []
        batch, start = fetch.begin(len(task), allocate), 0
        try:
            for part, value in zip(parts, values, strict=True):
                marred = value if isinstance(value, Marred) else Marred(value, [], len(value))
                faults += [fault._replace(row=start + fault.row) for fault in marred.faults]
                start += len(part.indices)
                batch.add(marred.value or [])
            return self._finished(fetch, task, batch, faults)
        except BaseException as exc:
            annotate(exc, f"while loading {self.name(task, IDLE)}")
            raise

    # A task that one worker does.

    def _fetched(self, fetch: Fetch, task: Any, cell: MutableSequence[int], allocate: Allocate, inline: bool) -> Any:
        if isinstance(task, Part):
            fetch, task = Fetch(fetch.dataset, _samples), task.indices
        if not isinstance(task, Indices):
            raise GraphError(
                f"Fetch loads samples by index, and {type(task).__name__} came: put a Sampler at the source, or map with a plain function."
            )
        if self.changing and task.epoch != self._epoch:
            self._tell(task.epoch)
        if fetch.is_arrays and task.is_batch:
            try:
                batch = fetch.gathered(task, self.seed, allocate)
            except Exception:
                if self.on_error == "raise":
                    raise
                batch = None  # sample by sample, to find out which
            if batch is not None:
                return batch
        many = task.is_batch and not fetch.has_getitems and len(task) >= _WATCHED
        return self._keying.run(lambda: self._loaded(fetch, task, cell, allocate), of_many=many, kept=inline)

    def _loaded(self, fetch: Fetch, task: Indices, cell: MutableSequence[int], allocate: Allocate) -> Any:
        if not task.is_batch:
            one = Listed(lambda samples: fetch.convert(samples[0]))
            return self._row_by_row(fetch, task, [task.positions], [task.values], one, fetch.dataset.__getitem__, [IDLE])
        positions, indices = task.positions.tolist(), task.plain()
        if not fetch.has_getitems or not indices:
            load = fetch.dataset.__getitem__
        else:
            self._begin(Loading(self.seed, task.epoch, positions[:1], [indices], [IDLE]), positions[0])
            try:
                fetched = fetch.dataset.__getitems__(indices)
            except Exception:
                if self.on_error == "raise":
                    raise
                load = _one_of(fetch.dataset)  # once more, one by one, to find out which
            else:
                current.set(None)
                self._key_collate(fetch, task)
                return fetch.batch_of(fetched, allocate)
        return self._row_by_row(fetch, task, positions, indices, fetch.begin(len(indices), allocate), load, cell)

    def _row_by_row(
        self,
        fetch: Fetch,
        task: Indices,
        positions: list[int],
        indices: list[Any],
        batch: Collation | Listed,
        load: Callable[[Any], Any],
        cell: MutableSequence[int],
    ) -> Any:
        loading = Loading(self.seed, task.epoch, positions, indices, cell)
        current.set(loading)
        keyed, key, epoch = self._keying.keyed, self._keying.key, task.epoch
        faults: list[Fault] = []
        begun, rows = 0, len(indices)
        while begun < rows:
            samples: list[Any] = []
            for row in range(begun, min(rows, begun + batch.step)):
                cell[0] = row
                if keyed:
                    key(epoch, positions[row])
                try:
                    samples.append(load(indices[row]))
                except Exception as exc:
                    if self.on_error == "raise":
                        raise
                    substitute = self._substitute(exc, loading)
                    faults.append(Fault(row, self.name(task, row), in_words(exc), substitute is SKIP))
                    if substitute is not SKIP:
                        samples.append(substitute)
            begun = row + 1
            batch.add(samples)
        cell[0] = IDLE
        current.set(None)
        return self._finished(fetch, task, batch, faults)

    def _finished(self, fetch: Fetch, task: Indices, batch: Collation | Listed, faults: list[Fault]) -> Any:
        if faults and not batch.added:
            return Marred(None, faults, 0)
        self._key_collate(fetch, task)
        value = batch.finish()
        return Marred(value, faults, batch.added) if faults else value

    def _key_collate(self, fetch: Fetch, task: Indices) -> None:
        """A ``collate_fn`` that draws has a key of its own, so that it does not depend on what the samples drew."""
        if fetch.collate_fn is not None and fetch.collate_fn is not _samples and task.is_batch and len(task):
            self._keying.key_collate(task.epoch, int(task.positions[0]))

    def _begin(self, loading: Loading, position: int) -> None:
        if self._keying.keyed:
            self._keying.key(loading.epoch, position)
        current.set(loading)

    def _substitute(self, exc: Exception, loading: Loading) -> Any:
        if self.on_error == "skip":
            return SKIP
        assert callable(self.on_error)
        loading.again()  # its random numbers do not depend on where the sample failed
        sample = loading.sample()
        if self._keying.keyed:
            self._keying.key(sample.epoch, sample.position)
        return self.on_error(exc, sample.index, sample.epoch, sample.position)

    def _tell(self, epoch: int) -> None:
        self._epoch = None
        for dataset in self.changing:
            dataset.set_epoch(epoch)
        self._epoch = epoch


_WATCHED = 8
"""Samples in a batch that are worth watching."""


def _samples(samples: list[Any]) -> list[Any]:
    """The ``collate_fn`` of a `Part`."""
    return samples


def annotate(exc: BaseException, note: str) -> None:
    """Add a note, where the exception can bear one (a frozen dataclass cannot)."""
    with contextlib.suppress(Exception):
        exc.add_note(note)


def in_words(exc: BaseException) -> str:
    """Type and message, whatever the message may raise."""
    try:
        return f"{type(exc).__name__}: {exc}"
    except Exception:
        return f"{type(exc).__name__}, whose message cannot be shown"


def _one_of(dataset: Any) -> Callable[[Any], Any]:
    return lambda index: dataset.__getitems__([index])[0]
