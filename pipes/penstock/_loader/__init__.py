"""Loader, what builds its graph, and its saved state."""
