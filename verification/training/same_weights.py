"""The law of `ring.nn.SameWeights`: the same drawn steps have the same bits on any ranks, data x context.

It is the law of `verification.models.same_bits`. The other run takes all steps at once, also where the first one is
resumed from a checkpoint.

Steps of these kinds are drawn: accumulation, documents of each step, all recomputation, ignored labels, clipping, both
optimizers, tied weights, both norms, biases, GQA, fp64, fp32, and bf16 by autocast; with the comparison of chunks and
without. Left out are what `SameWeights` refuses: FSDP's parameters, compiled models, modules with parameters beside
modules, as sinks, ranks without a chunk; a loss with `averaged_over`; and transports other than process groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from verification.models.same_bits import SAME_WEIGHTS, check_same_bits
from verification.run.backends import Backend
from verification.training.step_observation import StepObservation
from verification.training.training_case import TrainingCase


def check_same_weights(
    backend: Backend, case: TrainingCase, observations: Sequence[StepObservation]
) -> dict[str, float]:
    """Check that a step's results have the same bits on the other ranks of the Case. observations: of its own ranks."""
    if not SAME_WEIGHTS.concerns(case):
        return {}
    losses = {part.accumulation for part in (*case.parts, case.elsewhere)} == {case.accumulation}
    return check_same_bits(case, observations, _observe_elsewhere(backend, case), losses)


def _observe_elsewhere(backend: Backend, case: TrainingCase) -> Sequence[StepObservation]:
    """Return the Observations of the other ranks."""
    from verification.training.rank.own_setup import OwnSetup  # lazy: importing FSDP slows every command
    from verification.training.rank.rank_step import train_on_rank

    other = case.elsewhere
    ranks = backend if other.world == case.world else backend.beside(other.world)
    ranks.submit(train_on_rank, other, OwnSetup, case)
    return ranks.collect()
