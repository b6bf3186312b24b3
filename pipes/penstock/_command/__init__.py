"""``python -m penstock``: measure and compare loaders, and explain their saved states."""
