"""What ranks do to train an example under DDP and under FSDP2: as a user would write it, with what is looked at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import RecordingTransport
from ring.nn import ContextParallel, clip_grad_norm, cross_entropy
from ring.nn.frameworks import ddp, fsdp, recompute
from tests.support.framework_example import TOGETHER, Example, Result, labels_of, optimizer_for
from tests.support.framework_llama import DecoderLayer, SmallLlama
from tests.support.sharded_training import trained

INFINITE = float("inf")


def under_ddp(example: Example, recomputed: dict[str, Any] | None = None) -> Result:
    mesh, inner = example.device_mesh(), SmallLlama()
    if recomputed is not None:
        recompute.wrap(inner, DecoderLayer, **recomputed)
    model = ddp.wrap(inner, mesh)
    return trained(
        example, mesh, inner, optimizer_for(model),
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
    mesh, model = example.device_mesh(), SmallLlama()
    for layer in model.layers if compiled else ():
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    if recomputed is not None:
        recompute.wrap(model, DecoderLayer, **recomputed)
    sharded = fsdp.shard(model, mesh, DecoderLayer, policy=policy, replicate=replicate)

    def micro_batch(last: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    return trained(
        example, mesh, model, optimizer_for(model),
        logits=lambda batch: model(batch.tokens, batch.context),
        micro_batch=micro_batch,
        clip=lambda: clip_grad_norm(model.parameters(), example.clip or 1e300),
    )  # fmt: skip


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
    turned = DeviceMesh("cpu", torch.tensor(TOGETHER), mesh_dim_names=("context", "data"))
    descending = DeviceMesh("cpu", torch.tensor(((1, 0), (3, 2))), mesh_dim_names=("data", "context"))
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
        "nothing to replicate over": lambda: fsdp.shard(model, mesh["context"], DecoderLayer, replicate=True),
        "context before data": lambda: fsdp.shard(model, turned, DecoderLayer, replicate=True),
        "ranks that descend": lambda: fsdp.shard(model, descending, DecoderLayer, replicate=True),
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
