"""Trains a TrainingCase in one process, in fp64, on the whole batch of each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verification.training.dense.dense_model import dense_logits
from verification.training.dense.noise import Rounded, exact
from verification.training.inputs import IGNORED, GlobalBatch, global_batch, initial_parameters, optimiser_of
from verification.training.training_case import TrainingCase

Named = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """Results by quantity and name, all float64.

    logits      "first micro-batch": of every data rank before the first step, (data, batch, n, vocabulary)
    losses      "step 1", ...: (); the mean over all labelled tokens of the step, 0 if there are none
    gradients   by the parameter's name, of step 1, before clipping
    norms       "step 1", ...: (); of all gradients together, before clipping. Empty without clipping
    parameters  by name, after the last step
    """

    logits: Named
    losses: Named
    gradients: Named
    norms: Named
    parameters: Named

    def quantities(self) -> dict[str, Named]:
        return {name: getattr(self, name) for name in QUANTITIES}


QUANTITIES = ("logits", "losses", "gradients", "norms", "parameters")
FIRST = "step 1"


def train_densely(case: TrainingCase, rounded: Rounded = exact, stored: Rounded = exact) -> TrainingResult:
    """Train the Case. rounded: applied to numbers that its dtype rounds; stored: to parameters after each step."""
    parameters = {name: x.requires_grad_() for name, x in initial_parameters(case).items()}
    optimiser = optimiser_of(case, parameters.values())
    result = TrainingResult({}, {}, {}, {}, {})
    for step in range(case.steps):
        batch, label = global_batch(case, step), f"step {step + 1}"
        logits = dense_logits(case.at(step), parameters, batch.tokens.flatten(0, 2), rounded)
        logits = logits.unflatten(0, batch.tokens.shape[:3])
        loss = mean_loss(logits, batch)
        optimiser.zero_grad()
        loss.backward()
        result.losses[label] = loss.detach()
        if step == 0:
            result.logits["first micro-batch"] = logits[:, 0].detach()
            result.gradients.update((name, _gradient(x).clone()) for name, x in parameters.items())
        if case.clipping is not None:
            result.norms[label] = torch.nn.utils.clip_grad_norm_(list(parameters.values()), case.clipping)
        optimiser.step()
        with torch.no_grad():
            for x in parameters.values():
                x.copy_(stored(x))
    result.parameters.update((name, x.detach()) for name, x in parameters.items())
    return result


def mean_loss(logits: Tensor, batch: GlobalBatch) -> Tensor:
    """Mean of -log softmax at the label over all labelled tokens: (); 0, with zero gradients, if there are none."""
    labelled = batch.labels != IGNORED
    label_logits = logits.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]  # (data, accumulation, batch, n)
    losses = logits.logsumexp(-1) - label_logits
    return (losses * labelled).sum() / max(1, batch.labelled)


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad
