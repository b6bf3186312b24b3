"""Datasets that are read once: Cached, Resident."""
