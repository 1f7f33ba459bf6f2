"""Share between the tests of `ring.nn`: meshes and handles on four ranks, layouts, drawn numbers, what a call said."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring import Layout
from ring.nn import ContextParallel

TOKENS, VOCABULARY = 13, 7
M = TypeVar("M", bound=nn.Module)
# Tokens of each of the four ranks.
UNEVEN = {"even": (4, 3, 3, 3), "uneven": (1, 6, 2, 4), "empty": (5, 0, 8, 0), "one": (0, 0, 13, 0)}
# Context alone, or data x context; the last two have context groups that are not contiguous.
MESHES: dict[str, Any] = {
    "reversed": (3, 2, 1, 0),
    "three": ((3,), (0,), (2,)),
    "1x4": ((0, 1, 2, 3),),
    "2x2": ((0, 1), (2, 3)),
    "2x2 apart": ((0, 2), (1, 3)),
    "2x2 turned": ((3, 1), (0, 2)),
}


@cache
def mesh_of(name: str) -> DeviceMesh:
    ranks = torch.tensor(MESHES[name])
    return DeviceMesh("cpu", ranks, mesh_dim_names=("data", "context")[-ranks.dim() :])


# Names of what losses and gradients may be given as `over`.
OVERS = ("default group", "2x2", "2x2 turned", "reversed", "process group", "one dimension", "three")


def over_of(name: str) -> tuple[dist.ProcessGroup | DeviceMesh | None, list[int]]:
    """Return what is given, and its ranks by their numbers in the world. Every rank calls it."""
    if name == "default group":
        return None, [0, 1, 2, 3]
    if name == "process group":
        group = mesh_of("2x2 apart")["context"].get_group()
        return group, dist.get_process_group_ranks(group)
    mesh = mesh_of("2x2")["data"] if name == "one dimension" else mesh_of(name)
    return mesh, mesh.mesh.flatten().tolist()


def layout_of(counts: Sequence[int], seed: int = 0) -> Layout:
    """The positions in a drawn order, dealt out by these counts."""
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
    return Layout.from_cuts(order, torch.tensor([0, *counts]).cumsum(0).tolist())


def context_of(shards: str = "uneven", group: dist.ProcessGroup | DeviceMesh | None = None) -> ContextParallel:
    """Over the four ranks, or over the mesh or group of two: then the counts of two neighbours together."""
    size = 4 if group is None else group.size()
    counts = UNEVEN[shards]
    share = 4 // size
    return ContextParallel(layout_of([sum(counts[r * share : (r + 1) * share]) for r in range(size)]), group)


def data_index(mesh: str) -> int:
    """Index of this rank along "data". Not `get_local_rank`: that is the rank in a group, whose ranks torch sorts."""
    here = mesh_of(mesh).get_coordinate()
    assert here is not None
    return here[0]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole_tokens(seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """(2, n), below VOCABULARY."""
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_fp64(build: Callable[[], M], seed: int = 0) -> M:
    """The same parameters on every rank, none of them 0 or 1 as norms and biases begin."""
    module = build().double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in module.parameters():
            x.copy_(0.4 * torch.randn(x.shape, dtype=torch.float64, generator=draw))
    return module


def grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def far(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """The greatest difference; infinite for NaN, which max() of Python would pass over."""
    pairs = list(zip(found, wanted, strict=True))
    assert all((a is None) == (b is None) for a, b in pairs)
    each = [(a - b).abs().max() for a, b in pairs if a is not None and b is not None and a.numel()]
    worst = torch.stack(each).max().item() if each else 0.0
    return math.inf if math.isnan(worst) else worst


def said(call: Callable[[], object]) -> str:
    """The error that a call raises, with its type, or "fine"."""
    try:
        call()
    except Exception as error:  # of any type: which it is, is what is asked
        return f"{type(error).__name__}: {error}"
    return "fine"
