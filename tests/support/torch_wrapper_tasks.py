"""What ranks do to train an example under DDP and under FSDP2: as a user would write it, with what is looked at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import RecordingTransport
from ring.nn import ContextParallel, clip_grad_norm, count_labels, cross_entropy
from ring.nn.frameworks import ddp, fsdp, recompute
from tests.support.framework_example import TOGETHER, Example, Result, gradients_of, labels_of, optimizer_for
from tests.support.framework_llama import DecoderLayer, SmallLlama

INFINITE = float("inf")


def under_ddp(example: Example, recomputed: dict[str, Any] | None = None) -> Result:
    mesh = example.device_mesh()
    context = example.handle(mesh)
    inner = SmallLlama()
    if recomputed is not None:
        recompute.wrap(inner, DecoderLayer, **recomputed)
    model = ddp.wrap(inner, mesh)
    optimizer, result = optimizer_for(model), Result([], [], {}, {})
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
        result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), example.clip or INFINITE)))
        if step == 0:
            result.gradients = plain(gradients_of(inner))
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = plain(dict(inner.named_parameters()))
    return result


def under_fsdp(
    example: Example, recomputed: dict[str, Any] | None = None, policy: MixedPrecisionPolicy | None = None
) -> Result:
    mesh = example.device_mesh()
    context = example.handle(mesh)
    model = SmallLlama()
    if recomputed is not None:
        recompute.wrap(model, DecoderLayer, **recomputed)
    sharded = fsdp.shard(model, mesh, DecoderLayer, policy=policy)
    optimizer, result = optimizer_for(model), Result([], [], {}, {})
    for step in range(example.steps):
        batches = example.batches(step, mesh, context)
        labelled = count_labels([labels_of(batch) for batch in batches], mesh)
        losses = []
        for number, batch in enumerate(batches):
            sharded.set_requires_gradient_sync(number == len(batches) - 1)
            loss = cross_entropy(model(batch.tokens, batch.context), labels_of(batch), mesh, labelled=labelled)
            loss.backward()
            losses.append(loss.item())
        result.losses.append(sum(losses))
        result.norms.append(float(clip_grad_norm(model.parameters(), example.clip or 1e300)))
        if step == 0:
            result.gradients = plain(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    result.parameters = plain(dict(model.named_parameters()))
    return result


def plain(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Whole tensors, by the names of a model that is not wrapped."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (x.full_tensor() if isinstance(x, DTensor) else x)
        .detach()
        .clone()
        for name, x in tensors.items()
    }


def messages(example: Example, recomputed: dict[str, Any] | None) -> tuple[int, int]:
    """How many messages this rank sends in the forward of one model, and in its backward."""
    mesh = example.device_mesh()
    transport = RecordingTransport(ProcessGroupTransport(mesh["context"].get_group()))
    context = ContextParallel(example.arranged(), transport)
    model = SmallLlama()
    if recomputed is not None:
        recompute.wrap(model, DecoderLayer, **recomputed)
    (batch,) = example.batches(0, mesh, context)
    before = len(transport.sent)
    loss = cross_entropy(model(batch.tokens, batch.context), labels_of(batch), mesh)
    forward = len(transport.sent)
    loss.backward()
    return forward - before, len(transport.sent) - forward


def refusals() -> dict[str, str]:
    """What the wrappers say to what they do not take."""
    mesh = Example(TOGETHER).device_mesh()
    unnamed = DeviceMesh("cpu", torch.tensor(TOGETHER))
    other = DeviceMesh("cpu", torch.tensor(TOGETHER), mesh_dim_names=("data", "tensor"))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = SmallLlama()
    calls: dict[str, Callable[[], object]] = {
        "data ranks only": lambda: ddp.wrap(model, mesh["data"]),
        "no names": lambda: fsdp.shard(model, unnamed, DecoderLayer),
        "another dimension": lambda: ddp.wrap(model, other),
        "a group": lambda: ddp.wrap(model, mesh.get_group("data")),  # type: ignore[arg-type]
        "a group of its own": lambda: ddp.wrap(model, mesh, process_group=mesh.get_group("data")),
        "a mesh of its own": lambda: fsdp.shard(model, mesh, DecoderLayer, dp_mesh_dims=None),
        "no such layer": lambda: fsdp.shard(model, mesh, nn.Conv2d),
        "an instance": lambda: recompute.wrap(model, model.layers[0]),  # type: ignore[arg-type]
        "sums in 16 bits": lambda: fsdp.shard(model, mesh, DecoderLayer, policy=half),
        "attention kept, reentrant": lambda: recompute.wrap(model, DecoderLayer, keep_attention=True, reentrant=True),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except (ValueError, NotImplementedError) as error:
            said[name] = str(error)
    return said
