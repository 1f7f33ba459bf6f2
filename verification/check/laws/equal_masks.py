"""One mask written in two ways gives the same results: slices cut in two or in another order, and causality, windows
and documents as slices.

The other pattern is written by a rule, not read off the mask. So the results differ where the oracle errs as the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

from hypothesis import reject
from hypothesis import strategies as st

from reference import validators
from reference.pattern import Branch
from reference.slices import Slice, frame_slices, prefix_slices, span_slices
from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.laws.law import TAME, How, Law, bounded, without_overflow, worst_difference
from verification.strategies.cases import cases
from verification.strategies.documents import WAYS as LENGTHS
from verification.strategies.documents import ends_of, lengths_of
from verification.strategies.slices import cut, sliced

Slices = list[Slice] | tuple[Slice, ...]


def _cut(case: Case, pick: Random, slices: Slices) -> Slices:
    return [half for one in slices for half in cut(one, pick, min(case.tokens, case.key_tokens))]


def _shuffled(case: Case, pick: Random, slices: Slices) -> Slices:
    return pick.sample(slices, len(slices))


def _documents(case: Case) -> list[int]:
    return list(case.pattern.documents or (case.tokens,))


def _band(case: Case, pick: Random, branch: Branch) -> tuple[Branch, Slices]:
    window, causal = branch.window, case.pattern.causal
    low, high = None if window is None else -window, 0 if causal else window
    return replace(branch, window=None), [Slice(low=low, high=high)]


def _squares(case: Case, pick: Random, branch: Branch) -> tuple[Branch, Slices]:
    edges, high = accumulate(_documents(case), initial=0), 0 if case.pattern.causal else None
    return branch, [Slice(a, b, a, b, high=high) for a, b in pairwise(edges)]


def _no_prefix(case: Case, pick: Random, branch: Branch) -> tuple[Branch, Slices]:
    return branch, prefix_slices([0])


def _whole_prefix(case: Case, pick: Random, branch: Branch) -> tuple[Branch, Slices]:
    lengths = _documents(case)
    return branch, prefix_slices(lengths, list(accumulate(lengths, initial=0))[:-1])


def _no_spans(case: Case, pick: Random, branch: Branch) -> tuple[Branch, Slices]:
    at = sorted(pick.randrange(case.tokens) for _ in range(3))
    return replace(branch, window=None), span_slices([(at[0], at[0]), (at[2], at[2] + 1)], branch.window)


def _short_frames(case: Case, pick: Random, branch: Branch) -> tuple[Branch, Slices]:
    return branch, frame_slices([1] * case.tokens)


# Other slices for those of each branch; a branch of another mask, as a branch and its slices.
OF_SLICES: dict[str, Callable[[Case, Random, Slices], Slices]] = {"cut in two": _cut, "in another order": _shuffled}
AS_SLICES: dict[str, Callable[[Case, Random, Branch], tuple[Branch, Slices]]] = {
    "causality and windows": _band, "documents": _squares, "prefix 0": _no_prefix, "prefix n": _whole_prefix,
    "empty spans": _no_spans, "frames of one token": _short_frames,
}  # fmt: skip
WAYS = (*OF_SLICES, *AS_SLICES)
_CAUSAL = ("prefix 0", "empty spans", "frames of one token")


def written(case: Case, way: str, seed: int) -> Case:
    """Return the Case with its mask written in another way. Raises ValueError where that way does not apply."""
    pattern, pick, documents = case.pattern, Random(seed), case.pattern.documents
    if way in OF_SLICES:
        branches = [
            b if b.slices is None else replace(b, slices=tuple(OF_SLICES[way](case, pick, b.slices)))
            for b in pattern.branches
        ]
    else:
        if pattern.has_slices or (way != "causality and windows" and case.keys is not None):
            raise ValueError(f"way is {way!r}, which applies to patterns without slices, of one sequence")
        if (way in _CAUSAL and not pattern.causal) or (way == "prefix n" and pattern.causal):
            raise ValueError(f"way is {way!r} and causal is {pattern.causal}, which hides other pairs")
        if way == "documents" and any((b.segment_length, b.dilation_rate) != (None, 1) for b in pattern.branches):
            raise ValueError(f"way is {way!r}, which applies to branches without segments and dilation")
        pairs = [AS_SLICES[way](case, pick, b) for b in pattern.branches]
        branches = [replace(b, slices=tuple(slices)) for b, slices in pairs]
        documents = None if way == "documents" else documents
    other = replace(pattern, branches=tuple(branches), documents=documents)
    if other == pattern:
        raise ValueError(f"way is {way!r}, which changes nothing in this pattern")
    return replace(case, pattern=other)


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    way: str = draw(st.sampled_from(WAYS))
    case = without_overflow(draw(cases(world)))
    if way in OF_SLICES:
        case = case if case.pattern.has_slices else sliced(draw, replace(case, keys=None))
    else:
        branches = [replace(branch, slices=None) for branch in case.pattern.branches]
        if way == "documents":
            branches = [Branch(heads=b.heads, window=b.window) for b in branches]
        causal = way in _CAUSAL or (way != "prefix n" and case.pattern.causal)
        case = replace(case, keys=None, pattern=replace(case.pattern, branches=tuple(branches), causal=causal))
        if way == "documents" and case.pattern.documents is None:
            lengths = lengths_of(draw, draw(st.sampled_from(LENGTHS)), case.tokens, ends_of(case.shards()))
            case = replace(case, pattern=replace(case.pattern, documents=lengths))
    case, seed = claimed(claims, case), draw(st.integers(0, 255))
    try:
        other = written(case, way, seed)
    except ValueError:
        reject()
    return (case, {"way": way, "seed": seed}) if claims(other) == other else reject()


def check_written(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """Results of the mask written in another way differ by no more than the sum of both bounds."""
    return worst_difference(ranks, case, written(case, how["way"], how["seed"]), how)


def _precondition(case: Case, how: How) -> None:
    written(case, how["way"], how["seed"])


def _claimed(claims: Claims, case: Case, how: How) -> None:
    other = written(case, how["way"], how["seed"])
    if claims(other) != other:
        raise ValueError(f"how is {how}; it must make a Case that is claimed")


SAME_MASK_SAME_RESULTS = Law(
    "a mask written in another way", _draw, check_written, _precondition, share=0.06, cases=TAME,
    how={"way": lambda case, name, value: validators.choice(name, value, WAYS), "seed": bounded},
    of_any="the claim has no slices", of_others=_claimed,
)  # fmt: skip
