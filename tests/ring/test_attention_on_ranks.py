"""`ring_attention` on real ranks, as a user calls it: the default group, bare process groups, what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ring_tasks import (
    gradients_on_some_ranks_only,
    on_a_subgroup,
    on_the_default_group,
    second_derivative,
)
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks

EXACT = 1e-12  # fp64, outputs and gradients of the order of 1


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3, preload=("torch", "tests.support.ring_tasks")) as ranks:
        yield ranks


def test_the_default_group(pool: Pool) -> None:
    assert max(pool.run(on_the_default_group)) < EXACT


@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2), (0, 2), (1,)])
def test_a_bare_process_group(pool: Pool, ranks: tuple[int, ...]) -> None:
    for rank, answer in enumerate(pool.run(on_a_subgroup, ranks)):
        if rank in ranks:
            assert isinstance(answer, float) and answer < EXACT
        else:
            assert "group must" in str(answer)


@pytest.mark.parametrize("rank", range(3))
def test_a_second_derivative_is_refused_and_nobody_waits(pool: Pool, rank: int) -> None:
    said = pool.run(second_derivative, rank)
    assert "double backward" in said[rank]
    assert [answer for other, answer in enumerate(said) if other != rank] == ["nothing", "nothing"]


def test_gradients_on_some_ranks_only_are_refused_everywhere(pool: Pool) -> None:
    said = pool.run(gradients_on_some_ranks_only)
    assert "requires_grad" in said[0] and said == [said[0]] * 3
