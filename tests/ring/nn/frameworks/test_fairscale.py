"""Steps under FairScale's OSS and ShardedDDP equal those of one dense process; FairScale's defaults do not."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from fairscale.nn.checkpoint import checkpoint_wrapper
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS

from ring.nn.frameworks import fairscale
from tests.support.framework_example import (
    ADAM,
    APART,
    EXACT,
    ROUNDED,
    SHORT,
    TOGETHER,
    Example,
    Result,
    SmallModel,
    assert_near,
    dense,
    mesh_of,
    trained,
)
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def _train(example: Example, zero_grad: dict[str, bool], recomputed: bool = False, guarded: bool = True) -> Result:
    """guarded: by `ring.nn.frameworks.fairscale`; else as FairScale comes. OSS clips in fp32, and refuses fp64."""
    inner = SmallModel() if example.clip is None else SmallModel().float()
    for layer in inner.layers if recomputed else ():
        checkpoint_wrapper(layer)
    if guarded:
        model, optimizer = fairscale.wrap(inner, torch.optim.AdamW, mesh_of(example.mesh), **ADAM)
    else:
        optimizer = OSS(inner.parameters(), optim=torch.optim.AdamW, **ADAM)
        model = ShardedDataParallel(inner, optimizer)
    return trained(
        example, inner, model, optimizer, micro_batch=lambda last: nullcontext() if last else model.no_sync(),
        clip=None if example.clip is None else partial(optimizer.clip_grad_norm, example.clip),
        zero_grad=zero_grad, gradients=False,  # a rank has those of its own part
    )  # fmt: skip


@pytest.mark.parametrize(
    ("example", "recomputed", "zero_grad"),
    [
        (Example(SHORT, steps=3), False, {}),
        (Example(SHORT, steps=3), True, {"set_to_none": True}),
        (Example(SHORT, steps=3), True, {"set_to_none": False}),
        pytest.param(Example(TOGETHER, accumulation=3), False, {}, marks=pytest.mark.slow),
        pytest.param(Example(APART, "striped", steps=3), True, {}, marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_one_process(ranks: Ranks, example: Example, recomputed: bool, zero_grad: dict[str, bool]) -> None:
    assert_near(ranks(example.world).run(_train, example, zero_grad, recomputed), dense(example))


def test_clipping_in_fp32(ranks: Ranks) -> None:
    example = Example(APART, accumulation=2, clip=0.1)
    assert_near(ranks(4).run(_train, example, {}), dense(example), ROUNDED)


def test_its_defaults_train_wrong_after_gradients_were_none(ranks: Ranks) -> None:
    """FairScale 0.4.13 as it comes: right with zeroed gradients, wrong without a word after torch's `zero_grad()`."""
    example = Example(SHORT, steps=3)
    exact = dense(example)
    assert_near(ranks(2).run(_train, example, {"set_to_none": False}, False, False), exact)
    for result in ranks(2).run(_train, example, {}, False, False):
        assert abs(result.losses[1] - exact.losses[1]) < EXACT  # until the second step
        assert abs(result.losses[2] - exact.losses[2]) > 1e-3


def _refuse() -> None:
    with pytest.raises(ValueError, match="mesh must have all 4 ranks of the world"):
        fairscale.wrap(SmallModel(), torch.optim.AdamW, mesh_of(SHORT), **ADAM)


def test_a_mesh_of_a_part_of_the_world_is_refused(ranks: Ranks) -> None:
    ranks(4).run(_refuse)
