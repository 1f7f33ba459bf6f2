"""A backend of one rank for the tests of peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from verification.run.backends import GlooBackend


@pytest.fixture(scope="module")
def backend() -> Iterator[GlooBackend]:
    with closing(GlooBackend()) as one:
        one.start(1)
        yield one
