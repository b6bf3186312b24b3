"""The commands of ``python -m penstock``: measure loaders, show saved states and caches, index files."""
