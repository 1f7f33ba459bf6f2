"""`ring_attention` on one rank as a citizen of autograd."""

from __future__ import annotations

import pytest
import torch

from reference.oracle import gradients
from reference.pattern import Pattern
from ring import Layout, ring_attention
from tests.support.attention_cases import LAYOUTS, PATTERNS, call, inputs, plain

INF = float("inf")


@pytest.mark.parametrize(
    "pattern, order",
    [("dense", "contiguous"), ("longnet causal", "hilbert"), ("per head", "contiguous"), ("twice", "hilbert")],
)
def test_gradcheck(pattern: str, order: str) -> None:
    q, k, v, *_ = (x.requires_grad_() for x in inputs(6, batch=1, dim=1))
    layout = LAYOUTS[order](6)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = call(q, k, v, PATTERNS[pattern], layout)
        return out, lse.masked_fill(lse == -INF, 0.0)

    assert torch.autograd.gradcheck(function, (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: plain(*x, PATTERNS[pattern], layout), (q, k, v), fast_mode=True)


def test_a_second_derivative_is_refused_by_name() -> None:
    *leaves, dout = (x.requires_grad_() for x in inputs()[:4])
    out = plain(*leaves, Pattern.dense(), Layout.contiguous(17, 1))
    for gradient in torch.autograd.grad(out, leaves, dout, create_graph=True):
        with pytest.raises(NotImplementedError, match="ring_attention: double backward"):
            torch.autograd.grad(gradient.sum(), leaves, retain_graph=True)
        with pytest.raises(NotImplementedError, match="ring_attention: double backward"):  # as jvps by two vjps ask
            torch.autograd.grad(gradient.sum(), dout, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
@pytest.mark.parametrize("kernel", ("auto", "math", "flash"))
def test_gradients_of_some_inputs_only(wanted: tuple[int, ...], kernel: str) -> None:
    q, k, v, dout, _ = inputs()
    pattern, layout = PATTERNS["longnet causal"], Layout.contiguous(17, 1)
    expected = gradients(q, k, v, pattern, dout)
    leaves = [x.requires_grad_(i in wanted) for i, x in enumerate((q, k, v))]
    (plain(*leaves, pattern, layout, kernel=kernel) * dout).sum().backward()
    for i, leaf in enumerate(leaves):
        if i in wanted:
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad, expected[i], rtol=1e-9, atol=1e-9)
        else:
            assert leaf.grad is None


def test_gradients_through_lse_alone() -> None:
    q, k, v, dout, dlse = inputs()
    leaves, pattern = [x.requires_grad_() for x in (q, k, v)], PATTERNS["longnet causal"]
    found = torch.autograd.grad(call(*leaves, pattern, Layout.contiguous(17, 1))[1], leaves, dlse)
    for x, y in zip(found, gradients(q, k, v, pattern, 0 * dout, dlse), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_no_grad_and_detached_inputs_leave_no_graph() -> None:
    q, k, v, *_ = inputs()
    layout = Layout.contiguous(17, 1)
    assert not plain(q, k, v, Pattern.dense(), layout).requires_grad
    with_graph = plain(q.requires_grad_(), k, v, Pattern.dense(), layout)
    with torch.no_grad():
        without = plain(q, k, v, Pattern.dense(), layout)
    assert with_graph.requires_grad and not without.requires_grad and with_graph.detach().equal(without)
    with torch.inference_mode():
        assert plain(q, k, v, Pattern.dense(), layout).equal(without)


Found = list[torch.Tensor]  # output and gradients


def differentiated(leaves: Found, taken: Found, kernel: str) -> Found:
    layout = Layout.contiguous(17, 1)
    out = ring_attention(taken[0], taken[1], taken[2], Pattern.dense(causal=True), layout, kernel=kernel)
    assert isinstance(out, torch.Tensor)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


MIXED = [
    (torch.float32, torch.float32, torch.float32), (torch.float32, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16, torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("kind", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kernel", ("math", "auto"))
@pytest.mark.parametrize("given", MIXED)
def test_under_autocast_inputs_are_taken_in_its_type(
    given: tuple[torch.dtype, ...], kernel: str, kind: torch.dtype
) -> None:
    """Bit by bit as if they were converted before; torch's own attention gives that type too."""
    leaves = [x.to(dtype).requires_grad_() for x, dtype in zip(inputs()[:3], given, strict=True)]
    with torch.autocast("cpu", kind):
        found = differentiated(leaves, leaves, kernel)
        theirs = torch.nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
    assert found[0].dtype is theirs.dtype is kind
    assert [x.dtype for x in found[1:]] == list(given)
    for x, y in zip(found, differentiated(leaves, [x.to(kind) for x in leaves], kernel), strict=True):
        assert x.equal(y)


@pytest.mark.parametrize("kernel", ("math", "auto"))
def test_autocast_leaves_doubles_and_other_work_alone(kernel: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [x.to(dtype).requires_grad_() for x in inputs()[:3]]
        plainly = differentiated(leaves, leaves, kernel)
        with torch.autocast("cpu", torch.bfloat16):
            found = differentiated(leaves, leaves, kernel)
        assert all(x.equal(y) for x, y in zip(found, plainly, strict=True))


def test_without_autocast_mixed_types_are_refused() -> None:
    """Not by autocast, on one rank alone: the meta device has none."""
    q, k, v, *_ = inputs()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="k must be on q's device meta"):
        ring_attention(q.to("meta"), k, v, Pattern.dense(), Layout.contiguous(17, 1))
