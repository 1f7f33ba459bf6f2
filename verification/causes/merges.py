"""Wrong merges of the partial results of each rank's keys, wrong lse, confused axes, and rows that see nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from verification.causes.example import Candidate, Example, Forward, Results, Weights, attention
from verification.causes.weights import of_forward


def partials(x: Example) -> list[Weights]:
    """Return the weights of each rank's keys alone."""
    return [replace(x.weights, count=x.weights.count * (x.holder == owner)) for owner in range(x.size)]


def stacked(x: Example, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (p, B, H, N, D) and lse (p, B, H, N) of each rank's keys alone."""
    outs, lses = zip(*(attention(q, k, v, weights) for weights in partials(x)), strict=True)
    return torch.stack(outs), torch.stack(lses)


def merges(x: Example) -> Iterator[Candidate]:
    """Yield merges with wrong coefficients of the partial outputs."""
    if x.size == 1:
        return

    def merged(rule: str) -> Forward:
        def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            outs, lses = stacked(x, q, k, v)
            seen, lse = lses > -math.inf, attention(q, k, v, x.weights)[1]
            if rule == "mean":
                shares = torch.full_like(lses, 1 / x.size)
            elif rule == "mean of seen":
                shares = seen / seen.sum(0).clamp(min=1)
            elif rule == "sum":
                shares = torch.ones_like(lses)
            else:
                tops = torch.stack([
                    (q @ k[:, w.kv_head].mT * w.scale).masked_fill(w.count == 0, -math.inf).amax(-1) for w in partials(x)
                ])  # fmt: skip
                tops = tops.masked_fill(~seen, 0.0)
                raw = (lses.masked_fill(~seen, 0.0) - tops if rule == "denominators" else tops).masked_fill(
                    ~seen, -math.inf
                )
                shares = raw.masked_fill(~seen.any(0), 0.0).softmax(0)
            return (shares[..., None] * outs).sum(0), lse

        return forward

    for rule, clause in {
        "mean": "the outputs of all ranks' keys were averaged, without their weights",
        "mean of seen": "the outputs of the ranks whose keys a query sees were averaged, without their weights",
        "sum": "the outputs of all ranks' keys were added up, without their weights",
        "denominators": "outputs were merged by denominators relative to each one's own maximum",
        "maxima": "outputs were merged by the maximum of each one's scores in place of its lse",
    }.items():
        if x.forward_is_wrong or not x.wrong:
            yield from of_forward(x, f"merge by {rule}", clause, merged(rule))
    yield Candidate("detached merge", f"{x.these} as if no gradient flowed through the weights of the merge",
                    backward=lambda: partial_softmax(x, shares=True, own_delta=True))  # fmt: skip


def partial_softmax(x: Example, shares: bool, own_delta: bool) -> Results:
    """Return gradients with the softmax of each rank's keys alone. shares: times its share in the whole softmax.
    own_delta: with rowsum(dout out) of its own out."""
    outs, lses = stacked(x, x.q, x.k, x.v)
    lse = x.exact["lse"] if shares else lses[x.holder].movedim(0, -1)  # (B, H, N, keys)
    delta = x.delta(x.exact["out"])
    if own_delta:
        each = (outs * x.dout).sum(-1) - (0.0 if not shares else x.dlse)
        delta = each[x.holder].movedim(0, -1)
    return x.by_hand(x.weights, lse, delta)


def wrong_lse(x: Example) -> Iterator[Candidate]:
    """Yield a wrong lse beside a right out."""
    if "lse" not in x.wrong or "out" in x.wrong:
        return
    lse, top = x.exact["lse"], (x.scores * x.weights.scale).masked_fill(x.weights.count == 0, -math.inf).amax(-1)
    rules = {
        "in base 2": lse / math.log(2), "in base 10": lse / math.log(10), "the maximum of the scores alone": top,
        "without the maximum of the scores": lse - top, "negated": -lse, "the sum of exponentials": lse.exp(),
    }  # fmt: skip
    if x.size > 1:
        lses, everyone = stacked(x, x.q, x.k, x.v)[1], torch.arange(x.case.tokens)
        for name, step in (("its own rank", 0), ("the next rank", 1), ("the previous rank", -1)):
            rules[f"that of the keys of {name} alone"] = lses[(x.holder + step) % x.size, ..., everyone].movedim(0, -1)
        rules["the mean of those of all ranks' keys"] = lses.mean(0)
    for name, predicted in rules.items():
        sentence, forward = f"lse is, to rounding, {name}", {"lse": predicted}
        yield Candidate(f"lse {name}", sentence, lambda forward=forward: forward)  # type: ignore[misc]
    if x.case.through_lse:
        base = {"lse": lse / math.log(2)}
        yield Candidate("lse in base 2, and its gradient", "lse is, to rounding, in base 2, and so is its gradient",
                        lambda: base, lambda: x.by_hand(x.weights, lse, x.delta(x.exact["out"], 1 / math.log(2))))  # fmt: skip


def axes(x: Example) -> Iterator[Candidate]:
    """Yield attention over the heads of each token, and shards that are reshaped where they must be transposed."""
    heads, kv_heads = x.case.heads, x.case.kv_heads
    if heads == 1 or not (x.forward_is_wrong or not x.wrong):
        return

    def over_heads(causal: bool) -> Forward:
        count = torch.ones(1, heads, kv_heads).double()
        weights = Weights(count.tril() if causal else count, x.weights.scale, torch.zeros(1).long())

        def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            # (B, H, N, D) -> (B N, 1, H, D): one sequence of heads for each token
            tokens = [t.transpose(1, 2).flatten(0, 1)[:, None] for t in (q, k, v)]
            out, lse = attention(tokens[0], tokens[1], tokens[2], weights)
            return out[:, 0].unflatten(0, (-1, q.shape[2])).transpose(1, 2), lse.view(-1, q.shape[2], heads).mT

        return forward

    for causal in (False, True):
        name = "attention over heads" + (", causal" if causal else "")
        yield from of_forward(x, name, "attention went over the heads of each token: axes 1 and 2 are swapped"
                              + (", and the mask is causal over heads" if causal else ""), over_heads(causal))  # fmt: skip

    def reshaped(t: Tensor) -> Tensor:
        """Read each shard (B, H, L, D) as if it were (B, L, H, D)."""
        result = t.clone()
        for positions in map(torch.tensor, x.shards.positions):
            part = t[:, :, positions]
            result[:, :, positions] = part.reshape(part.shape[0], -1, t.shape[1], t.shape[3]).transpose(1, 2)
        return result

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, x.weights)
        return reshaped(out), lse

    yield from of_forward(x, "reshaped", "out (B, H, L, D) were reshaped to (B, L, H, D) without a transpose", forward)


