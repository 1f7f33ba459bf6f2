"""Torch's `DistributedDataParallel` over data x context.

    model = ddp.wrap(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    labelled = count_labels([batch.labels for batch in batches], mesh)           # of the whole step
    for number, batch in enumerate(batches):                                     # gradient accumulation
        last = number == len(batches) - 1
        with nullcontext() if last else model.no_sync():                         # the forward is inside as well
            logits = model(batch.tokens, batch.context)
            cross_entropy(logits, batch.labels, mesh, labelled=labelled).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)                      # averages are equal on all ranks
    optimizer.step()

DDP averages, and `ring.nn.cross_entropy` has the scale for which the average is the gradient of the mean over all
labelled tokens. Each micro-batch divides by the labels of the whole step, so gradients are added. Parameters that a
rank does not use in a step take part with zeros, without `find_unused_parameters`; those that no rank uses keep None.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ring.integrations.wrappers import same_ranks
from ring.integrations.wrappers.context_use import require_use
from ring.integrations.wrappers.former_name import takes_former_name
from ring.integrations.wrappers.mesh import averaging_mesh
from ring.integrations.wrappers.missing_gradients import FilledBuckets
from ring.nn.batch_group import BatchRanks

OURS = ("process_group", "device_mesh")  # set by the mesh


@takes_former_name
def wrap(
    model: nn.Module, mesh: DeviceMesh, *, same_tokens: str | Iterable[str] = (), **options: Any
) -> DistributedDataParallel:
    """Return the model with gradients averaged over all ranks of the mesh.

    Args:
        model: to wrap.
        mesh: of the ranks with tokens of their own.
        same_tokens: names of the dimensions of its root mesh along which ranks hold the same tokens.
        options: of DDP (device_ids, static_graph, ...).

    Raises:
        ValueError: a mesh that leaves out ranks, or options that set the ranks of the average.
    """
    over = averaging_mesh(mesh, same_tokens)
    for name in OURS:
        if name in options:
            raise ValueError(f"{name} must be left out: gradients are averaged over the ranks of mesh, got {name}")
    same_ranks.watch(model, mesh)
    require_use(model)
    wrapped = DistributedDataParallel(model, process_group=over.get_group(), **options)
    if not wrapped.find_unused_parameters:
        FilledBuckets(wrapped, BatchRanks(over))
    return wrapped
