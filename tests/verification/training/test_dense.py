"""The dense computation is what the published definitions say, and its gradients are its own derivative."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from reference.pattern import Pattern
from tests.support.training_cases import small_model, small_step
from verification.training.dense.dense_model import dense_logits
from verification.training.dense.dense_step import train_densely
from verification.training.dense.noise import UNIT_ROUNDOFF, exact, noise
from verification.training.dense.oracle_attention import oracle_attention
from verification.training.dense.tolerance import THRESHOLD, allowed_deviations, largest, size
from verification.training.material import IGNORED, global_batch, initial_parameters
from verification.training.training_case import TrainingCase

LONGNET = small_model(kind="longnet", norm="layer", bias=True, dim=8, heads=2, head_dim=4, subln=True, kv_heads=1)
LLAMA = small_model(
    kind="llama", layers=2, heads=4, kv_heads=2, head_dim=4, qk_norm=True, positions="rotary", norm="layer"
)
CASES = {
    "sdpa": small_step(1, model=small_model(positions="learned", tied=True, bias=True), labels="some"),
    "llama": small_step(1, accumulation=2, model=LLAMA),
    "longnet": small_step(1, model=LONGNET, pattern=Pattern.longnet([3, 6], [1, 2], 2, True, "torchscale")),
}


def test_attention_and_its_gradients_are_torchs_where_torch_has_them() -> None:
    inputs = [torch.randn(2, 7, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    g = torch.randn(2, 7, 4, 4, dtype=torch.float64)
    ours = oracle_attention(*inputs, Pattern.dense(causal=True))
    q, k, v = (x.transpose(1, 2) for x in inputs)
    theirs = functional.scaled_dot_product_attention(q, k, v, None, 0.0, True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)
    for a, b in zip(torch.autograd.grad(ours, inputs, g), torch.autograd.grad(theirs, inputs, g), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_loss_is_torchs_and_the_gradients_are_its_derivative(case: TrainingCase) -> None:
    """The derivative is a central difference along a random direction."""
    result, batch, start = train_densely(case), global_batch(case, 0), initial_parameters(case)
    direction = {name: torch.randn_like(x) for name, x in start.items()}

    def loss(step: float) -> float:
        moved = {name: x + step * direction[name] for name, x in start.items()}
        logits = dense_logits(case, moved, batch.tokens.flatten(0, 2), exact)
        labels = batch.labels.flatten(0, 2).flatten()
        return float(functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED))

    assert loss(0.0) == pytest.approx(float(result.losses["step 1"]), rel=1e-13)
    slope = sum(float((result.gradients[name] * direction[name]).sum()) for name in start)
    assert slope == pytest.approx((loss(1e-6) - loss(-1e-6)) / 2e-6, rel=1e-6)


def test_a_step_without_labels_has_no_loss_and_no_gradients() -> None:
    result = train_densely(small_step(1, labels="none", clipping=0.1))
    assert float(result.losses["step 1"]) == float(result.norms["step 1"]) == 0.0
    assert not any(x.any() for x in result.gradients.values())


def test_clipping_that_bites_scales_the_step() -> None:
    free, bound = (train_densely(small_step(1, clipping=most)) for most in (None, 0.02))
    norm = float(torch.stack([x.square().sum() for x in free.gradients.values()]).sum().sqrt())
    assert float(bound.norms["step 1"]) == pytest.approx(norm, rel=1e-12) and norm > 0.02
    for name, x in initial_parameters(small_step(1)).items():
        expected = (free.parameters[name] - x) * (0.02 / (norm + 1e-6))
        torch.testing.assert_close(bound.parameters[name] - x, expected, rtol=0, atol=1e-14)


def test_noise_is_at_most_the_last_bit_forward_and_backward() -> None:
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    y = noise(2.0**-8, 0)(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    for relative in ((y.detach() / x.detach() - 1).abs(), (g - 1).abs()):
        assert 0.9 * 2.0**-8 < float(relative.max()) <= 2.0**-8 * (1 + 1e-9)


def test_what_is_allowed_grows_with_the_last_bit() -> None:
    """In fp64 it is the threshold; in lower precisions it follows from noise, and is far below the numbers in fp32."""
    cases = [
        small_step(1, steps=2, clipping=0.1, optimiser="adamw", dtype=dtype)
        for dtype in ("float64", "float32", "bfloat16")
    ]
    exactly = train_densely(cases[0])
    fp64, fp32, bf16 = (allowed_deviations(case, exactly) for case in cases)
    for quantity, named in exactly.quantities().items():
        for name in named:
            assert fp64[quantity][name] == THRESHOLD * largest(named)
            assert 0 < fp32[quantity][name] < min(1e-3 * largest(named), bf16[quantity][name])


@pytest.mark.slow
def test_what_norms_of_two_numbers_make_of_the_last_bit_of_fp64_is_allowed() -> None:
    """Layer norms of two numbers are nearly steps: in three steps, rounding alone takes parameters beyond the
    threshold, and step one's gradients not near it. Drawn, and found on 4 ranks."""
    model = small_model(kind="longnet", layers=2, dim=2, norm="layer", bias=True, subln=True, positions="rotary")
    pattern = Pattern.longnet([11, 22], [1, 2], 1, True, "torchscale")
    case = small_step(4, tokens=18, model=model, pattern=pattern, bucket=2, steps=3, seed=155)
    exactly = train_densely(case)
    allowed, unit = allowed_deviations(case, exactly), UNIT_ROUNDOFF["float64"]
    assert set(allowed["gradients"].values()) == {THRESHOLD * largest(exactly.gradients)}
    beyond = 0
    for seed in range(3):
        other = train_densely(case, noise(2 * unit, seed), noise(2 * unit, seed)).parameters
        deviations = {name: size(x - exactly.parameters[name]) for name, x in other.items()}
        assert all(deviations[name] <= allowed["parameters"][name] for name in other)
        beyond += max(deviations.values()) > THRESHOLD * largest(exactly.parameters)
    assert beyond
    assert max(allowed["parameters"].values()) < 1e-6 * largest(exactly.parameters), "far below any defect"
