"""DeepSpeed's ZeRO 1, 2 and 3 over data x context.

    engine = deepspeed.initialize(model, optimizer, mesh, {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0})
    labelled = count_labels([batch.labels for batch in batches], mesh)           # of the whole step
    for batch in batches:                                                        # gradient accumulation
        logits = engine(batch.tokens, batch.context)
        engine.backward(cross_entropy(logits, batch.labels, mesh, labelled=labelled))
    engine.step()                                                                # clips, steps, clears the gradients

DeepSpeed averages over all ranks of the world, as DDP does, so losses have the same scale. The number of micro-batches
is that of the loop above, not of the configuration, by which DeepSpeed would divide each loss once more.

ZeRO keeps parameters, and sums gradients, in fp32 for any model. So fp64 loses its precision. Stage 3 takes it only on
processors without fp16 instructions, so it is refused there. In 16 bits ZeRO adds the gradients of micro-batches in 16
bits unless the configuration names `data_types.grad_accum_dtype`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ring.extras import optional_imports

with optional_imports(__name__):
    import deepspeed

from ring.integrations.wrappers import same_ranks
from ring.integrations.wrappers.mesh import averaging_mesh

# Settings that the loop, the optimizer or the mesh determines. With some, DeepSpeed would compute something else.
NOT_IN_CONFIG = {
    "gradient_accumulation_steps": "the number of micro-batches is that of the calls of backward",
    "train_batch_size": "the number of micro-batches is that of the calls of backward",
    "managed_gradient_accumulation": "the number of micro-batches is that of the calls of backward",
    "optimizer": "it is an argument",
    "sequence_parallel_size": "the sequence is sharded by the handle",
    "tensor_parallel": "gradients are averaged over all ranks",
}
HALVES = ("fp16", "bf16")


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, config: dict[str, Any]
) -> deepspeed.DeepSpeedEngine:
    """Return DeepSpeed's engine for the model and a new optimizer of its parameters.

    Args:
        model: in fp32 or 16 bits for stage 3.
        optimizer: of the model's parameters.
        mesh: of all ranks of the world, each with tokens of its own.
        config: DeepSpeed's. It must name gradient_clipping (0 for none), since the default clips at 1.0; and in 16 bits
            communication_data_type, in which gradients are summed, since the default is 16 bits too.

    Raises:
        ValueError: a mesh that leaves out ranks, a model in fp64 at stage 3, a configuration without these settings, or
            with any that the loop, the mesh or the optimizer determines (gradient_accumulation_steps, ...).
    """
    over = averaging_mesh(mesh)
    if over.size() != dist.get_world_size():
        raise ValueError(
            f"mesh must have all {dist.get_world_size()} ranks of the world, over which DeepSpeed averages gradients, "
            f"got one of {over.size()}"
        )
    _check(config)
    in_fp64 = [name for name, x in model.named_parameters() if x.dtype == torch.float64]
    if in_fp64 and config.get("zero_optimization", {}).get("stage") == 3:
        raise ValueError(f"model must be in fp32 or 16 bits for stage 3, got {in_fp64[0]} in float64")
    same_ranks.watch(model, mesh)
    fixed = {"managed_gradient_accumulation": False, "train_micro_batch_size_per_gpu": 1}  # the latter is for its logs
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=fixed | config, dist_init_required=False)
    return engine


def _check(config: dict[str, Any]) -> None:
    if not isinstance(config, dict):
        raise ValueError(f"config must be a dictionary, got a {type(config).__name__}")
    for name, reason in NOT_IN_CONFIG.items():
        if name in config:
            raise ValueError(f"config must leave {name} out: {reason}; got {config[name]!r}")
    if "gradient_clipping" not in config:
        raise ValueError("config must name gradient_clipping, 0 for none: without it DeepSpeed clips at 1.0")
    enabled = [name for name in HALVES if config.get(name, {}).get("enabled")]
    if enabled and "communication_data_type" not in config:
        raise ValueError(
            f"config must name communication_data_type, in which gradients are summed, with {enabled[0]}: 'fp32', or "
            "16 bits if that is meant"
        )


def without_compiler() -> None:
    """Stop DeepSpeed from compiling when it starts on CPUs (DS_ACCELERATOR=cpu). Call it before `initialize`.

    DeepSpeed would compile an operator for shared memory, which takes long and which training does not use. This marks
    the operator as incompatible in DeepSpeed's table.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
