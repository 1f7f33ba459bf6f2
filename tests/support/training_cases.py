"""One TrainingCase for tests that need any, or one that differs in some fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from reference.pattern import Pattern
from verification.training.training_case import TrainingCase
from verification.training.training_model import Model

PLAIN_MODEL = Model(
    kind="sdpa", layers=1, dim=4, heads=1, kv_heads=1, head_dim=2, norm="rms", tied=False, qk_norm=False, bias=False,
    subln=False, positions="none",
)  # fmt: skip


def small_model(**changes: Any) -> Model:
    """The smallest model, with these fields changed."""
    return replace(PLAIN_MODEL, **changes)


def small_step(world: int, **changes: Any) -> TrainingCase:
    """One step of the smallest model on 8 tokens shared by all ranks, nothing unusual; with these fields changed."""
    case = TrainingCase(
        world=world, data=1, arrangement="contiguous", tokens=8, batch=1, order="contiguous", cuts=None,
        model=PLAIN_MODEL, pattern=Pattern.dense(causal=True), exchange="direct", bucket=None, handle="recorded",
        dtype="float64", wrapper="none", accumulation=1, checkpointing="none", clipping=None, optimiser="sgd", steps=1,
        labels="all", seed=0,
    )  # fmt: skip
    return replace(case, **changes)


def magnifying_step(world: int) -> TrainingCase:
    """Three steps of a model with layer norms of two numbers, which are nearly steps: together they make of the last
    bit of fp64 some 1e-9 of the largest parameter. Drawn, and found on 4 ranks."""
    model = small_model(kind="longnet", layers=2, dim=2, norm="layer", bias=True, subln=True, positions="rotary")
    pattern = Pattern.longnet([11, 22], [1, 2], 1, True, "torchscale")
    return small_step(world, tokens=18, model=model, pattern=pattern, bucket=2, steps=3, seed=155)


def drawn_from(strategy: SearchStrategy[TrainingCase | None], count: int) -> list[TrainingCase]:
    """What a run would draw from it, always the same."""
    found: list[TrainingCase] = []

    def keep(case: TrainingCase | None) -> None:
        assert case is not None
        found.append(case)

    chosen = settings(
        max_examples=count, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    seed(0)(chosen(given(strategy)(keep)))()
    return found
