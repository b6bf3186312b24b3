"""What a new interpreter knows of the program's main module, and the errors for when that is not enough.

A fork has everything that its parent has. A process started by spawn or forkserver imports the main script again, as
``__mp_main__``. If the program is not a file (a notebook, ``python -c``, standard input), there is nothing to import.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import FunctionType

REMEDY = 'use method="thread", or multiprocessing_context="fork"'


def check_not_importing() -> None:
    """Refuse to start processes from a process of multiprocessing's that is still importing the main script.

    Raises:
        RuntimeError: This is one.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "this worker process imports your script, and on import the script reads a loader that has worker "
            'processes itself. Put the script\'s code under `if __name__ == "__main__":`, because spawn and forkserver '
            f"import it again in every worker. Or {REMEDY}."
        )


def check_importable(method: str, pickled: memoryview) -> None:
    """Refuse what a new interpreter could not unpickle, before any is started.

    Args:
        method: The start method, for the message.
        pickled: What it would unpickle.

    Raises:
        RuntimeError: The main script has a name, but there is no such file, so the process could not even start.
        TypeError: Something defined in the main module is needed, and the main module is not a file.
    """
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:  # python -m
        return
    file = getattr(main, "__file__", None)
    if file is not None:
        folder = multiprocessing.process.ORIGINAL_DIR  # type: ignore[attr-defined,unused-ignore]
        if not Path(folder or "", file).exists():
            raise RuntimeError(
                f"worker processes started by {method!r} import the main script again, but there is no file {file!r}: "
                f"a script from standard input cannot be read again. Save it as a file and run that, or {REMEDY}."
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
            f"{', '.join(names) or 'a class or function'} is defined in __main__, which is not a file here (a "
            f"notebook, python -c), so worker processes started by {method!r} cannot import it. Move it to a module (a "
            f".py file) and import it from there, or {REMEDY}."
        )


def explained(error: AttributeError) -> AttributeError:
    """``error``, raised by unpickling in a new interpreter; with the reason, if the name was missing from the main
    module.
    """
    if "__main__" not in str(error) and "__mp_main__" not in str(error):
        return error
    return AttributeError(
        f"{error}. A worker process started by spawn or forkserver imports the main script again. It cannot find names "
        f'defined under `if __name__ == "__main__":`, inside a function, in a notebook or in python -c. Move them to a '
        f"module (a .py file) and import them from there, or {REMEDY}."
    )


def _pickled_name(name: str) -> bytes:
    """``name`` as pickle writes a text of up to 255 bytes."""
    encoded = name.encode()
    # SHORT_BINUNICODE of protocol 4. A longer name is not found, and then the worker itself says that it has no such
    # name.
    return b"\x8c" + bytes([len(encoded) % 256]) + encoded
