"""The columns of the conformance table: Cases that are made to have a feature, and the checks that judge it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
RESULTS = ("answers", "unseen", "finite", "values", "gradients")  # checks of a whole forward and backward
_FEWEST = 8  # tokens of a Case that gets documents, a window or cuts
_numbers = st.integers(0, 2**24 - 1)


@dataclass(frozen=True)
class Column:
    """A column.

    about   what its Cases have, in words
    force   gives a drawn Case the feature; a ValueError draws again
    has     True for a Case with the feature: a claim may take it away again
    checks  names in `checks.CHECKS` that judge the cell
    law     judges the cell in place of checks
    """

    name: str
    about: str
    force: Callable[[Draw, Case], Case] = lambda draw, case: case
    has: Callable[[Case], bool] = lambda case: True
    checks: tuple[str, ...] = RESULTS
    law: Law | None = None

    def draw(self, world: int, claims: Claims) -> st.SearchStrategy[Case]:
        """Return the strategy of its Cases: drawn, given the feature, then claimed."""
        return _subjects(self, world, claims)

    def validate(self, case: Case) -> None:
        """Raise ValueError for a Case without the feature."""
        if not self.has(case):
            raise ValueError(f"the Case is not of the column {self.name!r}: {self.about}")

    def judged(self, case: Case, expectation: Expectation, observations: Sequence[Observation]) -> dict[str, float]:
        """Return the worst error / bound of each property. Raises the first failure. In the column of lse the exact
        output takes the place of the ranks': a wrong one has a column of its own."""
        if self.name == "lse":
            exact = expectation.exact["out"]
            shards = zip(observations, case.shards().positions, strict=True)
            observations = [replace(x, out=exact[:, list(positions)]) for x, positions in shards]
        return properties.check(case, expectation, list(observations), self.checks)


@st.composite
def _subjects(draw: Draw, column: Column, world: int, claims: Claims) -> Case:
    case: Any = draw(cases_of_others(world))
    case = replace(case, again="alike")
    try:
        case = column.force(draw, case)
    except ValueError:  # two features of the Case exclude each other
        reject()
    case = claimed(claims, case)
    return case if column.has(case) else reject()


def _longer(case: Case, **changes: Any) -> Case:
    return case.lengthened(max(case.tokens, _FEWEST), cuts=None, keys=None, **changes)


def _forward(draw: Draw, case: Case) -> Case:
    return replace(case, backward=False, lse="unused")


def _lse(draw: Draw, case: Case) -> Case:
    return replace(case, backward=False, lse="returned")


def _packed(draw: Draw, case: Case) -> Case:
    case = _longer(case)
    lengths = lengths_of(draw, draw(st.sampled_from(WAYS)), case.tokens, ends_of(case.shards()))
    return replace(case, pattern=replace(case.pattern, documents=lengths))


def _window(draw: Draw, case: Case) -> Case:
    case = _longer(case)
    first, *others = case.pattern.branches
    window = window_of(first, draw(_numbers), case.tokens, -(-case.tokens // len(case.ranks)))
    first = replace(first, window=min(window, case.tokens // 2))
    return replace(case, pattern=replace(case.pattern, branches=(first, *others)))


def _grouped(draw: Draw, case: Case) -> Case:
    heads, kv_heads = draw(st.sampled_from([pair for pair in HEADS if pair[0] > pair[1]]))
    pattern = case.pattern
    if any(branch.heads is not None or isinstance(branch.offset, tuple) for branch in pattern.branches):
        pattern = Pattern.dense(pattern.causal, pattern.documents)
    return replace(case, heads=heads, kv_heads=kv_heads, pattern=pattern)


def _cuts(draw: Draw, case: Case, empty: bool) -> Case:
    """Cut the sequence at drawn places; empty: one rank, at least, gets none of it, else each gets a token."""
    case = replace(_longer(case).for_any_ranks(), group=None)
    ranks, tokens = case.world, max(case.tokens, case.world)
    if ranks == 1:
        reject()
    places = st.integers(0, tokens) if empty else st.integers(1, tokens - 1)
    inner = draw(st.lists(places, min_size=ranks - 1, max_size=ranks - 1, unique=not empty))
    cuts = [0, *sorted(inner), tokens]
    if empty:
        at = draw(st.integers(0, ranks - 2))
        cuts[at + 1] = cuts[at + draw(st.sampled_from((0, 2)))]  # the rank at `at`, or the next one
    return case.lengthened(tokens, cuts=tuple(cuts))


def _counts(case: Case) -> tuple[int, ...]:
    return tuple(case.shards().counts)


def _repeated(draw: Draw, case: Case) -> Case:
    return replace(case, again=draw(st.sampled_from(("alike", "between", "pipelined"))))


def _hides(case: Case) -> bool:
    return any(x.window is not None and x.window < case.tokens - 1 for x in case.pattern.branches)


COLUMNS = (
    Column(
        "output", "a forward alone", _forward, lambda case: not case.backward,
        ("answers", "unseen", "finite", "values"),
    ),
    Column("gradients", "a backward", has=lambda case: case.backward, checks=("answers", "gradients")),
    Column(
        "lse", "a forward that returns lse", _lse, lambda case: case.lse != "unused" and not case.backward,
        ("answers", "unseen", "finite", "values"),
    ),
    Column(
        "packed", "two documents or more", _packed,
        lambda case: sum(map(bool, case.pattern.documents or ())) > 1,
    ),
    Column("windows", "a window shorter than the sequence", _window, _hides),
    Column(
        "sinks", "a sink for each head", lambda draw, case: replace(case, sinks=draw(st.sampled_from(SINKS))),
        lambda case: case.sinks is not None,
    ),
    Column(
        "softcap", "bounded scores",
        lambda draw, case: replace(case, softcap=draw(st.sampled_from((50.0, 30.0, 1.0, 0.25)))),
        lambda case: case.softcap is not None,
    ),
    Column("GQA", "fewer key/value heads than heads", _grouped, lambda case: case.heads > case.kv_heads),
    Column(
        "uneven shards", "shards of different lengths, none empty", lambda draw, case: _cuts(draw, case, empty=False),
        lambda case: len(set(_counts(case))) > 1 and min(_counts(case)) > 0,
    ),
    Column(
        "empty ranks", "a rank without tokens", lambda draw, case: _cuts(draw, case, empty=True),
        lambda case: 0 in _counts(case),
    ),
    Column("repeatable", "a second run", _repeated, checks=("answers", "inputs", "repeat")),
    Column("same bits on any ranks", "other ranks, another order, or alone in a batch", law=SAME_BITS),
)  # fmt: skip
