"""Torch's `fully_shard` (FSDP2) over data x context: all ranks share parameters, gradients and optimizer states.

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    recompute.wrap(model, DecoderLayer)                                         # optional, before sharding
    fsdp.shard(model, mesh, DecoderLayer, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())                           # after sharding
    labelled = count_labels([batch.labels for batch in batches], mesh)          # of the whole step
    for number, batch in enumerate(batches):                                    # gradient accumulation
        model.set_requires_gradient_sync(number == len(batches) - 1)
        logits = model(batch.tokens, batch.context)
        cross_entropy(logits, batch.labels, mesh, labelled=labelled).backward()
    ring.nn.clip_grad_norm(model.parameters(), 1.0, mesh)                       # or torch's: both take DTensors
    optimizer.step()

FSDP averages as DDP does, so losses have the same scale. `mesh` has the ranks with tokens of their own; with ranks that
replicate the model, that shard it, that share sequences and that share tokens (tensor parallelism):

    fsdp.shard(model, mesh["replicate", "shard", "context"], DecoderLayer, replicate="replicate", same_tokens="tensor")

Layers are units: all ranks gather their parameters. A layer that only some ranks run is refused by name, on every rank,
before its parameters are mixed up with another's. Leave its class out of `layers`: its parameters then belong to the
layer around it, and ranks that do not use them take part with zeros. A layer that all ranks leave out is gathered
nevertheless, from the first forward that has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ring.integrations.wrappers import same_ranks
from ring.integrations.wrappers.context_use import require_use
from ring.integrations.wrappers.former_name import takes_former_name
from ring.integrations.wrappers.mesh import averaging_mesh, replicating_mesh
from ring.integrations.wrappers.missing_gradients import FilledUnits
from ring.integrations.wrappers.modules import find_modules
from ring.integrations.wrappers.unit_order import UnitOrder
from ring.nn.batch_group import BatchRanks

HALVES = (torch.bfloat16, torch.float16)
OURS = ("mesh", "mp_policy", "dp_mesh_dims")  # set by mesh and policy


@takes_former_name
def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    layers: type[nn.Module] | tuple[type[nn.Module], ...],
    *,
    policy: MixedPrecisionPolicy | None = None,
    replicate: str | Iterable[str] = (),
    same_tokens: str | Iterable[str] = (),
    **options: Any,
) -> FSDPModule:
    """Return the model, sharded in place over all ranks of the mesh; each layer is gathered when it runs.

    Args:
        model: on each rank with the same parameters.
        mesh: of the ranks with tokens of their own.
        layers: classes of the modules that are FSDP units, nested ones too.
        policy: param_dtype is the type of parameters and activations; the optimizer keeps the current type.
        replicate: names of the mesh's dimensions along which the model is replicated (torch's hybrid sharding): layers
            are gathered only along the others, which may be one host.
        same_tokens: names of the dimensions of the mesh's root mesh along which ranks hold the same tokens.
        options: of fully_shard (reshard_after_forward, offload_policy, ...).

    Raises:
        ValueError: a mesh that leaves out ranks, no such layer, options that mesh and policy set, or a policy of 16-bit
            parameters without reduce_dtype: gradients would be summed in 16 bits, with an error that grows with the
            ranks.
    """
    over = replicating_mesh(mesh, replicate, same_tokens) if replicate else averaging_mesh(mesh, same_tokens)
    for name in OURS:
        if name in options:
            raise ValueError(f"{name} must be left out: mesh and policy set it, got {name}")
    policy = MixedPrecisionPolicy() if policy is None else policy
    if policy.param_dtype in HALVES and policy.reduce_dtype is None:
        raise ValueError(
            f"policy must name reduce_dtype, in which gradients are summed, with param_dtype {policy.param_dtype}: "
            "torch.float32, or 16 bits if that is meant; got None"
        )
    same_ranks.watch(model, mesh)
    require_use(model)
    for layer in reversed(find_modules(model, layers)):  # torch requires nested layers first
        fully_shard(layer, mesh=over, mp_policy=policy, **options)
    sharded = fully_shard(model, mesh=over, mp_policy=policy, **options)
    ranks = BatchRanks(over)
    UnitOrder(sharded, ranks)
    FilledUnits(sharded, ranks)
    return sharded
