"""Tensors that are no shard of a rank: of other tokens, another type, or no plain tensors at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def longer(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, x.new_zeros(x.shape[0], 1, *x.shape[2:])), 1)


def shorter(x: torch.Tensor) -> torch.Tensor:
    return x[:, :-1]


def differentiable(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def as_array(x: torch.Tensor) -> Any:
    return x.detach().float().cpu().numpy()


def placed(x: torch.Tensor) -> torch.Tensor:
    """A DTensor, over this rank alone, and where there are no process groups a sparse tensor, which is as wrong."""
    if not dist.is_initialized():
        return x.to_sparse()
    mesh = DeviceMesh(x.device.type, [dist.get_rank()], _init_backend=False)
    return DTensor.from_local(x, mesh, [Shard(1)], run_check=False)


def in_another_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32 if x.dtype == torch.float64 else torch.float64)
