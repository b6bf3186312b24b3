"""Compatibility with ``torch.utils.data.DataLoader``: which of its attributes a loader has, and the errors for other
uses of one.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, NoReturn, final

from penstock._arguments import whole_number
from penstock._errors import GraphError, first_time
from penstock._nodes.node import BaseNode

if TYPE_CHECKING:
    from collections.abc import Callable


log = logging.getLogger("penstock")

_REBUILDS = "accelerate.data_loader"
"""The module whose functions (``prepare_data_loader``, ``skip_first_batches``) read a loader's attributes only to build
a ``DataLoader`` from them.

That ``DataLoader`` would silently lack the order, seed, transform and position. Only the calling module distinguishes
this from a script that logs ``batch_size``: the functions check no type, and replace an `AttributeError` by a default.
"""

_DISCARDS = "ignite.engine.deterministic"
"""The module whose ``DeterministicEngine`` reads and discards as many batches as it has trained in the epoch: only the
module that calls `iter` tells.
"""

_BUILT_IN = (
    "It is an argument of Loader.from_dataset, which builds it into the graph; loader.root is the graph's last node."
)


@final
class ReadOnly:
    """A read-only attribute with the name of one of ``DataLoader``'s.

    Args:
        shown: Whether a loader built by `from_dataset` has it. The others are hidden, because trainers that find them
            rebuild a ``DataLoader``.
        computed: The value may change, so the loader's ``_words`` hold a function that returns it.
    """

    def __init__(self, *, shown: bool, computed: bool = False) -> None:
        self._shown = shown
        self._computed = computed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        if loader is None:
            return self
        if sys._getframe(1).f_globals.get("__name__") == _REBUILDS:
            raise TypeError(
                f"Accelerate read {self._name!r} to build a DataLoader from this Loader, which would lose its order, "
                f"seed, transform and position. Leave out prepare, prepare_data_loader and skip_first_batches (in the "
                f"Hugging Face Trainer: set ignore_data_skip=True), and iterate over "
                f"penstock.integrations.accelerate.AccelerateLoader(loader, accelerator). A Loader resumes by its "
                f"load_state_dict."
            )
        if self._shown and loader._words is not None:
            value = loader._words[self._name]
            return value() if self._computed else value
        raise AttributeError(
            f"a Loader has no attribute {self._name!r}{' if it was built from a graph' * self._shown}. {_BUILT_IN}"
        )

    def __set__(self, loader: Any, value: Any) -> NoReturn:
        refuse_assignment(self._name)


def refuse_assignment(name: str) -> NoReturn:
    """Refuse ``loader.name = …``, which would change nothing."""
    raise AttributeError(
        f"loader.{name} cannot be assigned, because the graph was built with it. Build a new loader with "
        f"Loader.from_dataset(..., {name}=...), and pass this one's state_dict() to its load_state_dict."
    )


class DataLoaderWords:
    """The attributes that scripts read from a ``DataLoader``, for `Loader` to inherit."""

    _words: dict[str, Any] | None = None

    dataset = ReadOnly(shown=True)
    batch_size = ReadOnly(shown=True)
    num_workers = ReadOnly(shown=True, computed=True)
    collate_fn = ReadOnly(shown=True)
    pin_memory = ReadOnly(shown=True)
    drop_last = ReadOnly(shown=True)
    timeout = ReadOnly(shown=False)
    worker_init_fn = ReadOnly(shown=False)
    multiprocessing_context = ReadOnly(shown=False)
    generator = ReadOnly(shown=False)
    prefetch_factor = ReadOnly(shown=False)
    persistent_workers = ReadOnly(shown=False)
    pin_memory_device = ReadOnly(shown=False)
    in_order = ReadOnly(shown=False)


@final
class EpochView:
    """The value of ``loader.sampler`` for trainers: it has `set_epoch`, and nothing else.

    A loaded state that is not yet used takes precedence, because such trainers miscount the epochs of a resumed run.
    """

    def __init__(self, request: Callable[..., None]) -> None:
        self._request = request

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        self._request(check_epoch(epoch), by_sampler=True)


def refuse_discarding(loader: Any) -> None:
    """Refuse an iterator to a caller that skips by reading, if a loaded state has skipped the same batches.

    For `Loader.__iter__` only.
    """
    cursor = loader._reader.cursor
    # In a stream the position is unknown, None.
    if (
        sys._getframe(2).f_globals.get("__name__") == _DISCARDS
        and cursor.pending
        and loader._is_inside
        and loader.position != 0
    ):
        raise TypeError(
            "ignite's DeterministicEngine would read and discard the first batches of the epoch again, but this loader "
            "has loaded a state and begins after them. Train with ignite.engine.Engine, or wrap the loader as in "
            "'ignite' on the page 'Trainers' of the documentation."
        )


def check_root(root: Any, misplaced: tuple[Any, ...], dataset_words: dict[str, Any]) -> None:
    """Refuse calls meant for ``DataLoader``, and say what to write instead."""
    if isinstance(root, BaseNode) and not misplaced and not dataset_words:
        return
    arguments = "".join(f", {value!r:.60}" for value in misplaced)
    arguments += "".join(
        f", {name}={value!r:.60}" for name, value in dataset_words.items() if name != "dataset" or root is not None
    )
    if isinstance(root, BaseNode):
        raise GraphError(
            f"Loader(root) takes only a graph. Pass the other arguments ({arguments[2:]}) to its nodes: the Batcher, "
            f"the ParallelMapper and so on."
        )
    kind = type(dataset_words.get("dataset") if root is None else root).__name__
    raise GraphError(
        f"Loader(root) takes the last node of a graph, not a {kind}. For a dataset write "
        f"Loader.from_dataset(dataset{arguments or ', batch_size=…'})."
    )


def check_epoch(epoch: int) -> int:
    """``epoch`` as an ``int``, if it can be the number of an epoch."""
    return whole_number("epoch", epoch, 0, 2**62)


def say_once(text: str) -> None:
    """Log ``text``, once in this process."""
    if first_time(text):
        log.warning(text)
