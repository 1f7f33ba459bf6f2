"""Training of an example under DDP and under FSDP2, as a user would write it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ring.nn import clip_grad_norm
from ring.nn.frameworks import ddp, fsdp, recompute
from tests.support.framework_example import DecoderLayer, Example, Result, SmallLlama, optimizer_for, trained

INFINITE = float("inf")


def under_ddp(example: Example, recomputed: dict[str, Any] | None = None) -> Result:
    inner = SmallLlama()
    if recomputed is not None:
        recompute.wrap(inner, DecoderLayer, **recomputed)
    model = ddp.wrap(inner, example.device_mesh())
    return trained(
        example, inner, optimizer_for(model),
        logits=lambda batch: model(batch.tokens, batch.context),
        micro_batch=lambda last: nullcontext() if last else model.no_sync(),
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), example.clip or INFINITE),
    )  # fmt: skip


def under_fsdp(
    example: Example,
    recomputed: dict[str, Any] | None = None,
    policy: MixedPrecisionPolicy | None = None,
    replicate: bool = False,
    compiled: bool = False,
) -> Result:
    """compiled: whether the forward of each layer is; what FSDP does around it never is."""
    model = SmallLlama()
    for layer in model.layers if compiled else ():
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    if recomputed is not None:
        recompute.wrap(model, DecoderLayer, **recomputed)
    sharded = fsdp.shard(model, example.device_mesh(), DecoderLayer, policy=policy, replicate=replicate)

    def micro_batch(last: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    return trained(
        example, model, optimizer_for(model),
        logits=lambda batch: model(batch.tokens, batch.context),
        micro_batch=micro_batch,
        clip=lambda: clip_grad_norm(model.parameters(), example.clip or 1e300),
    )  # fmt: skip
