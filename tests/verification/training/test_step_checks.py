"""Limits of a training step; each check finds what it is for, and the failure names the broken property."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reference.pattern import Pattern
from tests.support.training_cases import small_model, small_step
from verification.check.properties import broken_by
from verification.failures import WrongResult
from verification.models.batches import global_batch
from verification.models.noise import UNIT_ROUNDOFF, noise
from verification.models.results import largest, size
from verification.models.tolerance import THRESHOLD
from verification.training.dense.dense_step import train_densely
from verification.training.step_checks import STEP_PROPERTIES, check_step
from verification.training.step_expectation import StepExpectation, allowed_in_steps, expect_training
from verification.training.step_observation import PartObservation, StepObservation
from verification.training.training_case import TrainingCase


def test_noise_is_at_most_the_last_bit() -> None:
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    y = noise(2.0**-8, 0)(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    for relative in ((y.detach() / x.detach() - 1).abs(), (g - 1).abs()):
        assert 0.9 * 2.0**-8 < float(relative.max()) <= 2.0**-8 * (1 + 1e-9)


def test_tolerance_grows_with_the_last_bit() -> None:
    """In fp64 it is the threshold; in lower precisions it follows from noise, and is far below the numbers in fp32."""
    changes: dict[str, Any] = {"steps": 2, "clipping": 0.1, "optimiser": "adamw"}
    cases = [small_step(1, dtype=dtype, **changes) for dtype in ("float64", "float32", "bfloat16")]
    exactly = train_densely(cases[0]).quantities()
    fp64, fp32, bf16 = (allowed_in_steps(case, exactly) for case in cases)
    for quantity, named in exactly.items():
        for name in named:
            assert fp64[quantity][name] == THRESHOLD * largest(named)
            assert 0 < fp32[quantity][name] < min(1e-3 * largest(named), bf16[quantity][name])


@pytest.mark.slow
def test_norms_of_two_numbers_may_amplify_the_last_bit() -> None:
    """Layer norms of two numbers are nearly steps: in three steps, rounding alone takes parameters beyond the
    threshold, and step one's gradients not near it. Drawn, and found on 4 ranks."""
    model = small_model(kind="longnet", layers=2, dim=2, norm="layer", bias=True, subln=True, positions="rotary")
    pattern = Pattern.longnet([11, 22], [1, 2], 1, True, "torchscale")
    case = small_step(4, tokens=18, model=model, pattern=pattern, bucket=2, steps=3, seed=155)
    exactly = train_densely(case)
    allowed, unit = allowed_in_steps(case, exactly.quantities()), UNIT_ROUNDOFF["float64"]
    assert set(allowed["gradients"].values()) == {THRESHOLD * largest(exactly.gradients)}
    bounds, numbers = allowed["parameters"], largest(exactly.parameters)
    assert THRESHOLD * numbers < max(bounds.values()) < 1e-6 * numbers, "far below any defect"
    other = train_densely(case, noise(2 * unit, 0), noise(2 * unit, 0)).parameters
    assert all(size(x - exactly.parameters[name]) <= bounds[name] for name, x in other.items())


CASE = small_step(4, data=2, accumulation=2, clipping=0.1, steps=3, cuts=(0, 3, 8), resumed="striped", spoilt="nan")
COMPILED = small_step(2, accumulation=2, steps=2, resumed="zigzag", handle="mesh", compiled="aot_eager")
EXPECTATION = expect_training(CASE)


def honest(case: TrainingCase, expectation: StepExpectation) -> list[StepObservation]:
    """Observations of ranks that make no error at all."""
    found = []
    batch = global_batch(case, 0)
    for rank in case.ranks:
        data, index = case.coordinates(rank)
        mine, numbers = case.shards().positions[index], range(case.accumulation)
        seen = StepObservation(data, index)
        seen.tokens = [batch.tokens[data, number].numpy()[:, mine] for number in numbers]
        seen.labels = [batch.labels[data, number].numpy()[:, mine] for number in numbers]
        seen.positions = [mine for _ in numbers]
        for part, sent, runs in zip(case.parts, expectation.sent, expectation.graph_runs, strict=True):
            index = part.coordinates(rank)[1]
            moved: Any = dict(enumerate(sent[index].tolist())), dict(enumerate(sent[:, index].tolist()))
            if case.handle != "recorded":
                moved = None, None
            seen.parts.append(PartObservation(index, {part.shards().counts[index]}, moved[0], moved[1], runs))
        for quantity, named in copy.deepcopy(expectation.exact).items():
            whole = {name: x[data] for name, x in named.items()} if quantity == "logits" else named
            getattr(seen, quantity).update(whole)
        found.append(seen)
    return found


