"""Hypothesis for all tests (no deadline, since a loaded machine is no failure), and fixtures that tests share."""

from hypothesis import settings

from tests.support.chunked_model import one_thread
from tests.support.installed import environment, wheel
from tests.support.ranks import ranks

__all__ = ["environment", "one_thread", "ranks", "wheel"]
collect_ignore = ["support/outside"]  # a project of its own, whose tests are run by test_outside.py
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
