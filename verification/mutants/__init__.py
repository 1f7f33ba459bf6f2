"""Seeded defects: small changes of `ring`, `reference` or the training step, which the checks must find."""
