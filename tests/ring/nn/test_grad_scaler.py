"""Gradients scaled by torch.amp: if they overflow on one rank, all ranks skip the step and scale alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from ring.integrations.wrappers import ddp, fsdp
from ring.nn import average_gradients, clip_grad_norm, cross_entropy
from tests.support.framework_example import mesh_of, whole
from tests.support.nn_ranks import VOCABULARY, far, said
from tests.support.ranks import Ranks

SCALE = 1024.0


def _trained(wrapper: str, scaler_class: type[Any], order: str, steps: str) -> tuple[str, list[Tensor], float]:
    """Return the first error, parameters and scale after steps on drawn batches. order: of the calls before a step.

    steps: a letter each, the seed of the batch; in step "x" the gradients of rank 1 are infinite.
    """
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)).double()
    mesh = mesh_of(((0, 1), (2, 3)))
    model: Any = inner
    if wrapper == "ddp":
        model = ddp.wrap(inner, mesh)
    if wrapper == "fsdp":
        model = fsdp.shard(inner, mesh, nn.Linear)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    scaler = scaler_class("cpu", init_scale=SCALE)
    parts = {
        "average": lambda: average_gradients(inner.parameters(), mesh),
        "unscale": lambda: scaler.unscale_(optimizer),
        "clip": lambda: clip_grad_norm(inner.parameters(), 0.5, mesh),
    }
    answer = "fine"
    for step in steps:
        draw = torch.Generator().manual_seed(4 * ord(step) + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (1, 5), generator=draw)
        loss = scaler.scale(cross_entropy(model(tokens), tokens, mesh))
        (loss * math.inf if step == "x" and dist.get_rank() == 1 else loss).backward()
        for part in order.split():
            answer = said(parts[part]) if answer == "fine" else answer
        if answer != "fine":
            break
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return answer, [whole(x) for x in inner.parameters()], scaler.get_scale()


ORDERS = [
    *((wrapper, GradScaler, order) for wrapper in ("ddp", "fsdp") for order in ("", "unscale clip")),
    *(("none", GradScaler, order) for order in ("average", "average unscale clip")),
    *(("none", ShardedGradScaler, order) for order in ("average", "average unscale clip", "unscale average clip")),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("wrapper", "scaler", "order"), ORDERS)
def test_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks, wrapper: str, scaler: type[Any], order: str) -> None:
    results = {steps: ranks(4).run(_trained, wrapper, scaler, order, steps) for steps in ("012", "02", "0x2")}
    (_, without, _), (_, wanted, _) = results["012"][0], results["02"][0]
    for answer, found, scale in results["0x2"]:
        assert answer == "fine" and scale == SCALE / 2
        assert far(found, wanted) == 0.0 < far(found, without)


@pytest.mark.ranks
def test_a_rank_that_leaves_out_a_step_alone_is_noticed(ranks: Ranks) -> None:
    """Each rank looks for infinite gradients before the average, which makes those of all ranks infinite."""
    (answer,) = {answer for answer, _, _ in ranks(4).run(_trained, "none", GradScaler, "unscale average clip", "0x2")}
    assert "parameters must have the same values on every rank" in answer and "on rank 1 than on rank 0" in answer
