"""Drawn TrainingCases reach everything that a run is to reach, and shrink to the smallest model and mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample

from reference.pattern import Branch
from tests.support.training_cases import drawn_from
from verification.report.coverage import Coverage
from verification.training.call_names import CALLS
from verification.training.drawing import training_cases
from verification.training.training_case import CHECKPOINTING, TrainingCase
from verification.training.training_coverage import TRAINING_GROUPS

DRAWN = 600


def test_every_feature_is_reached() -> None:
    coverage = Coverage(groups=TRAINING_GROUPS)
    for case in drawn_from(training_cases(4), DRAWN):
        coverage.add(case)
    missing = {name: count for name, count in coverage.to_dict().items() if count < DRAWN * 0.02}
    assert not missing, missing


def test_every_call_is_drawn_often() -> None:
    """In more than a tenth of all examples on average; in fewer here, by chance."""
    counts = Counter(name for case in drawn_from(training_cases(4), DRAWN) for name in set(case.calls))
    seldom = {name: counts[name] for name in CALLS if counts[name] < DRAWN * 0.04}
    assert not seldom, seldom


@pytest.mark.parametrize("world", (1, 3, 6, 8))
def test_other_world_sizes_are_drawn(world: int) -> None:
    cases = drawn_from(training_cases(world), 200)
    assert {case.world for case in cases} == {world}
    assert {case.data * case.context for case in cases} == {world}
    assert len({case.data for case in cases}) == len([d for d in range(1, world + 1) if world % d == 0])


def smallest(condition: Callable[[TrainingCase], bool], world: int = 4, most: int = 5000) -> TrainingCase:
    """most: examples that are drawn in search of one."""
    chosen = settings(database=None, max_examples=most, phases=[Phase.generate, Phase.shrink])
    return find(training_cases(world), condition, settings=chosen, random=Random(0))


def test_the_smallest_case_is_one_that_a_person_would_write() -> None:
    case = smallest(lambda case: True)
    model = case.model
    assert (case.data, case.tokens, case.batch, case.order, case.cuts) == (1, 2, 1, "contiguous", None)
    assert (case.wrapper, case.checkpointing, case.accumulation, case.steps) == ("none", "none", 1, 1)
    assert (case.dtype, case.optimiser, case.clipping, case.labels) == ("float64", "sgd", None, "all")
    assert (model.kind, model.layers, model.dim, model.heads, model.head_dim) == ("sdpa", 1, 4, 1, 2)
    assert case.pattern.branches == (Branch(),) and (case.handle, case.compiled) == ("recorded", "no")
    assert (case.loss, case.packed_by, case.drops_zeros, case.spoilt) == ("mean", "batch", False, None)
    assert (model.scale, model.bases) == (None, 1)


def test_what_a_failure_needs_stays_and_the_rest_goes() -> None:
    case = smallest(lambda case: case.wrapper == "fsdp2" and case.model.tied and case.steps > 1)
    assert (case.wrapper, case.model.tied, case.steps) == ("fsdp2", True, 2)
    assert (case.data, case.checkpointing, case.accumulation, case.model.kind) == (1, "none", 1, "sdpa")


def test_a_compiled_case_has_a_group_with_a_name_and_is_compiled_only_where_it_must_be() -> None:
    case = smallest(lambda case: case.compiled != "no")
    assert (case.compiled, case.handle, case.wrapper, case.checkpointing) == ("aot_eager", "group", "none", "none")
    assert smallest(lambda case: case.handle == "mesh").compiled == "no"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("wrapper", ("ddp", "fsdp2"))
def test_compiled_steps_are_drawn_with_every_recomputation(wrapper: str, checkpointing: str) -> None:
    wanted = ("aot_eager", wrapper, checkpointing)
    chosen = settings(database=None, max_examples=10_000, phases=[Phase.generate])
    find(
        training_cases(4),
        lambda case: (case.compiled, case.wrapper, case.checkpointing) == wanted,
        settings=chosen,
        random=Random(0),
    )


def _narrow_layer_norm(case: TrainingCase) -> bool:
    return case.model.norm == "layer" and case.model.dim < 4


def _narrow_norm_of_heads(case: TrainingCase) -> bool:
    return case.model.qk_norm and case.model.head_dim < 4


@pytest.mark.slow
@pytest.mark.parametrize(("narrow", "kind"), [(_narrow_layer_norm, "longnet"), (_narrow_norm_of_heads, "llama")])
def test_norms_that_are_steps_are_in_fp64(narrow: Callable[[TrainingCase], bool], kind: str) -> None:
    assert smallest(narrow).model.kind == kind
    with pytest.raises(NoSuchExample):
        smallest(lambda case: narrow(case) and case.dtype != "float64", most=500)
