"""Steps under DDP and FSDP2 equal those of one dense process, with and without recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support.framework_example import APART, EXACT, SHORT, TOGETHER, Example, dense, differences
from tests.support.torch_wrapper_tasks import messages, refusals, under_ddp, under_fsdp
from verification.run.processes.pool import Pool

pytestmark = pytest.mark.ranks

EXAMPLES = [
    Example(SHORT),
    Example(SHORT, "without rank 0", accumulation=2),
    Example(TOGETHER, accumulation=3, clip=0.1),
    Example(APART, "striped", clip=0.1),
    Example(((2, 0, 3, 1),), "contiguous", accumulation=2),
]
RECOMPUTED: list[dict[str, Any]] = [{}, {"keep_attention": True}, {"reentrant": True}]
PRELOAD = ("torch", "torch._dynamo", "tests.support.torch_wrapper_tasks")


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    with Pool(2, preload=PRELOAD) as two, Pool(4, preload=PRELOAD) as four:
        yield {2: two, 4: four}


def pool_of(pools: dict[int, Pool], example: Example) -> Pool:
    return pools[sum(map(len, example.mesh))]


def assert_equal(found: list[Any], example: Example) -> None:
    exact = dense(example)
    for result in found:
        assert max(differences(result, exact).values()) < EXACT, differences(result, exact)
        for name, x in result.parameters.items():
            assert torch.equal(x, found[0].parameters[name]), f"{name} differs between ranks"


@pytest.mark.parametrize("example", EXAMPLES)
def test_ddp_trains_as_one_process(pools: dict[int, Pool], example: Example) -> None:
    assert_equal(pool_of(pools, example).run(under_ddp, example), example)


@pytest.mark.parametrize("example", EXAMPLES)
def test_fsdp_trains_as_one_process(pools: dict[int, Pool], example: Example) -> None:
    assert_equal(pool_of(pools, example).run(under_fsdp, example), example)


@pytest.mark.parametrize("example", [Example(TOGETHER, accumulation=3, clip=0.1), Example(APART, "striped", clip=0.1)])
def test_fsdp_with_replicas_trains_as_one_process(pools: dict[int, Pool], example: Example) -> None:
    assert_equal(pools[4].run(under_fsdp, example, None, None, True), example)


@pytest.mark.parametrize("recomputed", RECOMPUTED, ids=str)
@pytest.mark.parametrize("train", [under_ddp, under_fsdp])
def test_recomputed_layers_train_as_one_process(pools: dict[int, Pool], train: Any, recomputed: dict[str, Any]) -> None:
    example = Example(APART, accumulation=2, clip=0.1)
    assert_equal(pools[4].run(train, example, recomputed), example)


def test_attention_that_is_kept_sends_nothing_twice(pools: dict[int, Pool]) -> None:
    example = Example(TOGETHER, steps=1)
    plain = pools[4].run(messages, example, None)
    again = pools[4].run(messages, example, {})
    kept = pools[4].run(messages, example, {"keep_attention": True})
    for (forward, backward), twice, once in zip(plain, again, kept, strict=True):
        assert forward > 0 and twice == (forward, backward + forward) and once == (forward, backward)


def test_mixed_precision_trains_to_within_16_bits(pools: dict[int, Pool]) -> None:
    """Parameters stay fp64, and what is computed in bf16 differs by its rounding, which is 2^-9 for each operation."""
    example = Example(APART, accumulation=2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found, exact = pools[4].run(under_fsdp, example, None, policy), dense(example)
    for result in found:
        assert all(x.dtype == torch.float64 for x in result.parameters.values())
        assert 1e-6 < abs(result.losses[0] - exact.losses[0]) < 0.02 * exact.losses[0]
        assert 1e-6 < abs(result.norms[0] - exact.norms[0]) < 0.05 * exact.norms[0]


def test_what_would_train_wrong_is_refused(pools: dict[int, Pool]) -> None:
    said = pools[4].run(refusals)
    assert said == [said[0]] * 4
    expected = {
        "data ranks only": "mesh must have the dimensions ('data', 'context')",
        "no names": "got no names",
        "another dimension": "got ('data', 'tensor')",
        "a group": "mesh must be a DeviceMesh",
        "a group of its own": "process_group must be left out",
        "a mesh of its own": "dp_mesh_dims must be left out",
        "no such layer": "layers must name classes of which the model has modules, got Conv2d",
        "an instance": "layers must be classes of modules",
        "nothing to replicate over": "mesh must have the dimensions ('data', 'context'), in this order, to replicate",
        "context before data": "in this order, to replicate over 'data', got ('context', 'data')",
        "ranks that descend": "mesh must have ascending ranks along 'context', got [[1, 0], [3, 2]]",
        "sums in 16 bits": "policy must name reduce_dtype",
        "attention kept, reentrant": "keep_attention=True needs reentrant=False",
    }
    assert said[0].keys() == expected.keys()
    for name, words in expected.items():
        assert words in said[0][name], f"{name}: {said[0][name]}"
