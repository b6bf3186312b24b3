"""What table formats share: several files, each with several pieces, and the same columns in all of them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, final

import numpy as np

from penstock._fetch.error_policy import annotate
from penstock._files.files import check_unchanged, stamp
from penstock._files.paths import bare, expanded, extra

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock._files.files import Stamp
    from penstock._files.paths import Paths, Reach

T = TypeVar("T")
WHOLE: Final = -1
_WHO: Final = "penstock.formats"


class Piece(NamedTuple):
    """A piece of a file. Its string continues a noun: row group "3 of a.parquet", file "a.parquet".

    Attributes:
        file: The number of the file.
        number: The number of the piece in its file; `WHOLE` for the whole file.
        path: Path of the file.
        stamp: The file's `stamp` when its pieces were counted.
    """

    file: int
    number: int
    path: str
    stamp: Stamp

    def __str__(self) -> str:
        return self.path if self.number == WHOLE else f"{self.number} of {self.path}"

    def check(self) -> None:
        """Refuse a file that is no longer the one that was counted."""
        why = ("since the dataset was built", "Its rows may be numbered differently now, so build the dataset again.")
        check_unchanged(self.path, self.stamp, stamp(self.path), *why)


@final
class Pieces(Sequence[Piece]):
    """The pieces of several files, one file after another. Takes 8 bytes per file, and nothing per piece.

    Args:
        files: Their paths.
        stamps: The `stamp` of each.
        pieces: The number of pieces in each file; None: each file is one piece.
    """

    def __init__(self, files: Sequence[str], stamps: Sequence[Stamp], pieces: Sequence[int] | None) -> None:
        self._files = list(zip(files, stamps, strict=True))
        self._whole = pieces is None
        self._ends = np.cumsum([0, *([1] * len(files) if pieces is None else pieces)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def files(self) -> list[str]:
        """The paths of the files."""
        return [path for path, _ in self._files]

    @property
    def file_numbers(self) -> np.ndarray:
        """The number of each piece's file: int64, shape ``(pieces,)``."""
        return np.repeat(np.arange(len(self._files)), np.diff(self._ends))

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        file = int(np.searchsorted(self._ends, number, side="right")) - 1
        return Piece(file, WHOLE if self._whole else number - int(self._ends[file]), *self._files[file])


def files_of(paths: Paths, suffix: str, reach: Reach | None = None) -> list[str]:
    """The files that ``paths`` names, at least one; see `expanded`."""
    files = expanded(paths) if reach is None else reach.of(expanded(paths, reach.storage_options))
    if not files:
        raise ValueError(f"paths={paths!r:.80} matches no file, but at least one is needed to determine the columns.")
    for file in files:
        if os.path.isdir(file):
            pattern = os.path.join(glob.escape(file), "**", f"*.{suffix}")
            but = (
                f", or however they end: none ends in .{suffix}"
                if next(glob.iglob(pattern, recursive=True), None) is None
                else ""
            )
            raise ValueError(f"{file} is a folder. Pass the files in it: {pattern!r}{but}.")
    return files


def names_of(columns: Sequence[str] | None) -> list[str] | None:
    """The column names as a list."""
    if isinstance(columns, str) or (columns is not None and not len(columns)):
        raise ValueError(
            f"columns={columns!r} must be a list of names, such as ['text', 'label'], or None for all columns."
        )
    return None if columns is None else list(columns)


