"""Steps under DeepSpeed's ZeRO 1, 2 and 3 equal those of one dense process."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks at it once, when it is imported

import pytest
from deepspeed.utils import safe_get_full_fp32_param

from ring.integrations import deepspeed
from tests.support.framework_example import Example, Result, SmallModel, assert_near, dense, optimizer_for, trained
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


@patch.dict(os.environ, LOCAL_RANK="0")  # as torchrun and DeepSpeed's launcher set it
def _train(example: Example, stage: int) -> Result:
    model = SmallModel() if stage < 3 else SmallModel().float()
    deepspeed.without_compiler()
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": example.clip or 0.0}
    engine = deepspeed.initialize(model, optimizer_for(model), example.device_mesh, config)

    def step() -> Any:
        engine.step()  # clips too, and clears the gradients
        return engine.get_global_grad_norm()

    done = SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
    result = trained(example, model, engine, done, backward=engine.backward, clip=step, gradients=False)
    for name, x in model.named_parameters():
        result.parameters[name] = safe_get_full_fp32_param(x).clone()
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_as_one_process(ranks: Ranks, stage: int) -> None:
    """ZeRO keeps parameters and sums gradients in fp32, for a model in fp64 too: exact until the first step, but at
    stage 3, which takes none in fp64. Drawn steps on data x context are those of the peers deepspeed/zero1 to zero3."""
    example = Example("short", clip=0.1)
    exact = dense(example)
    results = ranks(example.world).run(_train, example, stage)
    assert_near(results, exact, kept_in_fp32=True)
    assert all(abs(result.losses[0] - exact.losses[0]) < (1e-12 if stage < 3 else 2e-6) for result in results)


RIGHT = {"gradient_clipping": 0}
REFUSED: list[tuple[Any, str]] = [
    ({}, "config must name gradient_clipping"),
    (RIGHT | {"gradient_accumulation_steps": 2}, "config must leave gradient_accumulation_steps out"),
    (RIGHT | {"sequence_parallel_size": 2}, "config must leave sequence_parallel_size out"),
    (RIGHT | {"optimizer": {"type": "AdamW"}}, "config must leave optimizer out"),
    (RIGHT | {"bf16": {"enabled": True}}, "config must name communication_data_type"),
    (RIGHT | {"zero_optimization": {"stage": 3}}, "model must be in fp32 or 16 bits for stage 3"),
    ("config.json", "config must be a dictionary"),
]


def _refuse() -> None:
    """Before DeepSpeed is called."""
    model = SmallModel()
    for config, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            deepspeed.initialize(model, optimizer_for(model), Example("together").device_mesh, config)
    with pytest.raises(ValueError, match="mesh must have all 4 ranks of the world"):
        deepspeed.initialize(model, optimizer_for(model), Example("short").device_mesh, RIGHT)


def test_wrong_engines_are_refused(ranks: Ranks) -> None:
    ranks(4).run(_refuse)
