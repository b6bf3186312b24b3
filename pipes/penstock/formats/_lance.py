"""Lance datasets: rows of one version, by index."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from torch.utils.data import Dataset

from penstock._arguments import checksum
from penstock._fetch.error_policy import annotate
from penstock._files.paths import extra, is_remote
from penstock._streams.tables import chosen_types, names_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WHO: Final = "penstock.formats.lance"


def lance(
    uri: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    *,
    filter: str | None = None,
    version: int | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LanceRows:
    """A map-style dataset of the rows of a Lance dataset, deleted ones left out.

    Pass it to `Loader.from_dataset`, or mix several with `Mix`.

    A batch is one ``take``. A sample is a dict of Python values, as pyarrow's ``to_pylist`` makes it. Sample i is row i
    of the version, so nothing is read beforehand without a ``filter``, and resuming takes the same time anywhere. Lance
    compares its files with no checksum: damage that leaves a value readable goes unnoticed.

    Lance is not fork-safe. Use ``method="thread"``, or processes with ``multiprocessing_context="spawn"`` or
    ``"forkserver"``, which open the dataset anew.

    Args:
        uri: A folder, or a URL such as ``"s3://bucket/rows.lance"``.
        columns: Read only these. Default: all. Columns of blobs cannot be read.
        filter: A condition in SQL over the columns, such as ``"label != 3"``: only rows that satisfy it are samples, in
            the order of the rows. Their numbers are computed here, by one pass over the columns that it names (or by a
            scalar index of them), and take 8 bytes each, in each process.
        version: A number or a tag. Default: the latest one now. The rows of later versions do not come until the
            dataset is built again. A state loads only over the rows that it was saved over: after an append it names
            the version to pass here.
        storage_options: Keys, an endpoint, a region, as Lance takes them. Not part of the state.

    Raises:
        ValueError: There is no Lance dataset, or not this version; it has no rows, or none that the filter passes; a
            column is missing or holds blobs; the filter is no condition. On loading: the dataset at ``uri`` is another
            one.
        RuntimeError: On loading: in a worker that was forked.
        ImportError: pylance is not installed.
    """
    extra("lance", _WHO, "pylance")
    path = os.fspath(uri) if is_remote(os.fspath(uri)) else os.path.abspath(os.fspath(uri))
    options = None if storage_options is None else dict(storage_options)
    data = _opened(path, version, options)
    columns = _checked_columns(path, data, names_of(columns))
    rows = None if filter is None else _passing(path, data, filter)
    length = data.count_rows() if rows is None else len(rows)
    if not length:
        why = "has no rows" if filter is None else f"has no row that satisfies filter={filter!r}"
        raise ValueError(f"{path} {why} in version={data.version}, of {data.count_rows()}. Pass another one.")
    return LanceRows(path, data.version, options, columns, rows, length, data)


@final
class LanceRows(Dataset[dict[str, Any]]):
    """The dataset that `lance` makes.

    Any threads may read it; copies in other processes open the same version themselves.
    """

    def __init__(
        self,
        uri: str,
        version: int,
        storage_options: dict[str, Any] | None,
        columns: list[str],
        rows: np.ndarray | None,
        length: int,
        data: Any,
    ) -> None:
        self.uri = uri
        self.version = version
        self._storage_options = storage_options
        self._columns = columns
        self._rows = rows  # those that the filter passes, ascending
        self._length = length
        self._files = _files_of(data)
        self._data: Any = data

    @property
    def shard_names(self) -> str:
        """The version, and a checksum of the names of its files, which Lance never uses twice, and of the rows that the
        filter passes; see `Fetch`.
        """
        rows = "" if self._rows is None else checksum(self._rows)
        return f"version={self.version} {checksum(f'{self._files} {rows}'.encode())}"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The samples at ``indices``, in their order."""
        numbers = [self._row(operator.index(index)) for index in indices]
        data = self._opened()
        try:
            samples: list[dict[str, Any]] = data.take(numbers, self._columns).to_pylist()
        except BaseException as exc:
            if type(exc).__name__ == "PanicException":  # of Lance's own code, over a damaged file; it is no `Exception`
                raise ValueError(f"{self.uri}, version={self.version}, is damaged: {exc}") from exc
            annotate(
                exc,
                f"while reading {len(numbers)} rows of {self.uri}, version={self.version}, from row {numbers[0]} on. "
                f"If one of its files is gone or damaged, restore it. (cleanup_old_versions removes versions that have "
                f"no tag.)",
            )
            raise
        return samples

    def close(self) -> None:
        """Let go of what is open. Reading opens it again."""
        self._data = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_data": None}

    def _row(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is out of bounds for a dataset of {self._length} samples")
        index %= self._length
        return index if self._rows is None else int(self._rows[index])

    def _opened(self) -> Any:
        """Lance's dataset. Two threads may open it at the same time, of which one is kept."""
        if (data := self._data) is None:
            data = _opened(self.uri, self.version, self._storage_options)
            if _files_of(data) != self._files:
                raise ValueError(
                    f"{self.uri} is not the dataset that was opened before: its version={self.version} has other "
                    f"files. Make the same one readable in every process, or build the dataset again."
                )
            self._data = data
        else:
            _check_process(self.uri)
        return data


_user: int | None = None
"""The process that first opened a dataset: the threads that read for Lance are there, and a fork inherits their locks
without them.
"""


def _check_process(uri: str) -> None:
    """Refuse a fork of a process that has opened a dataset.

    Whether Lance would hang in it depends on what its threads were doing at that moment.
    """
    global _user
    if _user is None:
        _user = os.getpid()
    elif _user != os.getpid():
        raise RuntimeError(
            f"{uri} was opened by process {_user}, of which this one is a fork, and Lance is not fork-safe. Pass "
            f"method='thread', or multiprocessing_context='spawn' (or 'forkserver'), with which each worker opens it "
            f"itself."
        )


def _opened(uri: str, version: int | str | None, storage_options: dict[str, Any] | None) -> Any:
    """Lance's dataset, of that version."""
    pylance = extra("lance", _WHO, "pylance")
    _check_process(uri)
    try:
        return pylance.dataset(uri, version=version, storage_options=storage_options)
    except (ValueError, OSError) as exc:
        raise ValueError(
            f"{uri} is no Lance dataset, cannot be reached, or has no version={version!r}: {exc} Pass None for the "
            f"latest version. (cleanup_old_versions removes versions that have no tag.)"
        ) from exc


def _files_of(data: Any) -> str:
    """A checksum of the names of a version's files, with rows and with what of those is deleted."""
    names = ((fragment.metadata.files, fragment.deletion_file()) for fragment in data.get_fragments())
    return checksum("\n".join(f"{[file.path for file in files]} {deleted}" for files, deleted in names).encode())


def _checked_columns(uri: str, data: Any, columns: list[str] | None) -> list[str]:
    """The columns to read, whose values ``take`` gives."""
    wanted = [str(name) for name in chosen_types(uri, data.schema, columns, {})]
    for name in columns or wanted:
        field = data.schema.field(name)
        if "blob" in str(field.type) or (field.metadata or {}).get(b"lance-encoding:blob") == b"true":
            raise ValueError(
                f"the column {name!r} of {uri} holds blobs, of which Lance gives only where they lie. Leave it out: "
                f"columns=[…]. To read blobs, write a dataset around this one that calls read_blobs of Lance."
            )
    return columns or wanted


def _passing(uri: str, data: Any, filter: str) -> np.ndarray:
    """The numbers of the rows that the filter passes, ascending: int64."""
    try:
        found = data.to_table(columns=["_rowoffset"], filter=filter)
    except (ValueError, OSError) as exc:
        raise ValueError(
            f"filter={filter!r} is no condition over {uri}, whose columns are {', '.join(data.schema.names)}: {exc}"
        ) from exc
    return np.sort(found.column("_rowoffset").to_numpy().astype(np.int64))
