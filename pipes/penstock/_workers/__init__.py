"""Threads, processes and Ray's actors that run tasks, and threads that read ahead; independent of the data."""