@pytest.mark.parametrize("case", [CASE, COMPILED, small_step(2)], ids=("resumed", "compiled", "plain"))
def test_sound_steps_hold(case: TrainingCase) -> None:
    expectation = expect_training(case)
    ratios = check_step(case, expectation, honest(case, expectation))
    assert set(ratios) == {one.title for one in STEP_PROPERTIES if one.concerns(case)}
    assert not any(ratios.values())


Spoil = Callable[[StepObservation], object]


def _off(quantity: str, by: float, name: str | None = None) -> Spoil:
    """Add to one number of a quantity, by default of its last name, as a fraction of its largest."""

    def spoil(seen: StepObservation) -> None:
        named: dict[str, Any] = getattr(seen, quantity)
        chosen = name or list(named)[-1]
        changed = np.array(named[chosen])
        changed.reshape(-1)[-1] += by * max(np.abs(x).max() for x in EXPECTATION.exact[quantity].values())
        named[chosen] = changed

    return spoil


FAULTS: list[tuple[Spoil, str, str]] = [
    (lambda seen: seen.tokens.reverse(), "tokens, labels, positions", "tokens of micro-batch 1 on rank 3"),
    (lambda seen: seen.labels.append(seen.labels.pop() + 1), "tokens, labels, positions", "labels of micro-batch 2"),
    (lambda seen: seen.positions.append(seen.positions.pop(0) + 1), "tokens, labels, positions", "positions on rank 3"),
    (lambda seen: seen.parts[0].token_counts.add(8), "no rank has a whole sequence", "had [5, 8] tokens of a sequence"),
    (lambda seen: seen.parts[1].token_counts.clear(), "no rank has a whole sequence", "rank 3 (data 0, context 3) "),
    (_off("logits", 1e-6), "logits", "logits: first micro-batch on rank 3 (data 1, context 1) is "),
    (_off("losses", 1e-6, "step 1"), "loss of step one", "losses: step 1 on rank 3"),
    (_off("losses", 1e-6), "losses, norms of later steps", "losses: step 3 on rank 3"),
    (_off("losses", np.inf), "losses, norms of later steps", "is inf, expected"),
    (_off("gradients", 1e-6), "gradients after step one", "gradients: head.weight on rank 3"),
    (lambda seen: seen.gradients.pop("head.weight"), "gradients after step one", "context 1) is missing"),
    (_off("norms", 1e-6, "step 1"), "norm of the gradients", "norms: step 1 on rank 3"),
    (_off("norms", 1e-6), "losses, norms of later steps", "norms: step 3 on rank 3"),
    (_off("parameters", 1e-6), "parameters after the last", "parameters: head.weight on rank 3"),
    (lambda seen: seen.parameters.update(other=np.zeros(3)), "parameters after the last", "is not expected"),
    (_off("parameters", 1e-14), "ranks alike, bit by bit", "parameters: head.weight is not the same on ranks 0, 3"),
    (_off("logits", 1e-14), "ranks alike, bit by bit", "is not the same on ranks 2, 3"),
    (lambda seen: seen.wrongly_clipped.append("norm.weight"), "clipped though not finite", "on rank 3 (data 1, "),
    (lambda seen: seen.parts[0].sent.update({0: 1}), "bytes of the steps", "rank 3 (data 1, context 1) sent "),  # type: ignore[union-attr]
    (lambda seen: seen.parts[1].sent.update({0: 1}), "bytes of the steps", "rank 3 (data 0, context 3) sent "),  # type: ignore[union-attr]
    (lambda seen: seen.parts[0].received.clear(), "bytes of the steps", "received 0 bytes"),  # type: ignore[union-attr]
]


@pytest.mark.parametrize(("spoil", "title", "said"), FAULTS)
def test_wrong_steps_are_found_and_named(spoil: Spoil, title: str, said: str) -> None:
    observations = honest(CASE, EXPECTATION)
    spoil(observations[3])
    with pytest.raises(WrongResult) as caught:
        check_step(CASE, EXPECTATION, observations)
    assert broken_by(caught.value) == title
    assert said in str(caught.value) and "worst deviations / allowed: logits " in str(caught.value)


def test_steps_without_a_graph_are_found() -> None:
    expectation = expect_training(COMPILED)
    observations = honest(COMPILED, expectation)
    observations[1].parts[1].graph_runs -= 1
    with pytest.raises(WrongResult, match="rank 1 .* ran 1 compiled graphs in 1 steps; .* it must run 2"):
        check_step(COMPILED, expectation, observations)
    observations = honest(CASE, EXPECTATION)
    observations[0].parts[0].token_counts.add(8)
    _off("gradients", 1e-3)(observations[1])
    with pytest.raises(WrongResult) as caught:
        check_step(CASE, EXPECTATION, observations)
    assert broken_by(caught.value) == "no rank has a whole sequence" and caught.value.ratio == pytest.approx(1e6)
