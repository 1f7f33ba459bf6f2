"""The property that the oracle and its twin agree: it holds on drawn Cases, and fails for a defect in either alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from reference import exact, oracle
from tests.support.drawing import draw_many
from tests.support.plain_case import plain
from verification.case import Case
from verification.check import expectation, properties, twin
from verification.draw.cases import cases
from verification.failures import WrongResult

# name -> (what is replaced, by what)
IN_THE_TWIN = {
    "multiplicity lost": ("        p *= count\n", "        p *= seen\n"),
    "gradient of lse left out": ("delta - self.dlse)", "delta)"),
    "probabilities in fp32": ("out = x.p @ v", "out = x.p.astype(np.float32) @ v"),
}
IN_THE_ORACLE = {
    "gradient of lse left out": ("(p @ self.v)).sum(-1, keepdim=True) + dl)", "(p @ self.v)).sum(-1, keepdim=True))"),
    "dead rows not zero": ("(p @ self.v).masked_fill(dead, 0.0)", "(p @ self.v).masked_fill(dead, 1e-300)"),
    "gradients of dead rows": ("dlse[:, :, rows].masked_fill(dead, 0.0)", "dlse[:, :, rows]"),
    "scores in fp32": ("(self.q[:, :, rows] @ self.k.mT)", "(self.q[:, :, rows].float() @ self.k.mT.float()).double()"),
}


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return [case for case in draw_many(cases(2), 100) if twin.is_compared(case)]


def planted(module: ModuleType, change: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with the change, beside the real one."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(change[0]) == 1, change
    made = ModuleType(f"{module.__name__}_planted")
    monkeypatch.setitem(sys.modules, made.__name__, made)  # where dataclasses look their annotations up
    exec(compile(source.replace(*change), module.__file__, "exec"), made.__dict__)
    return made


def disagree(drawn: list[Case]) -> bool:
    for case in drawn:
        try:
            properties.check(case, properties.prepare(case), [], ("oracle",))
        except WrongResult as failure:
            return str(failure).startswith("oracle: ") and failure.broken == "oracle and its twin agree"
    return False


def test_they_agree_far_within_what_rounding_allows(drawn: list[Case]) -> None:
    assert len(drawn) > 60
    for case in drawn:
        ratios = twin.check_twin(case, properties.prepare(case), [])
        assert set(ratios) == set(exact.QUANTITIES) and all(0 <= ratio < 0.5 for ratio in ratios.values())


@pytest.mark.parametrize("name", IN_THE_TWIN)
def test_a_defect_in_the_twin_alone_is_found(name: str, drawn: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = planted(exact, IN_THE_TWIN[name], monkeypatch)
    monkeypatch.setattr(expectation, "evaluate", wrong.evaluate)
    monkeypatch.setattr(twin, "evaluate", wrong.evaluate)
    assert disagree(drawn)


@pytest.mark.parametrize("name", IN_THE_ORACLE)
def test_a_defect_in_the_oracle_alone_is_found(name: str, drawn: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = planted(oracle, IN_THE_ORACLE[name], monkeypatch)
    monkeypatch.setattr(twin, "attention_and_gradients", wrong.attention_and_gradients)
    assert disagree(drawn)


def test_what_is_too_large_for_the_oracle_is_left_out_and_not_counted() -> None:
    large = plain(1, tokens=129, heads=1, kv_heads=1)
    (looked_at,) = (one for one in properties.PROPERTIES if "oracle" in one.checks)
    assert 129**2 > twin.MOST_SCORES >= 128**2
    assert not looked_at.concerns(large) and looked_at.concerns(replace(large, tokens=128))
    assert twin.check_twin(large, expectation.expect(large), []) == {}


def test_bounds_that_know_nothing_allow_anything_and_nan_is_within_none() -> None:
    for oracle_, twin_, allowed, held in (
        (np.nan, 1.0, np.inf, True),
        (np.inf, np.inf, 0.0, True),
        (np.nan, 1.0, 1.0, False),
        (1.0, 1.5, 0.0, False),
        (0.0, 0.0, 0.0, True),
    ):
        values = [np.array([x]) for x in (oracle_, twin_, allowed)]
        if held:
            assert twin._compare("out", *values) == 0.0
        else:
            with pytest.raises(WrongResult, match="oracle: out is"):
                twin._compare("out", *values)
