"""Long problems and links between ranks, judged: every quantity, by the bounds of the device that computes it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from reference.fast_oracle import QUANTITIES
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.transport import SoloTransport
from tests.support.printed import recording
from tests.support.ranks import Ranks
from verification.check.expectation import expect
from verification.cli import validate
from verification.failures import WrongResult
from verification.problems import links, long_problems
from verification.problems.long_problems import Judgement, LongProblem
from verification.report.report import Report
from verification.run.rank import CallResult


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


FINE = Judgement(300, dict.fromkeys(QUANTITIES, 0.5), (), 0.0, 0)


@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("whole", [True, False])
def test_each_quantity_is_judged(monkeypatch: pytest.MonkeyPatch, name: str, whole: bool) -> None:
    real, at = long_problems.run_attention, QUANTITIES.index(name)
    if not whole:
        monkeypatch.setitem(long_problems.WHOLE, "cpu", 0)

    def spoilt(*arguments: Any) -> CallResult:
        run: Any = real(*arguments)
        return replace(run, results=(*run.results[:at], run.results[at].detach() + 1.0, *run.results[at + 1 :]))

    seen = long_problems.judge(SoloTransport(), LongProblem(1, 300, "dense float32").case("cpu"), spoilt)
    assert [other for other, ratio in seen.ratios.items() if ratio > 1] == [name]
    with pytest.raises(WrongResult, match=f"on rank 1: .*{name} of token"):
        long_problems.verdict(LongProblem(2, 300, "dense float32"), [FINE, seen])


@pytest.mark.parametrize("backend, device", [("gloo", "cpu"), ("nccl", "cuda")])
def test_long_problems_use_bounds_of_their_device(tmp_path: Path, backend: str, device: str) -> None:
    problem = LongProblem(1, 300, "dense bfloat16")
    ranks: Any = Mock(timeout=1.0, device=device, collect=lambda: [FINE])
    ranks.name = backend
    validate.run_long(Report(recording()), ranks, problem, tmp_path)
    assert [call.args[1].device for call in ranks.submit.mock_calls] == [device]
    assert ranks.last == {"kind": "long", "long": asdict(problem)}, "saved as that, not as a Case"


def test_a_nan_is_not_within_its_bound() -> None:
    x, zero = torch.tensor([[[torch.nan]], [[torch.inf]], [[-torch.inf]]]), torch.zeros(3, 1, 1)
    exact = torch.tensor([[[0.0]], [[0.0]], [[-torch.inf]]])
    assert long_problems._ratio(x, exact, zero + 1).flatten().tolist() == [torch.inf, torch.inf, 0.0]
    assert long_problems._ratio(zero, zero, zero).flatten().tolist() == [0.0, 0.0, 0.0]


def test_faults_of_links_are_named() -> None:
    links.check_round([[2, 1, 0], [0, 2, 1], [1, 0, 2]])
    with pytest.raises(WrongResult, match=r"rank 1 got the numbers \[2, 0, 1\]; they must be \[0, 2, 1\]"):
        links.check_round([[2, 1, 0], [2, 0, 1], [1, 0, 2]])
    said = {what: f"it is not {word}" for what, word in links.NAMED.items()}
    links.check_refusals([said, said])
    with pytest.raises(WrongResult, match="rank 1 said nothing to an empty send"):
        links.check_refusals([said, said | {"an empty send": ""}])
    fast, slow = [(False, 1, 1e-3), (False, 2, 1e-3)], [(False, 1, 2e-3), (False, 2, 4e-3), (True, 1, 8e-3)]
    found = [(x.between, x.ways, round(x.rate, 9)) for x in links.check_transfers(10**6, [([], fast), ([], slow)])]
    assert found == [(False, 1, 0.5), (False, 2, 0.5), (True, 1, 0.125)]
    seen = {tuple(links.contents(64, sender, shift).tolist()) for sender in range(8) for shift in (-1, 1)}
    assert len(seen) == 16


def _timed_on(hosts: tuple[int, ...]) -> tuple[list[str], list[links.Timing]]:
    with patch.object(ProcessGroupTransport, "hosts", hosts):
        return links.transfers(64)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("hosts", "kinds", "said"),
    [
        ((0, 0, 0), [{False}] * 3, "^links, messages of 64 bytes: [^;]*$"),
        ((0, 1, 0), [{False, True}, {True}, {False}], "bytes: within a host .*; between hosts .*both at once$"),
        ((0, 1, 2), [{True}] * 3, "bytes: between hosts [^;]*$"),
    ],
)
def test_links_within_hosts_and_between_are_timed_apart(
    ranks: Ranks, hosts: tuple[int, ...], kinds: list[set[bool]], said: str
) -> None:
    answers = ranks(3).run(_timed_on, hosts)
    assert [{between for between, _, _ in timings} for _, timings in answers] == kinds
    rates = links.check_transfers(64, answers)
    both = sorted(set.union(*kinds))
    assert [(rate.between, rate.ways) for rate in rates] == [(x, ways) for x in both for ways in (-1, 1, 2)]
    assert re.search(said, links.fastest(rates)) and len(links.table(rates)) == 2 * len(both)
    rates += links.check_transfers(64, [([], [(False, ways, 1.0) for ways in (1, -1, 2)])], shared=True)
    assert "through shared memory" in links.fastest(rates) and len(links.table(rates)) == 2 * len(both) + 2


def test_a_long_case_of_ones_own() -> None:
    line = "tokens=100 heads=4 kv_heads=2 head_dim=12 dtype=bfloat16 causal=true lse=returned"
    problem = LongProblem.own(1, line)
    assert LongProblem(**json.loads(json.dumps(asdict(problem)))) == problem, "as a saved record has it"
    case = problem.case("cpu")
    assert (case.world, case.tokens, case.head_dim, case.dtype) == (1, 100, 12, "bfloat16")
    ratios = long_problems.verdict(problem, [long_problems.judge(SoloTransport(), case)])
    assert set(ratios) == {"out", "lse", "dq", "dk", "dv"} and 0 < max(ratios.values()) < 1
    for wrong, said in (("world=2 tokens=9", "world is 2"), ("lse=alone", "lse is 'alone'"), ("tokens=9 x=1", "'x=1'")):
        with pytest.raises(ValueError, match=said):
            LongProblem.own(1, wrong)
