"""What ranks do to train an example under FairScale's OSS and ShardedDDP."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from fairscale.nn.checkpoint import checkpoint_wrapper
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS

from ring.nn import count_labels, cross_entropy
from ring.nn.frameworks import fairscale
from tests.support.framework_example import ADAM, SHORT, Example, Result, labels_of
from tests.support.framework_llama import SmallLlama


def under_fairscale(
    example: Example, zero_grad: dict[str, bool], recomputed: bool = False, dtype: torch.dtype = torch.float64
) -> Result:
    inner = SmallLlama().to(dtype)
    if recomputed:
        for layer in inner.layers:
            checkpoint_wrapper(layer)
    model, optimizer = fairscale.wrap(inner, torch.optim.AdamW, example.device_mesh(), **ADAM)
    return trained(example, model, optimizer, inner, zero_grad)


def as_it_comes(example: Example, zero_grad: dict[str, bool]) -> Result:
    """With FairScale's own defaults."""
    inner = SmallLlama()
    optimizer = OSS(inner.parameters(), optim=torch.optim.AdamW, **ADAM)
    return trained(example, ShardedDataParallel(inner, optimizer), optimizer, inner, zero_grad)


def trained(
    example: Example, model: ShardedDataParallel, optimizer: OSS, inner: SmallLlama, zero_grad: dict[str, bool]
) -> Result:
    mesh = example.device_mesh()
    context, result = example.handle(mesh), Result([], [], {}, {})
    for step in range(example.steps):
        batches = example.batches(step, mesh, context)
        labelled = count_labels([labels_of(batch) for batch in batches], mesh)
        losses = []
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else model.no_sync():
                logits = model(batch.tokens, batch.context)
                loss = cross_entropy(logits, labels_of(batch), mesh, labelled=labelled)
                loss.backward()
            losses.append(loss.item())
        result.losses.append(sum(losses))
        if example.clip is not None:
            result.norms.append(float(optimizer.clip_grad_norm(example.clip)))
        optimizer.step()
        optimizer.zero_grad(**zero_grad)
    result.parameters = {name: x.detach().clone() for name, x in inner.named_parameters()}
    return result


def refused_mesh() -> str:
    try:
        fairscale.wrap(SmallLlama(), torch.optim.AdamW, Example(SHORT).device_mesh(), **ADAM)
    except ValueError as error:
        return str(error)
    return "nothing"
