"""What a TrainingCase must give, and how far a run may be from it: all that its checks compare the ranks with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference import cost
from verification.training.dense.dense_step import train_densely
from verification.training.dense.tolerance import Allowed, allowed_deviations
from verification.training.inputs import GlobalBatch, global_batch
from verification.training.training_case import VOCABULARY, TrainingCase

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StepExpectation:
    """exact, allowed: by quantity (`dense_step.QUANTITIES`) and name. first: the batch of step one. sent: for each of
    the Case's parts, bytes from each index of a context group to each other, (context, context), the same in all
    groups. graph_runs: for each part, how often a rank runs a compiled graph forward."""

    exact: dict[str, dict[str, Floats]]
    allowed: Allowed
    first: GlobalBatch
    sent: tuple[NDArray[np.int64], ...]
    graph_runs: tuple[int, ...]


def expect_training(case: TrainingCase) -> StepExpectation:
    dense = train_densely(case)
    exact = {
        quantity: {name: np.asarray(x.numpy(), np.float64) for name, x in named.items()}
        for quantity, named in dense.quantities().items()
    }
    sent = tuple(bytes_sent(part, gathered=number == 0) for number, part in enumerate(case.parts))
    runs = tuple(map(graph_runs, case.parts))
    return StepExpectation(exact, allowed_deviations(case, dense), global_batch(case, 0), sent, runs)


def bytes_sent(case: TrainingCase, gathered: bool) -> NDArray[np.int64]:
    """(context, context), by `reference.cost`: of each layer in each micro-batch one forward, one more where
    checkpointing computes it again, and one backward; and of the logits, where they are gathered once."""
    forwards, attention = 2 if case.recomputed else 1, np.zeros((case.context, case.context), np.int64)
    for step in range(case.steps):
        call = _bytes_of_a_call(case.at(step))
        attention += case.model.layers * case.accumulation * (forwards * call.forward + call.backward)
    if not gathered:
        return attention
    shard = np.array(case.shards().counts) * case.batch * VOCABULARY * case.torch_dtype.itemsize
    others = 1 - np.eye(case.context, dtype=np.int64)
    return np.asarray(attention + shard[:, None] * others, np.int64)


def _bytes_of_a_call(case: TrainingCase) -> cost.Traffic:
    """Of the attention of one layer."""
    model = case.model
    setting = cost.Setting(
        case.pattern, case.shards().positions, case.batch, model.heads, model.kv_heads, model.head_dim,
        case.torch_dtype.itemsize,
    )  # fmt: skip
    narrow = case.device == "cuda" and case.exchange == "direct" and case.torch_dtype.itemsize == 2
    return cost.sent(setting, case.exchange, narrow)


def graph_runs(case: TrainingCase) -> int:
    """How often a rank runs a compiled graph forward: one for the model in each micro-batch, in which layers that are
    computed again are computed within its backward; under FSDP one for each layer, once more to compute it again."""
    if case.compiled == "no":
        return 0
    forwards = case.accumulation * case.steps
    if case.wrapper not in ("fsdp2", "hsdp2"):
        return forwards
    return forwards * case.model.layers * (1 if case.checkpointing == "none" else 2)
