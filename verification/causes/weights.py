"""Wrong probabilities: masks, parts of ranks, scale, softcap, sinks, and key/value heads; in the forward, the backward
or both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verification.causes.example import Candidate, Example, Forward, Results, Weights, attention


class Mistake(NamedTuple):
    """Wrong weights: name, clause after "as if", and the weights."""

    name: str
    clause: str
    weights: Weights


def wrong_weights(x: Example) -> Iterator[Candidate]:
    """Yield each wrong weights in forward and backward, in one of them, or in the backward of some inputs alone."""
    right = x.weights
    for name, clause, weights in (mistake for kind in (masks, parts, scales, softcaps, groups) for mistake in kind(x)):
        if all(torch.equal(a, b) for a, b in ((weights.count, right.count), (weights.kv_head, right.kv_head))):
            if (weights.scale, weights.softcap, weights.slope) == (right.scale, right.softcap, right.slope):
                continue
        if x.forward_may_be_wrong:
            yield from of_forward(x, name, clause, partial(attention, weights=weights))
        for names in () if x.forward_is_wrong else (("dq", "dk", "dv"), ("dk", "dv"), ("dq",)):
            where = "backward" if len(names) == 3 else f"backward for {' and '.join(names)} alone"
            sentence = f"{x.these} as if, in the {where}, {clause}"
            yield Candidate(f"{name} / {where}", sentence, backward=partial(_backward, x, weights, names))


def _backward(x: Example, weights: Weights, names: tuple[str, ...]) -> Results:
    grads = x.by_hand(weights, x.exact["lse"], x.delta(x.exact["out"]))
    return {name: grads[name] for name in names}


def of_forward(x: Example, name: str, clause: str, forward: Forward, exact: bool = True) -> Iterator[Candidate]:
    """Yield a wrong forward: with its own gradients, those of a right backward from its out and lse, or exact ones."""
    results: Results = {}

    def computed() -> Results:
        if not results:
            results.update(zip(("out", "lse"), forward(x.q, x.k, x.v), strict=True))
        return results

    def from_saved() -> Results:
        return x.by_hand(x.weights, computed()["lse"], x.delta(computed()["out"]))

    alone = f"{x.these} as if, in the forward alone, {clause}"
    yield Candidate(name, f"{x.these} as if {clause}", computed, partial(x.autograd, forward))
    yield Candidate(f"{name} / forward", f"{alone} (the gradients follow from its out and lse)", computed, from_saved)
    if exact:
        yield Candidate(f"{name} / forward, exact gradients", alone, computed, lambda: x.exact)


def masks(x: Example) -> Iterator[Mistake]:
    """Yield other multiplicities: by other positions, of the causal mask, of the pattern, of windows."""
    pattern, right, tokens = x.case.pattern, x.weights.count, torch.arange(x.case.tokens)
    before, local_before = tokens[:, None] - tokens, x.local[:, None] - x.local  # how far key j is before query i
    same_rank = x.holder[:, None] == x.holder
    what, off = "the mask compared positions", "the causal mask were off by one"

    def mask(name: str, clause: str, count: Tensor) -> Mistake:
        return Mistake(name, clause, x.weighted(count=count))

    def branches(**changes: Any) -> Tensor:
        return x.count(replace(pattern, branches=tuple(replace(branch, **changes) for branch in pattern.branches)))

    yield mask("local positions", f"{what} within the shards, of queries and of keys", x.count(None, x.local, x.local))
    yield mask("local queries", f"{what} of queries within their shard, of keys global ones", x.count(None, x.local))
    yield mask("local keys", f"{what} of keys within their shard, of queries global ones", x.count(None, keys=x.local))
    contiguous = f"{what} as if shards were contiguous (rank * length + index in the shard) in {x.case.order} order"
    yield mask("contiguous positions", contiguous, x.count(None, x.place, x.place))
    if pattern.causal:
        every = x.count(replace(pattern, causal=False))
        yield mask("strict diagonal", f"{off}: j < i", every * (before > 0))
        yield mask("diagonal + 1", f"{off}: j <= i + 1", every * (before >= -1))
        within = every.where(same_rank & (before == -1), right)
        yield mask("diagonal + 1 within shards", f"{off} within a shard: j <= i + 1", within)
        yield mask("not causal", "the mask were not causal", every)
        own_alone = right.where(same_rank, every)
        yield mask("causal on own shard alone", "the causal mask applied to keys of the own rank alone", own_alone)
        yield mask("reversed", "queries saw the keys after them, not those before", every * (before <= 0))
    else:
        yield mask("causal", "the mask were causal", x.count(replace(pattern, causal=True)))
    if pattern.documents is not None:
        yield mask("documents", "there were no documents", x.count(replace(pattern, documents=None)))
    yield mask("segments", "there were no segments", branches(segment_length=None))
    yield mask("dilation", "there was no dilation", branches(dilation_rate=1, offset=0))
    yield mask("no multiplicity", "a pair that several branches see counted once", right.clamp(max=1))
    window, wide = pattern.branches[0].window, branches(window=None)
    if window is not None and all(branch.window == window for branch in pattern.branches):
        yield mask("window", "there was no window", wide)
        yield mask("window + 1", "the window were longer by one", branches(window=window + 1))
        yield mask("window - 1", "the window were shorter by one", wide * (before.abs() < window))
        local = "the window compared positions within the shards"
        near = local_before.abs() <= window
        yield mask("local window", local, wide * near)
        yield mask("local window, keys before", f"{local}, and had no keys after", wide * near * (local_before >= 0))


def parts(x: Example) -> Iterator[Mistake]:
    """Yield keys of some ranks that some ranks' queries see twice or not at all."""
    rows, keys, p = x.holder[:, None], x.holder[None, :], x.size
    first, last, hop = x.case.ranks[0], x.case.ranks[-1], "the last hop of a ring that sends to it"
    for name, whose, pairs in (
        ("own", "the keys of their own rank", rows == keys),
        ("next", f"the keys of the next rank ({hop})", keys == (rows + 1) % p),
        ("previous", f"the keys of the previous rank ({hop})", keys == (rows - 1) % p),
        ("others", "the keys of all other ranks", keys != rows),
        ("first", f"the keys of rank {first}", keys == 0),
        ("last", f"the keys of rank {last}", keys == p - 1),
        ("to first", f"any keys, if they are on rank {first},", rows == 0),
        ("to last", f"any keys, if they are on rank {last},", rows == p - 1),
        ("not next", "the keys of any rank but the next", keys != (rows + 1) % p),
        ("not previous", "the keys of any rank but the previous", keys != (rows - 1) % p),
    ) if p > 1 else ():  # fmt: skip
        for times, clause in ((0.0, f"queries did not see {whose}"), (2.0, f"queries counted {whose} twice")):
            count = x.weights.count * torch.where(pairs, times, 1.0)
            yield Mistake(f"{name} x {times:.0f}", clause, x.weighted(count=count))


