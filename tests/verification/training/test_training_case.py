"""A TrainingCase refuses what makes no sense, says who holds what, and is drawn with every feature."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, settings

from reference.pattern import Pattern
from tests.support.training_cases import drawn_from, small_model, small_step
from verification.models.batches import IGNORED, global_batch
from verification.report.coverage import Coverage
from verification.training.inputs import initial_parameters, parameter_shapes
from verification.training.rank.ring_model import LanguageModel
from verification.training.strategies import training_cases
from verification.training.training_case import TrainingCase
from verification.training.training_coverage import TRAINING_GROUPS

LONGNET = small_model(kind="longnet", norm="layer", bias=True, dim=8, heads=2, kv_heads=2, head_dim=4)
PACKED = Pattern.dense(documents=(3, 5))
PLAIN = small_step(2).to_dict()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "a TrainingCase must be a JSON object, got list"),
        ({"world": 1}, "a TrainingCase: missing fields accumulation"),
        (PLAIN | {"colour": 1}, "unknown field colour"),
        (PLAIN | {"model": {"kind": "llama"}}, "a Model: missing fields bias"),
        (PLAIN | {"calls": ["a mask"]}, "a TrainingCase: unknown field calls$"),
    ],
)
def test_a_malformed_record_is_refused(data: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainingCase.from_dict(data)
    newer = ("device", "resumed", "compiled", "later_documents", "own_documents")
    earlier = {name: x for name, x in PLAIN.items() if name not in newer} | {"calls": []}
    assert TrainingCase.from_dict(earlier) == small_step(2), "a file of an earlier version stays good"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": 3}, "data is 3; it must be an integer from 1 to 2"),
        ({"world": 4, "data": 3}, "data is 3; it must divide world, 4"),
        ({"wrapper": "fsdp1"}, "wrapper is 'fsdp1'; it must be one of none, ddp"),
        ({"clipping": -1.0}, "clipping is -1.0; it must be a finite number of at least 0"),
        ({"cuts": (0, 3, 9)}, r"cuts is \(0, 3, 9\); it must be 3 non-decreasing offsets from 0 to 8"),
        ({"resumed": "zigzag"}, "resumed is 'zigzag'; it must be None with one step"),
        ({"compiled": "aot_eager"}, "handle is 'recorded'; it must be 'group' or 'mesh' with compiled 'aot_eager'"),
        ({"model": None}, "model is None; it must be a Model"),
        ({"steps": 3, "later_documents": (None,)}, "later_documents is .* an entry for each of the 3 steps but the"),
        ({"own_documents": (8,)}, "own_documents is .* it must be None .* where a step has no documents"),
        ({"pattern": PACKED, "own_documents": (8,), "model": LONGNET}, "own_documents is"),
        ({"model": LONGNET}, "pattern is .* it must be torchscale's"),
        # of the model
        ({"head_dim": 3, "positions": "rotary"}, "head_dim is 3; it must be even"),
        ({"kind": "llama", "scale": 0.0}, "scale must be None then"),
        ({"kind": "longnet"}, "they must be 'layer', True"),
        ({"kind": "longnet", "norm": "layer", "bias": True}, r"dim is 4; with 'longnet' it must be heads \* head_dim"),
    ],
)
def test_senseless_cases_are_refused(changes: dict[str, Any], said: str) -> None:
    step = small_step(2)
    with pytest.raises(ValueError, match=said):
        replace(step, **changes) if all(map(PLAIN.__contains__, changes)) else small_model(**changes)


def test_mesh_places_survive_resuming() -> None:
    assert small_step(4, data=2).mesh == ((0, 1), (2, 3))
    strided = small_step(4, data=2, arrangement="strided")
    assert strided.mesh == ((0, 2), (1, 3))
    assert [strided.coordinates(rank) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    case = replace(strided, accumulation=3, cuts=(0, 3, 8), steps=3, resumed="zigzag")
    first, then = case.parts
    assert first == replace(case, steps=1, resumed=None)
    assert (then.data, then.context, then.accumulation, then.steps) == (1, 4, 6, 2)
    assert (then.order, then.cuts, then.resumed, then.mesh) == ("zigzag", None, None, ((0, 1, 2, 3),))


def test_steps_and_modules_may_have_separate_documents() -> None:
    case = small_step(2, steps=3, pattern=PACKED, later_documents=((8,), None))
    assert [case.at(step).pattern.documents for step in range(3)] == [(3, 5), (8,), None]
    parts = replace(case, resumed="zigzag").parts
    found = [(part.steps, part.pattern.documents, part.later_documents) for part in parts]
    assert found == [(1, (3, 5), None), (2, (8,), (None,))]
    packed = small_step(2, pattern=PACKED, own_documents=[4, 4])
    assert packed.pattern_of_modules.documents == (4, 4) and packed.pattern.documents == (3, 5)
    assert small_step(2, pattern=PACKED).pattern_of_modules.documents is None


def test_cases_determine_parameters_tokens_and_labels() -> None:
    case = small_step(1, model=small_model(kind="llama", norm="layer", bias=True, positions="learned"))
    for name, x in initial_parameters(case).items():
        assert (x != 0).all() and (x != 1).all(), name
    for name, x in initial_parameters(small_step(1, dtype="bfloat16")).items():
        assert torch.equal(x, x.float().double()), name
    case = small_step(2, data=2, batch=2, accumulation=3, steps=2)
    batch, later = (global_batch(case, step) for step in range(2))
    assert batch.tokens.shape == batch.labels.shape == (2, 3, 2, 8)
    assert torch.equal(batch.labels[..., :-1], batch.tokens[..., 1:])
    assert (batch.labels[..., -1] == IGNORED).all() and batch.labelled == 2 * 3 * 2 * 7
    assert torch.equal(global_batch(case, 0).tokens, batch.tokens) and not torch.equal(later.tokens, batch.tokens)

    def labelled(labels: str, **changes: Any) -> torch.Tensor:
        """(data, accumulation, batch, n): what counts."""
        return global_batch(small_step(2, labels=labels, **changes), 0).labels != IGNORED

    assert 0.4 < labelled("some", tokens=24, batch=4).double().mean() < 0.9
    shards = labelled("shards", seed=1)
    assert shards[..., :4].all() and not shards[..., 4:].any()
    ranks = labelled("ranks", data=2, seed=1)
    assert ranks[0, ..., :-1].all() and not ranks[1].any()
    micro = labelled("ranks", accumulation=2, seed=1)
    assert micro[:, 0, ..., :-1].all() and not micro[:, 1].any()
    assert not labelled("none").any()


DRAWN = 600


def test_every_feature_and_mesh_is_reached() -> None:
    coverage = Coverage(groups=TRAINING_GROUPS)
    for number, case in enumerate(drawn_from(training_cases(4), DRAWN)):
        coverage.add(case)
        assert not case.model.has_steps or case.dtype == "float64"
        assert TrainingCase.from_dict(json.loads(json.dumps(case.to_dict()))) == case
        if number % 10 == 0:
            named = {name: tuple(x.shape) for name, x in LanguageModel(case).named_parameters()}
            assert named == parameter_shapes(case)
    missing = {name: count for name, count in coverage.to_dict().items() if count < DRAWN * 0.02}
    assert not missing, missing
    for world in (1, 3, 6, 8):
        cases = drawn_from(training_cases(world), 200)
        assert {(case.world, case.data * case.context) for case in cases} == {(world, world)}
        assert {case.data for case in cases} == {d for d in range(1, world + 1) if world % d == 0}


def test_smallest_case_is_plain() -> None:
    chosen = settings(database=None, phases=[Phase.generate, Phase.shrink])
    case = find(training_cases(4), lambda case: True, settings=chosen, random=Random(0))
    assert case == small_step(4, tokens=2, pattern=Pattern.dense())
