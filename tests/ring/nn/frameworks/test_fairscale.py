"""Steps under FairScale's OSS and ShardedDDP equal those of one dense process; FairScale's defaults do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.fairscale_tasks import as_it_comes, refused_mesh, under_fairscale
from tests.support.framework_example import APART, EXACT, ROUNDED, SHORT, TOGETHER, Example, dense, differences
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks
PRELOAD = ("torch", "torch._dynamo", "tests.support.fairscale_tasks")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    with Pool(2, preload=PRELOAD) as two, Pool(4, preload=PRELOAD) as four:
        yield {2: two, 4: four}


EXAMPLES = [Example(SHORT, steps=3), Example(TOGETHER, accumulation=3), Example(APART, "striped", steps=3)]


@pytest.mark.parametrize("zero_grad", [{}, {"set_to_none": True}, {"set_to_none": False}], ids=str)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_it_trains_as_one_process(
    pools: dict[int, Pool], example: Example, recomputed: bool, zero_grad: dict[str, bool]
) -> None:
    exact = dense(example)
    for result in pools[sum(map(len, example.mesh))].run(under_fairscale, example, zero_grad, recomputed):
        assert max(differences(result, exact).values()) < EXACT, differences(result, exact)


def test_clipping_in_fp32(pools: dict[int, Pool]) -> None:
    """OSS takes norms in fp32, and refuses fp64. Within some roundings of numbers up to 4, each by at most 2^-23."""
    example = Example(APART, accumulation=2, clip=0.1)
    exact = dense(example)
    for result in pools[4].run(under_fairscale, example, {}, False, torch.float32):
        assert max(differences(result, exact).values()) < ROUNDED, differences(result, exact)


def test_its_defaults_train_wrong_after_gradients_were_none(pools: dict[int, Pool]) -> None:
    """FairScale 0.4.13 as it comes: right with zeroed gradients, wrong without a word after torch's `zero_grad()`."""
    example = Example(SHORT, steps=3)
    exact = dense(example)
    for result in pools[2].run(as_it_comes, example, {"set_to_none": False}):
        assert max(differences(result, exact).values()) < EXACT
    for result in pools[2].run(as_it_comes, example, {}):
        assert abs(result.losses[1] - exact.losses[1]) < EXACT  # until the second step
        assert abs(result.losses[2] - exact.losses[2]) > 1e-3


def test_a_mesh_of_a_part_of_the_world_is_refused(pools: dict[int, Pool]) -> None:
    assert all("mesh must have all 4 ranks of the world" in said for said in pools[4].run(refused_mesh))
