"""The contract of a node, and one file a node."""
