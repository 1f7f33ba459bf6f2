"""The oracle and its twin agree: the property holds on drawn Cases, and fails for a spoilt quantity of the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from reference.fast_oracle import QUANTITIES
from tests.support.drawing import draw_many
from tests.support.plain_case import plain
from verification.case import Case
from verification.check import oracle_agreement, properties
from verification.check.expectation import expect
from verification.failures import WrongResult
from verification.run.observation import RESULTS
from verification.strategies.cases import cases


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return [case for case in draw_many(cases(2), 100) if oracle_agreement.is_compared(case)]


def test_oracle_and_twin_agree_within_rounding(drawn: list[Case]) -> None:
    assert len(drawn) > 60
    for case in drawn:
        ratios = oracle_agreement.check_twin(case, properties.prepare(case), [])
        assert set(ratios) == {*QUANTITIES, *(["dsinks"] if case.sinks else [])} and all(
            0 <= ratio < 0.5 for ratio in ratios.values()
        )


@pytest.mark.parametrize(
    "name, spoil",
    [*((name, lambda x: x * (1 + 1e-9)) for name in RESULTS), ("out", lambda x: torch.where(x == 0, 1e-300, x))],
)
def test_deviations_of_the_oracle_are_found(
    name: str, spoil: Any, drawn: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, at = oracle_agreement.attention_and_gradients, RESULTS.index(name)

    def spoilt(*given: Any, **options: Any) -> Any:
        found = real(*given, **options)
        return *found[:at], *map(spoil, found[at : at + 1]), *found[at + 1 :]

    monkeypatch.setattr(oracle_agreement, "attention_and_gradients", spoilt)
    with pytest.raises(WrongResult, match=f"^oracle: {name} is ") as caught:
        for case in drawn:
            properties.check(case, properties.prepare(case), [], ("oracle",))
    assert caught.value.broken == "oracle and its twin agree"


def test_oversized_cases_are_skipped() -> None:
    large = plain(1, tokens=129, heads=1, kv_heads=1)
    (looked_at,) = (one for one in properties.PROPERTIES if "oracle" in one.checks)
    assert not looked_at.concerns(large) and looked_at.concerns(replace(large, tokens=128))
    assert oracle_agreement.check_twin(large, expect(large), []) == {}
    nan, inf, one, zero = (np.array([x]) for x in (np.nan, np.inf, 1.0, 0.0))
    assert oracle_agreement._compare("out", nan, one, inf) == oracle_agreement._compare("out", inf, inf, zero) == 0.0
    with pytest.raises(WrongResult, match="oracle: out is nan"):
        oracle_agreement._compare("out", nan, one, one)
