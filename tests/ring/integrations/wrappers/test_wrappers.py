"""Steps under DDP and FSDP2, and with layers computed again, equal those of one dense process; what DDP refuses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring.integrations.wrappers import ddp, fsdp, recompute
from ring.nn import LongNetBlock, clip_grad_norm
from tests.support.framework_example import Example, Result, SmallModel, assert_near, dense, mesh_of, trained
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


def _train(example: Example, wrapper: str, recomputed: dict[str, Any] | None) -> Result:
    inner, mesh = SmallModel(), example.device_mesh
    if recomputed is not None:
        recompute.wrap(inner, LongNetBlock, **recomputed)
    if wrapper == "ddp":
        model = ddp.wrap(inner, mesh)
        return trained(
            example,
            inner,
            model,
            micro_batch=lambda last: nullcontext() if last else model.no_sync(),
            clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), example.clip or torch.inf),
        )
    sharded: Any = fsdp.shard(inner, mesh, LongNetBlock, replicate="data" if wrapper == "hsdp" else ())

    def micro_batch(last: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    return trained(
        example, inner, sharded, micro_batch=micro_batch,
        clip=lambda: clip_grad_norm(sharded.parameters(), example.clip or 1e300),
    )  # fmt: skip


TURNED = Example("turned", "contiguous", accumulation=2)
CLIPPED = Example("apart", "striped", accumulation=2, clip=0.1)


@pytest.mark.parametrize(
    ("example", "wrapper", "recomputed"),
    [
        (Example("short", "without rank 0", accumulation=2), "ddp", None),
        (Example("together", accumulation=3, clip=0.1), "ddp", None),
        (TURNED, "ddp", None),
        (Example("short", "without rank 0", accumulation=2), "fsdp", None),
        (CLIPPED, "fsdp", None),
        (TURNED, "fsdp", None),
        (Example("together", accumulation=3, clip=0.1), "hsdp", None),
        (Example("apart", "striped", clip=0.1), "hsdp", None),
        *(
            (CLIPPED, wrapper, way)
            for wrapper in ("ddp", "fsdp")
            for way in ({}, {"keep_attention": True}, {"reentrant": True})
        ),
    ],
)
def test_wrapped_models_train_as_one_process(
    ranks: Ranks, example: Example, wrapper: str, recomputed: dict[str, Any] | None
) -> None:
    assert_near(ranks(example.world).run(_train, example, wrapper, recomputed), dense(example))


def _begin_apart() -> None:
    model = nn.Linear(2, 1)
    rank = dist.get_rank()
    nn.init.constant_(model.weight, 5.0 + rank)
    wrapped = ddp.wrap(model, mesh_of((1, 0), ("context",)), gradient_as_bucket_view=True)
    assert wrapped.module is model and wrapped.gradient_as_bucket_view
    assert (model.weight == 5.0).all(), "all ranks have the parameters of the first one"
    (wrapped(torch.ones(1, 2)).sum() * (rank + 1)).backward()
    assert model.weight.grad is not None and (model.weight.grad == 1.5).all()


def test_ddp_broadcasts_parameters_and_averages_gradients(ranks: Ranks) -> None:
    ranks(2).run(_begin_apart)


def _refuse() -> None:
    mesh = Example("short").device_mesh
    with pytest.raises(ValueError, match="mesh must have all ranks with tokens of their own, got 1 of the 2 ranks"):
        ddp.wrap(nn.Linear(1, 1), mesh["data"])
    for name in ("process_group", "device_mesh"):
        with pytest.raises(ValueError, match=f"{name} must be left out"):
            ddp.wrap(nn.Linear(1, 1), mesh, **{name: None})  # type: ignore[arg-type]


def test_other_ranks_for_ddp_to_average_over_are_refused(ranks: Ranks) -> None:
    ranks(2).run(_refuse)
