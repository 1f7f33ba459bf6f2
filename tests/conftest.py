"""Hypothesis for all tests (no deadline, since a loaded machine is no failure), and the ranks that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.ranks import Ranks, pools_of_ranks

settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Pools of persistent ranks: `ranks(4).run(task, *arguments)` returns one result a rank."""
    with pools_of_ranks() as ranks:
        yield ranks
