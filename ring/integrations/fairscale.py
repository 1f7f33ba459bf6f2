"""FairScale's OSS and ShardedDDP over data x context: each rank updates its part of the parameters for all ranks.

    model, optimizer = fairscale.wrap(model, torch.optim.AdamW, mesh, lr=1e-3)
    for number, batch in enumerate(batches):                                     # gradient accumulation
        with nullcontext() if number == len(batches) - 1 else model.no_sync():
            logits = model(batch.tokens, batch.context)
            cross_entropy(logits, batch.labels, mesh, labelled=labelled).backward()
    optimizer.clip_grad_norm(1.0)           # of OSS: a rank has only the gradients of its part. Not for fp64
    optimizer.step()
    optimizer.zero_grad()

ShardedDDP averages as DDP does, so losses have the same scale. Layers can be recomputed by FairScale's
`checkpoint_wrapper` or by `ring.integrations.wrappers.recompute`.

By default ShardedDDP reduces buffers of which gradients are views. After gradients become None, as by torch's default
`zero_grad()`, the next ones are no longer views: it then reduces stale buffers, and silently trains wrongly (FairScale
0.4.13). `wrap` therefore makes it reduce the gradients themselves, one by one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ring.extras import optional_imports

with optional_imports(__name__):
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

from ring.integrations.wrappers import same_ranks
from ring.integrations.wrappers.mesh import averaging_mesh


def wrap(
    model: nn.Module, kind: type[torch.optim.Optimizer], mesh: DeviceMesh, **settings: Any
) -> tuple[ShardedDataParallel, OSS]:
    """Return the model with gradients averaged over all ranks of the mesh, and the optimizer of its parameters.

    Args:
        model: to wrap.
        kind: class of the optimizer, which must update each parameter independently.
        mesh: of all ranks of the world, each with tokens of its own.
        settings: of the optimizer (lr, ...).

    Raises:
        ValueError: a mesh that leaves out ranks: OSS takes the norm of gradients over all ranks of the world.
    """
    over = averaging_mesh(mesh)
    if over.size() != dist.get_world_size():
        raise ValueError(
            f"mesh must have all {dist.get_world_size()} ranks of the world, over which OSS takes norms of gradients, "
            f"got one of {over.size()}"
        )
    same_ranks.watch(model, mesh)
    group = over.get_group()
    optimizer = OSS(model.parameters(), optim=kind, group=group, **settings)
    return ShardedDataParallel(model, optimizer, process_group=group, reduce_buffer_size=0), optimizer
