"""Steps under DeepSpeed's ZeRO 1, 2 and 3 equal those of one dense process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.deepspeed_tasks import refusals, under_zero
from tests.support.framework_example import APART, EXACT, ROUNDED, SHORT, TOGETHER, Example, dense, differences
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks
PRELOAD = ("torch", "torch._dynamo", "tests.support.deepspeed_tasks")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    with Pool(2, preload=PRELOAD, timeout=60) as two, Pool(4, preload=PRELOAD, timeout=60) as four:
        yield {2: two, 4: four}


EXAMPLES = [Example(SHORT, clip=0.1), Example(TOGETHER, accumulation=3, clip=0.1), Example(APART, "striped")]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("example", EXAMPLES)
def test_zero_trains_as_one_process(pools: dict[int, Pool], example: Example, stage: int) -> None:
    """ZeRO keeps parameters and sums gradients in fp32, for a model in fp64 too: exact until the first step, but at
    stage 3, which takes none in fp64."""
    exact = dense(example)
    for result in pools[sum(map(len, example.mesh))].run(under_zero, example, stage):
        assert abs(result.losses[0] - exact.losses[0]) < (EXACT if stage < 3 else ROUNDED)
        assert max(differences(result, exact).values()) < ROUNDED, differences(result, exact)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [{}, {"keep_attention": True}, {"reentrant": True}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_recomputed_layers_train_as_one_process(pools: dict[int, Pool], stage: int, recomputed: dict[str, Any]) -> None:
    example = Example(APART, accumulation=2, clip=0.1)
    exact = dense(example)
    for result in pools[4].run(under_zero, example, stage, recomputed):
        assert max(differences(result, exact).values()) < ROUNDED, differences(result, exact)


REFUSED = {
    "a part of the world": "mesh must have all 4 ranks of the world",
    "no clipping named": "config must name gradient_clipping",
    "accumulation": "config must leave gradient_accumulation_steps out",
    "sequence parallelism": "config must leave sequence_parallel_size out",
    "an optimizer": "config must leave optimizer out",
    "16 bits": "config must name communication_data_type",
    "fp64 at stage 3": "model must be in fp32 or 16 bits for stage 3",
    "a file": "config must be a dictionary",
}


def test_what_would_train_wrong_is_refused(pools: dict[int, Pool]) -> None:
    said = pools[4].run(refusals)
    assert said == [said[0]] * 4
    assert said[0].keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert words in said[0][name], f"{name}: {said[0][name]}"
