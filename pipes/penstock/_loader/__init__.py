"""The public Loader, the graph that it builds, and its saved state."""
