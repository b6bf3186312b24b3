"""The roof of a graph."""
