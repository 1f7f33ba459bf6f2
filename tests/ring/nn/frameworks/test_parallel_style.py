"""`RingParallel` in a plan of `parallelize_module`: shards, DTensors, and which of those are refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.framework_example import EXACT
from tests.support.parallel_style_tasks import refused, refused_plans, with_dtensors, with_shards
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, preload=("torch", "torch._dynamo", "tests.support.parallel_style_tasks")) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_local_shards(pool: Pool, kind: str) -> None:
    assert max(pool.run(with_shards, kind)) < EXACT


@pytest.mark.parametrize("use_local_output", [True, False])
def test_dtensors(pool: Pool, use_local_output: bool) -> None:
    assert max(pool.run(with_dtensors, use_local_output)) < EXACT


REFUSED = {
    "replicated": "key must be sharded along its tokens, Shard(2), got (Replicate(),)",
    "along heads": "key must be sharded along its tokens",
    "other tokens": "key must have the 13 tokens of the layout, got 26",
    "other ranks": "key must be a DTensor over the handle's ranks in their order, [0, 1, 2, 3], got [1, 2, 3, 0]",
    "another layout": "must hold on each rank the tokens that the layout gives it",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dtensor_on_one_rank_is_refused_on_every_rank(pool: Pool, name: str) -> None:
    for said, error in pool.run(refused, name):
        assert REFUSED[name] in said
        assert error < EXACT


def test_plans_that_do_not_fit_are_refused(pool: Pool) -> None:
    expected = [
        "device_mesh must have the handle's ranks",
        "module must take the keyword context",
        "use_local_output=False needs",
    ]
    for said in pool.run(refused_plans):
        assert all(words in text for words, text in zip(expected, said, strict=True)), said
