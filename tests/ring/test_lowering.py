"""The plan lowered to kernel calls: it is made once for a setting, and a call then costs little."""

from __future__ import annotations

import cProfile
import gc
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ring.consensus
import ring.execute
import ring.lowering
import ring.programs
from ring import Layout, Pattern, ring_attention
from ring.caching.bounded_cache import BoundedCache
from ring.compute.kernel_choice import make_kernel_setting
from ring.compute.kernels.kernel import Scores
from ring.lowering import BlockPrograms, Program
from ring.plan.exchanges import DIRECT
from ring.plan.plan import plan_of
from tests.support.attention_cases import PATTERNS, inputs

# Functions of this project in a forward and a backward: 118, with 55 more if a program is made again, and with 88 more
# if a call is validated again. The bound lies in the middle. Functions of torch and Python differ by version.
MAX_CALLS = 145
FOLDER = str(Path(ring.__file__).parent)


def test_the_page_shows_the_program_of_the_example() -> None:
    pattern = Pattern.longnet(segment_lengths=(8,), dilation_rates=(2,), heads=2, causal=True)
    plan = plan_of(pattern, Layout.zigzag(16, 2), 0, heads=2, kv_heads=2, exchange=DIRECT, bucket=8)
    q = torch.empty(1, 8, 2, 4)
    shown = str(BlockPrograms(plan, q, make_kernel_setting("auto", q, q, q, Scores(0.5))).forward)
    assert textwrap.indent(shown, "    ") in str(ring.lowering.__doc__)


@pytest.mark.parametrize("lse", (False, True))
def test_a_program_is_made_once_for_a_setting(lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forwards and backwards of equal calls, whose strides differ; another type is another setting."""
    lowered: list[bool] = []

    class Counted(BlockPrograms):
        def _lower(self, q: torch.Tensor, backward: bool, *how: bool) -> Program:
            lowered.append(backward)
            return super()._lower(q, backward, *how)

    monkeypatch.setattr(ring.programs, "BlockPrograms", Counted)
    monkeypatch.setattr(ring.execute, "_programs", BoundedCache(8))
    for dtype, strided in ((torch.float64, False), (torch.float64, True), (torch.float32, False)):
        q, k, v, dout, dlse = inputs(dtype=dtype)
        if strided:
            q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        found = ring_attention(q, k, v, PATTERNS["longnet causal"], Layout.contiguous(17, 1), return_lse=True)
        torch.autograd.grad(found[: 2 if lse else 1], leaves, (dout, dlse)[: 2 if lse else 1])
    assert lowered == [False, True] * 2


def counted(act: Callable[[], object]) -> int:
    """Calls of this project's functions, once everything is settled."""
    for _ in range(3):
        act()
    profile = cProfile.Profile()
    gc.collect()
    gc.disable()  # Hypothesis has callbacks of the garbage collector, which would count as well
    try:
        profile.enable()
        act()
        profile.disable()
    finally:
        gc.enable()
    # pstats merges functions of one file, line and name, as the __init__ of several dataclasses are: it counts too few.
    called = [(entry.code, entry.callcount) for entry in profile.getstats()]  # a built-in function is a string
    return sum(n for code, n in called if not isinstance(code, str) and code.co_filename.startswith(FOLDER))


@pytest.mark.parametrize("causal", (False, True))
def test_a_call_on_one_rank_makes_few_calls(causal: bool) -> None:
    q, k, v = (torch.randn(1, 256, 4, 32, requires_grad=True) for _ in range(3))
    pattern, layout = Pattern.dense(causal=causal), Layout.contiguous(256, 1)

    def step() -> None:
        out = ring_attention(q, k, v, pattern, layout)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()

    assert counted(step) <= MAX_CALLS
    for anew in (ring.execute._programs, ring.consensus._settings):

        def made_anew(anew: BoundedCache[Any, Any] = anew) -> None:
            anew.clear()
            step()

        assert counted(made_anew) > MAX_CALLS