def scales(x: Example) -> Iterator[Mistake]:
    scale, default = x.weights.scale, x.case.head_dim**-0.5
    others = {"left out": 1.0, "the default one": default, "applied twice": scale**2, "doubled": 2 * scale,
              "halved": scale / 2, "negated": -scale, "inverted": 1 / scale if scale else 0.0}  # fmt: skip
    for name, value in others.items():
        yield Mistake(f"scale {name}", f"the scale of the scores were {name}", x.weighted(scale=value))


def softcaps(x: Example) -> Iterator[Mistake]:
    softcap, scale = x.weights.softcap, x.weights.scale
    if softcap is not None:
        yield Mistake("no softcap", "there were no softcap", x.weighted(softcap=None))
        yield Mistake("no slope", "the softcap had the derivative 1", x.weighted(slope=False))
        if scale:  # scale t tanh(q . k / t) is a cap of scale t
            clause = "the softcap were applied before the scale, to q . k"
            yield Mistake("softcap before scale", clause, x.weighted(softcap=softcap * scale))


def wrong_sinks(x: Example) -> Iterator[Candidate]:
    """Yield forwards with other sinks. A backward by hand, from their out and lse, has the gradients of autograd."""
    right, every = x.weights.sinks, "each query counted its sink once for every rank"
    if right is None or not x.forward_may_be_wrong:
        return
    others: dict[str, tuple[str, Tensor | None]] = {"no sinks": ("there were no sinks", None)}
    if x.size > 1:
        seen = torch.stack([x.weights.count[..., x.holder == rank].any(-1) for rank in range(x.size)]).sum(0)
        others["sinks per rank"] = every, right + math.log(x.size)
        others["sinks per rank seen"] = f"{every} that has keys for it", right + seen.log()
    for name, (clause, sinks) in others.items():
        yield next(of_forward(x, name, clause, partial(attention, weights=x.weighted(sinks=sinks))))


def groups(x: Example) -> Iterator[Mistake]:
    interleaved = x.weighted(kv_head=torch.arange(x.case.heads) % x.case.kv_heads)
    yield Mistake("interleaved heads", "head h used key/value head h % Hk, not h // (H / Hk)", interleaved)
