"""Rotary positions against the convention of transformers' Llama, written here without the module's code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring.nn import rotary
from tests.support.nn_ranks import drawn
from verification.models.formulas import rotated

X = drawn(0, 2, 5, 3, 8)
POSITIONS = torch.tensor([0, 3, 1, 1_000_000, 17])


@pytest.mark.parametrize("theta", [10000.0, 2.5])
def test_rotary_equals_llamas(theta: float) -> None:
    found = rotary(X, POSITIONS, theta)
    torch.testing.assert_close(found, rotated(X, POSITIONS, theta), rtol=0.0, atol=1e-9)  # angles up to 10^6
    near = rotary(X, POSITIONS % 100, theta)
    torch.testing.assert_close(near, rotated(X, POSITIONS % 100, theta), rtol=0.0, atol=1e-13)
    each = torch.stack((POSITIONS, POSITIONS.flip(0)))
    assert torch.equal(rotary(X, each.int(), theta)[:1], found[:1])
    assert torch.equal(rotary(X, each, theta)[1:], rotary(X[1:], each[1], theta))
    assert rotary(X[:, :0], POSITIONS[:0]).shape == (2, 0, 3, 8)


@pytest.mark.parametrize("theta", [10000.0, 300.0])  # of which the latter has angles that fp32 does not hold
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype, theta: float) -> None:
    x = X.to(dtype)
    found = rotary(x, POSITIONS, theta)
    assert found.dtype is dtype and torch.equal(x, X.to(dtype))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), rotary(x.double(), POSITIONS, theta), rtol=eps, atol=8 * eps)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"x": X[0]}, r"x must be a real \(batch, tokens, heads, head dim\) tensor, got torch.float64 of shape"),
        ({"x": X.long()}, "x must be a real .* got torch.int64"),
        ({"x": None}, "x must be a real .*NoneType"),
        ({"x": X[..., :3]}, "head_dim must be even for rotary positions, got 3"),
        ({"positions": POSITIONS[:4]}, r"positions must have the shape \(5,\) or \(2, 5\), .* got \(4,\)"),
        ({"positions": POSITIONS.float()}, "positions must be an int64 or int32 tensor, got torch.float32"),
        ({"positions": [0, 1, 2, 3, 4]}, "positions must be an int64 or int32 tensor, got .*list"),
        ({"positions": POSITIONS.to("meta")}, "positions must be on x's device cpu, got meta"),
        ({"theta": float("inf")}, "theta must be a positive finite number, got inf"),
        ({"theta": "10000"}, "theta must be a positive finite number, got '10000'"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": X, "positions": POSITIONS} | changes
    with pytest.raises(ValueError, match=message):
        rotary(**arguments)
