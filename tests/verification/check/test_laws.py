"""Laws between Cases hold, and a planted defect breaks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from reference.exact import evaluate
from reference.oracle import attention_and_gradients
from reference.pattern import Branch, Pattern
from tests.support.plain_case import plain
from tests.support.planted import plant_16_bit_accumulator, plant_swallowed_error
from verification import runner
from verification.case import Case
from verification.check.expectation import arithmetic_of, inputs_of
from verification.check.laws import LAWS, How, Law
from verification.check.laws.growth import check_growth
from verification.check.laws.mistakes import check_refused
from verification.check.laws.order import permuted
from verification.failures import WrongResult
from verification.report.report import Report
from verification.run.backends import GlooBackend
from verification.run.rank import InputEdit
from verification.search.search import Search

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def ranks() -> Any:
    backend = GlooBackend(10.0)
    backend.start(3)
    yield backend
    backend.close()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_laws_hold(law: Law, ranks: GlooBackend) -> None:
    report = Report(Console(quiet=True))
    report.start_world(3, 8)
    found = Search(runner.law_experiment(law), ranks, report, 3).explore(min(8, law.most), 1)
    assert not found, str(found)


def test_what_hidden_keys_leave_is_what_the_oracle_says() -> None:
    """The law's exact values come from finite numbers and a mask; the oracle is given the infinities."""
    case = plain(
        2,
        tokens=9,
        heads=4,
        kv_heads=2,
        dtype="float64",
        lse="differentiated",
        scale=-0.5,
        pattern=Pattern.dense(causal=True),
    )
    hidden, counted = (0, 1, 5), np.ones((2, 9), bool)
    counted[1, list(hidden)] = False
    finite = InputEdit("hide", -1).apply(case.tensors())
    found = evaluate(replace(inputs_of(case, finite), counted=counted), arithmetic_of(case)).exact
    q, k, v, dout, dlse = InputEdit("hide", -1, positions=hidden, kv_order=(1,)).apply(case.tensors())
    assert (k == -np.inf).sum() == 3 * case.batch
    exact = attention_and_gradients(q, k, v, case.pattern, dout, dlse, scale=-0.5)
    for name, wanted in zip(("out", "lse", "dq", "dk", "dv"), exact, strict=True):
        places = (..., slice(1, None)) if name == "dq" else ...
        np.testing.assert_allclose(found[name][places], wanted[places].numpy(), rtol=1e-9, atol=1e-12)
    assert (found["lse"][:, 2:, :2] == -np.inf).all() and np.isfinite(found["lse"][:, :2]).all()


def broken(prepare: Callable[[], None], law: Callable[..., float], case: Case, how: How) -> str:
    backend = GlooBackend(10.0, prepare)
    backend.start(case.world)
    try:
        with pytest.raises(WrongResult) as caught:
            law(backend, case, how)
    finally:
        backend.close()
    return str(caught.value)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather"))
def test_a_16_bit_accumulator_makes_the_error_grow(exchange: str) -> None:
    case = plain(8, tokens=512, heads=4, kv_heads=4, head_dim=16, dtype="bfloat16", exchange=exchange)
    message = broken(plant_16_bit_accumulator, check_growth, case, {"shift": 1})
    assert "the RMS error of out" in message


def test_a_rank_that_does_not_refuse_is_found() -> None:
    case = plain(2)
    how = {"mistakes": [["one token too many in q", 1]]}
    backend = GlooBackend(2.0, plant_swallowed_error)
    backend.start(2)
    try:
        with pytest.raises(AssertionError):
            check_refused(backend, case, how)
    finally:
        backend.close()


def test_patterns_are_permuted_with_their_heads() -> None:
    pattern = Pattern((Branch(8, 2, (0, 1, 1, 0)), Branch(4, 1, 0, range(0, 2))))
    assert permuted(pattern, (2, 3, 0, 1)) == Pattern((Branch(8, 2, (1, 0, 0, 1)), Branch(4, 1, 0, range(2, 4))))
    assert permuted(pattern, (0, 2, 1, 3)) is None, "heads 0 and 1 would be no range"
