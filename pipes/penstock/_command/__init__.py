"""``python -m penstock``: measure and compare loaders, and explain what they have saved."""
