"""Datasets that are loaded once."""
