"""A user's ``open``, called with copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, final

from penstock._files.files import opened_copy
from penstock._streams.open_shards import reads_forward
from penstock._streams.retrying import close

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock._files.files import Stamp


@final
class FromCopies:
    """Calls ``open`` with the path of a shard's copy, which is kept until the result is closed; or with the shard
    itself, if there is no room for a copy.

    Args:
        open: The user's.
    """

    by_fsspec = True
    """Remote paths are opened by fsspec as well."""

    def __init__(self, open: Callable[..., Any]) -> None:
        self.__wrapped__ = open
        self.reads_forward = reads_forward(open)

    def __call__(self, shard: str, expected: Stamp | None = None, **start: int) -> Any:
        copy = opened_copy(shard, expected)
        if copy is None:
            return self.__wrapped__(str(shard), **start)
        try:
            opened = self.__wrapped__(copy.name, **start)
        except BaseException:
            copy.close()
            raise
        return (_Indexed if hasattr(opened, "__getitem__") and hasattr(opened, "__len__") else _Records)(opened, copy)


class _Records:
    """The opened records, together with the copy that they are read from."""

    def __init__(self, opened: Any, copy: BinaryIO) -> None:
        self._opened = opened
        self._copy = copy

    def __iter__(self) -> Iterator[Any]:
        return iter(self._opened)

    def close(self) -> None:
        """Close both. Idempotent."""
        close(self._opened, Exception)
        self._copy.close()

    def __del__(self) -> None:
        self._copy.close()


class _Indexed(_Records):
    def __init__(self, opened: Any, copy: BinaryIO) -> None:
        super().__init__(opened, copy)
        self.__getitems__ = getattr(opened, "__getitems__", None)
        if (check := getattr(opened, "check_version", None)) is not None:
            self.check_version = check

    def __len__(self) -> int:
        return len(self._opened)

    def __getitem__(self, number: int) -> Any:
        return self._opened[number]
