"""Simplification of a failing Case, one feature at a time.

Hypothesis shrinks draw by draw: it may never reach a Case without documents, if another draw must grow at the same
time, and rarely leaves the corner cases, which have strategies of their own. So this module removes features directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import accumulate, combinations, pairwise
from typing import Any, TypeVar

from reference.pattern import Branch, Pattern
from reference.slices import CAUSAL, Slice
from verification.case import Case, Keys
from verification.check.numbered_exchange import with_number
from verification.protocols import CaseLike
from verification.strategies.slices import clipped

C = TypeVar("C", bound=CaseLike)

# The simplest value of each field, for all kinds of Cases that have it.
SIMPLEST: dict[str, Any] = {
    "hosts": 1, "group": None, "cuts": None, "packed": None, "padding": False, "bucket": None, "scale": None,
    "clipping": None, "resumed": None, "arrangement": "contiguous",
    "own_documents": None, "later_documents": None, "strided": False, "measured": False, "again": "alike",
    "compiled": "no", "wrapper": "none", "checkpointing": "none", "accumulation": 1, "steps": 1, "optimiser": "sgd",
    "labels": "all", "loss": "mean", "packed_by": "batch", "drops_zeros": False, "spoilt": None, "exchange": "ring",
    "order": "contiguous", "kernel": "auto", "lse": "unused", "values": "normal", "score_scale": 1.0, "batch": 1,
    "compares": False, "head_dim": 1, "value_dim": None, "softcap": None, "sinks": None, "keys": None, "seed": 0,
}  # fmt: skip
FEW = 8  # tokens, of which all divisions into up to three documents are tried


def minimize(case: C, fails: Callable[[C], bool]) -> C:
    """Return the simplest Case reachable by simplifying one feature at a time that still fails. `case` itself must
    fail: it is not tried."""
    while (simpler := next(filter(fails, simpler_cases(case)), None)) is not None:
        case = simpler
    return case


def simpler_cases(case: C) -> Iterator[C]:
    """Yield the valid Cases with one simpler feature: documents, pattern, another field, tokens or heads."""
    changed: Any = case  # a dataclass, of whatever kind
    pattern: Pattern | None = getattr(case, "pattern", None)
    if pattern is not None:
        for simpler in _simpler_patterns(pattern):
            yield from _if_valid(changed, pattern=simpler)
    known = {field.name for field in fields(changed)}
    for name, simplest in SIMPLEST.items():
        if name in known and getattr(case, name) != simplest:
            yield from _if_valid(changed, **{name: simplest})
    yield from _simpler_settings(changed)
    if getattr(case, "dtype", "float32") in ("bfloat16", "float16"):  # fp64 shows more than fp32, so leave it
        yield from _if_valid(changed, dtype="float32")
    if known >= {"tokens", "cuts", "pattern"}:
        yield from _with_fewer_tokens(changed)
    if getattr(case, "keys", None) is not None:
        for keys in _simpler_keys(changed.keys):
            yield from _if_valid(changed, keys=keys)
    if known >= {"heads", "kv_heads"}:
        halves = changed.heads // 2, changed.kv_heads // 2
        singles = ((heads, kv_heads) for heads in _fewer(changed.heads) for kv_heads in (heads, 1))
        for heads, kv_heads in ((1, 1), halves, (changed.kv_heads,) * 2, *singles):
            if 0 < kv_heads and heads < changed.heads:
                yield from _if_valid(changed, heads=heads, kv_heads=kv_heads)
    for name in {"batch", "head_dim"} & known:
        for size in _fewer(getattr(case, name)):
            yield from _if_valid(changed, **{name: size})


def _simpler_settings(case: Any) -> Iterator[Any]:
    """Yield the Case with a numbered exchange, without chunks, and with longer ones; with a call or a slot less."""
    if not isinstance(case, Case):
        calls = getattr(case, "calls", ((),))
        slots = (tuple(row[:at] + row[at + 1 :] for row in calls) for at in range(len(calls[0])))
        for fewer in (*slots, *(calls[:at] + calls[at + 1 :] for at in range(len(calls) if calls[0] else 0))):
            yield from _if_valid(case, calls=fewer)
        return
    if (numbered := with_number(case)) is not case:
        yield from _if_valid(case, exchange=numbered.exchange)
    if case.same_bits is not None:
        keys = case.keys and Keys(case.keys.tokens)
        yield from _if_valid(case, same_bits=None, order="contiguous", keys=keys)
        if case.order == "dealt chunks":
            yield from _if_valid(case, order="chunks")
        if case.same_bits < max(case.tokens, case.key_tokens):
            yield from _if_valid(case, same_bits=2 * case.same_bits)


def _simpler_patterns(pattern: Pattern) -> Iterator[Pattern]:
    """Yield the pattern without documents, dense, not causal, with a branch less, and with a simpler branch."""
    if pattern.documents is not None:
        yield replace(pattern, documents=None)
    if pattern.branches != (Branch(),):
        yield replace(pattern, branches=(Branch(),))
    if pattern.causal:
        yield replace(pattern, causal=False)
    if any(branch.window is not None for branch in pattern.branches):
        yield replace(pattern, branches=tuple(replace(branch, window=None) for branch in pattern.branches))
    if pattern.has_slices:
        without = tuple(replace(branch, slices=None) for branch in pattern.branches)
        yield replace(pattern, branches=without, causal=True)
        yield replace(pattern, branches=without)
    for at, branch in enumerate(pattern.branches):
        before, after = pattern.branches[:at], pattern.branches[at + 1 :]
        if before or after:
            yield replace(pattern, branches=before + after)
        for simpler in _simpler_branches(branch):
            yield replace(pattern, branches=(*before, simpler, *after))


def _simpler_branches(branch: Branch) -> Iterator[Branch]:
    """Yield the branch without one of its features, and with a dilation of 1 or 2."""
    if branch.window is not None:
        yield replace(branch, window=None)
    for slices in _fewer_slices(branch.slices):
        with suppress(ValueError):  # longer ones may overlap
            yield replace(branch, slices=slices)
    if branch.segment_length is not None:
        yield replace(branch, segment_length=None)
    if branch.offset != 0:
        yield replace(branch, offset=0)
        if branch.heads is not None:  # the length of a tuple of offsets must equal the number of heads
            yield replace(branch, offset=0, heads=None)
    elif branch.heads is not None:
        yield replace(branch, heads=None)
    if branch.dilation_rate > 1:
        yield replace(branch, dilation_rate=1, offset=0)
    if branch.dilation_rate > 2:
        yield replace(branch, dilation_rate=2, offset=0)


def _fewer_slices(slices: tuple[Slice, ...] | None) -> Iterator[tuple[Slice, ...] | None]:
    """Yield no slices, those of causality, and the slices with one left out, without an end or bound, or shorter."""
    if slices is None:
        return
    yield None
    if slices and slices != (CAUSAL,):
        yield (CAUSAL,)
    for at in range(0 if slices == (CAUSAL,) else len(slices)):
        one, before, after = slices[at], slices[:at], slices[at + 1 :]
        yield before + after
        simpler = [one._replace(**{name: x}) for name, x in Slice()._asdict().items() if x != getattr(one, name)]
        for begin, end in (("q0", "q1"), ("k0", "k1")):
            first, last = getattr(one, begin), getattr(one, end)
            if last is not None:
                simpler += [one._replace(**{end: first + length}) for length in _fewer(last - first)]
        for other in simpler:
            yield (*before, other, *after)


def _with_fewer_tokens(case: Any) -> Iterator[Any]:
    """Yield the Case with fewer tokens, or with two documents merged. Cuts past the new end move to it. All small
    numbers of tokens are tried: an implementation may support only those that twice the ranks divide."""
    documents, ranks = case.pattern.documents, len(case.ranks)
    few = max(2 * ranks, FEW)
    fewer = {*range(1, few + 1), *_fewer(case.tokens), *(case.tokens - step for step in (2 * ranks, ranks))}
    totals = sorted(tokens for tokens in fewer if 0 < tokens < case.tokens)
    if documents is None:
        for tokens in totals:
            yield from _if_valid(case, tokens=tokens, cuts=_cut(case.cuts, tokens))
        return
    merged = [(*documents[:at], sum(documents[at : at + 2]), *documents[at + 2 :]) for at in range(len(documents) - 1)]
    shorter = (lengths for tokens in (*totals, case.tokens) for lengths in _shorter(documents, tokens, few))
    for lengths in dict.fromkeys((*shorter, *merged)):
        if sum(lengths) == case.tokens and len(lengths) >= len(documents):
            continue
        pattern = replace(case.pattern, documents=lengths)
        yield from _if_valid(case, tokens=sum(lengths), cuts=_cut(case.cuts, sum(lengths)), pattern=pattern)


def _shorter(documents: tuple[int, ...], tokens: int, few: int) -> Iterator[tuple[int, ...]]:
    """Yield documents with that many tokens: one, two or three if there are few tokens, and the given ones with one
    shorter or left out and the rest cut at either end."""
    for number in range(3 if tokens <= few else 1):
        for edges in combinations(range(1, tokens), number):
            yield tuple(end - start for start, end in pairwise((0, *edges, tokens)))
    excess = sum(documents) - tokens
    for at, length in enumerate(documents):
        before, after = documents[:at], documents[at + 1 :]
        if length >= excess:
            yield (*before, *((length - excess,) if length > excess else ()), *after)
        elif sum(before + after) >= tokens:
            yield _first(before + after, tokens)
            yield _first((before + after)[::-1], tokens)[::-1]


def _first(documents: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Return the documents of the first tokens."""
    ends = (0, *(min(end, tokens) for end in accumulate(documents)))
    return tuple(end - start for start, end in pairwise(ends) if end > start)


