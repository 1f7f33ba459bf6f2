"""Trains a TrainingCase in one process, in fp64, on the whole batch of each step."""

from __future__ import annotations

from torch import Tensor

from verification.models.batches import IGNORED, GlobalBatch, global_batch
from verification.models.noise import Rounded, exact
from verification.models.recording import train_in_one_process
from verification.models.results import Results
from verification.training.dense.dense_model import dense_logits
from verification.training.inputs import initial_parameters
from verification.training.training_case import TrainingCase


def train_densely(case: TrainingCase, rounded: Rounded = exact, stored: Rounded = exact) -> Results:
    """Train the Case; results are float64. rounded: applied to numbers that its dtype rounds; stored: to parameters
    after each step."""
    parameters = {name: x.requires_grad_() for name, x in initial_parameters(case).items()}
    kind, settings = case.optimizer
    results = Results()

    def loss_of(step: int) -> Tensor:
        batch = global_batch(case, step)
        logits = dense_logits(case.at(step), parameters, batch.tokens.flatten(0, 2), rounded)
        logits = logits.unflatten(0, batch.tokens.shape[:3])
        if step == 0:
            results.logits["first micro-batch"] = logits[:, 0].detach().numpy()
        return mean_loss(logits, batch)

    train_in_one_process(case, parameters, kind(parameters.values(), **settings), loss_of, results, stored=stored)
    return results


def mean_loss(logits: Tensor, batch: GlobalBatch) -> Tensor:
    """Mean of -log softmax at the label over all labelled tokens: (); 0, with zero gradients, if there are none."""
    labelled = batch.labels != IGNORED
    label_logits = logits.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]  # (data, accumulation, batch, n)
    losses = logits.logsumexp(-1) - label_logits
    return (losses * labelled).sum() / max(1, batch.labelled)
