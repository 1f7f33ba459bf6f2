"""The cause of a failure, from its minimal Case and further ones: a minimal Case alone is ambiguous."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from reference.fast_oracle import Expectation
from verification.case import Case
from verification.causes.example import Example, listed
from verification.causes.explain import Cause, agree, explain, tells
from verification.failures import RankFailure, WrongResult
from verification.run.backends import Backend, Unavailable
from verification.run.observation import Observations
from verification.strategies.cases import cases

Run = Callable[[Backend, Case], tuple[Expectation, Observations]]
Claim = Callable[[Case], Case | None]

DRAWN = 8
MOST = 3  # mistakes that are named together
RUNS = 3  # of a Case whose results no mistake explains
CHANGES = "changed from one run to the next: memory is read before it is written, such as a buffer before its wait"
PRECISE = ("float64", "float32", "float16")  # dtypes in which rounding hides least, before others
LARGER = ((4, 2, 4), (6, 3, 3), (8, 2, 8), (5, 3, 5))  # tokens on a rank, heads of a group, head_dim


def find_cause(run: Run, backend: Backend, minimal: Case, first: Case, claim: Claim, world: int) -> str | None:
    """Return a sentence on the minimal Case, or on the first larger one whose errors are large enough to tell: the
    mistake that explains it and larger Cases like it; else None. Up to MOST mistakes between which no Case decides are
    named together, the plainest first. Results that no mistake explains are computed again: they may change.

    Others, `first` and drawn ones, may fail for another reason, so they only narrow. If causes are left that say
    different things, larger Cases run on a world of another size, too.
    """

    def agreed(causes: list[Cause], cases: Iterable[Case], most: int) -> list[Cause]:
        """Return the causes that the Cases allow. No further one runs when at most `most` are left."""
        for case in cases:
            if len(sentences(causes)) <= most:
                break
            causes = agree(causes, case, *run(backend, case))
        return causes

    try:
        further = iter([minimal, *larger_cases(minimal, claim)])
        causes = agreed(_explain_first(run, backend, further), further, 0)
        causes = causes or _explain_by_earlier_calls(run, backend, larger_cases(minimal, claim))
        if not causes and (changing := _changing(run, backend, minimal)):
            return changing
    except (WrongResult, RankFailure):  # a wrong shape, a crash
        return None
    with suppress(WrongResult, RankFailure, Unavailable):  # go on with what is known
        causes = agreed(causes, [first, *drawn_cases(minimal, claim)], 1) or causes
        if len(sentences(causes)) > 1 and world != minimal.world:
            try:
                backend.start(world)
                causes = agreed(causes, larger_cases(replace(minimal.for_any_ranks(), world=world), claim), 1) or causes
            finally:
                backend.start(minimal.world)
    return "; or ".join(sentences(causes)) if 0 < len(sentences(causes)) <= MOST else None


def _explain_first(run: Run, backend: Backend, cases: Iterable[Case]) -> list[Cause]:
    """Return the mistakes that explain the first Case which can tell."""
    for case in cases:
        if tells(case, *(results := run(backend, case))):
            return explain(case, *results)
    return []


def _changing(run: Run, backend: Backend, case: Case) -> str | None:
    """Return a sentence that names the results which change when a Case is run again; None if none does."""
    first, *others = (Example(case, *run(backend, case)) for _ in range(RUNS))
    changing = [name for name in first.observed if any(first.differs(name, other.observed[name]) for other in others)]
    return f"{listed(changing)} {CHANGES}" if changing else None


def sentences(causes: Iterable[Cause]) -> list[str]:
    return list(dict.fromkeys(cause.sentence for cause in causes))


def _explain_by_earlier_calls(run: Run, backend: Backend, cases: Sequence[Case]) -> list[Cause]:
    """Return the mistakes that explain every Case, also by a call of the same sizes that ran before it."""
    causes: list[Cause] | None = None
    for case in cases:
        earlier = replace(case, seed=case.seed + 1)
        run(backend, earlier)
        results = run(backend, case)
        causes = explain(case, *results, earlier) if causes is None else agree(causes, case, *results, earlier)
    return causes or []


def larger_cases(case: Case, claim: Claim) -> list[Case]:
    """Return Cases like a minimal one, of sizes that distinguish mistakes."""
    larger, kv_heads = [], min(2, case.heads)
    for length, group, dim in LARGER:
        tokens = max(case.tokens, length * len(case.ranks))
        longer = case.lengthened(tokens, cuts=None, batch=2, head_dim=dim, seed=length)
        with suppress(ValueError):  # the pattern depends on the number of heads
            heads = kv_heads * (group if case.heads > case.kv_heads else 1)
            longer = replace(longer, heads=heads, kv_heads=kv_heads)
        larger.append(precise(longer, claim))
    return [case for case in larger if case is not None]


def drawn_cases(case: Case, claim: Claim) -> list[Case]:
    """Return further Cases of the same world, always the same ones."""
    drawn: list[Case] = []

    @settings(
        max_examples=DRAWN, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @seeded(0)
    @given(cases(case.world))
    def draw(other: Case) -> None:
        if (claimed := precise(other, claim)) is not None:
            drawn.append(claimed)

    draw()
    return drawn


def precise(case: Case, claim: Claim) -> Case | None:
    """Return the Case that the claim makes of it with plain values, in the first dtype that the claim leaves."""
    case = replace(case, values="normal", score_scale=1.0, keys=None)
    claimed = ((dtype, claim(replace(case, dtype=dtype))) for dtype in (*PRECISE, case.dtype))
    return next((nearest for dtype, nearest in claimed if nearest and nearest.dtype == dtype), None)
