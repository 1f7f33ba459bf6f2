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

# Masks that differ in few places, with the regions between which they distinguish.
REGIONS: dict[str, tuple[str, ...]] = {
    "strict diagonal": ("", ", queries of first half", ", queries of second half"),
    "strict diagonal but first": ("",),
    "local window": ("",),
    "local window, keys before": ("",),
}


class Mistake(NamedTuple):
    """Wrong weights: name, clause after "as if", and the weights."""

    name: str
    clause: str
    weights: Weights


def wrong_weights(x: Example) -> Iterator[Candidate]:
    """Yield each wrong weights in forward and backward, in one of them, or in the backward of some inputs alone."""
    right, kinds = x.weights, (masks, parts, buffers, scales, softcaps, groups)
    settings = right.scale, right.softcap, right.slope
    for name, clause, weights in (mistake for kind in kinds for mistake in kind(x)):
        if all(torch.equal(a, b) for a, b in ((weights.count, right.count), (weights.kv_head, right.kv_head))):
            if weights.bank is None and (weights.scale, weights.softcap, weights.slope) == settings:
                continue
        if x.forward_may_be_wrong:
            yield from wrong_forwards(x, name, clause, partial(attention, weights=weights))
            if weights.bank is not None or weights.scale != right.scale:  # a backward by hand is not that of autograd
                sentence, computed = f"{x.these} as if {clause}", partial(_forward, x, weights)
                yield Candidate(f"{name} / by hand", sentence, computed, partial(_by_hand, x, weights))
        for names in () if x.forward_is_wrong else (("dq", "dk", "dv"), ("dk", "dv"), ("dq",)):
            where = "backward" if len(names) == 3 else f"backward for {' and '.join(names)} alone"
            sentence = f"{x.these} as if, in the {where}, {clause}"
            yield Candidate(f"{name} / {where}", sentence, backward=partial(_backward, x, weights, names))


def _backward(x: Example, weights: Weights, names: tuple[str, ...]) -> Results:
    grads = x.by_hand(weights, x.exact["lse"], x.delta(x.exact["out"]))
    return {name: grads[name] for name in names}


def _forward(x: Example, weights: Weights) -> Results:
    return dict(zip(("out", "lse"), attention(x.q, x.k, x.v, weights), strict=True))


def _by_hand(x: Example, weights: Weights) -> Results:
    """Return the gradients of a backward that has the same mistake, and multiplies ds by the right scale."""
    forward = _forward(x, weights)
    grads = x.by_hand(weights, forward["lse"], x.delta(forward["out"]))
    share = x.weights.scale / weights.scale if weights.scale else 1.0
    return grads | {name: share * grads[name] for name in ("dq", "dk")}


def wrong_forwards(x: Example, name: str, clause: str, forward: Forward, exact: bool = True) -> Iterator[Candidate]:
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
    """Yield other multiplicities: by other positions, and of another pattern, for all pairs or those of some ranks or
    chunks."""
    what = "the mask compared positions"
    contiguous = f"{what} as if shards were contiguous (rank * length + index in the shard) in {x.case.order} order"
    every, halves = torch.arange(x.case.tokens), "with the halves of each shard swapped"
    for name, clause, *positions in (
        ("local positions", f"{what} within the shards, of queries and of keys", x.local, x.local),
        ("local queries", f"{what} of queries within their shard, of keys global ones", x.local, every),
        ("local keys", f"{what} of keys within their shard, of queries global ones", every, x.local),
        ("contiguous positions", contiguous, x.place, x.place),
        ("swapped halves", f"{what} {halves}", x.halved, x.halved),
        ("swapped halves of keys", f"{what} of keys {halves}", every, x.halved),
    ):
        yield Mistake(name, clause, x.weighted(count=x.count(None, *positions)))
    for name, clause, count in patterns(x):
        for where, words, pairs in regions(x):
            if where in REGIONS.get(name, (where,)):
                yield Mistake(name + where, clause + words, x.weighted(count=count.where(pairs, x.weights.count)))


def regions(x: Example) -> Iterator[tuple[str, str, Tensor]]:
    """Yield pairs of queries and keys to which another mask may apply alone: name, words, and the pairs (N, N)."""
    rows, keys, p = x.holder[:, None], x.holder, x.size
    first = 2 * x.local < torch.tensor(x.shards.counts)[x.holder]
    yield "", "", torch.ones(1, 1).bool()
    if p > 1:
        yield ", own keys", ", for keys of the own rank", rows == keys
        yield ", others' keys", ", for keys of other ranks", rows != keys
        yield ", keys of previous", ", for keys of the previous rank", keys == (rows - 1) % p
        yield ", keys of next", ", for keys of the next rank", keys == (rows + 1) % p
    for half, chosen in (("first", first), ("second", ~first)):
        yield f", queries of {half} half", f", for queries in the {half} half of a shard", chosen[:, None]
        yield f", keys of {half} half", f", for keys in the {half} half of a shard", chosen


