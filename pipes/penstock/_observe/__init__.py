"""Observes a running loader: how long everything takes, and what to do about it."""
