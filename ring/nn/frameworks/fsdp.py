"""Torch's `fully_shard` (FSDP2) over data x context: all ranks share parameters, gradients and optimizer states.

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    recompute.wrap(model, DecoderLayer)                                         # before sharding, where it is wanted
    fsdp.shard(model, mesh, DecoderLayer, policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())                           # after sharding
    labelled = count_labels([batch.labels for batch in batches], mesh)          # of the whole step
    for number, batch in enumerate(batches):                                    # gradient accumulation
        model.set_requires_gradient_sync(number == len(batches) - 1)
        logits = model(batch.tokens, batch.context)
        cross_entropy(logits, batch.labels, mesh, labelled=labelled).backward()
    ring.nn.clip_grad_norm(model.parameters(), 1.0, mesh)                       # or torch's: both know DTensors
    optimizer.step()

FSDP averages as DDP does, so losses are scaled alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ring.nn.frameworks.mesh import averaging_mesh, replicating_mesh
from ring.nn.frameworks.modules import modules_of

HALVES = (torch.bfloat16, torch.float16)
OURS = ("mesh", "mp_policy", "dp_mesh_dims")  # what mesh and policy say


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    layers: type[nn.Module] | tuple[type[nn.Module], ...],
    *,
    policy: MixedPrecisionPolicy | None = None,
    replicate: bool = False,
    **options: Any,
) -> FSDPModule:
    """The same model, sharded in place over all ranks of the mesh; each layer is gathered when it is its turn.

    mesh: of ("data", "context"), or of "context" alone. layers: the classes of the modules that are units of their own,
    also where one is within another.
    policy: its param_dtype is that of parameters and activations; the optimizer sees the parameters as they are now.
    replicate: whether each group of context ranks holds the whole model, of which its ranks have a shard each (torch's
    hybrid sharding): layers are then gathered within such a group alone, which may be one host.
    options: fully_shard's own (reshard_after_forward, offload_policy, ...).

    Raises ValueError for another mesh, where the model has no such layer, for options that say what mesh and policy
    say, and for a policy of 16-bit parameters that does not name the type in which gradients are summed: left out, that
    would be 16 bits too, which loses more the more ranks there are.
    """
    over = replicating_mesh(mesh) if replicate else averaging_mesh(mesh)
    for name in OURS:
        if name in options:
            raise ValueError(f"{name} must be left out: mesh and policy say it, got {name}")
    policy = MixedPrecisionPolicy() if policy is None else policy
    if policy.param_dtype in HALVES and policy.reduce_dtype is None:
        raise ValueError(
            f"policy must name reduce_dtype, in which gradients are summed, with param_dtype {policy.param_dtype}: "
            "torch.float32, or 16 bits if that is meant; got None"
        )
    for layer in reversed(modules_of(model, layers)):  # a layer within another comes before it, as torch asks
        fully_shard(layer, mesh=over, mp_policy=policy, **options)
    return fully_shard(model, mesh=over, mp_policy=policy, **options)
