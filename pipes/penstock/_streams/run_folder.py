"""RunFolder: where the processes of one loader leave notes for each other."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from typing import Any, final


@final
class RunFolder:
    """A temporary folder of one loader, deleted with this object in the process that made it.

    Every method works without it, as far as possible.
    """

    def __init__(self) -> None:
        self.path = os.devnull  # below which there is nothing
        with suppress(OSError):  # no folder can be written to: then each process is alone
            self.path = tempfile.mkdtemp(prefix="penstock-")
            weakref.finalize(self, _delete, self.path, os.getpid())

    def first(self, name: str, text: str = "") -> bool:
        """Write the note ``name``. False if any process of the loader has written it before."""
        try:
            with open(os.path.join(self.path, name), "x") as file:
                file.write(text)
        except FileExistsError:
            return False
        except OSError:  # a full disk, or the loader has ended: then each process counts as the first
            return True
        return True

    def read(self, name: str) -> str:
        """The note ``name``; empty if there is none yet."""
        try:
            with open(os.path.join(self.path, name)) as file:
                return file.read()
        except OSError:
            return ""

    def __reduce__(self) -> Any:
        return _received, (self.path,)


def _received(path: str) -> RunFolder:
    """The same folder in another process; on another machine one of that process alone."""
    if not os.path.isdir(path):
        return RunFolder()
    folder = object.__new__(RunFolder)
    folder.path = path
    return folder


def _delete(path: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
