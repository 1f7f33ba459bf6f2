"""Wrong gradients beside a right forward: factors, the saved lse and out, and the sum over heads of a group."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from verification.causes.example import Candidate, Example, Results, phrase
from verification.causes.merges import stacked

SCALED = (("dk", "dv"), ("dq", "dk"), ("dq", "dk", "dv"), ("dq",), ("dk",), ("dv",), ("dsinks",))


def factors(x: Example) -> Iterator[Candidate]:
    """Yield gradients that are a multiple of the exact ones."""
    group, scale = x.case.heads // x.case.kv_heads, x.weights.scale

    def times(names: tuple[str, ...], value: float) -> Results:
        return {name: x.exact[name] * value for name in names}

    values = {"the scale": scale, "the number of ranks": float(x.size), "the heads of a group": float(group)}
    values |= {f"one over {name}": 1 / value for name, value in values.items() if value}
    values = {name: value for name, value in values.items() if value not in (0.0, 1.0)}
    for factor, value in (values | {"twice": 2.0, "half": 0.5, "minus": -1.0, "zero times": 0.0}).items():
        how = f"{value:.3g} times the exact ones: by {factor}" if factor in values else f"{factor} the exact ones"
        for names in SCALED if x.weights.sinks is not None else SCALED[:-1]:
            these = phrase([name for name in names if name in x.wrong] or ["dk"])
            yield Candidate(f"{', '.join(names)}: {factor}", f"{these} {how}", backward=partial(times, names, value))


def swapped(x: Example) -> Iterator[Candidate]:
    """Yield dk and dv in each other's place."""
    predicted = {"dk": x.exact["dv"], "dv": x.exact["dk"]}
    yield Candidate("dk and dv swapped", f"{phrase(['dk', 'dv'])} swapped", backward=lambda: predicted)


def sent_back(x: Example) -> Iterator[Candidate]:
    """Yield dk and dv that travel against the keys: a rank adds its part to that of the rank on the other side."""
    if x.size < 3 or len(set(x.shards.counts)) != 1:  # of two ranks both sides are the same
        return
    order, length = x.place.argsort(), x.shards.counts[0]

    def backward() -> Results:
        total = {"dk": torch.zeros_like(x.k), "dv": torch.zeros_like(x.v)}
        for rank in range(x.size):
            of_rank = x.weighted(count=x.weights.count * (x.holder == rank)[:, None])
            parts = x.by_hand(of_rank, x.exact["lse"], x.delta(x.exact["out"]))
            other_side = order[(2 * rank - x.holder) % x.size * length + x.local]
            total = {name: grads + parts[name][:, :, other_side] for name, grads in total.items()}
        return total

    sentence = f"{phrase(['dk', 'dv'])} as if they went round against the keys, to the rank on the other side"
    yield Candidate("dk, dv the other way", sentence, backward=backward)


def saved_results(x: Example) -> Iterator[Candidate]:
    """Yield a backward with another lse or rowsum(dout out) than the whole softmax's."""
    lse, out = x.exact["lse"], x.exact["out"]

    def wrong(name: str, clause: str, lse: Tensor, delta: Tensor) -> Candidate:
        backward = partial(x.by_hand, x.weights, lse, delta)
        return Candidate(name, f"{x.these} as if, in the backward, {clause}", backward=backward)

    if x.weights.sinks is not None:
        weights = (x.weights.sinks - lse).exp().nan_to_num()
        for name, clause, delta in (
            ("no dlse to sinks", "no gradient came through lse", x.delta(out, 0.0)),
            ("no delta to sinks", "rowsum(dout * out) were left out", -x.dlse),
        ):
            predicted: Results = {"dsinks": -(weights * delta).sum((0, 2))}
            yield Candidate(name, f"dsinks is, to rounding, as if {clause}", backward=partial(dict, predicted))
    yield wrong("no delta", "rowsum(dout * out) were left out", lse, -x.dlse)
    if x.case.through_lse:
        yield wrong("no dlse", "no gradient came through lse", lse, x.delta(out, 0.0))
        yield wrong("dlse twice", "the gradient through lse counted twice", lse, x.delta(out, 2.0))
        yield wrong("dlse negated", "the gradient through lse had the wrong sign", lse, x.delta(out, -1.0))
    if x.size == 1:
        return
    outs, lses = stacked(x, x.q, x.k, x.v)
    deltas = torch.stack([x.delta(part) for part in outs])
    delta_of, lse_of = (of_ranks[x.holder].movedim(0, -1) for of_ranks in (deltas, lses))  # (B, H, N, keys)
    yield wrong("detached merge", "the weights of the merge were constants", lse, delta_of)
    of_part = (lses - lse).exp().nan_to_num() * (deltas + x.dlse) - x.dlse
    clause = "rowsum(dout * out) were each time that of one rank's part of out"
    yield wrong("partial delta", clause, lse, of_part[x.holder].movedim(0, -1))
    yield wrong("partial lse", "lse were each time that of one rank's keys, not of all", lse_of, x.delta(out))
    yield wrong("partial lse and out", "lse and out were each time those of one rank's keys", lse_of, delta_of)
    tokens = torch.arange(x.case.tokens)
    for name, step in (("its own rank", 0), ("the next rank", 1), ("the previous rank", -1)):
        owner, keys = (x.holder + step) % x.size, f"of the keys of {name} alone"
        delta_of, lse_of = (of_ranks[owner, ..., tokens].movedim(0, -1) for of_ranks in (deltas, lses))
        yield wrong(f"lse of {name}", f"a query had the lse {keys}", lse_of, x.delta(out))
        yield wrong(f"lse and out of {name}", f"a query had the lse and out {keys}", lse_of, delta_of)
        yield wrong(f"out of {name}", f"a query had the out {keys}", lse, delta_of)


def groups(x: Example) -> Iterator[Candidate]:
    """Yield dk and dv that are not the sum over the heads of each group."""
    kv_heads, heads, kv_head = x.case.kv_heads, torch.arange(x.case.heads), x.weights.kv_head
    group = x.case.heads // kv_heads

    def summed(share: Tensor, kv_head: Tensor) -> Results:
        _, dk, dv = x.by_head(x.weights, x.exact["lse"], x.delta(x.exact["out"]))
        return {"dk": x.summed(dk * share[:, None, None], kv_head), "dv": x.summed(dv * share[:, None, None], kv_head)}

    for name, clause, share, to in (
        ("first head", "those of the first head of each group alone", heads % group == 0, kv_head),
        ("last head", "those of the last head of each group alone", heads % group == group - 1, kv_head),
        ("interleaved sum", "sums over heads h % Hk, not h // (H / Hk)", heads >= 0, heads % kv_heads),
    ):
        if group > 1:
            backward = partial(summed, share.double(), to)
            yield Candidate(f"dk, dv of the {name}", f"{x.these} {clause}", backward=backward)
