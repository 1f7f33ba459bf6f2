"""The patterns that are published, and what is no pattern and no layout, said a second time.

Oracle and ranks take their patterns from `reference.pattern`: a mistake there is on both sides of every comparison.
Here the pairs are collected segment by segment from lists of tokens, as the papers describe them, without arithmetic
on positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference import fields
from reference.documents import documents_from_cu_seqlens, documents_from_positions
from reference.pattern import Branch, Pattern, multiplicity
from ring.comm.transport import Transport
from ring.layout import Layout
from verification.case import Case
from verification.check.laws.law import How, Law
from verification.draw.drawn_documents import documents_of
from verification.failures import WrongResult
from verification.run.backends import Backend

Counts = NDArray[np.int64]
_MOST_TOKENS, _MOST_HEADS, _MOST_RATE = 24, 6, 7
MADE = ("longnet", "head_groups")
RULES = ("paper", "torchscale", "fkodom")


# --- what is published ------------------------------------------------------------------------------------------------


def _in_turn(rate: int, heads: int) -> list[int]:
    """LongNet, section 2.2: the heads of a branch take the offsets 0, 1, ..., r - 1 in turn."""
    return list(islice(cycle(range(rate)), heads))


def _in_stretches(rate: int, heads: int) -> list[int]:
    """torchscale: the first heads take offset 0, as many the next one, and so on; the last stretch may be short."""
    stretch = next(size for size in range(1, heads + 1) if size * rate >= heads)
    return [offset for offset in range(rate) for _ in range(stretch)][:heads]


def _of_branch(number: int, rate: int) -> int:
    """dilated-attention-pytorch: one offset a branch, which the branches take in turn."""
    return list(islice(cycle(range(rate)), number + 1))[-1]


Chosen = list[list[tuple[int | None, int] | None]]  # by branch and head: segment length and offset, or no such branch


def offsets_of(rule: str, number: int, rate: int, heads: int) -> list[int]:
    """Of the branch of that number, by head."""
    if rule == "fkodom":
        return [_of_branch(number, rate)] * heads
    return _in_turn(rate, heads) if rule == "paper" else _in_stretches(rate, heads)


def longnet(segments: list[int | None], rates: list[int], heads: int, rule: str) -> Chosen:
    """Every head has every branch."""
    chosen: Chosen = []
    for number, (segment, rate) in enumerate(zip(segments, rates, strict=True)):
        chosen.append([(segment, offset) for offset in offsets_of(rule, number, rate, heads)])
    return chosen


def head_groups(segments: list[int | None], rates: list[int], heads: int) -> list[list[tuple[int | None, int] | None]]:
    """The same where each head has one branch: the first branch takes the first heads. Groups are as equal as can be,
    and larger ones come first."""
    groups = np.array_split(range(heads), len(rates))
    chosen: list[list[tuple[int | None, int] | None]] = []
    for number, (group, rate) in enumerate(zip(groups, rates, strict=True)):
        mine = (segments[number], _of_branch(number, rate))
        chosen.append([mine if head in group else None for head in range(heads)])
    return chosen


def pairs(
    tokens: int,
    rates: list[int],
    chosen: Chosen,
    causal: bool,
    documents: tuple[int, ...] | None = None,
    windows: list[int | None] | None = None,
) -> Counts:
    """(heads, tokens, tokens): how many branches let a query see a key. Segments are cut anew in each document.
    windows: of each branch, as many tokens on either side of a query as it sees; None: it sees all.
    """
    heads = len(chosen[0])
    found = np.zeros((heads, tokens, tokens), np.int64)
    for rate, of_heads, window in zip(rates, chosen, windows or [None] * len(rates), strict=True):
        for head, one in enumerate(of_heads):
            if one is None:
                continue
            length, offset = one
            for segment in _segments(tokens, length, documents):
                kept = segment[offset::rate]  # from the offset on every r-th of the segment
                for query in kept:
                    for key in sorted({*kept} & {*_around(query, tokens, window)}):
                        found[head, query, key] += not causal or key <= query
    return found


def _around(query: int, tokens: int, window: int | None) -> list[int]:
    """The tokens from so many before the query to so many behind it."""
    before, behind = list(range(query)), list(range(query + 1, tokens))
    if window is None:
        return [*before, query, *behind]
    return [*before[::-1][:window], query, *behind[:window]]


def _segments(tokens: int, length: int | None, documents: tuple[int, ...] | None) -> Iterator[list[int]]:
    everything = iter(range(tokens))
    for size in (tokens,) if documents is None else documents:
        document = list(islice(everything, size))
        while document:
            yield document[:length]
            document = [] if length is None else document[length:]


# --- what is refused --------------------------------------------------------------------------------------------------

# By name: what makes it, and the argument that the refusal must name.
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "segment of nothing": (lambda: Branch(0), "segment_length"),
    "segment of half a token": (lambda: Branch(1.5), "segment_length"),  # type: ignore[arg-type]
    "segment True": (lambda: Branch(True), "segment_length"),
    "rate 0": (lambda: Branch(4, 0), "dilation_rate"),
    "rate of text": (lambda: Branch(4, "2"), "dilation_rate"),  # type: ignore[arg-type]
    "offset at the rate": (lambda: Branch(4, 2, 2), "offset"),
    "negative offset": (lambda: Branch(4, 2, -1), "offset"),
    "one offset at the rate": (lambda: Branch(4, 2, (0, 2)), "offset"),
    "no offsets": (lambda: Branch(4, 2, ()), "offset"),
    "an offset too many": (lambda: Branch(4, 2, (0, 1), range(1)), "offset"),
    "an offset too few": (lambda: Branch(4, 2, (0, 1), range(3)), "offset"),
    "heads of a list": (lambda: Branch(4, 2, 0, [0, 1]), "heads"),  # type: ignore[arg-type]
    "no heads": (lambda: Branch(4, 2, 0, range(2, 2)), "heads"),
    "every other head": (lambda: Branch(4, 2, 0, range(0, 4, 2)), "heads"),
    "heads below 0": (lambda: Branch(4, 2, 0, range(-1, 2)), "heads"),
    "window below 0": (lambda: Branch(window=-1), "window"),
    "window of half a token": (lambda: Branch(window=1.5), "window"),  # type: ignore[arg-type]
    "window True": (lambda: Branch(window=True), "window"),
    "window of both sides": (lambda: Branch(window=(1, 1)), "window"),  # type: ignore[arg-type]
    "dense: window below 0": (lambda: Pattern.dense(window=-1), "window"),
    "no branch": (lambda: Pattern(()), "branches"),
    "a branch that is none": (lambda: Pattern((4,)), "branches"),  # type: ignore[arg-type]
    "causal 1": (lambda: Pattern((Branch(),), 1), "causal"),  # type: ignore[arg-type]
    "documents of a number": (lambda: Pattern((Branch(),), documents=4), "documents"),  # type: ignore[arg-type]
    "a document below nothing": (lambda: Pattern((Branch(),), documents=(2, -1)), "documents"),
    "half a document": (lambda: Pattern((Branch(),), documents=(2, 1.5)), "documents"),  # type: ignore[arg-type]
    "a document True": (lambda: Pattern((Branch(),), documents=(True, 1)), "documents"),
    "documents of an array": (lambda: Pattern((Branch(),), documents=np.ones(2, int)), "documents"),  # type: ignore[arg-type]
    "documents of a token too few": (lambda: Pattern.dense(documents=(2, 1)).validate_tokens(4), "documents"),
    "documents of a token too many": (lambda: Pattern.dense(documents=(2, 3)).validate_tokens(4), "documents"),
    "heads beyond those there are": (lambda: Pattern((Branch(heads=range(3)),)).validate(2), "heads"),
    "offsets for fewer heads": (lambda: Pattern((Branch(4, 2, (0, 1)),)).validate(3), "offset"),
    "longnet: lengths that disagree": (lambda: Pattern.longnet([4, 8], [1], 2), "segment_lengths"),
    "longnet: nothing": (lambda: Pattern.longnet([], [], 2), "segment_lengths"),
    "longnet: rate 0": (lambda: Pattern.longnet([4], [0], 2), "dilation_rates"),
    "longnet: no heads": (lambda: Pattern.longnet([4], [1], 0), "heads"),
    "longnet: another rule": (lambda: Pattern.longnet([4], [1], 2, offsets="mine"), "offsets"),
    "groups: fewer heads than groups": (lambda: Pattern.head_groups([4, 8], [1, 2], 1), "heads"),
    "groups: lengths that disagree": (lambda: Pattern.head_groups([4, 8], [1], 2), "segment_lengths"),
    "layout: negative tokens": (lambda: Layout.contiguous(-1, 2), "n must"),
    "layout: no ranks": (lambda: Layout.zigzag(4, 0), "p must"),
    "layout: half a token": (lambda: Layout.striped(4.5, 2), "n must"),  # type: ignore[arg-type]
    "layout: a token twice": (lambda: Layout.from_cuts([0, 1, 1, 3], (0, 2, 4)), "order"),
    "layout: a token beyond": (lambda: Layout.from_cuts([0, 1, 2, 4], (0, 2, 4)), "order"),
    "layout: a token below 0": (lambda: Layout.from_cuts([0, 1, 2, -1], (0, 2, 4)), "order"),
    "layout: two dimensions": (lambda: Layout.from_cuts(np.arange(4).reshape(2, 2), (0, 2, 4)), "order"),
    "layout: falling cuts": (lambda: Layout.from_cuts(range(4), (0, 3, 2, 4)), "cuts"),
    "layout: cuts that begin later": (lambda: Layout.from_cuts(range(4), (1, 4)), "cuts"),
    "layout: cuts that end before": (lambda: Layout.from_cuts(range(4), (0, 3)), "cuts"),
    "layout: a single cut": (lambda: Layout.from_cuts((), (0,)), "cuts"),
    "layout: half a cut": (lambda: Layout.from_cuts(range(4), (0, 1.5, 4)), "cuts"),  # type: ignore[arg-type]
    "layout: shards of other lengths": (
        lambda: Layout.contiguous(4, 2).unshard([torch.zeros(1, 1), torch.zeros(1, 3)]),
        "shards",
    ),
    "layout: a shard too few": (lambda: Layout.contiguous(4, 2).unshard([torch.zeros(1, 4)]), "shards"),
    "layout: a token too many": (lambda: Layout.contiguous(4, 2).shard(torch.zeros(1, 5), 0), "x must"),
    "layout: zigzag of other documents": (lambda: Layout.zigzag(4, 2, documents=(2, 1)), "documents"),
    "layout: balanced for other documents": (
        lambda: Layout.balanced(Pattern.dense(documents=(2, 1)), 4, 2),
        "documents",
    ),
    "layout: balanced for other heads": (lambda: Layout.balanced(Pattern((Branch(4, 2, (0, 1)),)), 4, 2, 3), "offset"),
    "documents that end too early": (lambda: documents_from_cu_seqlens([0, 2], 3), "cu_seqlens"),
    "documents that go back": (lambda: documents_from_cu_seqlens([0, 2, 1, 3], 3), "cu_seqlens"),
    "documents that go back, unsigned": (
        lambda: documents_from_cu_seqlens(np.array([0, 2, 1, 3], np.uint32), 3),
        "cu_seqlens",
    ),
    "documents of positions that jump": (lambda: documents_from_positions([0, 2]), "positions"),
    "layout: a rank too many": (lambda: Layout.contiguous(4, 2).positions(2), "rank"),
    "layout: a rank below 0": (lambda: Layout.contiguous(4, 2).shard(torch.zeros(1, 4), -1), "rank"),
}


def not_refused() -> str | None:
    """What is wrong with the first refusal that is not as it should be."""
    for name, (make, argument) in REFUSED.items():
        try:
            made = make()
        except ValueError as error:
            if argument not in str(error):
                return f"{name}: the refusal must name {argument!r}, got {error}"
        except Exception as error:
            return f"{name}: must be refused as ValueError, got {type(error).__name__}: {error}"
        else:
            return f"{name}: must be refused as ValueError, got {made!r}"
    return None


# --- the law ----------------------------------------------------------------------------------------------------------


def _windows(tokens: int) -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.integers(0, 4), st.integers(0, tokens + 3))


@st.composite
def _draw(draw: st.DrawFn, world: int) -> tuple[Case, How]:
    made = draw(st.sampled_from(MADE))
    branches = draw(st.integers(1, 3))
    tokens = draw(st.integers(1, _MOST_TOKENS))
    heads = draw(st.integers(branches if made == "head_groups" else 1, _MOST_HEADS))
    lengths = st.one_of(st.integers(1, tokens + 3), st.integers(1, tokens + 3), st.none())
    how: How = {
        "made": made,
        "segment_lengths": draw(st.lists(lengths, min_size=branches, max_size=branches)),
        "dilation_rates": draw(st.lists(st.integers(1, 7), min_size=branches, max_size=branches)),
        "offsets": draw(st.sampled_from(RULES)),
        "windows": draw(st.lists(_windows(tokens), min_size=branches, max_size=branches)),
    }
    pattern = Pattern.dense(draw(st.booleans()), documents_of(draw, tokens, [tokens // 2]))
    case = Case(
        world=world, group=None, tokens=tokens, order="contiguous", cuts=None,
        pattern=pattern, batch=1, heads=heads, kv_heads=heads, head_dim=1, dtype="float32",
        scale=None, score_scale=1.0, values="normal", seed=0, exchange="ring", bucket=None, kernel="auto",
        lse="unused", strided=False,
    )  # fmt: skip
    return case, how


def check_definition(backend: Backend, case: Case, how: How) -> float:
    """Of what the ranks run, not of this process's own copy: rank 0 looks at it alone, without messages."""
    backend.submit(misread, case, how)
    for wrong in backend.collect():
        if wrong is not None:
            raise WrongResult(wrong)
    return 0.0


