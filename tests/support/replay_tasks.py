"""Ranks on GPUs whose calls are replayed as CUDA graphs, or some of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from reference import Pattern
from ring import Layout, ring_attention
from ring.compute.gpu import replay
from ring.compute.kernel_counts import picked_kernels

TOKENS, DIM = 512, 64  # tokens of a rank


def _attended(tensors: list[torch.Tensor], pattern: Pattern, layout: Layout, exchange: str) -> list[torch.Tensor]:
    *leaves, dout = tensors
    q, k, v = (x.requires_grad_() for x in leaves)
    out = ring_attention(q, k, v, pattern, layout, exchange=exchange)
    assert isinstance(out, torch.Tensor)
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


def replays(replaying: list[bool], exchange: str) -> tuple[int, int]:
    """Graphs, and calls whose result differs in some bit from the plain one. replaying: by rank, whether it may."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(rank)
    replay._seen.clear()
    replay._replays.clear()
    most, wrong = replay.MOST_BYTES, 0
    zigzag, contiguous = Layout.zigzag(TOKENS * world, world), Layout.contiguous(TOKENS * world, world)
    longnet = Pattern.longnet([256, 512, 1024], [1, 2, 4], heads=8, causal=True)
    for _ in range(replay.BEFORE + 3):
        for pattern, layout, kv_heads in ((Pattern.dense(True), zigzag, 2), (longnet, contiguous, 8)):
            shapes = [(1, TOKENS, heads, DIM) for heads in (8, kv_heads, kv_heads, 8)]
            tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
            replay.MOST_BYTES = most if replaying[rank] else 0
            found = _attended(tensors, pattern, layout, exchange)
            with picked_kernels():  # whoever counts kernels sees plain calls
                plain = _attended(tensors, pattern, layout, exchange)
            wrong += not all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))
    replay.MOST_BYTES = most
    torch.use_deterministic_algorithms(False)
    return len(replay._replays), wrong
