"""Threads and processes that run tasks; independent of the data."""
