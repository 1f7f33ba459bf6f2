"""The kernel that merges two partial results of the same rows on GPUs, as `ring.compute.accumulator.merge` does, in one
pass over memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16  # of a program


@triton.jit
def _merge_pair(  # type: ignore[no-untyped-def]
    left, right, left_lse, right_lse, out, lse, length,
    left_batch, left_head, left_row, right_batch, right_head, right_row,
    left_lse_batch, left_lse_head, left_lse_row, right_lse_batch, right_lse_head, right_lse_row,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of one head and batch entry. out and lse are contiguous."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64), tl.arange(0, BLOCK)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    held = row < length
    inside = held[:, None] & (column < DIM)[None, :]
    at = left_lse + batch * left_lse_batch + head * left_lse_head + row * left_lse_row
    a = tl.load(at, held, other=0.0)
    at = right_lse + batch * right_lse_batch + head * right_lse_head + row * right_lse_row
    b = tl.load(at, held, other=0.0)
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    top = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp(a - top), tl.exp(b - top)
    total = a + b
    share = tl.where(total == 0.0, 1.0, total)
    at = left + batch * left_batch + head * left_head + (row * left_row)[:, None] + column[None, :]
    x = tl.load(at, inside, other=0.0).to(tl.float32)
    at = right + batch * right_batch + head * right_head + (row * right_row)[:, None] + column[None, :]
    y = tl.load(at, inside, other=0.0).to(tl.float32)
    place = (batch * tl.num_programs(1) + head) * length + row
    tl.store(
        out + (place * DIM)[:, None] + column[None, :], (a / share)[:, None] * x + (b / share)[:, None] * y, inside
    )
    tl.store(lse + place, top + tl.log(total), held)


def merge_pair(
    left: torch.Tensor, left_lse: torch.Tensor, right: torch.Tensor, right_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) in fp32. left, right: (1, B, groups, per_group, L, D) in fp32 or 16 bits; their lse in fp32."""
    shape = left.shape
    x, y, a, b = (z.flatten(2, 3).squeeze(0) for z in (left, right, left_lse, right_lse))
    x, y = (z if z.stride(3) == 1 else z.contiguous() for z in (x, y))
    batch, heads, length, dim = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    lse = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    grid = triton.cdiv(length, _ROWS), heads, batch
    _merge_pair[grid](
        x, y, a, b, out, lse, length, *x.stride()[:3], *y.stride()[:3], *a.stride(), *b.stride(),
        DIM=dim, BLOCK=triton.next_power_of_2(dim), ROWS=_ROWS,
    )  # fmt: skip
    return out.view(shape), lse.view(shape[:-1])
