"""Syntactic changes of the source, by cosmic-ray."""
