"""Wrong merges of the partial results of each rank's keys, wrong lse, confused axes, and rows that see nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from verification.causes.example import Candidate, Example, Results, Weights, attention
from verification.causes.weights import wrong_forwards

Edit = Callable[[Tensor], Tensor]
WAYS = ("to next", "to previous", "by rank")
BASES = {
    "powers of 2": (math.log(2), "powers of 2 of lse, a natural logarithm"),
    "lse in base 2": (1 / math.log(2), "exponentials of lse in base 2"),
}


def partials(x: Example) -> list[Weights]:
    """Return the weights of each rank's keys alone, without sinks."""
    counts = (x.weights.count * (x.holder == owner) for owner in range(x.size))
    return [replace(x.weights, count=count, sinks=None) for count in counts]


def stacked(x: Example, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (p, B, H, N, D) and lse (p, B, H, N) of each rank's keys alone."""
    outs, lses = zip(*(attention(q, k, v, weights) for weights in partials(x)), strict=True)
    return torch.stack(outs), torch.stack(lses)


def hops(x: Example, parts: Tensor, way: str) -> Tensor:
    """Return the parts (p, B, H, N, ...) of each rank in the order in which a token's rank meets them, by the way of
    WAYS: on a ring that sends to the next rank, or to the previous one, or by rank."""
    steps, tokens = torch.arange(x.size)[:, None], torch.arange(x.case.tokens)
    ranks = {"to next": x.holder - steps, "to previous": x.holder + steps, "by rank": steps + 0 * tokens}[way]
    return parts.movedim(3, 1)[ranks % x.size, tokens].movedim(1, 3)


def merged_by_hops(
    x: Example, way: str, rule: str, edits: Mapping[str, Edit], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return out and lse, merged hop by hop. edits: of out or lse, or of its "part", at each hop."""
    part_out, part_lse, of_out, of_lse = (
        edits.get(name, Tensor.clone) for name in ("part out", "part lse", "out", "lse")
    )
    outs, lses = (hops(x, parts, way) for parts in stacked(x, q, k, v))
    out, lse = of_out(part_out(outs[0])), of_lse(part_lse(lses[0]))
    for part, its_lse in zip(part_out(outs[1:]), part_lse(lses[1:]), strict=True):
        total = torch.logaddexp(lse, its_lse)
        old, new = ((y - total).exp().where(total > -math.inf, 0.0)[..., None] for y in (lse, its_lse))
        half = torch.full_like(old, 0.5)
        old, new = {
            "swapped": (new, old), "not rescaled": (old**0, new), "halves": (half, half), "last": (0 * old, old**0),
        }.get(rule, (old, new))  # fmt: skip
        out, lse = of_out(old * out + new * part), of_lse(total)
    return out, lse


def merges(x: Example) -> Iterator[Candidate]:
    """Yield merges with wrong coefficients of the partial outputs."""
    if x.size == 1 or not x.forward_may_be_wrong:
        return
    averaged, each = "averaged, without their weights", "each rank's keys"
    for name, (factor, how) in BASES.items():
        for lse, power in ((", and lse", 1), (", and the sum of lse", 0), ("", None)):
            clause = f"the outputs of {each} were merged by {how}{lse and ', and lse too'}"
            yield from wrong_forwards(x, f"merge by {name}{lse}", clause, partial(merged_in_base, x, factor, power))
    for rule, clause in {
        "swapped": "each merge swapped the weights of its two outputs",
        "not rescaled": "a merge added its output without multiplying the earlier ones by their weight",
        "halves": "each merge averaged its two outputs, without their weights",
        "last": "each merge replaced the output by that of its own keys",
    }.items():
        for way in WAYS:
            yield from wrong_forwards(x, f"merge, {rule}, {way}", clause, partial(merged_by_hops, x, way, rule, {}))
    for rule, clause in {
        "mean": f"the outputs of {each} were {averaged}",
        "mean of seen": f"the outputs of {each} that a query sees were {averaged}",
        "sum": f"the outputs of {each} were added up, without their weights",
        "denominators": f"the outputs of {each} were merged by denominators relative to each one's own maximum",
        "maxima": f"the outputs of {each} were merged by the maximum of the scores in place of lse",
        "powers of 2 / all": f"the outputs of {each} had the weights 2 ** (their lse - lse of all)",
    }.items():
        yield from wrong_forwards(x, f"merge by {rule}", clause, partial(merged, x, rule))


def merged_in_base(
    x: Example, factor: float, power: int | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return out with weights exp(factor * lse), and their lse / factor ** power; power: None for the right lse."""
    outs, lses = stacked(x, q, k, v)
    total = (factor * lses).logsumexp(0)
    shares = (factor * lses - total).exp().where(total > -math.inf, 0.0)
    lse = attention(q, k, v, x.weights)[1] if power is None else total / factor**power
    return (shares[..., None] * outs).sum(0), lse


def merged(x: Example, rule: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse with the outputs of each rank's keys merged by a rule."""
    outs, lses = stacked(x, q, k, v)
    seen, lse = lses > -math.inf, attention(q, k, v, x.weights)[1]
    shares = {"mean": torch.ones_like(lses) / x.size, "mean of seen": seen / seen.sum(0).clamp(min=1)}.get(rule)
    if rule == "powers of 2 / all":
        shares = torch.exp2(lses - lse.where(seen.any(0), 0.0))
    if rule in ("denominators", "maxima"):
        scores = x.weights.scores(q @ k[:, x.weights.kv_head].mT)
        tops = torch.stack([scores.masked_fill(w.count == 0, -math.inf).amax(-1) for w in partials(x)])
        logits = lses.where(seen, 0.0) - tops.where(seen, 0.0) if rule == "denominators" else tops
        shares = logits.where(seen, -math.inf).where(seen.any(0), 0.0).softmax(0)
    return (outs if shares is None else shares[..., None] * outs).sum(0), lse


def wrong_lse(x: Example) -> Iterator[Candidate]:
    """Yield a wrong lse beside a right out."""
    if "lse" not in x.wrong or "out" in x.wrong:
        return
    lse, delta = x.exact["lse"], x.delta(x.exact["out"], 1 / math.log(2))
    top = x.weights.scores(x.scores).masked_fill(x.weights.count == 0, -math.inf).amax(-1)
    rules = {
        "in base 2": lse / math.log(2), "in base 10": lse / math.log(10), "the maximum of the scores alone": top,
        "without the maximum of the scores": lse - top, "negated": -lse, "the sum of exponentials": lse.exp(),
    }  # fmt: skip
    lses, tokens = stacked(x, x.q, x.k, x.v)[1], torch.arange(x.case.tokens)
    for name, step in (("its own rank", 0), ("the next rank", 1), ("the previous rank", -1)) if x.size > 1 else ():
        rules[f"that of the keys of {name} alone"] = lses[(x.holder + step) % x.size, ..., tokens].movedim(0, -1)
    for name, predicted in rules.items():
        yield Candidate(f"lse {name}", f"lse is, to rounding, {name}", partial(dict, lse=predicted))
    follow = "lse is, to rounding, in base 2, and the gradients follow from that"
    base: Results = {"lse": rules["in base 2"]}
    backward = partial(x.by_hand, x.weights, lse, delta)
    yield Candidate("lse in base 2, and its gradient", follow, lambda: base, backward)


def axes(x: Example) -> Iterator[Candidate]:
    """Yield attention over the heads of each token, and shards that are reshaped where they must be transposed."""
    if x.case.heads == 1 or not x.forward_may_be_wrong:
        return
    every = torch.ones(1, x.case.heads, x.case.kv_heads).double()
    swapped = "attention went over the heads of each token: axes 1 and 2 are swapped"
    for name, clause, count in (("", "", every), (", causal", ", and the mask goes by heads", every.tril())):
        weights = Weights(count, x.weights.scale, torch.zeros(1).long())
        forward = partial(over_heads, weights)
        yield from wrong_forwards(x, f"attention over heads{name}", swapped + clause, forward)
    clause = "out (B, H, L, D) were reshaped to (B, L, H, D) without a transpose"
    yield from wrong_forwards(x, "reshaped", clause, partial(reshaped, x))


def over_heads(weights: Weights, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse of attention whose sequences are the heads of one token: (B N, 1, H, D)."""
    queries, keys, values = (t.transpose(1, 2).flatten(0, 1)[:, None] for t in (q, k, v))
    out, lse = attention(queries, keys, values, weights)
    tokens = -1, q.shape[2]
    return out[:, 0].unflatten(0, tokens).transpose(1, 2), lse[:, 0].unflatten(0, tokens).mT


def reshaped(x: Example, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out, of which each shard is read as (B, L, H, D), and lse."""
    out, lse = attention(q, k, v, x.weights)
    moved = out.clone()
    for positions in map(torch.tensor, x.shards.positions):
        part = out[:, :, positions]
        moved[:, :, positions] = part.reshape(part.shape[0], -1, *part.shape[1::2]).transpose(1, 2)
    return moved, lse


def rows_that_see_nothing(x: Example) -> Iterator[Candidate]:
    """Yield other results than 0 and -inf of queries that see nothing. Whatever lse they have is accepted."""
    unseen = ~x.weights.count.any(-1)  # (H, N)
    if not unseen.any() or not x.forward_may_be_wrong:
        return
    seen = {name: x.observed.get(name, exact) for name, exact in x.exact.items()}
    lse, every = seen["lse"].where(unseen, x.exact["lse"]), torch.ones_like(x.weights.count)

    def result(scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = attention(q, k, v, x.weights)[0]
        return attention(q, k, v, x.weighted(count=every, scale=scale))[0].where(unseen[..., None], out), lse

    def accepted() -> Results:
        return {"out": seen["out"].where(unseen[..., None], x.exact["out"]), "lse": lse}

    each = "queries that see nothing"
    yield from wrong_forwards(x, "unseen rows: mean", f"{each} had the mean of all v", partial(result, 0.0), False)
    yield from wrong_forwards(
        x, "unseen rows: all keys", f"{each} saw all keys", partial(result, x.weights.scale), False
    )
    if seen["out"][:, unseen].isnan().all():
        gradients = {name: seen[name].where(seen[name].isnan(), x.exact[name]) for name in ("dq", "dk", "dv")}
        yield Candidate("unseen rows: NaN", f"out of {each} is NaN; it must be 0", accepted, lambda: gradients)
    elif "out" not in x.wrong and "lse" in x.wrong:
        right = "-inf" if x.weights.sinks is None else "their sink"
        yield Candidate("unseen rows: lse", f"lse is wrong for {each} alone; it must be {right}", accepted)