def patterns(x: Example) -> Iterator[tuple[str, str, Tensor]]:
    """Yield multiplicities of other patterns: name, clause, and the multiplicities."""
    pattern, right, tokens = x.case.pattern, x.weights.count, torch.arange(x.case.tokens)
    before, local_before = tokens[:, None] - tokens, x.local[:, None] - x.local  # how far key j is before query i
    off = "the causal mask were off by one"

    def branches(**changes: Any) -> Tensor:
        return x.count(replace(pattern, branches=tuple(replace(branch, **changes) for branch in pattern.branches)))

    if pattern.causal:
        every = x.count(replace(pattern, causal=False))
        strict = every * (before > 0)
        yield "strict diagonal", f"{off}: j < i", strict
        but_first = strict.where(strict.any(-1, keepdim=True), right)
        yield "strict diagonal but first", f"{off}: j < i, but where a query would see nothing", but_first
        yield "diagonal + 1", f"{off}: j <= i + 1", every * (before >= -1)
        yield "not causal", "the mask were not causal", every
        yield "reversed", "queries saw the keys after them, not those before", every * (before <= 0)
    else:
        yield "causal", "the mask were causal", x.count(replace(pattern, causal=True))
    if pattern.documents is not None:
        yield "documents", "there were no documents", x.count(replace(pattern, documents=None))
        for name, clause, step in (("later", "began", 1), ("earlier", "ended", -1)):
            moved = (tokens - step).clamp(0, len(tokens) - 1)
            within = x.count(replace(pattern, causal=False), moved, moved) * (before >= 0 if pattern.causal else 1)
            yield f"documents one {name}", f"documents {clause} one token {name}", within
    yield "segments", "there were no segments", branches(segment_length=None)
    yield "dilation", "there was no dilation", branches(dilation_rate=1, offset=0)
    yield "no multiplicity", "a pair that several branches see counted once", right.clamp(max=1)
    window, wide = pattern.branches[0].window, branches(window=None)
    if window is not None and all(branch.window == window for branch in pattern.branches):
        yield "window", "there was no window", wide
        yield "window + 1", "the window were longer by one", branches(window=window + 1)
        yield "window - 1", "the window were shorter by one", wide * (before.abs() < window)
        local, near = "the window compared positions within the shards", local_before.abs() <= window
        yield "local window", local, wide * near
        yield "local window, keys before", f"{local}, and had no keys after", wide * near * (local_before >= 0)


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
        ("higher", "the keys of ranks above theirs", keys > rows),
        ("to first", f"any keys, if they are on rank {first},", rows == 0),
        ("to last", f"any keys, if they are on rank {last},", rows == p - 1),
        ("not next", "the keys of any rank but the next", keys != (rows + 1) % p),
        ("not previous", "the keys of any rank but the previous", keys != (rows - 1) % p),
    ) if p > 1 else ():  # fmt: skip
        for times, clause in ((0.0, f"queries did not see {whose}"), (2.0, f"queries counted {whose} twice")):
            count = x.weights.count * torch.where(pairs, times, 1.0)
            yield Mistake(f"{name} x {times:.0f}", clause, x.weighted(count=count))
    length = torch.tensor(x.shards.counts)[x.holder]
    for name, ends in (("first", x.local == 0), ("last", x.local == length - 1)):
        for where, words, among in (
            ("", "each shard", rows >= 0),
            (" of others", "each other rank's shard", rows != keys),
        ):
            count = x.weights.count * ~(ends & among)
            yield Mistake(
                f"{name} key{where}", f"queries did not see the {name} key of {words}", x.weighted(count=count)
            )


def buffers(x: Example) -> Iterator[Mistake]:
    """Yield keys, values or both that are not those of their hop, under its mask: a buffer is read before its wait, is
    not written, or has those of an earlier call."""
    own, tokens, length = x.holder[:, None], torch.arange(x.case.tokens), x.shards.counts[0]
    if len(set(x.shards.counts)) != 1:
        return
    order, zeros = x.place.argsort(), (torch.zeros_like(x.k[:, :, :1]), torch.zeros_like(x.v[:, :, :1]))
    early, others = "a buffer is read before its wait", x.holder != own
    banks = {"own": ("of other ranks were those of the own rank", order[own * length + x.local], zeros)}
    for name, back in {"the hop before": 1, "two hops before": 2, "zeros": x.size}.items():
        for way, sign in (("to next", 1), ("to previous", -1)):
            places = order[(x.holder + back * sign) % x.size * length + x.local]
            places = places.where(sign * (own - x.holder) % x.size >= back, len(tokens))
            what = "zeros" if name == "zeros" else f"those of {name}"
            banks[f"{name}, {way}"] = f"of other ranks were {what}: {early}", places, zeros
    if x.size > 2:
        whose = "of other ranks were those of the rank as far on the other side: they go the wrong way"
        banks["other side"] = whose, order[(2 * own - x.holder) % x.size * length + x.local], zeros
    banks = {name: (whose, places.where(others, tokens), bank) for name, (whose, places, bank) in banks.items()}
    if x.earlier is not None:
        before = (tokens + len(tokens)).expand_as(others)
        banks["earlier call"] = "were those of an earlier call: a buffer or cache is reused", before, x.earlier
        whose = "of other ranks were those of an earlier call: a buffer or cache is reused"
        banks["earlier call, others"] = whose, before.where(others, tokens), x.earlier
    for name, (whose, places, bank) in banks.items():
        for which in ("keys and values", "keys", "values"):
            key_of, value_of = (places if each in which else None for each in ("key", "value"))
            weights = x.weighted(key_of=key_of, value_of=value_of, bank=bank)
            yield Mistake(f"{which}: {name}", f"the {which} {whose}", weights)


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
        yield next(wrong_forwards(x, name, clause, partial(attention, weights=x.weighted(sinks=sinks))))


def groups(x: Example) -> Iterator[Mistake]:
    interleaved = x.weighted(kv_head=torch.arange(x.case.heads) % x.case.kv_heads)
    yield Mistake("interleaved heads", "head h used key/value head h % Hk, not h // (H / Hk)", interleaved)
