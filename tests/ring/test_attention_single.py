"""`ring_attention` on one rank, without a process group, against the fp64 oracle."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import ring.execute
from reference.fast_oracle import Inputs, evaluate
from reference.oracle import attention, gradients
from reference.pattern import Branch, Pattern
from ring import Layout
from ring.caching.bounded_cache import BoundedCache
from ring.compute import kernel_calls, kernel_choice
from tests.support import plain_case
from tests.support.attention_cases import LAYOUTS, PACKED, PATTERNS, call, inputs, normal, plain
from verification.check.expectation import arithmetic_of

INF = float("inf")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Scores and outputs here are of size 1 to 10, over at most 40 keys in at most three branches: the unit roundoff of the
# working type times some tens of rounded operations. 16-bit types round probabilities, outputs and gradients too.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 2**-8 * 24, torch.float16: 2**-11 * 24}


def check(tensors: list[torch.Tensor], pattern: Pattern, layout: Layout, with_lse: bool, **options: Any) -> None:
    """Output, lse and gradients of a call against the oracle; tensors are in the layout's order."""
    q, k, v, dout, dlse = tensors
    dtype, bound, positions = q.dtype, TOLERANCE[q.dtype], layout.positions(0)
    at: dict[str, Any] = {"q_positions": positions, "k_positions": positions, "scale": options.get("scale")}
    wanted, wanted_lse = attention(q, k, v, pattern, **at)
    wanted_grads = gradients(q, k, v, pattern, dout, dlse if with_lse else None, **at)
    copies = [x.clone() for x in tensors]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = call(*leaves, pattern, layout, **options)
    assert out.dtype is dtype and out.shape == q.shape and out.is_contiguous()
    assert lse.dtype is dlse.dtype and lse.shape == dlse.shape and lse.is_contiguous()
    torch.testing.assert_close(out.double(), wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=bound, atol=min(bound, 2e-4))
    dead = wanted_lse == -INF
    assert lse[dead].eq(-INF).all() and out[dead.transpose(1, 2)].eq(0).all()
    given = [dout, dlse.masked_fill(dead, 0.0)] if with_lse else [dout]
    got = torch.autograd.grad([out, lse][: len(given)], leaves, given)
    for x, y, leaf in zip(got, wanted_grads, leaves, strict=True):
        assert x.dtype is dtype and x.shape == leaf.shape and x.is_contiguous()
        most = max(1.0, float(y.abs().amax()) if y.numel() else 1.0)
        torch.testing.assert_close(x.double(), y, rtol=bound, atol=bound * most)
    assert got[0][dead.transpose(1, 2)].eq(0).all()
    assert all(x.equal(y) for x, y in zip(tensors, copies, strict=True)), "inputs were changed"


@pytest.mark.parametrize("with_lse", (False, True))
@pytest.mark.parametrize("kernel", ("auto", "math", "flash"))
@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_oracle_agrees_in_fp64(pattern: str, order: str, kernel: str, with_lse: bool) -> None:
    check(inputs(), PATTERNS[pattern], LAYOUTS[order](17), with_lse, kernel=kernel)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ("auto", "math", "flash"))
@pytest.mark.parametrize("order", LAYOUTS)
def test_the_oracle_agrees_on_packed_documents(order: str, kernel: str, dtype: torch.dtype) -> None:
    check(inputs(dtype=dtype), PACKED, LAYOUTS[order](17), True, kernel=kernel)


@pytest.mark.parametrize("kernel", ("auto", "math", "flash"))
@pytest.mark.parametrize("scale", (0.0, -0.5, 2.0, 1))
@pytest.mark.parametrize("pattern", ("dense", "causal", "longnet causal"))
def test_any_scale_is_taken_as_it_is(pattern: str, scale: float, kernel: str) -> None:
    check(inputs(), PATTERNS[pattern], Layout.contiguous(17, 1), False, kernel=kernel, scale=scale)


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("offset", (0, 17, 2**30))
@pytest.mark.parametrize("rate", (2**30 + 1, 2**63 - 1))
def test_rates_and_segments_beyond_the_sequence(rate: int, offset: int, order: str) -> None:
    branches = Branch(9, rate, offset), Branch(None, rate, offset), Branch(5, 2), Branch(2**62, 2, 1), Branch(2**62)
    check(inputs(), Pattern(branches, causal=True), LAYOUTS[order](17), True)


