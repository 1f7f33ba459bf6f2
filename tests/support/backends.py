"""A backend whose ranks all tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from verification.run.backends import Backend


def shared(make: Callable[[], Backend], world: int) -> Any:
    """Return a fixture: the backend, with so many ranks."""

    @pytest.fixture(scope="module")
    def backend() -> Iterator[Backend]:
        with closing(make()) as made:
            made.start(world)
            yield made

    return backend