def _simpler_keys(keys: Keys) -> Iterator[Keys]:
    """Yield the keys without cuts, in contiguous order, and fewer of them."""
    for simpler in (keys._replace(cuts=None), keys._replace(order="contiguous")):
        if simpler != keys:
            yield simpler
    for tokens in _fewer(keys.tokens):
        yield keys._replace(tokens=tokens, cuts=_cut(keys.cuts, tokens))


def _fewer(size: int) -> list[int]:
    """Return smaller sizes of 1 or more, from half of it up to one less: they lead to a threshold in few steps."""
    return sorted({size - (size >> shift) for shift in range(1, size.bit_length())})


def _cut(cuts: tuple[int, ...] | None, tokens: int) -> tuple[int, ...] | None:
    return None if cuts is None else tuple(min(cut, tokens) for cut in cuts)


def _if_valid(case: Any, **changes: Any) -> Iterator[Any]:
    """Yield the Case with these changes, if it is valid. Slices past the new end move to it."""
    if isinstance(case, Case):
        tokens, keys = changes.get("tokens", case.tokens), changes.get("keys", case.keys)
        pattern = changes.get("pattern", case.pattern)
        changes["pattern"] = clipped(pattern, tokens, tokens if keys is None else keys.tokens)
    try:
        yield replace(case, **changes)
    except ValueError:
        return
