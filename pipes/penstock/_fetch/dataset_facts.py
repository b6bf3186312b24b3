"""DatasetFacts: what a loader needs to know about a dataset. Nothing else looks for what a dataset may have.

`DatasetLike` lists the names. Each question is asked once, when its answer is first needed, and `Fetch`,
`IterableSource` and the workers are given the answers.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, final

from torch.utils.data import ConcatDataset, IterableDataset, Subset

from penstock._arguments import Shown, checksum, joined
from penstock._fetch.array_dataset import ArrayDataset, is_arrays
from penstock._fetch.held import held
from penstock._fetch.self_splitting import splits_itself
from penstock._random.order import Order
from penstock._random.orders import SequentialOrder, ShuffledOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._statistics import CopyStatistics

Read = Literal["by index", "forward", "once", "as it comes", "never"]


class DatasetLike(Protocol):
    """All that a dataset may have for a loader.

    It needs ``__getitem__`` and ``__len__``, or ``__iter__`` as an ``IterableDataset``; the rest is optional.

    A dataset that wraps others in ``dataset`` or ``datasets`` (``Subset``, ``ConcatDataset``, and penstock's own) need
    not repeat their ``set_epoch`` and ``shard_names``. Of any other wrapper only its own attributes count.

    Attributes:
        forward_lanes: The dataset is read forward in so many lanes: rows whose indices are equal modulo this number
            should be read by one reader, in ascending order. With several worker processes, each lane then belongs to
            one worker: a batch is loaded by the workers that own its rows, and their samples, which must be picklable,
            are collated in batch order in the consumer's process. A ``collate_fn`` runs there as well.
        forward_cuts: The same for rows whose positions in the epoch are equal modulo this number.
        sets_worker_info: It sets torch's worker info while it is read, which belongs to the process. So worker threads
            are refused, and a reader thread reads it only while the consumer waits. Such a dataset has
            `seed_items`.
        shard_names: Identifies the files that the indices count through, such as a checksum of their names in order. A
            state loads only if it is the same.
        grows: Later runs may find more of it, behind what there is; see `Shards`.
        source_lengths: The names and lengths of the datasets that the indices count through, one after another in the
            order of their names.
    """

    forward_lanes: int | None
    forward_cuts: int | None
    sets_worker_info: bool
    shard_names: str | None
    grows: bool
    source_lengths: dict[str, int] | None

    def __len__(self) -> int:
        """Number of samples. The length that an ``IterableDataset`` claims only affects ``len(loader)``."""
        ...

    def __getitem__(self, index: Any) -> Any:
        """One sample."""

    def __getitems__(self, indices: list[Any]) -> Any:
        """The samples of a batch as a list; or the batch itself: a tensor, an array, or a dict or named tuple of them.

        None: not available.
        """

    def __iter__(self) -> Iterator[Any]:
        """The samples of an epoch, in their order; for data that is read from its beginning."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Called before the first sample of an epoch: in each worker process, or where the data is read.

        Refused with worker threads.
        """

    def state_dict(self) -> dict[str, Any]:
        """Where an iterable is. See `IterableSource`."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where ``state_dict`` was taken. Both, or neither."""

    def order(self, *, shuffle: bool, seed: int) -> Order | None:
        """The dataset's own order, as a pure function of the arguments; None for the default order.

        Used unless another one is passed.

        Args:
            shuffle: Whether the user asked for a shuffle.
            seed: Seeds everything random.
        """

    def where(self, index: Any) -> str:
        """Where the sample comes from, for people: a file and the record in it, a source of a mix."""
        ...

    def seed_items(self, seed_global_rngs: bool | Literal["always"], worker_init_fn: Any = None) -> None:
        """Called by the loader of a dataset that `sets_worker_info`, which seeds its items itself, and calls
        ``worker_init_fn`` for each worker that it pretends to be.

        Raises:
            ValueError: Another loader has told it otherwise.
        """

    def would_wait(self, index: Any) -> bool:
        """Whether a thread that wants the sample ``index`` now would wait for another thread."""
        ...

    def read_by_all(self) -> None:
        """Called by a loader that does not follow `order`: then no lane belongs to a single worker."""

    def copy_statistics(self) -> CopyStatistics | None:
        """Counts of the local copies of its files, for ``loader.statistics()``."""


DatasetLike.__module__ = "penstock.nodes"  # in the class it would be a member of the protocol


class DatasetView:
    """A dataset whose samples are made from those of another, ``dataset``, which is the one that the user knows."""

    dataset: Any


@final
class DatasetFacts:
    """The answers of one dataset. Loads no sample.

    Args:
        dataset: The dataset.
        read: How it is read, if the caller knows; see `read`.

    Attributes:
        dataset: The dataset.
        name: Name of its class.
    """

    def __init__(self, dataset: Any, read: Read | None = None) -> None:
        self.dataset = dataset
        self.name = type(dataset).__name__
        if read is not None:
            self.read = read
        self.grows = getattr(dataset, "grows", False) is True
        """Whether later runs may find more of it; set by the loader as well."""

    @classmethod
    def of(cls, dataset: Any) -> DatasetFacts:
        """The facts of ``dataset``, which may be facts already."""
        return dataset if isinstance(dataset, DatasetFacts) else cls(dataset)

    def __reduce__(self) -> Any:
        # what the caller knew; the rest is asked again
        return DatasetFacts, (self.dataset, vars(self).get("read")), {"grows": self.grows}

    @cached_property
    def read(self) -> Read:
        """``"by index"``, or ``"forward"``, from its beginning, for an ``IterableDataset``.

        Anything else is ``"once"``, an iterator; ``"as it comes"``, another iterable; or ``"never"``.
        """
        if isinstance(self.dataset, IterableDataset):
            return "forward"
        if self._has("__getitem__") or self._has("__getitems__"):
            return "by index"
        return "once" if isinstance(self.dataset, Iterator) else "as it comes" if self._has("__iter__") else "never"

    @cached_property
    def _measured(self) -> tuple[int, None] | tuple[None, Exception | None]:
        return measured(self.dataset) if self.read == "by index" else (None, None)

    @property
    def length(self) -> int | None:
        """Number of samples, if it is read by index and has a length. The length that a stream claims is ignored."""
        return self._measured[0]

    @property
    def unsized(self) -> Exception | None:
        """The error of its ``__len__``, if that raised one."""
        return self._measured[1]

    def samples(self) -> int:
        """`length`.

        Raises:
            TypeError: The dataset has no length.
        """
        if self.length is None:
            raise TypeError(
                f"{self.name} has no length, which its order requires. Give it a __len__, or pass a sampler; "
                f"a dataset that can only be iterated should be a torch.utils.data.IterableDataset."
            ) from self.unsized
        return self.length

    @cached_property
    def has_getitems(self) -> bool:
        """Whether ``__getitems__`` is worth calling: that of `Subset` only loops if the inner dataset has none."""
        inner = self.dataset
        while isinstance(inner, Subset) and (type(inner).__getitem__, type(inner).__getitems__) == (
            Subset.__getitem__,
            Subset.__getitems__,
        ):
            inner = inner.dataset
        return callable(getattr(inner, "__getitems__", None))

    @cached_property
    def is_arrays(self) -> bool:
        """Whether a batch can be gathered by index operations; see `is_arrays`."""
        return is_arrays(self.dataset)

    @property
    def in_memory(self) -> bool:
        """Whether its samples are rows of arrays, so that there is nothing to load."""
        return isinstance(self.dataset, ArrayDataset)

    def own_order(self, *, shuffle: bool, seed: int) -> Order | None:
        """Its own order, if it has one; see `DatasetLike`.

        An ``order`` that is not a method, or takes other arguments, is unrelated and is ignored.

        Raises:
            TypeError: Its ``order`` method returned something else.
        """
        method = getattr(type(self.dataset), "order", None)
        if not callable(method):
            return None
        try:
            inspect.signature(method).bind(self.dataset, shuffle=shuffle, seed=seed)
        except (TypeError, ValueError):
            return None
        order = self.dataset.order(shuffle=shuffle, seed=seed)
        if order is not None and not isinstance(order, Order):
            raise TypeError(
                f"{self.name}.order(shuffle=, seed=) returned a {type(order).__name__}, but an order has __len__, "
                f"indices and settings. If the method is unrelated to the loader, rename it."
            )
        return order

    def order(self, *, shuffle: bool, seed: int) -> Order:
        """Its own order, or the default order for its length."""
        own = self.own_order(shuffle=shuffle, seed=seed)
        return (
            own
            if own is not None
            else ShuffledOrder(self.samples(), seed)
            if shuffle
            else SequentialOrder(self.samples())
        )

    def where(self, index: int) -> str | None:
        """See `DatasetLike`; None if it does not say."""
        return None if (tell := getattr(self.dataset, "where", None)) is None else str(tell(index))

    @property
    def would_wait(self) -> Callable[[Any], bool] | None:
        """See `DatasetLike`; None if it does not say."""
        return getattr(self.dataset, "would_wait", None)

    def read_by_all(self) -> None:
        """See `DatasetLike`."""
        if (say := getattr(self.dataset, "read_by_all", None)) is not None:
            say()

    @property
    def parts(self) -> Any:
        """The method of a dataset that `grows` by itself; None if it does not, whatever it has of that name."""
        return getattr(self.dataset, "parts", None) if getattr(self.dataset, "grows", False) is True else None

    @property
    def lanes(self) -> int | None:
        """The number of lanes that the dataset itself declares, not its wrappers; None if it declares none.

        Settled once its order is.
        """
        return _number(getattr(self.dataset, "forward_lanes", None))

    @property
    def is_read_in_lanes(self) -> bool:
        """Whether ranks that are dealt single items read different shards, of it or of a source of a mix."""
        parts = (self.dataset, *(self.dataset.datasets if isinstance(self.dataset, ConcatDataset) else ()))
        return self.lanes is not None or any(hasattr(part, "read_by_all") for part in parts)

    @property
    def cuts(self) -> int | None:
        """The number of lanes per epoch, determined in the same way."""
        return _number(getattr(self.dataset, "forward_cuts", None))

    @property
    def sets_worker_info(self) -> bool:
        """See `DatasetLike`."""
        return getattr(self.dataset, "sets_worker_info", False) is True

    def seed_items(self, seed_global_rngs: bool | Literal["always"], worker_init_fn: Any = None) -> None:
        """See `DatasetLike`."""
        if self.sets_worker_info and callable(tell := getattr(self.dataset, "seed_items", None)):
            tell(seed_global_rngs, worker_init_fn)

    @property
    def source_lengths(self) -> dict[str, int] | None:
        """See `DatasetLike`; None if it does not say."""
        return getattr(self.dataset, "source_lengths", None)

    @cached_property
    def names(self) -> dict[str, str]:
        """The names of its shards, if it has them, and which samples its subsets have, as settings of a state."""
        found = {name: said_of(self.dataset, name) for name in (SHARD_NAMES, SUBSET_INDICES)}
        return {name: said for name, said in found.items() if said is not None}

    @cached_property
    def tops(self) -> list[Any]:
        """The dataset with a ``set_epoch`` that the user knows, it itself or inside a wrapper, if it has one."""
        one = self.dataset
        while isinstance(one, Subset | DatasetView) and not callable(getattr(one, "set_epoch", None)):
            one = one.dataset
        return [one] if callable(getattr(one, "set_epoch", None)) else []

    @property
    def is_told(self) -> bool:
        """Whether it has a ``set_epoch`` itself."""
        return callable(getattr(self.dataset, "set_epoch", None))

    @property
    def copied(self) -> Any:
        """The `DatasetCopies` of which each epoch reads new ones, and their dataset is what the user knows; None if
        the dataset is none of that kind.
        """
        return getattr(self.dataset, "copied_by_epoch", None)

    @property
    def has_state(self) -> bool:
        """Whether it says where it is, and goes where it is told."""
        return is_stateful(self.dataset)

    @cached_property
    def splits_itself(self) -> str | None:
        """Why it is known to give each rank its own share; None if there is no sign of it."""
        return splits_itself(self.dataset)

    @property
    def copies(self) -> CopyStatistics | None:
        """The counts of the local copies of its files; None if there are none."""
        from penstock._statistics import CopyStatistics

        ask = getattr(self.dataset, "copy_statistics", None)
        said = ask() if callable(ask) else None
        return said if isinstance(said, CopyStatistics) else None

    def _has(self, name: str) -> bool:
        return hasattr(self.dataset, name)


def measured(sized: Any) -> tuple[int, None] | tuple[None, Exception]:
    """``len(sized)``; or, if it has none, the error of its ``__len__``: any error means that."""
    try:
        return len(sized), None
    except Exception as exc:
        return None, exc


def length(sized: Any) -> int | None:
    """``len(sized)``; None if it has none."""
    return measured(sized)[0]


def is_stateful(thing: Any) -> bool:
    """Whether ``thing``, a dataset or its iterator, has both methods of a state."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


SHARD_NAMES: Final = "shard_names"
SUBSET_INDICES: Final = "subset_indices"
"""The names of these dataset attributes, and of the settings."""

_LOOKED_AT: Final = 1024
"""This many indices of a subset, evenly spaced, go into its checksum, because there may be very many."""


def said_of(dataset: Any, name: str) -> str | None:
    """The attribute ``name`` of ``dataset``, or those of all datasets inside it, if there are any; None if no dataset
    has it.
    """
    said = getattr(dataset, name, None)
    if isinstance(said, str):
        return said
    if not isinstance(dataset, Subset | ConcatDataset | DatasetView | Shown):
        return None
    inside = vars(dataset)
    found = [
        one for part in (*inside.get("datasets", ()), inside.get("dataset")) if (one := said_of(part, name)) is not None
    ]
    if name == SUBSET_INDICES and isinstance(dataset, Subset):
        with contextlib.suppress(Exception):  # a user's class that needs no indices
            indices = dataset.indices
            some = (indices[k] for k in range(0, len(indices), max(1, len(indices) // _LOOKED_AT)))
            found.append(
                checksum(
                    str(
                        [
                            operator.index(one) if hasattr(one, "__index__") else isinstance(one, str) and one
                            for one in some
                        ]
                    ).encode()
                )
            )
    return joined(found)


def loses_buffer(dataset: Any) -> bool:
    """Whether it is a Hugging Face stream with a shuffle buffer, which its ``state_dict`` leaves out."""
    steps = held({"": getattr(dataset, "_ex_iterable", None)})
    return any(type(step.value).__name__ == "BufferShuffledExamplesIterable" for step in steps)


def _number(said: Any) -> int | None:
    return said if isinstance(said, int) and not isinstance(said, bool) and said > 0 else None
