"""The law of streams is drawn on GPUs alone; its steps hold on a CPU, where there is one order of all work."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from reference.pattern import Pattern
from ring.comm.transport import SoloTransport
from tests.support.plain_case import plain
from verification.check.laws.streams import STREAMS_DO_NOT_MATTER, check_streams
from verification.run.backends import GlooBackend, SimBackend
from verification.run.layouts import strided_copy
from verification.run.rank import attend, same_bits, shards
from verification.run.side_streams import Side, results_on_streams
from verification.runner import PROFILES, RunPlan, laws_on

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("kind", (SimBackend, GlooBackend))
def test_it_holds_without_streams(kind: type[SimBackend | GlooBackend]) -> None:
    backend = kind(10.0)
    backend.start(2)
    try:
        for lse in ("unused", "differentiated", "alone", "apart"):
            case = plain(2, lse=lse, strided=lse == "alone", pattern=Pattern.dense(causal=True))
            assert 0.0 < check_streams(backend, case, {}) < 1.0
    finally:
        backend.close()


def test_the_results_are_those_of_the_call_and_the_inputs_stay() -> None:
    case = plain(1, lse="differentiated", strided=True)
    inputs = shards(case, 0, case.tensors())
    kept = [x.clone() for x in inputs]
    found, wanted = results_on_streams(SoloTransport(), case, inputs), attend(SoloTransport(), case, inputs).results
    assert all(x is not None and y is not None and same_bits(x, y) for x, y in zip(found, wanted, strict=True))
    assert all(same_bits(x, y) for x, y in zip(inputs, kept, strict=True))


def test_a_side_of_a_cpu_only_copies() -> None:
    side, x = Side(torch.device("cpu")), strided_copy(torch.full((2, 3), torch.nan), -1)
    side.follows()
    side.follows(Side(torch.device("cpu")))
    side.joins()
    side.late([x], [torch.ones(2, 3)])
    assert isinstance(side.on(), nullcontext) and torch.equal(x, torch.ones(2, 3))


@pytest.mark.parametrize(("backend", "drawn"), (("nccl", True), ("gloo", False), ("sim", False)))
def test_it_is_drawn_on_gpus_alone(backend: str, drawn: bool) -> None:
    plan = RunPlan((2,), PROFILES["quick"], None, 1, backend, Path())
    names = {experiment.name for experiment, _ in laws_on(plan, 2)}
    assert (STREAMS_DO_NOT_MATTER.name in names) == drawn
    assert ("a group that ends is let go" in names) != drawn
