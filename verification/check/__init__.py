"""Checks of every example, and the laws between Cases."""
