"""The result does not depend on the order of batches and heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reference import validators
from reference.pattern import Pattern
from verification.case import Case
from verification.check.attention_on_ranks import AttentionOnRanks, Claims, any_case, claimed
from verification.check.checks import assemble, compared
from verification.check.laws.law import TAME, How, Law, without_overflow, worst_ratio
from verification.run.rank import InputEdit
from verification.strategies.cases import cases, permutation_of


@st.composite
def _draw(draw: st.DrawFn, world: int, claims: Claims = any_case) -> tuple[Case, How]:
    case = without_overflow(draw(cases(world)))
    case = claimed(claims, replace(case, batch=max(case.batch, 2)))
    kv_order = permutation_of(draw, case.kv_heads)
    if permuted(case.pattern, head_order(case, kv_order)) is None:
        kv_order = tuple(range(case.kv_heads))
    return case, {"batch": list(permutation_of(draw, case.batch)), "kv_heads": list(kv_order)}


def head_order(case: Case, kv_order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order of the query heads, which move with their key/value head: order[new] = old."""
    share = case.heads // case.kv_heads
    return tuple(kv * share + member for kv in kv_order for member in range(share))


def permuted(pattern: Pattern, order: tuple[int, ...]) -> Pattern | None:
    """Return the pattern whose head j is head order[j] of this one; None if a branch's heads would not be a range."""
    branches = []
    for branch in pattern.branches:
        offsets = [branch.offsets(len(order))[old] for old in order]
        served = [new for new, offset in enumerate(offsets) if offset is not None]
        if served != list(range(served[0], served[-1] + 1)):
            return None
        present = tuple(offset for offset in offsets if offset is not None)
        heads = None if branch.heads is None else range(served[0], served[-1] + 1)
        offset = present if isinstance(branch.offset, tuple) else branch.offset
        branches.append(replace(branch, offset=offset, heads=heads))
    return replace(pattern, branches=tuple(branches))


def check_permuted(ranks: AttentionOnRanks, case: Case, how: How) -> float:
    """Permuted batches, and permuted heads with their offsets, give permuted results, within their bounds. A matrix
    product may be rounded differently if its operands lie at other addresses."""
    batch, kv = list(how["batch"]), list(how["kv_heads"])
    heads = list(head_order(case, tuple(kv)))
    pattern = permuted(case.pattern, tuple(heads))
    assert pattern is not None
    observations, expectation = ranks.observe_and_expect(case)
    edit = InputEdit("permute", order=tuple(batch), head_order=tuple(heads), kv_order=tuple(kv))
    other_observations, worst = ranks.observe(replace(case, pattern=pattern), edit), 0.0
    for name in compared(case):
        a, b = assemble(case, observations, name), assemble(case, other_observations, name)
        moved = partial(_permuted, name, batch, kv if name in ("dk", "dv") else heads)
        a, allowed = moved(a), moved(2 * expectation.bound[name])
        worst = max(worst, worst_ratio(name, a, b, allowed, how))
    return worst


def _permuted(name: str, batch: list[int], heads: list[int], x: np.ndarray) -> np.ndarray:
    if name == "dsinks":
        return x[heads]
    return x[batch][:, heads] if name == "lse" else x[batch][:, :, heads]


def _check_order(name: str, value: Any, size: int) -> None:
    if sorted(validators.integers(name, value)) != list(range(size)):
        raise ValueError(f"{name} is {value!r}; it must be an order of range({size})")


def _precondition(case: Case, how: How) -> None:
    if permuted(case.pattern, head_order(case, tuple(how["kv_heads"]))) is None:
        raise ValueError(f"kv_heads of how is {how['kv_heads']}; it must leave the heads of every branch a range")


def _permuted_claimed(claims: Claims, case: Case, how: How) -> None:
    pattern = permuted(case.pattern, head_order(case, tuple(how["kv_heads"])))
    other = replace(case, pattern=case.pattern if pattern is None else pattern)
    if claims(other) != other:
        raise ValueError(f"kv_heads of how is {how['kv_heads']}; it must leave a pattern that is claimed")


BATCHES_AND_HEADS_PERMUTE = Law(
    "batches and heads permute", _draw, check_permuted, _precondition, share=0.02,
    how={
        "batch": lambda case, name, value: _check_order(name, value, case.batch),
        "kv_heads": lambda case, name, value: _check_order(name, value, case.kv_heads),
    },
    cases=TAME, of_any="the claim has no values but huge ones", of_others=_permuted_claimed,
)  # fmt: skip
