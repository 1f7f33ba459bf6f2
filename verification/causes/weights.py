"""Wrong probabilities: masks, parts of ranks, the scale, and key/value heads; in the forward, the backward or both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from reference.pattern import Pattern
from verification.causes.example import Candidate, Example, Forward, Results, Weights, attention


class Mistake(NamedTuple):
    """Wrong weights: name, clause after "as if", and the weights."""

    name: str
    clause: str
    weights: Weights


def wrong_weights(x: Example) -> Iterator[Candidate]:
    for kind in (masks, parts, scales, groups):
        for mistake in kind(x):
            same = torch.equal(mistake.weights.count, x.weights.count) and mistake.weights.scale == x.weights.scale
            if not same or not torch.equal(mistake.weights.kv_head, x.weights.kv_head):
                yield from candidates(x, mistake)


def candidates(x: Example, mistake: Mistake) -> Iterator[Candidate]:
    """Yield the mistake in forward and backward, in one of them, or in the backward of some inputs alone."""
    name, clause, weights = mistake
    if x.forward_is_wrong or not x.wrong:
        yield from of_forward(x, name, clause, lambda q, k, v: attention(q, k, v, weights))
    if x.forward_is_wrong:
        return

    def backward(*names: str) -> Results:
        grads = x.by_hand(weights, x.exact["lse"], x.delta(x.exact["out"]))
        return {name: grads[name] for name in names}

    for names in (("dq", "dk", "dv"), ("dk", "dv"), ("dq",)):
        alone = "" if len(names) == 3 else f" for {' and '.join(names)} alone"
        yield Candidate(f"{name} / backward{alone}", f"{x.these} as if, in the backward{alone}, {clause}",
                        backward=lambda names=names: backward(*names))  # type: ignore[misc]  # fmt: skip


def of_forward(x: Example, name: str, clause: str, forward: Forward) -> Iterator[Candidate]:
    """Yield a wrong forward: with its own gradients, those of a right backward from its out and lse, or exact ones."""
    results: Results = {}

    def computed() -> Results:
        if not results:
            results.update(zip(("out", "lse"), forward(x.q, x.k, x.v), strict=True))
        return results

    def from_saved() -> Results:
        return x.by_hand(x.weights, computed()["lse"], x.delta(computed()["out"]))

    yield Candidate(name, f"{x.these} as if {clause}", computed, lambda: x.autograd(forward))
    alone = f"{x.these} as if, in the forward alone, {clause}"
    yield Candidate(f"{name} / forward", f"{alone} (the gradients follow from its out and lse)", computed, from_saved)
    yield Candidate(f"{name} / forward, exact gradients", alone, computed, lambda: x.exact)


def masks(x: Example) -> Iterator[Mistake]:
    pattern, tokens = x.case.pattern, torch.arange(x.case.tokens)
    before = tokens[:, None] - tokens  # how far key j is before query i
    same_rank = x.holder[:, None] == x.holder

    def mask(name: str, clause: str, count: Tensor) -> Mistake:
        return Mistake(name, clause, x.weighted(count=count))

    def changed(name: str, clause: str, pattern: Pattern, rows: Tensor = tokens, keys: Tensor = tokens) -> Mistake:
        return mask(name, clause, x.count(pattern, rows, keys))

    what = "the mask compared positions"
    yield changed("local positions", f"{what} within the shards, of queries and of keys", pattern, x.local, x.local)
    yield changed("local queries", f"{what} of queries within their shard with global ones of keys", pattern, x.local)
    yield changed("local keys", f"{what} of keys within their shard with global ones of queries", pattern, keys=x.local)
    yield changed("contiguous positions", f"shards were contiguous: {what} by rank * length + index in the shard, "
                  f"in {x.case.order} order", pattern, x.place, x.place)  # fmt: skip
    if pattern.causal:
        every = x.count(replace(pattern, causal=False))
        yield mask("strict diagonal", "a query did not see its own position: the causal mask is off by one (j < i)",
                   every * (before > 0))  # fmt: skip
        yield mask("diagonal + 1", "a query saw the position after its own: the causal mask is off by one (j <= i + 1)",
                   every * (before >= -1))  # fmt: skip
        yield mask("diagonal + 1 within shards", "the causal mask were off by one (j <= i + 1) within a shard",
                   torch.where(same_rank & (before == -1), every, x.weights.count))  # fmt: skip
        yield mask("not causal", "the mask were not causal", every)
        yield mask("causal on own shard alone", "the causal mask applied to the keys of the own rank alone",
                   torch.where(same_rank, x.weights.count, every))  # fmt: skip
        yield mask("reversed", "a query saw the keys after it, not those before it", every * (before <= 0))
    else:
        yield changed("causal", "the mask were causal", replace(pattern, causal=True))
    if pattern.documents is not None:
        yield changed("documents", "there were no documents", replace(pattern, documents=None))
    for field, value in (("segment_length", None), ("window", None), ("dilation_rate", 1)):
        if any(getattr(branch, field) != value for branch in pattern.branches):
            also = {"offset": 0} if field == "dilation_rate" else {}
            branches = tuple(replace(branch, **{field: value}, **also) for branch in pattern.branches)  # type: ignore
            words = {"dilation_rate": "dilation", "window": "window"}.get(field, "segments")
            yield changed(words, f"there were no {words}", replace(pattern, branches=branches))
    windows = [branch.window for branch in pattern.branches if branch.window is not None]
    for by in (-1, 1) if windows and min(windows) > 0 else (1,) if windows else ():
        branches = tuple(replace(b, window=b.window if b.window is None else b.window + by) for b in pattern.branches)
        yield changed(f"window {by:+}", f"the window were {'longer' if by > 0 else 'shorter'} by one",
                      replace(pattern, branches=branches))  # fmt: skip
    if windows:
        local, wide = (
            x.local[:, None] - x.local,
            replace(pattern, branches=tuple(replace(branch, window=None) for branch in pattern.branches)),
        )
        yield mask("local window", "the window compared positions within the shards",
                   x.count(wide) * (local.abs() <= windows[0]))  # fmt: skip
        yield mask("local window, before", "the window compared positions within the shards, and only keys up to the "
                   "query's index were in it", x.count(wide) * (local <= windows[0]) * (local >= 0))  # fmt: skip
    yield mask("no multiplicity", "pairs that several branches see counted once", x.weights.count.clamp(max=1))


def parts(x: Example) -> Iterator[Mistake]:
    """Yield keys of some ranks that some ranks' queries see twice or not at all. The neighbours are the last hop of a
    ring in one direction or the other."""
    if x.size == 1:
        return
    rows, keys, p = x.holder[:, None], x.holder[None, :], x.size
    first, last = x.case.ranks[0], x.case.ranks[-1]
    for name, whose, pairs in (
        ("own", "the keys of its own rank", rows == keys),
        ("next", "the keys of the next rank (the last hop of a ring that sends to it)", keys == (rows + 1) % p),
        (
            "previous",
            "the keys of the previous rank (the last hop of a ring that sends to that)",
            keys == (rows - 1) % p,
        ),
        ("others", "the keys of all other ranks", keys != rows),
        ("first", f"the keys of rank {first}", keys == 0),
        ("last", f"the keys of rank {last}", keys == p - 1),
        ("to first", f"any keys, if it is on rank {first},", rows == 0),
        ("to last", f"any keys, if it is on rank {last},", rows == p - 1),
        ("not next", "the keys of any rank but the next", keys != (rows + 1) % p),
        ("not previous", "the keys of any rank but the previous", keys != (rows - 1) % p),
    ):
        for times, how in ((0, f"a query did not see {whose}"), (2, f"a query counted {whose} twice")):
            factor = torch.where(pairs, float(times), 1.0)
            yield Mistake(f"{name} x {times}", how, x.weighted(count=x.weights.count * factor))


def scales(x: Example) -> Iterator[Mistake]:
    scale, default = x.weights.scale, x.case.head_dim**-0.5
    factors = {"left out": 1.0, "applied twice": scale**2, "doubled": 2 * scale, "halved": scale / 2,
               "negated": -scale, f"{default:.3g}, the default,": default}  # fmt: skip
    factors |= {"inverted (multiplied where it must divide)": 1 / scale} if scale else {}
    for how, factor in factors.items():
        name = "default" if how.endswith(",") else how
        yield Mistake(f"scale {name}", f"the scale of the scores were {how}".rstrip(","), x.weighted(scale=factor))


def groups(x: Example) -> Iterator[Mistake]:
    heads = torch.arange(x.case.heads)
    yield Mistake("interleaved heads", "head h used key/value head h % Hk, not h // (H / Hk)",
                  x.weighted(kv_head=heads % x.case.kv_heads))  # fmt: skip
