"""Steps under DeepSpeed's ZeRO 1, 2 and 3 equal those of one dense process."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks at it once, when it is imported

import pytest
from deepspeed.utils import safe_get_full_fp32_param

from ring.nn import count_labels, cross_entropy
from ring.nn.frameworks import deepspeed, recompute
from tests.support.framework_example import (
    APART,
    EXACT,
    ROUNDED,
    SHORT,
    TOGETHER,
    DecoderLayer,
    Example,
    Result,
    SmallLlama,
    assert_near,
    dense,
    labels_of,
    mesh_of,
    optimizer_for,
)
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


@patch.dict(os.environ, LOCAL_RANK="0")  # as torchrun and DeepSpeed's launcher set it
def _train(example: Example, stage: int, recomputed: dict[str, Any] | None = None) -> Result:
    mesh = example.device_mesh()
    context = example.handle(mesh)
    model = SmallLlama() if stage < 3 else SmallLlama().float()
    if recomputed is not None:
        recompute.wrap(model, DecoderLayer, **recomputed)
    deepspeed.without_compiler()
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": example.clip or 0.0}
    engine = deepspeed.initialize(model, optimizer_for(model), mesh, config)
    result = Result([], [], {}, {})
    for step in range(example.steps):
        batches = example.batches(step, mesh, context)
        labelled = count_labels([labels_of(batch) for batch in batches], mesh)
        losses = []
        for batch in batches:
            loss = cross_entropy(engine(batch.tokens, batch.context), labels_of(batch), mesh, labelled=labelled)
            engine.backward(loss)
            losses.append(loss.item())
        result.losses.append(sum(losses))
        engine.step()
        result.norms.append(float(engine.get_global_grad_norm()))
    for name, x in model.named_parameters():
        result.parameters[name.replace("_checkpoint_wrapped_module.", "")] = safe_get_full_fp32_param(x).clone()
    return result


def check(ranks: Ranks, example: Example, stage: int, recomputed: dict[str, Any] | None = None) -> None:
    """ZeRO keeps parameters and sums gradients in fp32, for a model in fp64 too: exact until the first step, but at
    stage 3, which takes none in fp64."""
    exact = dense(example)
    results = ranks(example.world).run(_train, example, stage, recomputed)
    assert_near(results, exact, ROUNDED)
    assert all(abs(result.losses[0] - exact.losses[0]) < (EXACT if stage < 3 else ROUNDED) for result in results)


EXAMPLES = [
    Example(SHORT, clip=0.1),
    pytest.param(Example(TOGETHER, accumulation=3, clip=0.1), marks=pytest.mark.slow),
    pytest.param(Example(APART, "striped"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("example", EXAMPLES)
def test_zero_trains_as_one_process(ranks: Ranks, example: Example, stage: int) -> None:
    check(ranks, example, stage)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [{}, {"keep_attention": True}, {"reentrant": True}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_recomputed_layers_train_as_one_process(ranks: Ranks, stage: int, recomputed: dict[str, Any]) -> None:
    check(ranks, Example(APART, accumulation=2, clip=0.1), stage, recomputed)


RIGHT = {"gradient_clipping": 0}
REFUSED: dict[str, tuple[Any, str]] = {
    "a part of the world": (RIGHT, "mesh must have all 4 ranks of the world"),
    "no clipping named": ({}, "config must name gradient_clipping"),
    "accumulation": (RIGHT | {"gradient_accumulation_steps": 2}, "config must leave gradient_accumulation_steps out"),
    "sequence parallelism": (RIGHT | {"sequence_parallel_size": 2}, "config must leave sequence_parallel_size out"),
    "an optimizer": (RIGHT | {"optimizer": {"type": "AdamW"}}, "config must leave optimizer out"),
    "16 bits": (RIGHT | {"bf16": {"enabled": True}}, "config must name communication_data_type"),
    "fp64 at stage 3": (RIGHT | {"zero_optimization": {"stage": 3}}, "model must be in fp32 or 16 bits for stage 3"),
    "a file": ("config.json", "config must be a dictionary"),
}


def _refuse(name: str) -> None:
    """Before DeepSpeed is called."""
    config, words = REFUSED[name]
    model, mesh = SmallLlama(), mesh_of(SHORT if name == "a part of the world" else TOGETHER)
    with pytest.raises(ValueError, match=words):
        deepspeed.initialize(model, optimizer_for(model), mesh, config)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_wrong_is_refused(ranks: Ranks, name: str) -> None:
    ranks(4).run(_refuse, name)
