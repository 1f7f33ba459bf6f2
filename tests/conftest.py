"""Hypothesis for all tests: no deadline, since a loaded machine is no failure."""

from hypothesis import settings

settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
