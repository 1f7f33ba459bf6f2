"""What ranks do to train an example under FairScale's OSS and ShardedDDP."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from fairscale.nn.checkpoint import checkpoint_wrapper
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS

from ring.nn.frameworks import fairscale
from tests.support.framework_example import ADAM, SHORT, Example, Result
from tests.support.framework_llama import SmallLlama
from tests.support.sharded_training import trained


def under_fairscale(
    example: Example, zero_grad: dict[str, bool], recomputed: bool = False, dtype: torch.dtype = torch.float64
) -> Result:
    inner = SmallLlama().to(dtype)
    if recomputed:
        for layer in inner.layers:
            checkpoint_wrapper(layer)
    model, optimizer = fairscale.wrap(inner, torch.optim.AdamW, example.device_mesh(), **ADAM)
    return _trained(example, model, optimizer, inner, zero_grad)


def as_it_comes(example: Example, zero_grad: dict[str, bool]) -> Result:
    """With FairScale's own defaults."""
    inner = SmallLlama()
    optimizer = OSS(inner.parameters(), optim=torch.optim.AdamW, **ADAM)
    return _trained(example, ShardedDataParallel(inner, optimizer), optimizer, inner, zero_grad)


def _trained(
    example: Example, model: ShardedDataParallel, optimizer: OSS, inner: SmallLlama, zero_grad: dict[str, bool]
) -> Result:
    return trained(
        example, example.device_mesh(), inner, optimizer,
        logits=lambda batch: model(batch.tokens, batch.context),
        micro_batch=lambda last: nullcontext() if last else model.no_sync(),
        clip=None if example.clip is None else partial(optimizer.clip_grad_norm, example.clip),
        zero_grad=zero_grad, gradients=False,  # a rank has those of its own part
    )  # fmt: skip


def refused_mesh() -> str:
    try:
        fairscale.wrap(SmallLlama(), torch.optim.AdamW, Example(SHORT).device_mesh(), **ADAM)
    except ValueError as error:
        return str(error)
    return "nothing"
