"""Hypothesis for all tests (no deadline, since a loaded machine is no failure), and the ranks that tests share."""

from hypothesis import settings

from tests.support.ranks import ranks

__all__ = ["ranks"]
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