def misread(transport: Transport, case: Case, how: How) -> str | None:
    """Task: what is wrong, of rank 0; None for nothing."""
    if transport.rank:
        return None
    offsets = _other_offsets(case.heads) or _other_groups(case.heads)
    return not_refused() or offsets or _not_as_published(case, how) or _dense_apart(case, how)


def _other_offsets(heads: int) -> str | None:
    """Of every rule, as many heads and each rate: rules differ for few of them."""
    for rule in RULES:
        for rate in range(1, _MOST_RATE + 1):
            made = Pattern.longnet([rate], [rate], heads, offsets=rule).branches[0].offsets(heads)
            if list(made) != offsets_of(rule, 0, rate, heads):
                return f"offsets {rule!r} of {heads} heads at rate {rate}: {made}, as published " + str(
                    offsets_of(rule, 0, rate, heads)
                )
    return None


def _other_groups(heads: int) -> str | None:
    """Of as many groups as there can be, at each rate: which heads each has, and their offset."""
    for count in range(1, heads + 1):
        for rate in range(1, _MOST_RATE + 1):
            rates = [rate] * count
            made = [one.offsets(heads) for one in Pattern.head_groups(rates, rates, heads).branches]
            groups = head_groups([*rates], rates, heads)
            published = [tuple(None if one is None else one[1] for one in chosen) for chosen in groups]
            if made != published:
                return f"{count} groups of {heads} heads at rate {rate}: offsets {made}, as published {published}"
    return None


