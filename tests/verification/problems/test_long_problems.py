"""Long problems, judged: rows all or sampled, every quantity, by the bounds of the device that computes them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from reference.exact import QUANTITIES
from ring.comm.transport import SoloTransport
from verification.case import Case
from verification.check.expectation import expect
from verification.cli import validate
from verification.failures import WrongResult
from verification.problems import long_problems
from verification.problems.long_problems import Judgement, LongProblem
from verification.report.report import Report
from verification.run.rank import Pass


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", long_problems.KINDS)
def test_bounds_on_a_device_are_those_of_the_expectation(kind: str, device: str) -> None:
    case = LongProblem(2, 80, kind).case(device)
    wanted = expect(case)
    found = long_problems.expect_rows(case, torch.arange(80), case.tensors()[:4])
    for name in QUANTITIES:
        np.testing.assert_allclose(found.bound[name], wanted.bound[name], rtol=1e-9)
        np.testing.assert_allclose(found.exact[name], wanted.exact[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("whole", [True, False])
def test_rows_are_judged_all_or_sampled(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    case = replace(LongProblem(1, 400, "LongNet float32").case("cpu"), order="striped")
    if not whole:
        monkeypatch.setitem(long_problems.WHOLE, "cpu", 0)
    rows = long_problems.judged_rows(case).tolist()
    assert len(rows) == (400 if whole else long_problems.SAMPLED) and rows == sorted(set(rows))
    assert rows[0] == 0 and rows[-1] == 399
    seen = long_problems.judge(SoloTransport(), case)
    assert seen.wrong == () and seen.rows == len(rows) and 0 < max(seen.ratios.values()) <= 1


@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("whole", [True, False])
def test_each_quantity_is_judged(monkeypatch: pytest.MonkeyPatch, name: str, whole: bool) -> None:
    real = long_problems.attend
    if not whole:
        monkeypatch.setitem(long_problems.WHOLE, "cpu", 0)

    def spoilt(*arguments: Any) -> Pass:
        run = real(*arguments)
        results: list[Any] = list(run.results)
        at = QUANTITIES.index(name)
        result = results[at]
        assert isinstance(result, torch.Tensor)
        results[at] = result.detach() + 1.0
        return replace(run, results=tuple(results))

    monkeypatch.setattr(long_problems, "attend", spoilt)
    seen = long_problems.judge(SoloTransport(), LongProblem(1, 300, "dense float32").case("cpu"))
    assert [other for other, ratio in seen.ratios.items() if ratio > 1] == [name]
    assert any(said.startswith(f"{name} of token ") for said in seen.wrong)
    fine = Judgement(300, dict.fromkeys(QUANTITIES, 0.5), (), 0.0, 0)
    with pytest.raises(WrongResult, match=f"on rank 1: .*{name} of token"):
        long_problems.verdict(LongProblem(2, 300, "dense float32"), [fine, seen])


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "cuda")])
def test_long_problems_are_judged_by_the_bounds_of_the_device_that_computes_them(
    tmp_path: Path, backend: str, device: str
) -> None:
    submitted: list[Case] = []
    problem = LongProblem(1, 300, "dense bfloat16")
    fine = Judgement(300, dict.fromkeys(QUANTITIES, 0.5), (), 0.0, 0)
    table: Any = SimpleNamespace(
        name=backend, timeout=1.0, submit=lambda task, case: submitted.append(case), collect=lambda: [fine]
    )
    validate.run_long(Report(Console(quiet=True)), table, problem, tmp_path)
    assert [case.device for case in submitted] == [device]
    assert table.last == {"long": asdict(problem)}, "saved as that if the processes are ended, not as a Case"


def test_a_nan_is_not_within_its_bound() -> None:
    x, zero = torch.tensor([[[torch.nan]], [[torch.inf]], [[-torch.inf]]]), torch.zeros(3, 1, 1)
    exact = torch.tensor([[[0.0]], [[0.0]], [[-torch.inf]]])
    assert long_problems._ratio(x, exact, zero + 1).flatten().tolist() == [torch.inf, torch.inf, 0.0]
    assert long_problems._ratio(zero, zero, zero).flatten().tolist() == [0.0, 0.0, 0.0]
