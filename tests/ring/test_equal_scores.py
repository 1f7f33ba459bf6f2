"""Large scores that are all equal: the logarithm of how many there are is lost in the last digits of lse.

Gradients, which come from lse, are wrong by as much as the bounds say. Whatever keeps one number of 24 bits for a row's
lse shares this: it is a property of flash attention's backward.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reference import Pattern
from reference.exact import Inputs, evaluate
from ring import Layout, ring_attention
from tests.support.plain_case import plain
from verification.check.expectation import arithmetic_of

N = 8


@pytest.mark.parametrize("kernel", ("math", "flash"))
@pytest.mark.parametrize(("score", "least", "most"), ((1e3, 0.0, 1e-4), (1e5, 0.0, 1e-2), (1e7, 0.01, 0.7)))
def test_gradients_are_off_by_the_last_digit_of_lse(kernel: str, score: float, least: float, most: float) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.full((1, N, 1, 1), score), torch.ones(1, N, 1, 1)
    v, dout = (torch.randn(1, N, 1, 1, generator=draw) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(q, k, v, Pattern.dense(), Layout.contiguous(N, 1), kernel=kernel, scale=1.0)
    assert isinstance(out, torch.Tensor)
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, leaves, dout)), strict=True))

    arithmetic = arithmetic_of(plain(1, tokens=N, heads=1, kv_heads=1, head_dim=1, kernel=kernel, scale=1.0))
    given = [x.detach().double().numpy() for x in (q, k, v, dout)]
    expectation = evaluate(Inputs(given[0], given[1], given[2], given[3], None, Pattern.dense(), 1.0), arithmetic)
    for name, x in found.items():
        error = np.abs(x.detach().double().numpy() - expectation.exact[name])
        assert (error <= expectation.bound[name]).all(), name
    exact = expectation.exact["dv"]
    assert least <= np.abs(found["dv"].numpy() - exact).max() / np.abs(exact).max() <= most
