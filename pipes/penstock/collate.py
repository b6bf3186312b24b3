"""Functions for ``collate_fn``."""

from penstock._fetch.padding import pad as pad

__all__ = ["pad"]
