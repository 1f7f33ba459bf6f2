"""LongNet's published method (arXiv 2307.02486, sections 2.3 and 3; microsoft/torchscale at 11e745e).

For every branch:
1. Gather the rows of each head's grid into a copy. All-gather these keys and values if a segment exceeds a shard.
2. Call the kernel once, and scatter outputs and lse to full size: 0 and -1e8 where the branch selects nothing.
Add the branches, weighted by the softmax of their lse. Weights are constants in backward: dV is exact, dQ and dK are
not. Heads are not padded if the rate exceeds their number.

Two additions make the result right. If a segment exceeds a shard, a second call, with its own lse, covers the causal
part of the rank's own shard (the published code has only earlier ranks' keys). Shared key/value heads are expanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import fused
from bench.baselines import kernels_alone
from bench.workload import Attend, Contender, Inputs, Unsupported, Workload
from verification.wording import counted

# Newer torch renamed these functions, and warns of the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
NOWHERE = -1e8  # lse of a row that a branch does not select


@dataclass(frozen=True)
class Grid:
    """One branch on one shard: every `rate`-th of `length` rows of a segment, which spans `ranks` ranks."""

    length: int
    rate: int
    ranks: int

    def gather(self, x: Tensor) -> Tensor:
        """Gather (B, n, H, D) -> (B n / length, length / rate, H, D): rows h mod rate, + rate, ... of head h."""
        return self._of_heads(x).permute(0, 1, 3, 4, 2).reshape(-1, self.length // self.rate, *x.shape[2:])

    def scatter(self, out: Tensor, shape: torch.Size) -> Tensor:
        """Invert `gather`; all other rows are 0."""
        full = torch.zeros(shape, dtype=out.dtype, device=out.device)
        view = self._of_heads(full)  # (segments, rows, D, groups, phases)
        groups, phases = view.shape[3:]
        view.copy_(out.unflatten(2, (groups, phases)).permute(0, 1, 4, 2, 3))
        return full

    def scatter_lse(self, lse: Tensor, shape: torch.Size) -> Tensor:
        """Scatter (segments, H, rows) -> (B, n, H, 1)."""
        full = torch.full((*shape[:3], 1), NOWHERE, dtype=lse.dtype, device=lse.device)
        view = self._of_heads(full)
        groups, phases = view.shape[3:]
        view.copy_(lse.transpose(1, 2).unflatten(2, (groups, phases)).unsqueeze(2))
        return full

    def _of_heads(self, x: Tensor) -> Tensor:
        """View of the rows on each head's grid, (segments, rows, D, groups, phases); head = group * phases + phase."""
        phases = min(self.rate, x.shape[2])
        y = x.view(-1, self.length // self.rate, self.rate, x.shape[2] // phases, phases, x.shape[3])
        return torch.diagonal(y, dim1=2, dim2=4).transpose(2, 3)


def grids(workload: Workload) -> list[Grid]:
    """Return the grid of each branch. Raises Unsupported if segments, shards, rates or heads do not divide."""
    branches = []
    for branch in workload.pattern.branches:
        segment = min(branch.segment_length or workload.total, workload.total)
        length, rate = min(segment, workload.tokens), branch.dilation_rate
        if max(segment, workload.tokens) % length or length % rate or workload.world % (segment // length):
            raise Unsupported(
                f"segments of {segment}, shards of {workload.tokens} and rate {rate} do not divide as the method needs"
            )
        if workload.shape.query % min(rate, workload.shape.query):
            raise Unsupported(f"{counted(workload.shape.query, 'head')}, which the rate {rate} does not divide")
        branches.append(Grid(length, rate, segment // length))
    return branches


def longnet(workload: Workload, rank: int) -> Attend:
    """Make the published method on one rank's shard. Raises Unsupported as `grids` does."""
    branches = grids(workload)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share = workload.shape.query // workload.shape.kv
        if share > 1:
            k, v = (x.repeat_interleave(share, dim=2) for x in (k, v))
        outs, lses = [], []
        for grid in branches:
            query, key, value = (grid.gather(x) for x in (q, k, v))
            parts = [fused.attention(query, key, value, workload.scale, True)]
            if grid.ranks > 1:
                everyone = _AllGathered.apply(torch.stack((key, value)))  # (p, 2, segments, rows, H, D)
                earlier = everyone[rank - rank % grid.ranks : rank]
                if len(earlier):
                    key, value = earlier.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
                    parts.append(fused.attention(query, key, value, workload.scale, False))
                else:  # keeps every rank in the backward of the all-gather
                    parts[0] = parts[0][0] + 0 * everyone[:0].sum(), parts[0][1]
            outs += [grid.scatter(out, q.shape) for out, _ in parts]
            lses += [grid.scatter_lse(lse, q.shape) for _, lse in parts]
        return weighted(outs, lses)

    return attend


def weighted(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """Sum outs, (B, n, H, D) each, weighted by the softmax of lses, (B, n, H, 1) each."""
    with torch.no_grad():
        top = torch.stack(lses).amax(0)
        parts = [torch.exp(lse - top) for lse in lses]
        total = torch.stack(parts).sum(0)
        weights = [part / total for part in parts]
    out = outs[0] * weights[0].to(outs[0].dtype)
    for x, weight in zip(outs[1:], weights[1:], strict=True):
        out = out + x * weight.to(x.dtype)
    return out


def longnet_kernels(workload: Workload, inputs: Inputs, rank: int) -> Contender:
    """Make the method's kernel calls alone, on copies gathered before, with random keys of other ranks. A workload of
    one rank covers the whole sequence."""
    share = workload.shape.query // workload.shape.kv
    q, k, v, dout = (x.detach() for x in inputs)
    k, v = (x.repeat_interleave(share, dim=2) for x in (k, v))
    calls: list[tuple[Tensor, Tensor, Tensor, Tensor, bool]] = []
    for grid in grids(workload):
        query, key, value, gradient = (grid.gather(x) for x in (q, k, v, dout))
        calls.append((query, key, value, gradient, True))
        if earlier := rank % grid.ranks:
            other_key, other_value = (torch.randn_like(x).repeat(1, earlier, 1, 1) for x in (key, value))
            calls.append((query, other_key, other_value, gradient, False))
    return kernels_alone(calls, workload.scale)


class _AllGathered(torch.autograd.Function):
    """All-gather x of every rank: (p, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        world = dist.get_world_size()
        everyone = x.new_empty((world * x.shape[0], *x.shape[1:]))
        _all_gather(everyone, x.contiguous())
        return everyone.unflatten(0, (world, -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        own = gradient.new_empty(gradient.shape[1:])
        _reduce_scatter(own, gradient.contiguous().flatten(0, 1))
        return own
