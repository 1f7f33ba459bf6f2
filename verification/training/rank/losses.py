"""Ways to compute the loss. All give the same value, and after averaging the same gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from ring.nn import SameWeights, count_labels, cross_entropy, token_mean
from verification.models.batches import IGNORED, VOCABULARY

OTHER_IGNORED = VOCABULARY  # neither a token nor negative


class PlainLoss:
    """Plain `cross_entropy`. part: the factor on the loss before backward."""

    part = 1.0

    def count(self, labels: list[Tensor], mesh: DeviceMesh) -> int:
        """Number of labels in all micro-batches of a step on all ranks."""
        return count_labels(labels, mesh)

    def mean(self, logits: Tensor, labels: Tensor, mesh: DeviceMesh | SameWeights, labelled: int | None) -> Tensor:
        return cross_entropy(logits, labels, mesh, labelled=labelled)


class ScaledLoss(PlainLoss):
    """Doubled gradients of half the loss, with another ignored label."""

    part = 0.5

    def count(self, labels: list[Tensor], mesh: DeviceMesh) -> int:
        return count_labels([_with_other_ignored(x) for x in labels], mesh, OTHER_IGNORED)

    def mean(self, logits: Tensor, labels: Tensor, mesh: DeviceMesh | SameWeights, labelled: int | None) -> Tensor:
        assert not isinstance(mesh, SameWeights)
        twice = 2.0 * mesh.size()
        return cross_entropy(
            logits, _with_other_ignored(labels), mesh, labelled=labelled, averaged_over=twice, ignored=OTHER_IGNORED
        )


class TokenLosses(PlainLoss):
    """Losses of tokens computed by the program, infinite at unlabelled ones."""

    def mean(self, logits: Tensor, labels: Tensor, mesh: DeviceMesh | SameWeights, labelled: int | None) -> Tensor:
        wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).flatten(0, 1)
        losses = functional.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="none")
        losses = losses.view_as(labels).masked_fill(labels == IGNORED, torch.inf)
        return token_mean(losses, labels, mesh, labelled=labelled)


def _with_other_ignored(labels: Tensor) -> Tensor:
    return labels.masked_fill(labels == IGNORED, OTHER_IGNORED)


LOSSES = {"mean": PlainLoss(), "scaled": ScaledLoss(), "given": TokenLosses()}
