"""One TrainingCase for tests that need any, or one that differs in some fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis.strategies import SearchStrategy

from reference.pattern import Pattern
from tests.support.drawing import draw_many
from verification.training.training_case import TrainingCase
from verification.training.training_model import Model


def small_model(**changes: Any) -> Model:
    """The smallest model, with these fields changed."""
    model = Model(
        kind="sdpa", layers=1, dim=4, heads=1, kv_heads=1, head_dim=2, norm="rms", tied=False, qk_norm=False,
        bias=False, subln=False, positions="none",
    )  # fmt: skip
    return replace(model, **changes)


def small_step(world: int, **changes: Any) -> TrainingCase:
    """One step of the smallest model on 8 tokens shared by all ranks, nothing unusual; with these fields changed."""
    case = TrainingCase(
        world=world, data=1, arrangement="contiguous", tokens=8, batch=1, order="contiguous", cuts=None,
        model=small_model(), pattern=Pattern.dense(causal=True), exchange="direct", bucket=None, handle="recorded",
        dtype="float64", wrapper="none", accumulation=1, checkpointing="none", clipping=None, optimiser="sgd", steps=1,
        labels="all", seed=0,
    )  # fmt: skip
    return replace(case, **changes)


def drawn_from(strategy: SearchStrategy[TrainingCase | None], count: int) -> list[TrainingCase]:
    """Draw what a run would, always the same."""
    return [case for case in draw_many(strategy, count) if case is not None]
