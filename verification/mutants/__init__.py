"""Seeded defects: small changes of `ring` and of the pattern, which the checks must find."""
