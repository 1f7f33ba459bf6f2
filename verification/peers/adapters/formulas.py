"""Rings of keys by formulas that GPU packages publish, on CPUs: the formulas, and none of their code.

A step of a ring yields an output O_i and S_i = row max + ln(sum of exp), its lse, which cuDNN calls Stats.

    formula/transformer-engine-p2p    lse = max + log1p(exp(min - max)) over the steps, then O = sum exp(S_i - lse) O_i
    formula/cudnn-stats               step by step: m = max(S, S_i), w = exp(S - m), w_i = exp(S_i - m),
                                      O = (w O + w_i O_i) / (w + w_i), S = m + ln(w + w_i)

This is one merge; the first holds the O_i of all steps until the last lse. The backward repeats each step with the
final lse and O. Gradients travel with their keys, back to the owner.
Causal ones of the first are in dual-chunk order, which is zigzag: rank r has chunks r and 2p - 1 - r. All its queries
see the first half of a lower rank's keys, the second half of them all keys of a higher rank.

Chosen here: all but inputs and keys under way is in fp32 and rounded once, where packages round more with 16 bits. A
step of scores that are all -inf has O_i = 0, S_i = -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from verification.case import Case
from verification.peers import claims
from verification.peers.adapters import flash_attn_shim
from verification.peers.adapters.flash_attn_shim import wide
from verification.peers.peer import Peer

Parts = Iterator[tuple[slice, Tensor, Tensor]]  # of steps: rows, O_i (B, rows, H, D), S_i (B, H, rows)
Merge = Callable[[Parts], tuple[Tensor, Tensor]]  # returns O and lse
ALL = slice(None)


def visible(order: str, causal: bool, rank: int, owner: int, tokens: int) -> tuple[slice, slice, bool] | None:
    """Return rows, keys and if they form a diagonal in the step with the keys of `owner`; None if nothing is seen."""
    if not causal or rank == owner:
        return ALL, ALL, causal
    if order == "contiguous":
        return (ALL, ALL, False) if owner < rank else None
    return (ALL, slice(tokens // 2), False) if owner < rank else (slice(tokens // 2, None), ALL, False)


def correction(final: Tensor, step: Tensor) -> Tensor:
    """Return the factor of a step's output, (B, rows, H, 1)."""
    return (step - final).exp().transpose(1, 2).unsqueeze(-1)


def corrected_at_the_end(parts: Parts, correction: Callable[..., Tensor] = correction) -> tuple[Tensor, Tensor]:
    (_, first, lse), *others = steps = list(parts)
    lse = lse.clone()
    for rows, _, stats in others:
        high, low = torch.maximum(lse[..., rows], stats), torch.minimum(lse[..., rows], stats)
        lse[..., rows] = high + (low - high).exp().log1p()
    out = torch.zeros_like(first)
    for rows, own, stats in steps:
        out[:, rows] += own * correction(lse[..., rows], stats)
    return out, lse


def weighted_by_stats(parts: Parts) -> tuple[Tensor, Tensor]:
    _, out, lse = next(parts)
    for _, own, stats in parts:  # of all rows
        high = torch.maximum(lse, stats)
        before, now = correction(high, lse), correction(high, stats)
        out, lse = (before * out + now * own) / (before + now), high + (before + now).log().squeeze(-1).mT
    return out, lse


def circulate(block: Tensor, group: ProcessGroup, hops: int) -> Iterator[Tensor]:
    """Yield the block of each rank in turn, every one sent `hops` ranks on."""
    rank, world = group.rank(), group.size()
    there, back = (dist.get_global_rank(group, (rank + x) % world) for x in (hops, -hops))
    yield block
    for _ in range(world - 1):
        block, sent = torch.empty_like(block), block
        both = dist.P2POp(dist.isend, sent, there, group), dist.P2POp(dist.irecv, block, back, group)
        for work in dist.batch_isend_irecv(list(both)):
            work.wait()
        yield block


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, merge: Merge, *settings: Any) -> tuple[Tensor, Tensor]:
        order, causal, scale, group = settings
        keys = own = torch.stack((k, v))

        def parts() -> Parts:
            nonlocal keys
            for step, keys in enumerate(circulate(own, group, 1)):
                if seen := visible(order, causal, group.rank(), (group.rank() - step) % group.size(), q.shape[1]):
                    rows, columns, diagonal = seen
                    k, v = keys[:, :, columns]
                    out, lse, _, _ = flash_attn_shim.forward(wide(q[:, rows]), k, v, 0.0, scale, diagonal)
                    yield rows, out, lse.masked_fill(lse == math.inf, -math.inf)  # of a row that sees nothing

        out, lse = merge(parts())
        ctx.save_for_backward(q, keys, out, lse)
        ctx.settings = settings
        ctx.mark_non_differentiable(lse)
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Send keys back the way that they came, so that each rank ends with its own."""
        (q, last, out, lse), (order, causal, scale, group) = ctx.saved_tensors, ctx.settings
        dq, sums = torch.zeros_like(wide(q)), torch.zeros_like(wide(last))
        received = circulate(sums, group, -1)
        for step, keys in enumerate(circulate(last, group, -1), 1):
            sums = next(received)
            if seen := visible(order, causal, group.rank(), (group.rank() + step) % group.size(), q.shape[1]):
                (rows, columns, diagonal), (k, v) = seen, keys[:, :, seen[1]]
                rest = k, v, out[:, rows], lse[..., rows]
                own, dk, dv = (torch.empty_like(wide(x)) for x in (q[:, rows], k, v))
                flash_attn_shim.backward(dout[:, rows], q[:, rows], *rest, own, dk, dv, 0.0, scale, diagonal)
                dq[:, rows] += own
                sums[:, :, columns] += torch.stack((dk, dv))
        return dq.to(q.dtype), *sums.to(q.dtype), *(None,) * 5


def claimed(case: Case, order: str) -> Case:
    case = claims.dense(claims.two_ranks_or_more(claims.without_own_settings(case)))
    case = claims.even_shards(case, order, 2) if case.pattern.causal else claims.even_shards(case, "contiguous")
    return claims.lse_returned(claims.in_dtypes(case, "float32", "bfloat16", "float16"))


def attend(q: Tensor, k: Tensor, v: Tensor, case: Case, group: ProcessGroup, *, merge: Merge) -> Any:
    return _Ring.apply(q, k, v, merge, case.order, case.pattern.causal, case.softmax_scale, group)


def formula(name: str, order: str, merge: Merge) -> Peer:
    return Peer(
        f"formula/{name}",
        f"the published formula, not the package: dense, causal in {order} order, not causal contiguous, shards of one "
        "length, fp32, bf16, fp16, GQA, any scale, subgroups of two ranks or more; lse is returned",
        partial(claimed, order=order), partial(attend, merge=merge),
    )  # fmt: skip


transformer_engine = formula("transformer-engine-p2p", "zigzag", corrected_at_the_end)
cudnn = formula("cudnn-stats", "contiguous", weighted_by_stats)
