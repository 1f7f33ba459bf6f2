"""Faults of saved files: mutated records of every kind, and files that are none, read or replayed."""
