"""Expected results of a TrainingCase, and the allowed deviations: everything that the checks compare ranks with."""

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
    """Expected results.

    exact, allowed  by quantity (`dense_step.QUANTITIES`) and name
    first           the batch of step one
    sent            for each of the Case's parts, bytes from index to index of a context group, (context, context)
    graph_runs      for each part, how often a rank runs a compiled graph forward
    """

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
    """Bytes by `reference.cost`, (context, context). Each layer counts, per micro-batch, one backward and one forward,
    or two forwards where checkpointing recomputes it. gathered: also count one gather of the logits."""
    forwards, attention = 2 if case.recomputed else 1, np.zeros((case.context, case.context), np.int64)
    for step in range(case.steps):
        call = _call_traffic(case.at(step))
        attention += case.model.layers * case.accumulation * (forwards * call.forward + call.backward)
    if not gathered:
        return attention
    shard = np.array(case.shards().counts) * case.batch * VOCABULARY * case.torch_dtype.itemsize
    others = 1 - np.eye(case.context, dtype=np.int64)
    return np.asarray(attention + shard[:, None] * others, np.int64)


def _call_traffic(case: TrainingCase) -> cost.Traffic:
    """Bytes of one layer's attention."""
    model = case.model
    setting = cost.Setting(
        case.pattern, case.shards().positions, case.batch, model.heads, model.kv_heads, model.head_dim,
        case.torch_dtype.itemsize,
    )  # fmt: skip
    narrow = case.device == "cuda" and case.exchange == "direct" and case.torch_dtype.itemsize == 2
    return cost.sent(setting, case.exchange, narrow)


def graph_runs(case: TrainingCase) -> int:
    """Number of forward runs of compiled graphs on a rank. Without FSDP: one per micro-batch, since the graph's
    backward recomputes layers. With FSDP: one per layer and micro-batch, two where the layer is recomputed."""
    if case.compiled == "no":
        return 0
    forwards = case.accumulation * case.steps
    if case.wrapper not in ("fsdp2", "hsdp2"):
        return forwards
    return forwards * case.model.layers * (1 if case.checkpointing == "none" else 2)
