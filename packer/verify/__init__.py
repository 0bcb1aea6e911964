"""Proving a container: its structure, its bytes, its likeness to its source, and what its model computes."""