def _not_as_published(case: Case, how: How) -> str | None:
    segments, rates, causal = how["segment_lengths"], how["dilation_rates"], case.pattern.causal
    packed = case.pattern.documents
    if how["made"] == "longnet":
        made = Pattern.longnet(segments, rates, case.heads, causal, how["offsets"], packed)
        chosen = longnet(segments, rates, case.heads, how["offsets"])
    else:
        made = Pattern.head_groups(segments, rates, case.heads, causal, packed)
        chosen = head_groups(segments, rates, case.heads)
    windows = _windows_of(how)
    limited = zip(made.branches, windows, strict=True)
    made = replace(made, branches=tuple(replace(branch, window=window) for branch, window in limited))
    return _apart(how["made"], made, case, how, pairs(case.tokens, rates, chosen, causal, packed, windows))


def _dense_apart(case: Case, how: How) -> str | None:
    """Of `Pattern.dense` with each window."""
    causal, packed = case.pattern.causal, case.pattern.documents
    for window in _windows_of(how):
        wanted = pairs(case.tokens, [1], [[(None, 0)] * case.heads], causal, packed, [window])
        if wrong := _apart("dense", Pattern.dense(causal, packed, window), case, how, wanted):
            return wrong
    return None


def _apart(what: str, made: Pattern, case: Case, how: How, wanted: Counts) -> str | None:
    """Where a pattern is not as it is wanted."""
    positions = torch.arange(case.tokens)
    found = multiplicity(made, positions, positions, case.heads).numpy()
    apart = np.argwhere(found != wanted)
    if not len(apart):
        return None
    head, query, key = (int(i) for i in apart[0])
    return (
        f"{what}: head {head}, query {query}, key {key}: {found[head, query, key]} branches see the pair, as published "
        f"{wanted[head, query, key]}; of {case.tokens} tokens, {case.heads} heads, {how}, causal {made.causal}, "
        f"documents {made.documents}"
    )


