"""Steps under FairScale's OSS and ShardedDDP equal those of one dense process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from fairscale.nn.checkpoint import checkpoint_wrapper

from ring.integrations import fairscale
from tests.support.framework_example import ADAM, Example, Result, SmallModel, assert_near, dense, trained
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def _train(example: Example, zero_grad: dict[str, bool], recomputed: bool = False) -> Result:
    """OSS clips in fp32, and refuses fp64."""
    inner = SmallModel() if example.clip is None else SmallModel().float()
    for layer in inner.layers if recomputed else ():
        checkpoint_wrapper(layer)
    model, optimizer = fairscale.wrap(inner, torch.optim.AdamW, example.device_mesh, **ADAM)
    return trained(
        example, inner, model, optimizer, micro_batch=lambda last: nullcontext() if last else model.no_sync(),
        clip=None if example.clip is None else partial(optimizer.clip_grad_norm, example.clip),
        zero_grad=zero_grad, gradients=False,  # a rank has those of its own part
    )  # fmt: skip


@pytest.mark.parametrize(
    ("example", "recomputed", "zero_grad"),
    [
        (Example("short", steps=3), False, {}),
        (Example("short", steps=3), True, {"set_to_none": True}),
        (Example("short", steps=3), True, {"set_to_none": False}),
    ],
)
def test_fairscale_trains_as_one_process(
    ranks: Ranks, example: Example, recomputed: bool, zero_grad: dict[str, bool]
) -> None:
    assert_near(ranks(example.world).run(_train, example, zero_grad, recomputed), dense(example))


def test_clipping_in_fp32(ranks: Ranks) -> None:
    example = Example("apart", accumulation=2, clip=0.1)
    assert_near(ranks(4).run(_train, example, {}), dense(example), kept_in_fp32=True)


def _refuse() -> None:
    with pytest.raises(ValueError, match="mesh must have all 4 ranks of the world"):
        fairscale.wrap(SmallModel(), torch.optim.AdamW, Example("short").device_mesh, **ADAM)


def test_a_mesh_of_a_part_of_the_world_is_refused(ranks: Ranks) -> None:
    ranks(4).run(_refuse)
