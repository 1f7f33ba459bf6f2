"""Partial results that are rounded to 16 bits at each merge."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from verification.causes.example import Candidate, Example, Results
from verification.causes.merges import partials, stacked

KINDS = {"gradients": ("dq", "dk", "dv"), "out": ("out", "dq", "dk", "dv")}
LEAST_SHARE = 0.02  # of the allowed error: smaller ones have another cause
# Share of errors with the sign of the exact result, of that many wrong entries or more: beyond it, or below one minus
# it, they are due to a factor, not to rounding.
ONE_SIDED, ENTRIES = 0.95, 16


def rounding(x: Example) -> Iterator[Candidate]:
    """Yield errors that one rounding to 16 bits for each rank's part explains. They are no predictions: what is
    observed is accepted within the errors that such roundings may make."""
    if x.wrong.keys() == {"dsinks"}:
        return
    for dtype in (torch.float16, torch.bfloat16) if x.case.torch_dtype.itemsize > 2 else ():
        title, unit = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps / 2
        for kind, names in KINDS.items() if x.forward_may_be_wrong else [("gradients", KINDS["gradients"])]:
            wrong = [name for name in names if name in x.wrong]
            rounded, rest = (["out"], [name for name in wrong if name != "out"]) if kind == "out" else (wrong, [])
            exactly = wrong and all(torch.equal(x.observed[n], x.observed[n].to(dtype).double()) for n in rounded)
            sentence = (
                f"the errors of {' and '.join(rounded)} are no larger than those of rounding to {title} at each merge"
            )
            sentence += f"; every entry is a {title} number" if exactly else ""
            sentence += f"; those of {' and '.join(rest)} follow" if rest else ""
            forward, backward = (partial(accepted, x, unit, part) for part in (names[:-3], names[-3:]))
            yield Candidate(f"{kind} in {title}", sentence, forward, backward)


def accepted(x: Example, unit: float, names: tuple[str, ...]) -> Results:
    """Return what is observed, for quantities whose errors such roundings may make; else the exact results."""
    results = {}
    for name in names:
        results[name] = x.observed.get(name, x.exact[name])
        if name in x.wrong:
            error, limit = x.observed[name] - x.exact[name], unit * (x.size + 1) * sizes(x)[name]
            same_sign = (error * x.exact[name] > 0)[x.wrong[name]].double()
            random = len(same_sign) < ENTRIES or 1 - ONE_SIDED < float(same_sign.mean()) < ONE_SIDED
            fits = (error.abs() <= limit + x.allowed[name]).all()
            fits &= (error.abs() > LEAST_SHARE * limit + x.allowed[name]).any()
            results[name] = x.observed[name] if fits and random else x.exact[name]
    return results


def sizes(x: Example) -> dict[str, Tensor]:
    """Return the sums of sizes of the ranks' contributions, to dq and dk with what the error of out adds to them."""
    outs, lses = stacked(x, x.q, x.k, x.v)
    lse, delta = x.exact["lse"], x.delta(x.exact["out"])
    total = {"out": ((lses - lse).exp().nan_to_num()[..., None] * outs.abs()).sum(0)}
    total |= {name: torch.zeros_like(x.exact[name]) for name in ("dq", "dk", "dv")}
    for owner, weights in enumerate(partials(x)):
        from_queries = x.weighted(count=x.weights.count * (x.holder == owner)[:, None])
        for name, chosen in (("dq", weights), ("dk", from_queries), ("dv", from_queries)):
            total[name] = total[name] + x.by_hand(chosen, lse, delta)[name].abs()
    if "out" in x.wrong:  # its error is in rowsum(dout out), too: ds changes by p times that
        error = (x.dout.abs() * total["out"]).sum(-1) * abs(x.weights.scale)
        p = x.weights.count * (x.weights.scores(x.scores) - lse[..., None]).exp().nan_to_num(posinf=0.0)
        ds, kv_head = p * error[..., None], x.weights.kv_head
        total["dq"] = total["dq"] + ds @ x.k[:, kv_head].abs()
        total["dk"] = total["dk"] + x.summed(ds.mT @ x.q.abs(), kv_head)
    return total
