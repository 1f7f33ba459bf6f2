"""A user's ring attention over torch.distributed: dense causal, contiguous or zigzag, with a hand-written backward.

Each Peer below makes one of the usual mistakes; `right` makes none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verification.case import Case
from verification.peers import Peer, claims
from verification.peers.adapters import formulas


def shift(*blocks: Tensor) -> list[Tensor]:
    """Send each block to the next rank and return what the previous rank sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(block, memory_format=torch.contiguous_format) for block in blocks]
    sends = [dist.P2POp(dist.isend, block.contiguous(), (rank + 1) % world) for block in blocks]
    for work in dist.batch_isend_irecv(sends + [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in received]):
        work.wait()
    return received


class Ring(torch.autograd.Function):
    keys: Tensor  # of the latest call

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
        ahead = keys[None, :] > rows[:, None]
        return (q @ Ring.repeated(k, q).mT * scale).masked_fill(ahead.to(q.device), -torch.inf)

    @staticmethod
    def repeated(x: Tensor, q: Tensor) -> Tensor:
        """Return the keys or values of each query head."""
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)

    @staticmethod
    def summed(x: Tensor, like: Tensor) -> Tensor:
        """Sum over the query heads of each key/value head."""
        return x.unflatten(1, (-1, x.shape[1] // like.shape[1])).sum(2)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        rank, world = dist.get_rank(), dist.get_world_size()
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:3], 1), -torch.inf)
        blocks = [k, v]
        for step in range(world):
            s = Ring.scores(q, blocks[0], (rank - step) % world, settings)
            total = torch.logaddexp(lse, s.logsumexp(-1, keepdim=True))
            safe = total.masked_fill(total == -torch.inf, 0.0)
            out = (lse - safe).exp() * out + (s - safe).exp() @ Ring.repeated(blocks[1], q)
            lse = total
            out = out.bfloat16().to(q.dtype) if settings[-1] == "bf16_sum" else out
            blocks = shift(*blocks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        Ring.keys = k
        return out, lse.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        (q, k, v, out, lse), (scale, _, mistake) = ctx.saved_tensors, ctx.settings
        rank, world = dist.get_rank(), dist.get_world_size()
        k = Ring.keys if mistake == "shared_buffer" else k
        delta = (dout * out).sum(-1, keepdim=True) - dlse[..., None]
        sums = torch.bfloat16 if mistake == "bf16_gradients" else q.dtype
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=sums), torch.zeros_like(v, dtype=sums)
        for step in range(world):
            s = Ring.scores(q, k, (rank - step) % world, ctx.settings)
            block_lse = s.logsumexp(-1, keepdim=True) if mistake == "partial_lse" else lse
            p = (s - block_lse.masked_fill(block_lse == -torch.inf, torch.inf)).exp()
            ds = p * (dout @ Ring.repeated(v, q).mT - delta) * scale
            dq = dq + ds @ Ring.repeated(k, q)
            dk, dv = dk + Ring.summed(ds.mT @ q, k).to(sums), dv + Ring.summed(p.mT @ dout, v).to(sums)
            k, v, dk, dv = shift(k, v, dk, dv)
        if mistake == "neighbours_gradients":
            dk, dv = shift(dk, dv)
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


MISTAKES = ("local_mask", "neighbours_gradients", "partial_lse", "bf16_gradients")
right, shared_buffer = ring(), ring("shared_buffer")
bf16_sum = replace(ring("bf16_sum"), claims=lambda case: claims.in_dtypes(claimed(case), "bfloat16"))
globals().update({mistake: ring(mistake) for mistake in MISTAKES})


def halved(*given: Any) -> tuple[Tensor, Tensor]:
    out, lse = right.attend(*given)
    return out, lse / 2


halved_lse = replace(right, claims=lambda case: claims.lse_returned(claimed(case)), attend=halved)
inverted = partial(formulas.corrected_at_the_end, correction=lambda final, step: formulas.correction(step, final))
inverted_correction = replace(formulas.transformer_engine, attend=partial(formulas.attend, merge=inverted))


def twice(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    (out, lse), (again, _) = (formulas.cudnn.attend(*given, **named) for _ in range(2))
    return (out + again) / 2, lse


sent_twice = replace(formulas.cudnn, attend=twice)
sends_nothing = replace(formulas.cudnn, attend=lambda q, k, v, case, group: q + k + v)
