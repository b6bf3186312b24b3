"""Datasets over files of common formats, for `Loader.from_dataset`. Each is a `penstock.Shards`, or has the same methods."""

from __future__ import annotations

from penstock._streams.tokens import tokens as tokens

__all__ = ["tokens"]
