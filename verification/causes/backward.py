"""Wrong gradients beside a right forward: factors, the saved lse and out, and the sum over heads of a group."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verification.causes.example import Candidate, Example, Results, phrase
from verification.causes.merges import partial_softmax, stacked

SCALED = (("dk", "dv"), ("dq", "dk"), ("dq", "dk", "dv"), ("dq",), ("dk",), ("dv",))


def factors(x: Example) -> Iterator[Candidate]:
    group, scale = x.case.heads // x.case.kv_heads, x.weights.scale
    values = {"the scale": scale, "the number of ranks": float(x.size), "the heads of a group": float(group)}
    values |= {f"one over {name}": 1 / value for name, value in values.items() if value}
    values |= {"twice the exact one": 2.0, "half the exact one": 0.5, "the exact one negated": -1.0}
    for factor, value in values.items():
        if value in (0.0, 1.0):
            continue
        how = factor if "exact" in factor else f"the exact one times {value:.3g}, {factor}"
        for names in SCALED:
            yield Candidate(
                f"{', '.join(names)}: {factor}", f"{phrase([n for n in names if n in x.wrong] or ['dk'])} {how}",
                backward=lambda names=names, value=value: {n: x.exact[n] * value for n in names},  # type: ignore[misc]
            )  # fmt: skip


def saved_results(x: Example) -> Iterator[Candidate]:
    """Yield a backward with another lse or rowsum(dout out) than the whole softmax's."""
    lse, delta = x.exact["lse"], x.delta(x.exact["out"])

    def wrong(name: str, clause: str, **changes: torch.Tensor) -> Candidate:
        arguments = {"lse": lse, "delta": delta} | changes
        return Candidate(name, f"{x.these} as if, in the backward, {clause}",
                         backward=lambda: x.by_hand(x.weights, **arguments))  # fmt: skip

    yield wrong("no delta", "rowsum(dout * out) were left out", delta=-x.dlse)
    if x.case.through_lse:
        out = x.exact["out"]
        yield wrong("no dlse", "no gradient came through lse", delta=x.delta(out, 0.0))
        yield wrong("dlse twice", "the gradient through lse counted twice", delta=x.delta(out, 2.0))
        yield wrong("dlse negated", "the gradient through lse had the wrong sign", delta=x.delta(out, -1.0))
    if x.size == 1:
        return
    for name, clause, shares, own_delta in (
        ("partial lse", "the lse were each time that of one rank's keys, not of all keys", False, False),
        (
            "partial lse and out",
            "lse and out were each time those of one rank's keys, not of all keys",
            False,
            True,
        ),
    ):
        yield Candidate(name, f"{x.these} as if, in the backward, {clause}",
                        backward=lambda a=shares, b=own_delta: partial_softmax(x, a, b))  # type: ignore[misc]  # fmt: skip
    outs, lses = stacked(x, x.q, x.k, x.v)
    tokens = torch.arange(x.case.tokens)
    for name, step in (("its own rank", 0), ("the next rank", 1), ("the previous rank", -1)):
        owner = (x.holder + step) % x.size
        part = {"lse": lses[owner, ..., tokens].movedim(0, -1)}
        out = outs[owner, ..., tokens, :].movedim(0, -2)
        yield wrong(f"lse of {name}", f"a query's lse were that of the keys of {name} alone", **part)
        yield wrong(f"lse and out of {name}", f"a query's lse and out were those of the keys of {name} alone",
                    **part, delta=x.delta(out))  # fmt: skip
        yield wrong(f"out of {name}", f"a query's out were that of the keys of {name} alone", delta=x.delta(out))


def groups(x: Example) -> Iterator[Candidate]:
    """Yield dk and dv that are not the sum over the heads of each group."""
    group, heads = x.case.heads // x.case.kv_heads, torch.arange(x.case.heads)
    if group == 1:
        return
    kv_head = x.weights.kv_head

    def summed(share: torch.Tensor, head: torch.Tensor) -> Results:
        weights = x.weights
        p = (
            weights.count
            * (x.scores * weights.scale - x.exact["lse"][..., None]).masked_fill(weights.count == 0, -torch.inf).exp()
        )
        delta = x.delta(x.exact["out"])[..., None]
        ds = p * (x.dout @ x.v[:, kv_head].mT - delta) * weights.scale
        share = share.double()[:, None, None]
        return {"dk": x.summed(share * (ds.mT @ x.q), head), "dv": x.summed(share * (p.mT @ x.dout), head)}

    for name, clause, share, head in (
        ("first head", "those of the first head of each group alone", heads % group == 0, kv_head),
        ("last head", "those of the last head of each group alone", heads % group == group - 1, kv_head),
        ("mean of heads", "the mean over the heads of a group, not their sum", torch.ones(len(heads)) / group, kv_head),
        (
            "interleaved sum",
            "sums over heads h % Hk, not h // (H / Hk)",
            torch.ones(len(heads)),
            heads % x.case.kv_heads,
        ),
    ):
        yield Candidate(f"dk, dv of the {name}", f"{x.these} {clause}",
                        backward=lambda a=share, b=head: summed(a, b))  # type: ignore[misc]  # fmt: skip
