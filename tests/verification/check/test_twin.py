"""The property that the oracle and its twin agree: it holds on drawn Cases, and fails for a defect in either alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings

from reference import exact, oracle
from verification.case import Case
from verification.check import expectation, properties, twin
from verification.draw.cases import cases
from verification.failures import WrongResult

# name -> (what is replaced, by what)
IN_THE_TWIN = {
    "multiplicity lost": ("        p *= count\n", "        p *= seen\n"),
    "later keys seen": ("rows[:, None] >= position", "rows[:, None] + 1 >= position"),
    "segments one too long": ("(position - begin) % length", "(position - begin) % (length + 1)"),
    "gradient of lse left out": ("delta - self.dlse)", "delta)"),
    "documents left out": ("begin = _document_begins(pattern, position)", "begin = position * 0"),
    "scale of dK left out": ("dk = (ds.swapaxes(-1, -2) @ q) * self.scale", "dk = ds.swapaxes(-1, -2) @ q"),
    "probabilities in fp32": ("out = x.p @ v", "out = x.p.astype(np.float32) @ v"),
}
IN_THE_ORACLE = {
    "multiplicity lost": ("e = c * torch.exp(s - top)", "e = (c > 0) * torch.exp(s - top)"),
    "gradient of lse left out": ("(p @ self.v)).sum(-1, keepdim=True) + dl)", "(p @ self.v)).sum(-1, keepdim=True))"),
    "scale of dK left out": ("dk += self.scale * (ds.mT", "dk += (ds.mT"),
    "query heads of a key not added up": ("keys, dim).sum(2)", "keys, dim).mean(2)"),
    "dead rows not zero": ("(p @ self.v).masked_fill(dead, 0.0)", "(p @ self.v).masked_fill(dead, 1e-300)"),
    "gradients of dead rows": ("dlse[:, :, rows].masked_fill(dead, 0.0)", "dlse[:, :, rows]"),
    "scores in fp32": ("(self.q[:, :, rows] @ self.k.mT)", "(self.q[:, :, rows].float() @ self.k.mT.float()).double()"),
}


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    found: list[Case] = []

    @seed(1)
    @settings(max_examples=100, database=None, deadline=None, phases=(Phase.generate,))
    @given(cases(2))
    def collect(case: Case) -> None:
        if twin.is_compared(case):
            found.append(case)

    collect()
    return found


def planted(module: ModuleType, change: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with the change, beside the real one."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(change[0]) == 1, change
    made = ModuleType(f"{module.__name__}_planted")
    monkeypatch.setitem(sys.modules, made.__name__, made)  # where dataclasses look their annotations up
    exec(compile(source.replace(*change), module.__file__, "exec"), made.__dict__)
    return made


def disagreements(drawn: list[Case]) -> int:
    count = 0
    for case in drawn:
        given_ = properties.prepare(case)
        try:
            twin.check_twin(case, given_, [])
        except WrongResult as failure:
            assert str(failure).startswith("oracle: ")
            with pytest.raises(WrongResult) as caught:
                properties.check(case, given_, [], ("oracle",))
            assert properties.broken_by(caught.value) == "oracle and its twin agree"
            count += 1
    return count


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
    assert disagreements(drawn) > 0


@pytest.mark.parametrize("name", IN_THE_ORACLE)
def test_a_defect_in_the_oracle_alone_is_found(name: str, drawn: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = planted(oracle, IN_THE_ORACLE[name], monkeypatch)
    monkeypatch.setattr(twin, "attention_and_gradients", wrong.attention_and_gradients)
    assert disagreements(drawn) > 0


def test_what_is_too_large_for_the_oracle_is_left_out_and_not_counted() -> None:
    case = Case.from_json(
        '{"world": 1, "group": null, "tokens": 129, "order": "contiguous", "cuts": null, "pattern": {"branches": '
        '[{"segment_length": null, "dilation_rate": 1, "offset": 0, "heads": null}], "causal": false}, "batch": 1, '
        '"heads": 1, "kv_heads": 1, "head_dim": 4, "dtype": "float32", "scale": null, "score_scale": 1.0, "values": '
        '"normal", "seed": 0, "exchange": "ring", "bucket": null, "kernel": "math", "lse": "unused", "strided": false}'
    )
    (looked_at,) = (one for one in properties.PROPERTIES if "oracle" in one.checks)
    assert 129**2 > twin.MOST_SCORES >= 128**2
    assert not looked_at.concerns(case) and looked_at.concerns(replace(case, tokens=128))
    assert twin.check_twin(case, expectation.expect(case), []) == {}


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
