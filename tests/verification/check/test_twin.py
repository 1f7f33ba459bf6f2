"""The property that the oracle and its twin agree: it holds on drawn Cases, and fails for a defect in either alone."""

from __future__ import annotations

import sys
from contextlib import nullcontext
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

# The module, what is replaced in it, by what.
DEFECTS = [
    (exact, "        p *= count\n", "        p *= seen\n"),
    (exact, "delta - self.dlse)", "delta)"),
    (exact, "out = x.p @ v", "out = x.p.astype(np.float32) @ v"),
    (oracle, "(p @ self.v)).sum(-1, keepdim=True) + dl)", "(p @ self.v)).sum(-1, keepdim=True))"),
    (oracle, "(p @ self.v).masked_fill(dead, 0.0)", "(p @ self.v).masked_fill(dead, 1e-300)"),
    (oracle, "dlse[:, :, rows].masked_fill(dead, 0.0)", "dlse[:, :, rows]"),
    (oracle, "(self.q[:, :, rows] @ self.k.mT)", "(self.q[:, :, rows].float() @ self.k.mT.float()).double()"),
]


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return [case for case in draw_many(cases(2), 100) if twin.is_compared(case)]


def test_they_agree_far_within_what_rounding_allows(drawn: list[Case]) -> None:
    assert len(drawn) > 60
    for case in drawn:
        ratios = twin.check_twin(case, properties.prepare(case), [])
        assert set(ratios) == set(exact.QUANTITIES) and all(0 <= ratio < 0.5 for ratio in ratios.values())


@pytest.mark.parametrize("module, was, becomes", DEFECTS, ids=range(len(DEFECTS)))
def test_a_defect_in_one_of_them_alone_is_found(
    module: ModuleType, was: str, becomes: str, drawn: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(str(module.__file__)).read_text()
    assert source.count(was) == 1
    wrong: Any = ModuleType(f"{module.__name__}_planted")  # beside the real one
    monkeypatch.setitem(sys.modules, wrong.__name__, wrong)  # where dataclasses look their annotations up
    exec(compile(source.replace(was, becomes), str(module.__file__), "exec"), wrong.__dict__)
    if module is exact:
        monkeypatch.setattr(expectation, "evaluate", wrong.evaluate)
        monkeypatch.setattr(twin, "evaluate", wrong.evaluate)
    else:
        monkeypatch.setattr(twin, "attention_and_gradients", wrong.attention_and_gradients)
    with pytest.raises(WrongResult, match="^oracle: ") as caught:
        for case in drawn:
            properties.check(case, properties.prepare(case), [], ("oracle",))
    assert caught.value.broken == "oracle and its twin agree"


def test_what_is_too_large_for_the_oracle_is_left_out_and_not_counted() -> None:
    large = plain(1, tokens=129, heads=1, kv_heads=1)
    (looked_at,) = (one for one in properties.PROPERTIES if "oracle" in one.checks)
    assert 129**2 > twin.MOST_SCORES >= 128**2
    assert not looked_at.concerns(large) and looked_at.concerns(replace(large, tokens=128))
    assert twin.check_twin(large, expectation.expect(large), []) == {}


@pytest.mark.parametrize(
    "oracle_, twin_, allowed, held",
    [(np.nan, 1.0, np.inf, True), (np.inf, np.inf, 0.0, True), (np.nan, 1.0, 1.0, False), (1.0, 1.5, 0.0, False)],
)
def test_bounds_that_know_nothing_allow_anything_and_nan_is_within_none(
    oracle_: float, twin_: float, allowed: float, held: bool
) -> None:
    with nullcontext() if held else pytest.raises(WrongResult, match="oracle: out is"):
        assert twin._compare("out", *(np.array([x]) for x in (oracle_, twin_, allowed))) == 0.0
