"""Datasets made of others: cached on disk, held on a device, filtered, mixed by weight."""
