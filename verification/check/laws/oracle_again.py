"""What the oracle, its bounds and its costs say of a pattern beyond what an example shows, said a second time.

Each function is given a pattern and its pairs, collected as in `definition`, and returns what is wrong, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference import gradients
from reference.arithmetic import Arithmetic, Counts, most_seen
from reference.cost import Setting, flops, resident
from reference.exact import Inputs, evaluate
from reference.pattern import Pattern

Pairs = NDArray[np.int64]  # (heads, queries, keys): how many branches let a query see a key
DIM, SCALE = 2, 0.5
APART = 1e-9  # of sums of at most some dozens of numbers below 10, in fp64


def looked_at(made: Pattern, by_branch: Sequence[Pairs]) -> str | None:
    """by_branch: the pairs of each branch."""
    together = sum(by_branch[1:], start=by_branch[0])
    wrong = _counted_too_few(made, together) or _counted_otherwise(made, together) or _held_otherwise(made, together)
    return wrong or _detached_otherwise(made, by_branch) or _one_sided(made, together)


def _counted_too_few(made: Pattern, pairs: Pairs) -> str | None:
    """The pairs of the fullest row and of the fullest key, by which rounding is bounded, with as many key/value heads
    as query heads, and with one."""
    heads, tokens, _ = pairs.shape
    rows, keys = int(pairs.sum(2).max()), pairs.sum(1)
    for kv_heads, fullest in ((heads, int(keys.max())), (1, int(keys.sum(0).max()))):
        of_row, of_key = most_seen(made, tokens, heads, kv_heads)
        if of_row < rows or of_key < fullest:
            return (
                f"{made}: of {tokens} tokens and {heads} heads, {kv_heads} of keys, a row is said to see at most "
                f"{of_row} keys and a key {of_key} rows; as published they may be {rows} and {fullest}"
            )
    return None


def _counted_otherwise(made: Pattern, pairs: Pairs) -> str | None:
    """The pairs of two ranks, which their floating-point operations follow from."""
    heads, tokens, _ = pairs.shape
    cut = tokens // 3
    setting = Setting(made, (np.arange(cut), np.arange(cut, tokens)), 1, heads, heads, DIM)
    found, wanted = flops(setting).pairs, (int(pairs[:, :cut].sum()), int(pairs[:, cut:].sum()))
    if found == wanted:
        return None
    return f"{made}: the rows before {cut} and those from it on see {found} keys, as published {wanted}; {heads} heads"


def _held_otherwise(made: Pattern, pairs: Pairs) -> str | None:
    """The bytes of two ranks' tensors, in all working types: sums, lse among them, are as wide as fp32 at least."""
    heads, tokens, _ = pairs.shape
    cut = tokens // 3
    for wide, itemsize in ((8, 8), (4, 4), (4, 2)):
        held = resident(Setting(made, (np.arange(cut), np.arange(cut, tokens)), 1, heads, heads, DIM, itemsize))
        found = [parts.tolist() for parts in (held.shards, held.accumulator, held.gradients)]
        # q, k, v, out and lse; out and lse once more; dq, dk, dv
        of_row = (heads * (4 * DIM * itemsize + wide), heads * (DIM + 1) * wide, heads * 3 * DIM * wide)
        wanted = [[size * cut, size * (tokens - cut)] for size in of_row]
        if found != wanted:
            return f"{made}: with {itemsize} bytes a number ranks hold {found} bytes, must be {wanted}; {heads} heads"
    return None


def _detached_otherwise(made: Pattern, by_branch: Sequence[Pairs]) -> str | None:
    """The gradients for which the weights of the mixture are constants, by torch's derivatives of LongNet's equations 9
    and 10: the outputs of the branches, weighted by their shares of the softmax's denominator.
    """
    heads, tokens, _ = by_branch[0].shape
    generator = torch.Generator().manual_seed(tokens)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    q, k, v = (numbers(1, tokens, heads, DIM).requires_grad_() for _ in range(3))
    dout, dlse = numbers(1, tokens, heads, DIM), numbers(1, heads, tokens)
    scores = SCALE * torch.einsum("bnhd,bmhd->bhnm", q, k)
    outs, lses = zip(*(_of_branch(scores, v, torch.from_numpy(pairs) > 0) for pairs in by_branch), strict=True)
    each = torch.stack(lses)  # (branches, 1, H, N)
    alive = (each > -torch.inf).any(0)
    lse = torch.where(alive, each, 0.0).logsumexp(0)
    shares = torch.where(alive, (each - lse).exp(), 0.0).detach().transpose(2, 3).unsqueeze(4)  # (branches, 1, N, H, 1)
    loss = (torch.stack(outs) * shares * dout).sum() + torch.where(alive, lse * dlse, 0.0).sum()
    wanted = torch.autograd.grad(loss, (q, k, v))
    found = gradients(q, k, v, made, dout, dlse, scale=SCALE, weights="detached")
    for name, x, right in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        apart = float((x - right).abs().max())
        if not apart <= APART:
            return f"{made}: {name} with detached weights is off by {apart:.3g}; {tokens} tokens, {heads} heads"
    return None


def _of_branch(scores: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output (1, N, H, D) and lse (1, H, N) of a branch alone; 0 and -inf where a row sees nothing. seen (H, N, N)."""
    alive = seen.any(-1)
    masked = scores.masked_fill(~seen & alive.unsqueeze(-1), -torch.inf)
    weights = masked.softmax(-1) * alive.unsqueeze(-1)
    return torch.einsum("bhnm,bmhd->bnhd", weights, v), masked.logsumexp(-1).masked_fill(~alive, -torch.inf)


def _one_sided(made: Pattern, pairs: Pairs) -> str | None:
    """Where exact values are computed in the same type, they are as far off: bounds are twice those of one side."""
    heads, tokens, _ = pairs.shape
    rng = np.random.default_rng(tokens)
    q, k, v, dout = rng.standard_normal((4, 1, tokens, heads, DIM))
    inputs = Inputs(q, k, v, dout, rng.standard_normal((1, heads, tokens)), made, SCALE)
    counts = Counts(*most_seen(made, tokens, heads, heads))
    arithmetic = Arithmetic.of("float64", "math", DIM, SCALE, counts)
    both, one = (evaluate(inputs, replace(arithmetic, sides=sides)).bound for sides in (2, 1))
    for name, bound in both.items():
        if not np.array_equal(bound, 2 * one[name]):
            return f"{made}: the bound of {name} for two sides is not twice that of one; {tokens} tokens, {heads} heads"
    return None
