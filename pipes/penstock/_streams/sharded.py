"""What `Shards` and `Stream` share: the shards, copies of them, and the transform; and the keyword arguments of
formats.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

from torch.utils.data import Dataset, Subset

from penstock._arguments import Shown, checksum, whole_number
from penstock._fetch.dataset_facts import SHARD_NAMES
from penstock._files.paths import CopyOptions, Reach, kept_in, listed, reached
from penstock._streams.from_copies import FromCopies
from penstock._streams.shard_names import names_of
from penstock._streams.tables import Pieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock._statistics import CopyStatistics
    from penstock._streams.steps import Step


class StreamOptions(TypedDict, total=False):
    """Keyword arguments that `Stream.of` and formats pass on to a `Stream`."""

    lanes: int | None
    transform: Callable[[Any], Any] | None
    steps: Sequence[Step]
    bookmarks: str | os.PathLike[str] | bool
    retries: int
    on_error: Literal["raise", "skip"]


class FormatOptions(StreamOptions, CopyOptions, total=False):
    """Keyword arguments that formats pass on to `Shards`, or with an ``epoch_size`` to a `Stream`."""

    window: int
    epoch_size: int | None
    grow: bool


class FileOptions(CopyOptions, total=False):
    """How the files of `Shards` or a `Stream` are reached."""

    ahead: int


class Sharded(Shown, Dataset[Any]):
    """A dataset over shards: `Shards` or a `Stream`, which document the arguments.

    Attributes:
        refused: What to say about arguments that only the other one has.
        grows: Whether later runs may find more shards; see `Shards`.
    """

    refused: ClassVar[dict[str, str]]
    grows = False

    def __init__(
        self,
        shards: Sequence[Any] | int,
        open: Callable[..., Any],
        name: str,
        settings: dict[str, Any] | None,
        transform: Callable[[Any], Any] | None,
        files: Any,
    ) -> None:
        if isinstance(shards, str | bytes | os.PathLike):
            raise TypeError(f"shards={shards!r} is a single path, but must be a list of paths: [{shards!r}].")
        # An array without dimensions is a number.
        if isinstance(shards, Iterable) and not isinstance(shards, Sequence) and getattr(shards, "ndim", 1):
            shards = listed(shards)
        for what, function in (("open", open), *(() if transform is None else (("transform", transform),))):
            if not callable(function):
                raise TypeError(f"{what} must be a function, but {function!r:.80} is not callable.")
        for word in files:
            if word not in Reach._fields:
                raise TypeError(f"{type(self).__name__} has no argument {word}=. {self.refused.get(word, '')}".rstrip())
        if {"cache_dir", "max_cache_size"} & {word for word, value in files.items() if value is not None}:
            if not isinstance(shards, Sequence) or not all(isinstance(shard, str | os.PathLike) for shard in shards):
                raise TypeError(
                    f"cache_dir={files.get('cache_dir')!r} keeps copies of files, so shards must be a list of paths, "
                    f"not {shards!r:.80}."
                )
            reach = Reach(**files)
            shards, open = (
                reach.of([reached(os.fspath(shard), reach.storage_options) for shard in shards]),
                FromCopies(open),
            )
        self.shards: Sequence[Any] = (
            shards if isinstance(shards, Sequence) else range(whole_number("shards", shards, 0))
        )
        self._opener = open
        self._name = name
        self._settings = copy.deepcopy(settings)
        self._transform = transform

    @property
    def shard_names(self) -> str | None:
        """A checksum of the shard names, in the order given; see `Fetch`. None if the shards are only numbers."""
        return self._names(len(self.shards))

    def _names(self, many: int) -> str | None:
        """The same of the first ``many`` shards."""
        if isinstance(self.shards, range):
            return None
        if isinstance(self.shards, Pieces):
            return names_of(self.shards.files[: int(self.shards.file_numbers[many - 1]) + 1 if many else 0])
        return names_of(self.shards[:many])

    def _said(self, many: int) -> dict[str, Any]:
        """Settings that identify the first ``many`` shards."""
        more = {SHARD_NAMES: self._names(many)} if not isinstance(self.shards, range) else {}
        more |= (
            {"pieces": checksum(self.shards.file_numbers[:many].astype("<i8").tobytes())}
            if isinstance(self.shards, Pieces)
            else {}
        )
        return {"shards": many, **more}

    def _check_grow(self, grow: bool, lanes: int | None) -> bool:
        if grow and lanes is None:
            raise ValueError(
                "grow=True needs lanes=, because the default depends on the number of shards, and must stay as it is. "
                "Pass what the run has, or a multiple of the number of ranks."
            )
        return grow

    def copy_statistics(self) -> CopyStatistics | None:
        """Statistics about the copies of the files; None if there are no copies."""
        first = next(iter(self.shards), None)
        cache = kept_in(getattr(first, "path", first))
        return None if cache is None else cache.statistics()

    def close(self) -> None:
        """Close the files that this process has open; garbage collection does the same.

        Idempotent. Reading opens them again.
        """
        raise NotImplementedError

    def _transformed(self, record: Any) -> Any:
        return record if self._transform is None else self._transform(record)


def close_shards(dataset: Any) -> None:
    """Close the files opened by a pass over ``dataset``, if it is `Sharded` or a subset of such: the next reader may
    need only one shard, or be another process.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, Sharded):
        dataset.close()
