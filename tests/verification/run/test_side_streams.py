"""The law of streams is drawn on GPUs alone; its steps hold on a CPU, where there is one order of all work."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from reference.pattern import Pattern
from tests.support.plain_case import plain
from verification.check.laws.streams import STREAMS_DO_NOT_MATTER, check_streams
from verification.run.backends import GlooBackend, SimBackend
from verification.runner import PROFILES, RunPlan, laws_on

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("kind", (SimBackend, GlooBackend))
def test_it_holds_without_streams(kind: type[SimBackend | GlooBackend]) -> None:
    with closing(kind(10.0)) as backend:
        backend.start(2)
        for lse in ("unused", "differentiated", "alone", "apart"):
            case = plain(2, lse=lse, strided=lse == "alone", pattern=Pattern.dense(causal=True))
            assert 0.0 < check_streams(backend, case, {}) < 1.0


@pytest.mark.parametrize(("backend", "drawn"), (("nccl", True), ("gloo", False), ("sim", False)))
def test_it_is_drawn_on_gpus_alone(backend: str, drawn: bool) -> None:
    laws = laws_on(RunPlan((2,), PROFILES["quick"], None, 1, backend, Path()), 2)
    assert (STREAMS_DO_NOT_MATTER.name in {experiment.name for experiment, _ in laws}) == drawn
