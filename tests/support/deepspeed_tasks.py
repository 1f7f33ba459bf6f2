"""What ranks do to train an example under DeepSpeed's ZeRO."""

from __future__ import annotations

import os
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks at it once, when it is imported

import torch
from torch.distributed.device_mesh import DeviceMesh

from ring.nn import count_labels, cross_entropy
from ring.nn.frameworks import deepspeed, recompute
from tests.support.framework_example import TOGETHER, Example, Result, labels_of, optimizer_for
from tests.support.framework_llama import DecoderLayer, SmallLlama


def under_zero(example: Example, stage: int, recomputed: dict[str, Any] | None = None) -> Result:
    from deepspeed.utils import safe_get_full_fp32_param

    mesh = example.device_mesh()
    context = example.handle(mesh)
    model = SmallLlama() if stage < 3 else SmallLlama().float()
    if recomputed is not None:
        recompute.wrap(model, DecoderLayer, **recomputed)
    os.environ["LOCAL_RANK"] = "0"  # as torchrun and DeepSpeed's launcher set it
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
    result.parameters = {plain(name): safe_get_full_fp32_param(x).clone() for name, x in model.named_parameters()}
    return result


def refusals() -> dict[str, str]:
    """What is refused before DeepSpeed is called."""
    model, mesh = SmallLlama(), Example(TOGETHER).device_mesh()
    part, right = (
        DeviceMesh("cpu", torch.tensor([[0, 1]]), mesh_dim_names=("data", "context")),
        {"gradient_clipping": 0},
    )
    calls: dict[str, tuple[DeviceMesh, Any]] = {
        "a part of the world": (part, right),
        "no clipping named": (mesh, {}),
        "accumulation": (mesh, right | {"gradient_accumulation_steps": 2}),
        "sequence parallelism": (mesh, right | {"sequence_parallel_size": 2}),
        "an optimizer": (mesh, right | {"optimizer": {"type": "AdamW"}}),
        "16 bits": (mesh, right | {"bf16": {"enabled": True}}),
        "fp64 at stage 3": (mesh, right | {"zero_optimization": {"stage": 3}}),
        "a file": (mesh, "config.json"),
    }
    said = {}
    for name, (over, config) in calls.items():
        try:
            deepspeed.initialize(model, optimizer_for(model), over, config)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")
