"""DeepSpeed's ZeRO, and FairScale's OSS with ShardedDDP, as the wrapper of a training step."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

from ring.comm.transport import Transport
from verification.peers.training.step_peer import Claims, StepPeer, in_dtype
from verification.training.rank.rank_step import train_on_rank
from verification.training.step_observation import StepObservation
from verification.training.training_case import TrainingCase

ZERO, OSS = "verification.peers.training.zero_engine", "verification.peers.training.oss_model"


def wrapper_peer(name: str, supported: str, claims: Claims, module: str, kind: str, *arguments: object) -> StepPeer:
    """module: the only one that imports the package. kind: its OwnSetup. arguments: passed first."""

    def train(transport: Transport, case: TrainingCase) -> StepObservation:
        return train_on_rank(transport, case, partial(getattr(importlib.import_module(module), kind), *arguments))

    package, prepare = name.partition("/")[0], partial(importlib.import_module, module)
    return StepPeer(name, supported, claims, train, package=package, prepare=prepare, preload=(module,))


def without_wrapper(case: TrainingCase) -> TrainingCase:
    """Remove the Case's own wrapper, and compilation. Do not resume: both packages have their own checkpoints."""
    return replace(case, wrapper="none", resumed=None, compiled="no", spoilt=None)


def in_fp32(case: TrainingCase) -> TrainingCase:
    """Replace fp64 by fp32: ZeRO keeps parameters, and sums gradients, in fp32."""
    return in_dtype(without_wrapper(case), "float32" if case.dtype == "float64" else case.dtype)


def without_clipping_in_fp64(case: TrainingCase) -> TrainingCase:
    """Remove clipping in fp64: OSS computes the norm of gradients in fp32, and refuses fp64."""
    return replace(without_wrapper(case), clipping=None if case.dtype == "float64" else case.clipping)


def zero(stage: int) -> StepPeer:
    supported = f"ring.integrations.deepspeed, ZeRO {stage}: fp32, and bf16 with parameters and sums in fp32"
    return wrapper_peer(f"deepspeed/zero{stage}", supported, in_fp32, ZERO, "Zero", stage)


def oss(name: str, kind: str, supported: str) -> StepPeer:
    supported = f"{supported}: fp64 without clipping, fp32, bf16 by autocast"
    return wrapper_peer(f"fairscale/{name}", supported, without_clipping_in_fp64, OSS, kind)


WRAPPER_PEERS = (
    *(zero(stage) for stage in (1, 2, 3)),
    oss("guarded", "Sharded", "ring.integrations.fairscale"),
    oss("as-written", "ShardedAsWritten", "OSS and ShardedDDP by their defaults, and the optimizer's zero_grad()"),
)
