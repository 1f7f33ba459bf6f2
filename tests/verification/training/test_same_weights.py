"""The law of the same weights holds on real ranks, and breaks where a sum depends on the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference.pattern import Pattern
from ring.nn.same_weights import gradient_sums
from tests.support.backends import shared
from tests.support.training_cases import drawn_from, small_model, small_step
from verification.check.properties import broken_by
from verification.failures import WrongResult
from verification.models.same_bits import SAME_WEIGHTS
from verification.run.backends import Backend, GlooBackend
from verification.run.processes.process_tree import alive
from verification.runner import RunPlan
from verification.training.strategies import same_weights_cases
from verification.training.training_case import OtherRanks, TrainingCase
from verification.training.training_run import (
    ON_OTHER_RANKS,
    TRAINING_PRELOAD,
    TRAINING_PROFILES,
    experiments_on,
    on_device,
    validate_same_weights,
)

ALONE = OtherRanks(
    world=1, data=1, accumulation=1, batch=4, arrangement="contiguous", order="chunks", exchange="direct", bucket=None,
    checkpointing="none",
)  # fmt: skip
LLAMA = small_model(kind="llama", dim=8, heads=4, kv_heads=2, head_dim=4, qk_norm=True, bias=True, positions="rotary")


def two_ranks(**changes: Any) -> TrainingCase:
    """Four sequences of four chunks and a rest on two ranks, and on one."""
    fields: dict[str, Any] = {
        "tokens": 70, "order": "chunks", "same_bits": 16, "handle": "group", "batch": 2, "accumulation": 2, "steps": 2,
        "dtype": "float32", "optimiser": "adamw", "clipping": 0.1, "labels": "some", "other_ranks": ALONE,
    }  # fmt: skip
    return small_step(2, **fields | changes)


def gloo(prepare: Callable[[], None] | None = None) -> GlooBackend:
    return GlooBackend(20.0, prepare, TRAINING_PRELOAD)


backend = shared(gloo, 2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "changes",
    [
        {"order": "dealt chunks", "model": small_model(tied=True, positions="learned")},
        {"data": 2, "accumulation": 1, "arrangement": "strided", "resumed": "chunks", "loss": "given"},
        {"pattern": Pattern.dense(True, (20, 0, 33, 17)), "later_documents": (None,), "checkpointing": "reentrant"},
        {"dtype": "bfloat16", "checkpointing": "non-reentrant", "model": LLAMA, "packed_by": "handle"},
        {"compares": True, "model": LLAMA, "batch": 1, "other_ranks": replace(ALONE, batch=2)},
        {"other_ranks": replace(ALONE, world=2, data=2, accumulation=2, batch=1, exchange="ring", bucket=16)},
    ],
    ids=range(6),
)
def test_a_step_has_the_same_bits(backend: GlooBackend, changes: dict[str, Any]) -> None:
    assert ON_OTHER_RANKS.check(backend, two_ranks(**changes))[SAME_WEIGHTS.title] == 0.0


@pytest.mark.ranks
def test_other_ranks_remain_until_the_own_ones_end() -> None:
    with closing(gloo()) as backend:
        backend.start(2)
        for _ in range(2):
            ON_OTHER_RANKS.check(backend, two_ranks(steps=1))
        beside = backend.beside(1)
        assert beside is backend.beside(1) is not backend.beside(2)
        pids = _pids(backend) | _pids(beside)
        assert alive(pids) == pids and len(pids) == 3
        ON_OTHER_RANKS.check(backend, two_ranks(steps=1))
        assert _pids(backend) | _pids(beside) == pids
    assert not alive(pids)


def _pids(backend: Backend) -> set[int]:
    assert isinstance(backend, GlooBackend) and backend._pool is not None
    return set(backend._pool.pids)


def _number_entry_by_entry() -> None:
    """Sequences of all data ranks are numbered through the first entry, then through the second."""
    real = gradient_sums.sequences
    gradient_sums.sequences = lambda held: sorted(real(held), key=lambda sequence: sequence[::-1])


@pytest.mark.ranks
def test_sums_in_the_order_of_ranks_are_found() -> None:
    with closing(gloo(_number_entry_by_entry)) as broken:
        broken.start(2)
        with pytest.raises(WrongResult, match="same weights: gradients: .* they must be the same bits") as caught:
            ON_OTHER_RANKS.check(broken, two_ranks(data=2, accumulation=1))
    assert broken_by(caught.value) == SAME_WEIGHTS.title


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"order": "zigzag"}, "order must be one of chunks, dealt chunks and cuts None"),
        ({"same_bits": None}, "without it another one"),
        ({"same_bits": 24}, "same_bits is 24; it must be a multiple of 16"),
        ({"compares": True, "batch": 1, "tokens": 32}, "compares is True; it must be False where a rank has a single"),
        ({"wrapper": "ddp"}, "wrapper is 'ddp'; it must be 'none' with same_bits"),
        ({"tokens": 16}, "every rank must have a chunk"),
        ({"later_documents": (None, None), "steps": 3, "tokens": 16}, "every rank must have a chunk"),
        ({"handle": "recorded"}, "handle is 'recorded'; with same_bits it must be one of 'group', 'mesh'"),
        ({"loss": "scaled"}, "loss is 'scaled'"),
        ({"other_ranks": replace(ALONE, batch=3)}, "it must have the 4 sequences of a step"),
    ],
)
def test_cases_that_it_does_not_take_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        two_ranks(**changes)


def test_draws_reach_other_ranks_of_each_kind() -> None:
    cases = drawn_from(same_weights_cases(3), 150)
    for case in cases:
        validate_same_weights(case)
        assert TrainingCase.from_dict(case.to_dict()) == case
    assert {case.elsewhere.world for case in cases} == {1, 2, 3} and {case.dtype for case in cases} == {
        "float64", "float32", "bfloat16"
    }  # fmt: skip
    assert {case.elsewhere.checkpointing for case in cases} == {"none", "non-reentrant", "reentrant", "selective"}
    assert {case.compares for case in cases} == {True, False}
    for differs in ("accumulation", "data", "exchange", "checkpointing"):
        assert any(getattr(case.elsewhere, differs) != getattr(case, differs) for case in cases), differs


def test_a_title_alone_is_checked_alone() -> None:
    plan = RunPlan((2,), TRAINING_PROFILES["quick"], 50, 0, "gloo", Path())
    assert [(one.name, count) for one, count in experiments_on(plan, 2)] == [
        ("training steps", 50),
        (SAME_WEIGHTS.title, 5),
    ]
    assert experiments_on(replace(plan, only=(SAME_WEIGHTS.title,)), 2) == [(ON_OTHER_RANKS, 50)]
    assert len(experiments_on(replace(plan, only=("logits",)), 2)) == 1


def test_sequences_on_gpus_are_as_many_of_their_chunks() -> None:
    for case in drawn_from(same_weights_cases(3), 60):
        moved = on_device(case, "cuda")
        assert moved.device == moved.elsewhere.device == "cuda" and on_device(case, "cpu") == case
        assert moved.same_bits == 128 and TrainingCase.from_dict(moved.to_dict()) == moved
        times = 128 // (case.same_bits or 0)
        for one, longer in ((case, moved), (case.elsewhere, moved.elsewhere)):
            for step in range(one.steps):
                at, later = one.at(step), longer.at(step)
                assert [times * count for count in at.shards().counts] == [*later.shards().counts]
                assert [times * length for length in at.documents] == [*later.documents]