def _windows_of(how: How) -> list[int | None]:
    """Of each branch; saved examples may be from before there were any."""
    return how.get("windows") or [None] * len(how["dilation_rates"])


def _premise(case: Case, how: Any) -> None:
    if isinstance(how, dict) and "windows" not in how:  # which is from before there were windows
        how = how | {"windows": None}
    fields.exactly("how", how, ["made", "segment_lengths", "dilation_rates", "offsets", "windows"])
    fields.choice("made of how", how["made"], MADE)
    fields.choice("offsets of how", how["offsets"], RULES)
    fields.at_most("tokens", case.tokens, _MOST_TOKENS)
    fields.at_most("heads", case.heads, _MOST_HEADS)
    lengths, rates = how["segment_lengths"], how["dilation_rates"]
    if not isinstance(lengths, list) or not isinstance(rates, list) or not 1 <= len(lengths) == len(rates) <= 3:
        raise ValueError(f"segment_lengths and dilation_rates of how are {lengths!r} and {rates!r}; they must be lists "
                         "of one to three entries, equally long")  # fmt: skip
    for name, values in (("segment_lengths", [x for x in lengths if x is not None]), ("dilation_rates", rates)):
        for value in values:
            fields.integer(f"an entry of {name} of how", value, 1, 1024)
    windows = _windows_of(how)
    if not isinstance(windows, list) or len(windows) != len(rates):
        raise ValueError(f"windows of how is {windows!r}; it must be a list of {len(rates)} entries")
    for window in (window for window in windows if window is not None):
        fields.integer("an entry of windows of how", window, 0, 1024)
    if how["made"] == "head_groups" and case.heads < len(rates):
        raise ValueError(f"heads is {case.heads}; it must be at least {len(rates)}, the number of groups")


PATTERNS_ARE_AS_PUBLISHED = Law("patterns are as published", _draw, check_definition, _premise, share=0.05, most=60)