def test_padded_keys_in_a_part_of_their_own() -> None:
    """Keys that a row sees with scores of -inf only, in one kernel call, and others in the next."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 1, 8) for _ in range(3))
    q[..., -1] = 1.0
    k[..., -1] = 0.0
    k[:, :32, :, -1] = -INF
    exact = attention(q, k, v, Pattern.dense())
    for kernel in ("math", "flash", "auto"):
        found = call(q, k, v, Pattern.dense(), Layout.contiguous(64, 1), kernel=kernel, bucket=32)
        for x, y in zip(found, exact, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", (0, 1))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_short_sequences(pattern: str, n: int) -> None:
    check(inputs(n), PATTERNS[pattern], Layout.contiguous(n, 1), True)


def restride(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "dim first":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    if kind.startswith("expanded"):
        return x[tuple(slice(0, 1 if str(dim) in kind else None) for dim in range(4))].expand(x.shape)
    wide = torch.zeros(x.shape[0] + 1, 2 * x.shape[1], x.shape[2] + 2, 2 * x.shape[3], dtype=x.dtype)
    wide[1:, ::2, 1:-1, 1::2] = x
    return wide[1:, ::2, 1:-1, 1::2]


STRIDES = ("heads first", "dim first", "sliced", *(f"expanded {dims}" for dims in ("0", "1", "2", "3", "0123")))


@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("order", ("contiguous", "hilbert"))
@pytest.mark.parametrize("kernel", ("auto", "math"))
def test_strided_inputs(kernel: str, order: str, kind: str) -> None:
    *qkvd, dlse = inputs()
    strided = [restride(x, kind) for x in qkvd]
    assert not any(x.is_contiguous() for x in strided)
    check([*strided, dlse], PATTERNS["longnet causal"], LAYOUTS[order](17), True, kernel=kernel)


def test_one_tensor_as_q_k_and_v() -> None:
    x, _, _, dout, _ = inputs(kv_heads=4)
    x.requires_grad_()
    out = plain(x, x, x, PATTERNS["longnet"], Layout.contiguous(17, 1))
    (got,) = torch.autograd.grad(out, [x], dout)
    torch.testing.assert_close(got, sum(gradients(x, x, x, PATTERNS["longnet"], dout)), rtol=1e-9, atol=1e-9)


def test_huge_half_precision_scores() -> None:
    """Scores of about 10^6 in fp16: finite everywhere, and the right row wins."""
    n = 16
    q = 200 * torch.nn.functional.one_hot(torch.arange(n), n).to(torch.float16)[None, :, None].expand(1, n, 2, n)
    v = normal(1, n, 1, 4 * 4, seed=0, dtype=torch.float16)
    leaves = [x.clone().requires_grad_() for x in (q, q[:, :, :1], v)]
    for kernel in ("auto", "math"):
        out = plain(*leaves, Pattern.dense(), Layout.contiguous(n, 1), scale=25.0, kernel=kernel)
        assert out.equal(v.expand(1, n, 2, n))
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("kernel", ("math", "flash"))
@pytest.mark.parametrize(("score", "least", "most"), ((1e3, 0.0, 1e-4), (1e5, 0.0, 1e-2), (1e7, 0.01, 0.7)))
def test_large_equal_scores_cost_the_last_digit_of_lse(kernel: str, score: float, least: float, most: float) -> None:
    """Equality holds within the bounds: one fp32 number for a row's lse loses the logarithm of how many there are."""
    q, k = torch.full((1, 8, 1, 1), score), torch.ones(1, 8, 1, 1)
    v, dout = torch.randn(2, 1, 8, 1, 1, generator=torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = plain(*leaves, Pattern.dense(), Layout.contiguous(8, 1), kernel=kernel, scale=1.0)
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, dout)), strict=True))
    case = plain_case.plain(1, tokens=8, heads=1, kv_heads=1, head_dim=1, kernel=kernel, scale=1.0)
    given = [x.detach().double().numpy() for x in (q, k, v, dout)]
    wanted = evaluate(Inputs(given[0], given[1], given[2], given[3], None, Pattern.dense(), 1.0), arithmetic_of(case))
    errors = {name: np.abs(x.detach().double().numpy() - wanted.exact[name]) for name, x in found.items()}
    assert all((error <= wanted.bound[name]).all() for name, error in errors.items())
    assert least <= errors["dv"].max() / np.abs(wanted.exact["dv"]).max() <= most


@pytest.mark.parametrize("kernel, name", [("auto", "flash"), ("math", "math")])
def test_kernels_are_chosen_by_head_dim(kernel: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU any dim goes with any kernel, so that results do not tell by what a kernel was chosen."""
    choose, backward = Mock(wraps=kernel_choice.choose), Mock(wraps=kernel_calls.backward)
    monkeypatch.setattr(kernel_choice, "choose", choose)
    monkeypatch.setattr(kernel_calls, "backward", backward)
    monkeypatch.setattr(ring.execute, "_programs", BoundedCache(8))  # what was chosen before is kept
    check(inputs(), Pattern.dense(), Layout.contiguous(17, 1), False, kernel=kernel)
    assert {call.args[0].dims for call in choose.call_args_list} == {(5, 5)}  # of 4 heads and 17 tokens
    given = {(call.args[0].name, call.args[4].delta is not None) for call in backward.call_args_list}
    assert given == {(name, name == "math")}
