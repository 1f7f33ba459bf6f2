"""What a group leaves when it has ended is named, one thing at a time; sound groups leave nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from tests.support.plain_case import plain
from tests.support.planted_groups import (
    begins_a_thread,
    keeps_a_file_open,
    keeps_groups,
    keeps_the_page,
    leaves_a_name,
    take_away,
)
from verification.check.laws.group_ends import check_ended
from verification.failures import WrongResult
from verification.run.backends import GlooBackend, SimBackend
from verification.run.resources import in_use, left_since

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("kind", (SimBackend, GlooBackend))
@pytest.mark.parametrize("seed", (0, 1))
def test_a_sound_group_leaves_nothing(kind: type[SimBackend] | type[GlooBackend], seed: int) -> None:
    with closing(kind(10.0)) as backend:
        backend.start(2)
        assert check_ended(backend, plain(2, seed=seed), {}) == 0.0


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (keeps_a_file_open, "open file /dev/shm/ring-"),
        (begins_a_thread, "thread "),
        (keeps_the_page, "shared memory /dev/shm/ring-"),
        (keeps_groups, "ProcessGroup in memory"),
        (leaves_a_name, "/dev/shm/ring-"),
    ],
)
def test_what_it_leaves_is_named(prepare: Callable[[], None], said: str) -> None:
    with closing(GlooBackend(10.0, prepare)) as backend:
        backend.start(2)
        with pytest.raises(WrongResult, match=f"still there: .*{said}"):
            check_ended(backend, plain(2), {})
        backend.submit(take_away_on, plain(2))
        backend.collect()


def take_away_on(transport: object, case: object) -> None:
    take_away()


def test_an_open_file_is_in_use_until_it_is_closed() -> None:
    before = in_use()
    with open("/proc/self/status", encoding="ascii"):
        assert left_since(before)[0].startswith("open file /proc/")
    assert left_since(before) == []