def rows_that_see_nothing(x: Example) -> Iterator[Candidate]:
    unseen = ~x.weights.count.any(-1)  # (H, N)
    if not unseen.any() or not ("out" in x.wrong or "lse" in x.wrong or not x.wrong):
        return
    rows = unseen[..., None].double()
    each = "a query that sees nothing"
    any_lse = x.observed.get("lse", x.exact["lse"])

    def result(count: Tensor, scale: float) -> Forward:
        weights = x.weighted(count=count, scale=scale)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = attention(q, k, v, x.weights)
            dead = attention(q, k, v, weights)[0]
            return torch.where(unseen[..., None], dead, out), torch.where(unseen, any_lse, lse)

        return forward

    every = torch.ones_like(x.weights.count)
    yield from of_forward(x, "unseen rows: mean", f"{each} got the mean of all v", result(every, 0.0))
    yield from of_forward(x, "unseen rows: all keys", f"{each} saw all keys", result(every, x.weights.scale))
    seen = x.observed.get("out", x.exact["out"])
    if not seen[:, unseen].isfinite().any():
        forward = {
            "out": torch.where(rows.bool(), seen, x.exact["out"]),
            "lse": torch.where(unseen, any_lse, x.exact["lse"]),
        }
        spread = {g: torch.where(t.isnan(), t, x.exact[g]) for g, t in x.observed.items() if g in ("dq", "dk", "dv")}
        yield Candidate(
            "unseen rows: NaN", f"out is NaN for {each}, where it must be 0", lambda: forward, lambda: spread
        )
    elif "lse" in x.wrong and "out" not in x.wrong:
        right = {"lse": torch.where(unseen, any_lse, x.exact["lse"])}
        yield Candidate("unseen rows: lse", f"lse is wrong for {each} alone, where it must be -inf", lambda: right)
