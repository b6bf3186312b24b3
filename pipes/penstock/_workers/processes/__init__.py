"""The engine of a pool of processes."""
