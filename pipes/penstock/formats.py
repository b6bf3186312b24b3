"""Datasets over files of common formats, for `Loader.from_dataset`. Each is a `penstock.Shards`, or has the same methods."""

from __future__ import annotations

from penstock._streams.arrow import arrow as arrow
from penstock._streams.hugging_face import hf as hf
from penstock._streams.jsonl import jsonl as jsonl
from penstock._streams.parquet import parquet as parquet
from penstock._streams.tar import tar as tar
from penstock._streams.tokens import tokens as tokens

__all__ = ["arrow", "hf", "jsonl", "parquet", "tar", "tokens"]
