"""Expected results of a TrainingCase, and the allowed deviations: everything that the checks compare ranks with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from reference import cost
from reference.head_groups import groups_of
from verification.models.batches import VOCABULARY, GlobalBatch, global_batch
from verification.models.results import Expectation, Named
from verification.models.tolerance import Allowed, allowed_deviations
from verification.training.dense.dense_step import train_densely
from verification.training.training_case import TrainingCase


@dataclass(frozen=True, eq=False, kw_only=True)
class StepExpectation(Expectation):
    """Results of the dense run, and what ranks have and send.

    first           the batch of step one
    sent            for each of the Case's parts, bytes from index to index of a context group, (context, context)
    graph_runs      for each part, how often a rank runs a compiled graph forward
    """

    first: GlobalBatch
    sent: tuple[NDArray[np.int64], ...]
    graph_runs: tuple[int, ...]


def expect_training(case: TrainingCase) -> StepExpectation:
    exact = train_densely(case).quantities()
    return StepExpectation(
        exact=exact,
        allowed=allowed_in_steps(case, exact),
        first=global_batch(case, 0),
        sent=tuple(bytes_sent(part, gathered=number == 0) for number, part in enumerate(case.parts)),
        graph_runs=tuple(map(graph_runs, case.parts)),
    )


def allowed_in_steps(case: TrainingCase, exact: Mapping[str, Named]) -> Allowed:
    """Return the largest allowed deviations, estimated in fp64 too for models with norms that may be steps
    (`Model.has_steps`): a layer norm multiplies a small change by up to 1 / sqrt(eps), and several in sequence have
    amplified the last bit to 4e-9."""
    return allowed_deviations(case, exact, partial(train_densely, case), estimated=case.model.has_steps)


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
    straight = groups_of(case.exchange, case.context).straight
    narrow = case.device == "cuda" and straight and case.torch_dtype.itemsize == 2
    return cost.sent(setting, case.exchange, narrow)


def graph_runs(case: TrainingCase) -> int:
    """Number of forward runs of compiled graphs on a rank. Without FSDP: one per micro-batch, since the graph's
    backward recomputes layers. With FSDP: one per layer and micro-batch, two where the layer is recomputed."""
    if case.compiled == "no":
        return 0
    forwards = case.accumulation * case.steps
    if not case.fully_sharded:
        return forwards
    return forwards * case.model.layers * (1 if case.checkpointing == "none" else 2)
