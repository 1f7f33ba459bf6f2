"""The columns of the conformance table: Cases that are made to have a feature, and the checks that judge it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypothesis import reject
from hypothesis import strategies as st

from reference.fast_oracle import Expectation
from reference.pattern import Pattern
from verification.case import SINKS, Case
from verification.check import properties
from verification.check.attention_on_ranks import Claims, claimed
from verification.check.laws import Law
from verification.check.laws.same_bits import SAME_BITS
from verification.run.observation import Observation
from verification.strategies.cases import HEADS, cases_of_others
from verification.strategies.documents import WAYS, ends_of, lengths_of, window_of

Draw = st.DrawFn
OUTPUT = ("answers", "unseen", "finite", "values")  # checks of a forward
_FEWEST = 8  # tokens that are drawn
_GROUPED = st.sampled_from([pair for pair in HEADS if pair[0] > pair[1]])
_number = st.integers(0, 2**24 - 1)


@dataclass(frozen=True, eq=False)
class Column:
    """A column.

    about   what its Cases have, in words
    has     True for a Case with the feature: a claim may take it away again
    force   gives a drawn Case the feature; a ValueError draws again
    checks  names in `checks.CHECKS` that judge the cell
    law     judges the cell in place of checks
    """

    name: str
    about: str
    has: Callable[[Case], bool] = lambda case: True
    force: Callable[[Draw, Case], Case] = lambda draw, case: case
    checks: tuple[str, ...] = (*OUTPUT, "gradients")
    law: Law | None = None

    def draw(self, world: int, claims: Claims) -> st.SearchStrategy[Case]:
        """Return the strategy of its Cases: drawn, given the feature, then claimed."""
        return _subjects(self, world, claims)

    def validate(self, case: Case) -> None:
        """Raise ValueError for a Case without the feature."""
        if not self.has(case):
            raise ValueError(f"the Case is not of the column {self.name!r}: {self.about}")

    def judge(self, case: Case, expectation: Expectation, observations: Sequence[Observation]) -> dict[str, float]:
        """Return the worst error / bound of each property. Raises the first failure. In the column of lse the exact
        output takes the place of the ranks': a wrong one has a column of its own."""
        if self.name == "lse":
            shards = zip(observations, case.shards().positions, strict=True)
            observations = [replace(x, out=expectation.exact["out"][:, list(own)]) for x, own in shards]
        return properties.check(case, expectation, list(observations), self.checks)


@st.composite
def _subjects(draw: Draw, column: Column, world: int, claims: Claims) -> Case:
    case = draw(cases_of_others(world))
    try:
        case = column.force(draw, _plain(case))
    except ValueError:  # two features of the Case exclude each other
        reject()
    case = claimed(claims, case)
    return case if column.has(case) else reject()


def _plain(case: Case) -> Case:
    """Return the Case without the features of columns, in shards of one length: a fault in one column shows in others
    only if it does not need the feature."""
    pattern, unit = case.pattern, 6 * len(case.ranks)  # zigzag has two parts a rank, dealt three
    branches = tuple(replace(branch, window=None) for branch in pattern.branches)
    return replace(
        case, tokens=-(-max(case.tokens, _FEWEST) // unit) * unit, cuts=None, keys=None, kv_heads=case.heads,
        pattern=replace(pattern, branches=branches, documents=None), sinks=None, softcap=None, again="alike",
    )  # fmt: skip


def _packed(draw: Draw, case: Case) -> Case:
    lengths = lengths_of(draw, draw(st.sampled_from(WAYS)), case.tokens, ends_of(case.shards()))
    return replace(case, pattern=replace(case.pattern, documents=lengths))


def _windowed(draw: Draw, case: Case) -> Case:
    first, *others = case.pattern.branches
    window = window_of(first, draw(_number), case.tokens, -(-case.tokens // len(case.ranks)))
    branches = (replace(first, window=min(window, case.tokens // 2)), *others)
    return replace(case, pattern=replace(case.pattern, branches=branches))


def _grouped(draw: Draw, case: Case) -> Case:
    (heads, kv_heads), pattern = draw(_GROUPED), case.pattern
    if any(branch.heads is not None or isinstance(branch.offset, tuple) for branch in pattern.branches):
        pattern = Pattern.dense(pattern.causal, pattern.documents)
    return replace(case, heads=heads, kv_heads=kv_heads, pattern=pattern)


def _cut(draw: Draw, case: Case, empty: bool) -> Case:
    """Cut the sequence at drawn places; empty: one rank, at least, gets none of it, else each gets a token."""
    case, ranks = replace(case.for_any_ranks(), group=None), case.world
    if ranks == 1:
        reject()
    places = st.integers(0, case.tokens) if empty else st.integers(1, case.tokens - 1)
    cuts = [0, *sorted(draw(st.lists(places, min_size=ranks - 1, max_size=ranks - 1, unique=not empty))), case.tokens]
    if empty:
        at = draw(st.integers(0, ranks - 2))
        cuts[at + 1] = cuts[at + draw(st.sampled_from((0, 2)))]  # the rank at `at`, or the next one
    return replace(case, cuts=tuple(cuts))


def _counts(case: Case) -> tuple[int, ...]:
    return tuple(case.shards().counts)


COLUMNS = (
    Column(
        "output", "a forward alone", lambda case: not case.backward,
        lambda draw, case: replace(case, backward=False, lse="unused"), OUTPUT,
    ),
    Column("gradients", "a backward", lambda case: case.backward, checks=("answers", "gradients")),
    Column(
        "lse", "a forward that returns lse", lambda case: case.lse != "unused" and not case.backward,
        lambda draw, case: replace(case, backward=False, lse="returned"), OUTPUT,
    ),
    Column(
        "packed", "two documents or more", lambda case: sum(map(bool, case.pattern.documents or ())) > 1, _packed,
    ),
    Column(
        "windows", "a window shorter than the sequence",
        lambda case: any(x.window is not None and x.window < case.tokens - 1 for x in case.pattern.branches), _windowed,
    ),
    Column(
        "sinks", "a sink for each head", lambda case: case.sinks is not None,
        lambda draw, case: replace(case, sinks=draw(st.sampled_from(SINKS))),
    ),
    Column(
        "softcap", "bounded scores", lambda case: case.softcap is not None,
        lambda draw, case: replace(case, softcap=draw(st.sampled_from((50.0, 30.0, 1.0, 0.25)))),
    ),
    Column("GQA", "fewer key/value heads than heads", lambda case: case.heads > case.kv_heads, _grouped),
    Column(
        "uneven shards", "shards of different lengths, none empty",
        lambda case: len(set(_counts(case))) > 1 and min(_counts(case)) > 0,
        lambda draw, case: _cut(draw, case, empty=False),
    ),
    Column(
        "empty ranks", "a rank without tokens", lambda case: 0 in _counts(case),
        lambda draw, case: _cut(draw, case, empty=True),
    ),
    Column(
        "repeatable", "a second run", checks=("answers", "inputs", "repeat"),
        force=lambda draw, case: replace(case, again=draw(st.sampled_from(("alike", "between", "pipelined")))),
    ),
    Column("same bits on any ranks", "other ranks, another order, or alone in a batch", law=SAME_BITS),
)  # fmt: skip
