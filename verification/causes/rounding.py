"""Results that are rounded to 16 bits at each merge, or once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product

import torch
from torch import Tensor

from verification.causes.example import Candidate, Example, Results
from verification.causes.merges import WAYS, Edit, hops, merged_by_hops, partials

# What is rounded, as a sentence says it; whether the order of the merges matters.
FORWARDS = {
    "part out": ("the output of each rank's keys were rounded to {} before the merge", False),
    "out": ("the merged output were rounded to {} after each rank's keys", True),
    "part lse": ("lse of each rank's keys were rounded to {} before the merge", False),
    "lse": ("the merged lse were rounded to {} after each rank's keys", True),
}
BACKWARDS = {
    "part": ("each rank's part of {} were rounded to {}", False),
    "sum": ("{} were rounded to {} after each rank's part", True),
    "part and sum": ("{} were rounded to {} after each rank's part", True),
}
SUMS = (("dk", "dv"), ("dq",), ("dq", "dk", "dv"))


def rounding(x: Example) -> Iterator[Candidate]:
    """Yield roundings to 16 bits: of parts before a merge, of sums after each, of the saved out, and of all results."""
    for dtype in (torch.bfloat16, torch.float16) if x.case.torch_dtype.itemsize > 2 else ():
        title, rounded = str(dtype).removeprefix("torch."), partial(_rounded, dtype)
        for name, (clause, ordered) in FORWARDS.items() if x.size > 1 and x.forward_may_be_wrong else ():
            for way in WAYS if ordered else WAYS[:1]:
                forward = partial(_forward, x, way, {name: rounded})
                sentence = f"{x.these} as if {clause.format(title)}"
                yield Candidate(f"{name} in {title}, {way}", sentence, forward, partial(_follow, x, forward))
        for names, (name, (clause, ordered)) in product(SUMS, BACKWARDS.items()) if not x.forward_is_wrong else ():
            for way in WAYS if ordered else WAYS[:1]:
                these, backward = " and ".join(names), partial(_sums, x, names, way, name, rounded)
                sentence = f"{x.these} as if {clause.format(these, title)}"
                yield Candidate(f"{name} of {these} in {title}, {way}", sentence, backward=backward)
        if not x.forward_is_wrong:
            backward = partial(x.by_hand, x.weights, x.exact["lse"], x.delta(rounded(x.exact["out"])))
            sentence = f"{x.these} as if out were rounded to {title} before rowsum(dout * out)"
            yield Candidate(f"saved out in {title}", sentence, backward=backward)
            backward = partial(x.by_hand, x.weights, rounded(x.exact["lse"]), x.delta(x.exact["out"]))
            sentence = f"{x.these} as if, in the backward, lse were rounded to {title}"
            yield Candidate(f"saved lse in {title}", sentence, backward=backward)
        sentence = f"{x.these} as if rounded once to {title}: every entry is such a number"
        yield Candidate(f"results in {title}", sentence, *[partial(_accepted, x, dtype)] * 2)


def _rounded(dtype: torch.dtype, y: Tensor) -> Tensor:
    return y.to(dtype).double()


def _forward(x: Example, way: str, edits: Mapping[str, Edit]) -> Results:
    return dict(zip(("out", "lse"), merged_by_hops(x, way, "", edits, x.q, x.k, x.v), strict=True))


def _follow(x: Example, forward: partial[Results]) -> Results:
    results = forward()
    return x.by_hand(x.weights, results["lse"], x.delta(results["out"]))


def _sums(x: Example, names: tuple[str, ...], way: str, of: str, rounded: Edit) -> Results:
    """Return gradients whose parts, or sums, are rounded."""
    lse, delta = x.exact["lse"], x.delta(x.exact["out"])
    from_queries = (x.weighted(count=x.weights.count * (x.holder == rank)[:, None]) for rank in range(x.size))
    of_keys, of_queries = ([x.by_hand(w, lse, delta) for w in weights] for weights in (partials(x), from_queries))
    results = {}
    for name in names:
        parts = hops(x, torch.stack([grads[name] for grads in (of_keys if name == "dq" else of_queries)]), way)
        parts = rounded(parts) if "part" in of else parts
        total = torch.zeros_like(parts[0])
        for part in parts:
            total = rounded(total + part) if "sum" in of else total + part
        results[name] = total
    return results


def _accepted(x: Example, dtype: torch.dtype) -> Results:
    """Return what is observed where all of its entries are 16-bit numbers, off by no more than one rounding."""
    unit, results = torch.finfo(dtype).eps / 2, {}
    for name in x.observed:
        seen, exact = x.observed[name], x.exact[name]
        once = ((seen - exact).abs() <= unit * exact.abs() + x.allowed[name]).all()
        fits = once and torch.equal(seen, seen.to(dtype).double())
        results[name] = seen if name in x.wrong and fits else exact
    return results
