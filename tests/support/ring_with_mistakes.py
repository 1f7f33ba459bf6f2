"""A user's ring attention over torch.distributed: dense causal, contiguous or zigzag, with a hand-written backward.

Each Peer below makes one of the usual mistakes; `right` makes none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verification.case import Case
from verification.peers import Peer, claims


def shift(*blocks: Tensor) -> list[Tensor]:
    """Send each block to the next rank and return what the previous rank sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(block, memory_format=torch.contiguous_format) for block in blocks]
    sends = [dist.P2POp(dist.isend, block.contiguous(), (rank + 1) % world) for block in blocks]
    for work in dist.batch_isend_irecv(sends + [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in received]):
        work.wait()
    return received


class Ring(torch.autograd.Function):
    @staticmethod
    def positions(order: str, length: int, rank: int, mistake: str) -> Tensor:
        """Return the positions of a rank's tokens."""
        tokens, world = torch.arange(length), dist.get_world_size()
        if mistake == "local_mask":
            return tokens
        if order == "contiguous":
            return rank * length + tokens
        half = length // 2
        return torch.cat([rank * half + tokens[:half], (2 * world - 1 - rank) * half + tokens[:half]])

    @staticmethod
    def scores(q: Tensor, k: Tensor, owner: int, settings: Any) -> Tensor:
        """Return (B, H, L, L) scaled scores with a rank's keys, -inf where a key lies ahead."""
        scale, order, mistake = settings
        rows, keys = (Ring.positions(order, q.shape[2], rank, mistake) for rank in (dist.get_rank(), owner))
        ahead = keys[None, :] > rows[:, None] - int(mistake == "diagonal_off_by_one")
        return (q @ Ring.repeated(k, q, mistake).mT * scale).masked_fill(ahead.to(q.device), -torch.inf)

    @staticmethod
    def repeated(x: Tensor, q: Tensor, mistake: str) -> Tensor:
        """Return the keys or values of each query head."""
        group = q.shape[1] // x.shape[1]
        return x.repeat(1, group, 1, 1) if mistake == "gqa_interleaved" else x.repeat_interleave(group, 1)

    @staticmethod
    def summed(x: Tensor, like: Tensor, mistake: str) -> Tensor:
        """Sum over the query heads of each key/value head."""
        group = x.shape[1] // like.shape[1]
        if mistake == "gqa_interleaved":
            return x.unflatten(1, (group, -1)).sum(1)
        return x.unflatten(1, (-1, group)).sum(2)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        mistake, rank, world = settings[-1], dist.get_rank(), dist.get_world_size()
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:3], 1), -torch.inf)
        blocks = [k, v]
        for step in range(world):
            s = Ring.scores(q, blocks[0], (rank - step) % world, settings)
            for _ in range(2 if mistake == "own_block_twice" and step == 0 else 1):
                total = torch.logaddexp(lse, s.logsumexp(-1, keepdim=True))
                safe = total.masked_fill(total == -torch.inf, 0.0)
                out = (lse - safe).exp() * out + (s - safe).exp() @ Ring.repeated(blocks[1], q, mistake)
                lse = total
            if mistake == "bf16_out":
                out = out.bfloat16().to(q.dtype)
            if mistake == "last_hop_skipped" and step == world - 2:
                break
            blocks = shift(*blocks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        return out, lse.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        (q, k, v, out, lse), (scale, _, mistake) = ctx.saved_tensors, ctx.settings
        rank, world = dist.get_rank(), dist.get_world_size()
        delta = (dout * out).sum(-1, keepdim=True) - dlse[..., None]
        if mistake == "scale_twice":
            scale = scale * scale
        sums = torch.bfloat16 if mistake == "bf16_gradients" else q.dtype
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=sums), torch.zeros_like(v, dtype=sums)
        for step in range(world):
            s = Ring.scores(q, k, (rank - step) % world, ctx.settings)
            block_lse = s.logsumexp(-1, keepdim=True) if mistake == "partial_lse" else lse
            p = (s - block_lse.masked_fill(block_lse == -torch.inf, torch.inf)).exp()
            if mistake == "last_hop_skipped" and step == world - 1:
                p = torch.zeros_like(p)
            ds = p * (dout @ Ring.repeated(v, q, mistake).mT - delta) * scale
            dq = dq + ds @ Ring.repeated(k, q, mistake)
            dk, dv = (
                dk + Ring.summed(ds.mT @ q, k, mistake).to(sums),
                dv + Ring.summed(p.mT @ dout, v, mistake).to(sums),
            )
            k, v, dk, dv = shift(k, v, dk, dv)
        if mistake == "neighbours_gradients":
            dk, dv = shift(dk, dv)
        if mistake == "summed_over_ranks":  # gathered, and then added up as if each rank had a part
            gathered = [torch.empty_like(dk) for _ in range(2 * world)]
            dist.all_gather(gathered[:world], dk.contiguous())
            dist.all_gather(gathered[world:], dv.contiguous())
            for x in gathered:
                dist.all_reduce(x)
            dk, dv = gathered[rank], gathered[world + rank]
        return dq, dk.to(q.dtype), dv.to(q.dtype), None, None, None


def claimed(case: Case) -> Case:
    order = "zigzag" if case.order == "zigzag" else "contiguous"
    case = claims.even_shards(claims.all_ranks(claims.without_own_settings(case)), order, 2)
    return claims.in_dtypes(claims.dense(case, causal=True), "float32", "float64")


def ring(mistake: str = "") -> Peer:
    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: object) -> tuple[Tensor, Tensor]:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = Ring.apply(*heads_first, case.softmax_scale, case.order, mistake)
        return out.transpose(1, 2), lse

    return Peer("ring", "dense causal, contiguous or zigzag, fp32 and fp64", claimed, attend)


MISTAKES = (
    "local_mask", "neighbours_gradients", "last_hop_skipped", "own_block_twice", "partial_lse", "summed_over_ranks",
    "scale_twice", "gqa_interleaved", "bf16_gradients", "bf16_out", "diagonal_off_by_one",
)  # fmt: skip
right = ring()
globals().update({mistake: ring(mistake) for mistake in MISTAKES})
