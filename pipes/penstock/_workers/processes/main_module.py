"""What a new interpreter can know of the program's main module, and what to say where that is too little.

A fork has all that its parent has. A process that spawn or forkserver starts imports the main script anew, under the name ``__mp_main__``;
where the program is no file (a notebook, ``python -c``, standard input), there is nothing to import.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import FunctionType

REMEDY = 'use method="thread", or multiprocessing_context="fork"'


def check_not_importing() -> None:
    """Refuse to start processes from one that multiprocessing has started, and that is still importing the main script.

    Raises:
        RuntimeError: It is.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "this worker process imports your script, and the script reads a loader with worker processes of its own before it gets further. Put what "
            'the script does under `if __name__ == "__main__":`, because spawn and forkserver import it anew in every worker. Or '
            f"{REMEDY}."
        )


def check_importable(method: str, pickled: memoryview) -> None:
    """Refuse, before any process is started, what a new interpreter could not unpickle.

    Args:
        method: That of multiprocessing.
        pickled: What it is to unpickle.

    Raises:
        RuntimeError: There is a main script by name, but no such file, so the process could not even start.
        TypeError: Something of the main module is needed, and the main module is no file.
    """
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:  # python -m
        return
    file = getattr(main, "__file__", None)
    if file is not None:
        if not Path(multiprocessing.process.ORIGINAL_DIR or "", file).exists():  # type: ignore[attr-defined,unused-ignore]
            raise RuntimeError(
                f"worker processes started by {method!r} import the main script anew, and there is no file {file!r}: a script from standard input cannot "
                f"be read again. Save it as a file and run that, or {REMEDY}."
            )
        return
    body = pickled.tobytes()
    if _pickled_name("__main__") in body:
        names = [
            name
            for name, value in vars(main).items()
            if isinstance(value, type | FunctionType) and value.__module__ == "__main__" and _pickled_name(name) in body
        ]
        raise TypeError(
            f"{', '.join(names) or 'a class or function'} is defined in __main__, which is no file here (a notebook, python -c), so worker processes "
            f"started by {method!r} cannot import it. Put it into a module of its own (a .py file) and import it from there, or {REMEDY}."
        )


def explained(error: AttributeError) -> AttributeError:
    """Why a new interpreter has found no such name in a module, where that is the main one."""
    if "__main__" not in str(error) and "__mp_main__" not in str(error):
        return error
    return AttributeError(
        f"{error}. A worker process started by spawn or forkserver imports the main script anew, and finds there neither what is defined under "
        f'`if __name__ == "__main__":` or inside a function, nor anything at all of a notebook or of python -c. Put it into a module of its own '
        f"(a .py file) and import it from there, or {REMEDY}."
    )


def _pickled_name(name: str) -> bytes:
    """As pickle writes a text of up to 255 bytes."""
    encoded = name.encode()
    return b"\x8c" + bytes([len(encoded) % 256]) + encoded
