"""Saved counter-examples, run again."""
