"""The cause of a failure, from its minimal Case and further ones: a minimal Case alone is ambiguous."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from reference.fast_oracle import Expectation
from verification.case import Case
from verification.causes.explain import Cause, agree, explain
from verification.failures import RankFailure, VerificationFailure, WrongResult
from verification.run.backends import Backend
from verification.run.observation import Observations
from verification.strategies.cases import cases

Run = Callable[[Backend, Case], tuple[Expectation, Observations]]
Claim = Callable[[Case], Case | None]

DRAWN = 8
# Dtypes in which rounding hides least, and sizes of larger Cases: (tokens on a rank, heads of a group, head_dim, seed).
PRECISE = ("float64", "float32", "float16")
LARGER = ((4, 1, 4, 1), (6, 2, 3, 2), (8, 1, 8, 3), (5, 3, 5, 4))


def find_cause(run: Run, backend: Backend, minimal: Case, first: Case, claim: Claim, world: int) -> str | None:
    """Return a sentence on the minimal Case: the plainest mistake that explains it, larger Cases like it, and others
    if any explains them, too. None if there is none.

    Larger Cases must agree with the cause. Others, `first` and drawn ones, may fail for another reason, so they only
    narrow. If several causes are left, larger Cases run on a world of that size, too.
    """
    causes = explain(minimal, *run(backend, minimal))
    narrowed = list(causes)

    def narrow(larger: Sequence[Case], others: Sequence[Case]) -> None:
        nonlocal causes, narrowed
        for case in (*larger, *others):
            if not causes or (case in others and len(narrowed) < 2):
                return
            try:
                expectation, observations = run(backend, case)
            except WrongResult:
                continue
            if case in larger:
                causes = agree(causes, case, expectation, observations)
            narrowed = agree([x for x in narrowed if x in causes], case, expectation, observations) or causes

    if causes:
        narrow(larger_cases(minimal, claim), [first, *drawn_cases(minimal, claim)])
    if len({cause.sentence for cause in narrowed}) > 1 and world != minimal.world:
        backend.start(world)
        try:
            narrow(larger_cases(dataclasses.replace(minimal, world=world), claim), ())
        finally:
            backend.start(minimal.world)
    return narrowed[0].sentence if narrowed else None


def larger_cases(case: Case, claim: Claim) -> list[Case]:
    """Return Cases like a minimal one, of sizes that tell mistakes apart."""
    found = []
    for length, group, dim, seed in LARGER:
        kv_heads = 1 if case.heads == 1 else 2
        heads = (
            kv_heads * (case.heads // case.kv_heads if group == 1 else group)
            if case.heads > case.kv_heads
            else kv_heads
        )
        try:
            larger = case.lengthened(max(case.tokens, length * len(case.ranks)), cuts=None, batch=2, heads=heads,
                                     kv_heads=kv_heads, head_dim=dim, seed=seed)  # fmt: skip
        except ValueError:  # the pattern has the heads of the minimal Case
            larger = case.lengthened(
                max(case.tokens, length * len(case.ranks)), cuts=None, batch=2, head_dim=dim, seed=seed
            )
        found.append(precise(larger, claim))
    return [case for case in found if case is not None]


def precise(case: Case, claim: Claim) -> Case | None:
    """Return the Case that the claim makes of it, with plain values and in the first dtype that it leaves."""
    for dtype in PRECISE:
        claimed = claim(dataclasses.replace(case, values="normal", score_scale=1.0, dtype=dtype))
        if claimed is None or claimed.dtype == dtype:
            return claimed
    return claim(case)


def drawn_cases(case: Case, claim: Claim) -> list[Case]:
    """Return further Cases of the same world."""
    drawn: list[Case] = []

    @settings(max_examples=DRAWN, phases=[Phase.generate], database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @seeded(0)
    @given(cases(case.world))
    def draw(other: Case) -> None:
        if (claimed := precise(other, claim)) is not None:
            drawn.append(claimed)

    draw()
    return drawn
