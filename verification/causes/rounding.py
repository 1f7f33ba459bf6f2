"""Partial results that are rounded to 16 bits at each merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from verification.causes.example import Candidate, Example
from verification.causes.merges import partials, stacked

FORMATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LEAST_SHARE = 0.02  # of the allowed error: smaller ones have another cause


def rounding(x: Example) -> Iterator[Candidate]:
    """Yield errors that one rounding to 16 bits for each rank's part explains. They are no predictions: what is
    observed is accepted within the errors that such roundings may make."""
    if x.case.torch_dtype.itemsize == 2:
        return
    for title, dtype in FORMATS.items():
        unit = torch.finfo(dtype).eps / 2
        for names in (("dk", "dv"), ("dq",), ("dq", "dk", "dv"), ("out",), ("out", "dq", "dk", "dv")):
            wrong = [name for name in names if name in x.wrong]
            if x.wrong and not wrong:
                continue
            rounded = ["out"] if "out" in wrong else wrong or ["out"]
            exactly = wrong and all(torch.equal(x.observed[n], x.observed[n].to(dtype).double()) for n in rounded)
            numbers = f"; every entry is a {title} number" if exactly else ""
            follow = f", and those of {' and '.join(wrong[1:])} follow" if "out" in wrong[:-1] else ""
            sentence = (
                f"the errors of {' and '.join(rounded)} are those of rounding to {title} at each merge{numbers}{follow}"
            )
            yield Candidate(
                f"{', '.join(names)} in {title}", sentence,
                lambda names=names, unit=unit: accepted(x, [n for n in names if n == "out"], unit),  # type: ignore[misc]
                lambda names=names, unit=unit: accepted(x, [n for n in names if n != "out"], unit),  # type: ignore[misc]
            )  # fmt: skip


def accepted(x: Example, names: list[str], unit: float) -> Mapping[str, Tensor]:
    """Return what is observed, for quantities whose errors such roundings may make; else the exact results."""
    results = {}
    for name in names:
        if name not in x.wrong:
            results[name] = x.observed.get(name, x.exact[name])
            continue
        error, limit = (x.observed[name] - x.exact[name]).abs(), unit * (x.size + 1) * sizes(x)[name]
        fits = bool((error <= limit + x.allowed[name]).all()) and bool((error >= LEAST_SHARE * limit).any())
        results[name] = x.observed[name] if fits else x.exact[name]
    return results


def sizes(x: Example) -> dict[str, Tensor]:
    """Return the sums of sizes of the ranks' contributions, out's error times what it does to dq and dk included."""
    outs, lses = stacked(x, x.q, x.k, x.v)
    out = ((lses - x.exact["lse"]).exp().nan_to_num()[..., None] * outs.abs()).sum(0)
    total = {"out": out, **{name: torch.zeros_like(x.exact[name]) for name in ("dq", "dk", "dv")}}
    lse, delta = x.exact["lse"], x.delta(x.exact["out"])
    for weights in partials(x):
        total["dq"] += x.by_hand(weights, lse, delta)["dq"].abs()
    for owner in range(x.size):
        rows = x.weighted(count=x.weights.count * (x.holder == owner)[:, None])
        grads = x.by_hand(rows, lse, delta)
        total = total | {name: total[name] + grads[name].abs() for name in ("dk", "dv")}
    if "out" in x.wrong:  # its error is in rowsum(dout out), too
        kv_head = x.weights.kv_head
        p = (
            x.weights.count
            * (x.scores * x.weights.scale - lse[..., None]).masked_fill(x.weights.count == 0, -torch.inf).exp()
        )
        ds = p * (x.dout.abs() * out).sum(-1)[..., None] * abs(x.weights.scale)
        total["dq"] += ds @ x.k[:, kv_head].abs()
        total["dk"] = total["dk"] + x.summed(ds.mT @ x.q.abs(), kv_head)
    return total