def looked_at(look: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    """``look(path)`` for every path, in up to 16 threads, because most of the time is spent waiting for a disk or a
    network. An error has a note that names the path.
    """

    def named(path: str) -> T:
        try:
            return look(path)
        except Exception as exc:
            annotate(exc, f"while looking at {path}")
            raise

    if len(paths) < 2:
        return list(map(named, paths))
    with ThreadPoolExecutor(min(16, len(paths)), "penstock-streams") as pool:
        return list(pool.map(named, paths))


class Look(NamedTuple):
    """What was found by looking into a file.

    Attributes:
        stamp: Stamp of the file.
        types: Types of the columns that are read, by name.
        rows: Row count of each piece.
        more: Whatever else its format needs.
    """

    stamp: Stamp
    types: dict[str, Any]
    rows: list[int]
    more: Any


def pieces_in(
    files: list[str], look: Callable[[str], Look], epoch_size: int | None, *, whole: bool = False
) -> tuple[Pieces, np.ndarray | None, list[Any]]:
    """The pieces of files with the same columns, the row count of each (None with an ``epoch_size``), and
    ``look(path).more`` for each file.

    With ``whole`` each file is one piece.
    """
    looks = looked_at(look, files)
    check_columns({file: look.types for file, look in zip(files, looks, strict=True)})
    rows = [[sum(look.rows)] if whole else look.rows for look in looks]
    counts = (
        None if epoch_size is not None else np.array([count for of_file in rows for count in of_file], dtype=np.int64)
    )
    pieces = None if whole else [len(of_file) for of_file in rows]
    return Pieces(files, [look.stamp for look in looks], pieces), counts, [look.more for look in looks]


def check_columns(of_files: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse files whose columns, or the sorts of Python values in them, differ from those of the first file.

    Args:
        of_files: For each path, the column types by name.
    """
    first, types = next(iter(of_files.items()))
    expected = {column: (_sort(here), here, first) for column, here in types.items()}
    for path, types in of_files.items():
        for column in {**expected, **types}:
            sort, there, where = expected.get(column, ([], "missing", first))
            here = types.get(column, "missing")
            if here == there:
                continue
            both = None if "missing" in (here, there) else _merged(sort, _sort(here))
            if both is None:
                raise ValueError(
                    f"the files have different columns: {column!r} is {there} in {where}, but {here} in {path}. Pass "
                    f"columns= to read only those that all files share, or make one dataset per kind of file and "
                    f"combine them with Mix or ConcatDataset."
                )
            if both != sort:
                expected[column] = both, here, path


def _sort(kind: Any) -> list[Any]:
    """The sort of Python values that a pyarrow type stands for, with those inside them; empty for nulls only."""
    pyarrow = extra("pyarrow", _WHO)
    types = pyarrow.types
    if types.is_null(kind):
        return []
    if types.is_struct(kind):
        fields = {field.name: _sort(field.type) for field in kind}
        return [f"struct of {sorted(fields)}", *(fields[name] for name in sorted(fields))]
    if types.is_map(kind):
        return ["map", _sort(kind.key_type), _sort(kind.item_type)]
    if hasattr(kind, "value_type") and not isinstance(kind, pyarrow.BaseExtensionType):
        inner = _sort(kind.value_type)
        return inner if types.is_dictionary(kind) or types.is_run_end_encoded(kind) else ["list", inner]
    return [re.sub(r"^(?:large_|fixed_size_|u)?(string|binary|int)(?:_view|\d+|\[\d+\])?$", r"\1", str(kind))]


def _merged(one: list[Any], other: list[Any]) -> list[Any] | None:
    """Two results of `_sort` in one; None if they differ."""
    if not one or not other:
        return one or other
    inner = list(map(_merged, one[1:], other[1:]))
    return None if one[0] != other[0] or None in inner else [one[0], *inner]


def folder_types(files: Sequence[str]) -> dict[str, Any]:
    """The columns that stand in the names of folders, such as ``lang=en``, with the types of pyarrow's Hive
    partitioning: integers if all files have one, else strings.
    """
    pyarrow, types = extra("pyarrow", _WHO), dict[str, Any]()
    paths = {os.path.dirname(bare(file)): file for file in files}
    for name in dict.fromkeys(
        part.partition("=")[0] for place in sorted(paths) for part in place.split("/") if "=" in part
    ):
        types[name] = pyarrow.int32()
        try:
            for path in paths.values():
                in_folders(types, path, (), None)
        except ValueError:
            types[name] = pyarrow.string()
    return types


def in_folders(
    types: Mapping[str, Any], path: str, own: Sequence[str], columns: Sequence[str] | None
) -> dict[str, Any]:
    """The values in the names of a file's folders, by column.

    Args:
        types: See `folder_types`.
        path: Path of the file.
        own: The columns of the file itself, which come first.
        columns: Those requested; None: all.
    """
    if not types:
        return {}
    dataset = extra("pyarrow.dataset", _WHO)
    hive = dataset.partitioning(extra("pyarrow", _WHO).schema(types.items()), flavor="hive")
    found = dataset.get_partition_keys(hive.parse(f"{os.path.dirname(bare(path))}/"))
    return {
        name: found[name]
        for name in types
        if name in found and name not in own and (columns is None or name in columns)
    }


def chosen_types(
    path: str,
    schema: Any,
    columns: Sequence[str] | None,
    folders: Mapping[str, Any],
    with_part: Callable[[str], Sequence[str]] = lambda _: (),
) -> dict[str, Any]:
    """The types of the columns that are read, completely or in part, by name.

    Args:
        path: For error messages.
        schema: The pyarrow schema, with all columns.
        columns: The requested names; None: all. A dot may also be a letter in the name of a column.
        folders: The types of the columns that folders name; see `folder_types`.
        with_part: The columns of which a requested name such as ``"a.b"`` is a part; none if there is no such part.

    Raises:
        ValueError: There is no such column, or several of that name.
    """
    own = {field.name: field.type for field in schema}
    types = {**own, **{name: folders[name] for name in in_folders(folders, path, list(own), None)}}
    wanted = set[str]()
    for column in types if columns is None else columns:
        found = [column] if column in types else with_part(column)
        if not found:
            raise ValueError(f"{path} has no column {column!r}, only {', '.join(map(repr, types)) or 'none at all'}.")
        wanted.update(found)
    types = {name: kind for name, kind in types.items() if name in wanted}
    for name in types:
        if len(schema.get_all_field_indices(name)) > 1:
            raise ValueError(
                f"{path} has several columns named {name!r}, but a sample is a dict. Rename them, or pass columns= "
                f"without this name."
            )
    return types
