"""What can be left out of a failing example, or made simpler, one thing at a time.

Hypothesis shrinks what was drawn, draw by draw: it may never come to an example without documents, if that needs
another draw to grow at the same time, and rarely leaves the special kinds of Cases, which are drawn in ways of their
own. So what an example can do without is tried by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from reference.pattern import Branch, Pattern
from verification.protocols import Example

C = TypeVar("C", bound=Example)

# Fields that may be left out or be simpler, and what they are then, of Cases of every kind that have them.
SIMPLEST: dict[str, Any] = {
    "group": None, "cuts": None, "bucket": None, "scale": None, "clipping": None, "resumed": None,
    "own_documents": None, "later_documents": None, "strided": False, "measured": False, "again": "alike",
    "compiled": "no", "wrapper": "none", "checkpointing": "none", "accumulation": 1, "steps": 1, "optimiser": "sgd",
    "labels": "all", "loss": "mean", "packed_by": "batch", "drops_zeros": False, "spoilt": None, "exchange": "ring",
    "order": "contiguous", "kernel": "auto", "lse": "unused", "values": "normal", "score_scale": 1.0, "batch": 1,
    "head_dim": 1, "seed": 0,
}  # fmt: skip


def least(case: C, fails: Callable[[C], bool]) -> C:
    """The Case with all left out, and made simpler, without which it fails as well. `fails` is not asked of `case`."""
    while (simpler := next(filter(fails, simpler_cases(case)), None)) is not None:
        case = simpler
    return case


def simpler_cases(case: C) -> Iterator[C]:
    """The Case with one thing less or simpler: its documents, its pattern, one of its other fields, its tokens, its
    heads. What makes no Case is left out."""
    changed: Any = case  # a dataclass, of whatever kind
    pattern: Pattern | None = getattr(case, "pattern", None)
    if pattern is not None:
        for simpler in _simpler_patterns(pattern):
            yield from _made(changed, pattern=simpler)
    known = {field.name for field in fields(changed)}
    for name, simplest in SIMPLEST.items():
        if name in known and getattr(case, name) != simplest:
            yield from _made(changed, **{name: simplest})
    if getattr(case, "dtype", "float32") in ("bfloat16", "float16"):  # what fails in fp64 says more there than in fp32
        yield from _made(changed, dtype="float32")
    if known >= {"tokens", "cuts", "pattern"}:
        yield from _with_fewer_tokens(changed)
    if known >= {"heads", "kv_heads"}:
        for heads, kv_heads in ((1, 1), (changed.heads // 2, changed.kv_heads // 2), (changed.kv_heads,) * 2):
            if 0 < kv_heads and heads < changed.heads:
                yield from _made(changed, heads=heads, kv_heads=kv_heads)


def _simpler_patterns(pattern: Pattern) -> Iterator[Pattern]:
    """Without documents; dense; not causal; with a branch less; with a branch that says less."""
    if pattern.documents is not None:
        yield replace(pattern, documents=None)
    if pattern.branches != (Branch(),):
        yield replace(pattern, branches=(Branch(),))
    if pattern.causal:
        yield replace(pattern, causal=False)
    if any(branch.window is not None for branch in pattern.branches):
        yield replace(pattern, branches=tuple(replace(branch, window=None) for branch in pattern.branches))
    for at, branch in enumerate(pattern.branches):
        before, after = pattern.branches[:at], pattern.branches[at + 1 :]
        if before or after:
            yield replace(pattern, branches=before + after)
        for simpler in _simpler_branches(branch):
            yield replace(pattern, branches=(*before, simpler, *after))


def _simpler_branches(branch: Branch) -> Iterator[Branch]:
    """Without one of the things that it says; of a dilation, the least; of offsets for each head, none."""
    if branch.window is not None:
        yield replace(branch, window=None)
    if branch.segment_length is not None:
        yield replace(branch, segment_length=None)
    if branch.offset != 0:
        yield replace(branch, offset=0)
        if branch.heads is not None:  # a tuple of offsets is as long as there are heads
            yield replace(branch, offset=0, heads=None)
    elif branch.heads is not None:
        yield replace(branch, heads=None)
    if branch.dilation_rate > 1:
        yield replace(branch, dilation_rate=1, offset=0)
    if branch.dilation_rate > 2:
        yield replace(branch, dilation_rate=2, offset=0)


def _with_fewer_tokens(case: Any) -> Iterator[Any]:
    """Of a sequence without documents, half the tokens, or one less; of documents, one less, or one that is shorter.
    Cuts past the new end are at the end."""
    documents = case.pattern.documents
    if documents is None:
        for tokens in sorted({case.tokens // 2, case.tokens - 1} - {0}):
            yield from _made(case, tokens=tokens, cuts=_cut(case.cuts, tokens))
        return
    for at, length in enumerate(documents):
        for shorter in ((), *((fewer,) for fewer in sorted({length // 2, length - 1}) if 0 <= fewer < length)):
            kept = (*documents[:at], *shorter, *documents[at + 1 :])
            tokens = sum(kept)
            pattern = replace(case.pattern, documents=kept)
            yield from _made(case, tokens=tokens, cuts=_cut(case.cuts, tokens), pattern=pattern)


def _cut(cuts: tuple[int, ...] | None, tokens: int) -> tuple[int, ...] | None:
    return None if cuts is None else tuple(min(cut, tokens) for cut in cuts)


def _made(case: Any, **changes: Any) -> Iterator[Any]:
    """The Case with these changes, if there is one: cuts are for so many ranks, say."""
    try:
        yield replace(case, **changes)
    except ValueError:
        return
