"""Dense causal attention without a ring: one GPU with the whole sequence, a ring's kernels alone, all-to-all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import fused
from bench.workload import Attend, Contender, Inputs, Results, Unsupported, Workload
from verification.wording import counted


def whole(workload: Workload, device: torch.device, seed: int) -> Contender:
    """Make one call on one GPU with the whole sequence. Its time / ranks is that of a perfect division."""
    inputs = workload.draw(device, seed, workload.total)
    return Contender.of(
        lambda q, k, v: fused.attention(q, k, v, workload.scale, True)[0], inputs, local=True, capturable=True
    )  # fmt: skip


def whole_by_flash(workload: Workload, device: torch.device, seed: int) -> Contender:
    """Make one call of FlashAttention-2 for variable lengths on one GPU with all documents."""
    inputs = workload.draw(device, seed, workload.total)
    return Contender.of(
        lambda q, k, v: fused.packed(q, k, v, workload.scale, workload.documents, workload.window), inputs,
        local=True, capturable=True,
        note="for variable lengths" if device.type == "cuda" else "",
    )  # fmt: skip


def zigzag_kernels(workload: Workload, inputs: Inputs, rank: int) -> Contender:
    """Make one rank's kernel calls of a zigzag ring, without exchange and merge: one for all earlier ranks, one for all
    later ones. All rows see the earlier ranks' first chunks; the second half sees the later ranks' whole shards."""
    q, k, v, dout = (x.detach() for x in inputs)
    half, batch = workload.tokens // 2, workload.shape.batch
    earlier, later = rank * half, (workload.world - 1 - rank) * workload.tokens
    keys, values = (x.new_empty(batch, max(earlier, later), *x.shape[2:]).normal_() for x in (k, v))
    calls = [(q, k, v, dout, True)]
    if earlier:
        calls.append((q, keys[:, :earlier], values[:, :earlier], dout, False))
    if later:
        calls.append((q[:, half:], keys[:, :later], values[:, :later], dout[:, half:], False))
    return kernels_alone(calls, workload.scale)


def kernels_alone(calls: list[tuple[Tensor, Tensor, Tensor, Tensor, bool]], scale: float) -> Contender:
    """Make a sequence of calls, each (q, k, v, dout, causal). Only the last results are returned, to free memory."""

    def forward() -> Results:
        results: Results = ()
        for q, k, v, _, causal in calls:
            results = fused.forward(q, k, v, scale, causal)
        return results

    def training() -> Results:
        results: Results = ()
        for q, k, v, dout, causal in calls:
            out, lse = fused.forward(q, k, v, scale, causal)
            results = out, *fused.backward(dout, q, k, v, out, lse, scale, causal)
        return results

    return Contender(forward, training, local=True, capturable=True)


def all_to_all(workload: Workload) -> Attend:
    """Make DeepSpeed-Ulysses (arXiv 2309.14509), in contiguous order: all-to-all to all tokens of some heads, a kernel
    call, all-to-all back. Raises Unsupported if the ranks do not divide the heads."""
    if workload.shape.kv % workload.world:
        raise Unsupported(
            f"{counted(workload.shape.kv, 'key/value head')} cannot be divided among {workload.world} ranks"
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (_Exchanged.apply(x, True) for x in (q, k, v))
        out: Tensor = _Exchanged.apply(fused.attention(query, key, value, workload.scale, True)[0], False)
        return out

    return attend


class _Exchanged(torch.autograd.Function):
    """All-to-all (B, n, H, D) -> (B, p n, H / p, D) if to_tokens, else back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_tokens: bool) -> Tensor:
        ctx.to_tokens = to_tokens
        return exchanged(x, to_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return exchanged(grads[0], not ctx.to_tokens), None


def exchanged(x: Tensor, to_tokens: bool) -> Tensor:
    """Exchange (B, n, H, D) -> (B, p n, H / p, D), or (B, p n, H, D) -> (B, n, p H, D)."""
    p = dist.get_world_size()
    parts = x.unflatten(2, (p, -1)).permute(2, 0, 1, 3, 4) if to_tokens else x.unflatten(1, (p, -1)).transpose(0, 1)
    sends = parts.contiguous()  # (p, B, n, heads, D)
    received = torch.empty_like(sends)
    dist.all_to_all_single(received, sends)
    return received.transpose(0, 1).flatten(1, 2) if to_tokens else received.permute(1, 2, 0, 3, 4).flatten(2, 3)
