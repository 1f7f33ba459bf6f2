"""A TrainingCase travels as JSON, refuses what makes no sense, and says who holds what."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from reference.pattern import Branch, Pattern
from tests.support.training_cases import small_model, small_step
from verification.training.drawing import training_cases
from verification.training.training_case import TrainingCase


@settings(max_examples=100, deadline=None)
@given(training_cases(4))
def test_a_drawn_case_survives_json(case: TrainingCase) -> None:
    assert TrainingCase.from_dict(json.loads(case.to_json())) == case


def test_a_file_from_before_a_field_had_a_default_stays_good() -> None:
    data = small_step(2).to_dict()
    for name in ("device", "resumed", "compiled", "later_documents", "own_documents"):
        del data[name]
    assert TrainingCase.from_dict(data) == small_step(2)


LONGNET = small_model(kind="longnet", norm="layer", bias=True, dim=8, heads=2, kv_heads=2, head_dim=4)
PACKED = Pattern.dense(documents=(3, 5))
TORCHSCALE = Pattern.longnet([4, 8], [1, 2], 2, True, "torchscale")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"world": 0}, "world is 0; it must be an integer from 1"),
        ({"data": 3}, "data is 3; it must be an integer from 1 to 2"),
        ({"world": 4, "data": 3}, "data is 3; it must divide world, 4"),
        ({"wrapper": "fsdp1"}, "wrapper is 'fsdp1'; it must be one of none, ddp"),
        ({"clipping": -1.0}, "clipping is -1.0; it must be a finite number of at least 0"),
        ({"cuts": (0, 3, 9)}, r"cuts is \(0, 3, 9\); it must be 3 non-decreasing offsets from 0 to 8"),
        ({"resumed": "zigzag"}, "resumed is 'zigzag'; it must be None with one step"),
        ({"steps": 2, "resumed": "sideways"}, "resumed is 'sideways'; it must be one of contiguous"),
        ({"compiled": "eager", "handle": "mesh"}, "compiled is 'eager'; it must be one of no, aot_eager"),
        ({"compiled": "aot_eager"}, "handle is 'recorded'; it must be 'group' or 'mesh' with compiled 'aot_eager'"),
        ({"model": None}, "model is None"),
        ({"steps": 3, "later_documents": (None,)}, "later_documents is .* an entry for each of the 3 steps but the"),
        ({"steps": 2, "later_documents": ((3, 6),)}, "documents"),
        ({"own_documents": (8,)}, "own_documents is .* it must be None .* where a step has no documents"),
        ({"pattern": PACKED, "own_documents": (9,)}, "documents"),
        ({"pattern": PACKED, "own_documents": (8,), "model": LONGNET}, "own_documents is"),
        ({"pattern": Pattern((Branch(heads=range(1, 2)),))}, "heads"),
        ({"model": LONGNET}, "pattern is .* it must be torchscale's"),
        ({"model": LONGNET, "pattern": Pattern.longnet([4, 8], [1, 2], 2, True, "fkodom")}, "must be torchscale's"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(small_step(2), **changes)


def test_steps_may_have_documents_of_their_own() -> None:
    packed = replace(small_step(2).pattern, documents=(8,))
    case = replace(small_step(2), steps=3, pattern=packed, later_documents=((3, 5), None))
    assert [case.at(step).pattern.documents for step in range(3)] == [(8,), (3, 5), None]
    assert all(case.at(step).later_documents is None for step in range(3))
    first, second = replace(case, resumed="zigzag").parts
    assert (first.steps, first.pattern.documents, first.later_documents) == (1, (8,), None)
    assert (second.steps, second.pattern.documents, second.later_documents) == (2, (3, 5), (None,))
    assert TrainingCase.from_dict(json.loads(case.to_json())) == case


def test_modules_may_have_documents_of_their_own() -> None:
    case = small_step(2, pattern=PACKED, own_documents=[4, 4])
    assert case.pattern_of_modules.documents == (4, 4) and case.pattern.documents == (3, 5)
    assert small_step(2, pattern=PACKED).pattern_of_modules.documents is None
    assert TrainingCase.from_dict(json.loads(case.to_json())) == case


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 3, "positions": "rotary"}, "head_dim is 3; it must be even"),
        ({"qk_norm": True}, "qk_norm must be False"),
        ({"subln": True}, "subln must be False"),
        ({"heads": 3, "kv_heads": 2}, "heads is 3; it must be a multiple of kv_heads, 2"),
        ({"kind": "longnet"}, "they must be 'layer', True"),
        (
            {"kind": "longnet", "norm": "layer", "bias": True},
            r"dim is 4; with 'longnet' it must be heads \* head_dim, 2",
        ),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small_model(**changes)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "a TrainingCase must be a JSON object, got list"),
        ({"world": 1}, "a TrainingCase: missing fields accumulation"),
        (small_step(1).to_dict() | {"colour": 1}, "unknown field colour"),
        (small_step(1).to_dict() | {"model": {"kind": "llama"}}, "model: missing fields bias"),
    ],
)
def test_a_malformed_record_is_refused(data: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainingCase.from_dict(data)


def test_longnet_takes_torchscales_pattern() -> None:
    case = small_step(2, model=LONGNET, pattern=TORCHSCALE)
    assert case.longnet == ([4, 8], [1, 2])


def test_who_stands_where_in_the_mesh() -> None:
    assert small_step(4, data=2).mesh == ((0, 1), (2, 3))
    strided = small_step(4, data=2, arrangement="strided")
    assert strided.mesh == ((0, 2), (1, 3))
    assert [strided.coordinates(rank) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert small_step(6, data=2, arrangement="strided").mesh == ((0, 2, 4), (1, 3, 5))


def test_a_run_that_is_resumed_has_two_parts() -> None:
    assert small_step(4).parts == (small_step(4),)
    case = small_step(4, data=2, arrangement="strided", accumulation=3, cuts=(0, 3, 8), steps=3, resumed="zigzag")
    first, then = case.parts
    assert first == replace(case, steps=1, resumed=None)
    assert (then.data, then.context, then.accumulation, then.steps) == (1, 4, 6, 2)
    assert (then.order, then.cuts, then.resumed) == ("zigzag", None, None)
    assert then.mesh == ((0, 1, 2, 3),)
    assert TrainingCase.from_dict(json.loads(case.to_json())) == case
