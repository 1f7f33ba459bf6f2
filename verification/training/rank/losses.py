"""The ways in which a training program takes its loss: all have one value, and after the average one gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from ring.nn import count_labels, cross_entropy, token_mean
from verification.training.inputs import IGNORED
from verification.training.training_case import VOCABULARY

OTHER_IGNORED = VOCABULARY  # no token, and not negative


class PlainLoss:
    """`cross_entropy` as it is. part: of the loss, whose backward is taken."""

    part = 1.0

    def count(self, labels: list[Tensor], mesh: DeviceMesh) -> int:
        """Of all micro-batches of a step on all ranks."""
        return count_labels(labels, mesh)

    def mean(self, logits: Tensor, labels: Tensor, mesh: DeviceMesh, labelled: int | None) -> Tensor:
        return cross_entropy(logits, labels, mesh, labelled=labelled)


class ScaledLoss(PlainLoss):
    """Gradients twice as large, of half the loss; another number stands where there is no label."""

    part = 0.5

    def count(self, labels: list[Tensor], mesh: DeviceMesh) -> int:
        return count_labels([_otherwise(one) for one in labels], mesh, OTHER_IGNORED)

    def mean(self, logits: Tensor, labels: Tensor, mesh: DeviceMesh, labelled: int | None) -> Tensor:
        twice = 2.0 * mesh.size()
        return cross_entropy(
            logits, _otherwise(labels), mesh, labelled=labelled, averaged_over=twice, ignored=OTHER_IGNORED
        )


class GivenLosses(PlainLoss):
    """Losses that the program computes by itself, without looking at where there is none."""

    def mean(self, logits: Tensor, labels: Tensor, mesh: DeviceMesh, labelled: int | None) -> Tensor:
        given = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).flatten(0, 1)
        losses = functional.cross_entropy(given, labels.flatten(), ignore_index=IGNORED, reduction="none")
        losses = losses.view_as(labels).masked_fill(labels == IGNORED, torch.inf)
        return token_mean(losses, labels, mesh, labelled=labelled)


def _otherwise(labels: Tensor) -> Tensor:
    return labels.masked_fill(labels == IGNORED, OTHER_IGNORED)


LOSSES = {"mean": PlainLoss(), "scaled": ScaledLoss(), "given": GivenLosses()}
