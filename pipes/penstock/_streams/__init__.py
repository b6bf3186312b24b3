"""Sharded data: files of many records each, read by position or forward, and the formats they come in."""
