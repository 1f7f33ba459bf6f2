"""The training of an example on one of several ranks, whatever wraps its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ring.nn import Batch, count_labels, cross_entropy
from tests.support.framework_example import Example, Result, gradients_of, labels_of


def trained(
    example: Example,
    mesh: DeviceMesh,
    inner: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    logits: Callable[[Batch], Tensor],
    micro_batch: Callable[[bool], AbstractContextManager[object]],
    clip: Callable[[], Any] | None,
    zero_grad: Mapping[str, bool] | None = None,
    gradients: bool = True,
) -> Result:
    """inner: the model that is wrapped, whose parameters are looked at. logits: of the wrapped one. micro_batch: around
    forward and backward of one, given whether it is the step's last. clip: clips, and returns the norm before.
    gradients: whether this rank has all of them.
    """
    context, result = example.handle(mesh), Result([], [], {}, {})
    for step in range(example.steps):
        batches = example.batches(step, mesh, context)
        labelled = count_labels([labels_of(batch) for batch in batches], mesh)
        losses = []
        for number, batch in enumerate(batches):
            with micro_batch(number == len(batches) - 1):
                loss = cross_entropy(logits(batch), labels_of(batch), mesh, labelled=labelled)
                loss.backward()
            losses.append(loss.item())
        result.losses.append(sum(losses))
        if clip is not None:
            result.norms.append(float(clip()))
        if gradients and step == 0:
            result.gradients = plain(gradients_of(inner))
        optimizer.step()
        optimizer.zero_grad(**zero_grad or {})
    result.parameters = plain(dict(inner.named_parameters()))
    return result


def plain(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Whole tensors, by the names of a model that is not wrapped."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (x.full_tensor() if isinstance(x, DTensor) else x)
        .detach()
        .clone()
        for name, x in tensors.items()
    }
