"""Parameters of which every rank has a copy, with the same values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ring.nn.batch_group import BatchRanks
from ring.validation import is_dtensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def check_plain(number: int, x: Tensor) -> None:
    """Raise NotImplementedError or ValueError unless parameter `number` is plain, real, and its gradient dense."""
    if is_dtensor(x) or is_dtensor(x.grad):
        raise NotImplementedError(
            f"parameters must be plain tensors, got a DTensor as number {number}: its wrapper averages it"
        )
    check_real(x)
    if x.grad is not None and x.grad.layout is not torch.strided:
        raise ValueError(f"gradients must be dense, got that of parameter {number} in {x.grad.layout}")


def check_real(x: Tensor) -> None:
    """Raise NotImplementedError for a complex gradient."""
    if x.is_complex():
        raise NotImplementedError(f"gradients must be real, got one in {x.dtype}")


def check_replicas(parameters: Sequence[Tensor], ranks: BatchRanks) -> None:
    """Raise ValueError, on every rank, if the bits of a parameter differ between ranks: compare sums of integers."""
    if not parameters or ranks.world_size == 1:
        return
    sums = [x.detach().view(_INTEGERS[x.element_size()]).sum(dtype=torch.int64) for x in parameters]
    everyone = ranks.gather(torch.stack([total.to(sums[0].device) for total in sums]))
    unlike = (everyone != everyone[0]).cpu()
    if unlike.any():
        rank, number = unlike.nonzero()[0].tolist()
        raise ValueError(
            f"parameters must have the same values on every rank, got others in number {number} on rank {rank} than on "
            "rank 0: make the model from one seed; average before GradScaler.unscale_, or use ShardedGradScaler, lest "
            "a rank leave out a step alone"
        )
