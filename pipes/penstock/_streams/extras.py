"""Packages that only some formats need."""

from __future__ import annotations

import importlib
from typing import Any


def needed(module: str) -> Any:
    """A module of a package that `penstock` does not depend on.

    Raises:
        ImportError: It is not installed; says how to install it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name != package:
            raise
        raise ImportError(f"this format needs {package}, which is not installed: pip install 'penstock[formats]'.", name=package) from exc
