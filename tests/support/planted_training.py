"""Faults that are planted into the ranks of a training run: a backend's `prepare`, called in every new rank."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from torch import Tensor

from ring.nn import batch
from ring.nn.batch_ranks import _Numbers
from verification.training.rank import rank_step
from verification.training.rank.graphs import Graphs
from verification.training.rank.ring_model import Inner, ring_inner
from verification.training.rank.wrapping import Unwrapped
from verification.training.training_case import TrainingCase


def plant_loss_of_steps() -> None:
    """From the second step on, the loss is noted a thousandth too large."""
    real = rank_step.take_gradients

    def spoiled(*arguments: Any) -> Tensor:
        losses = real(*arguments)
        return losses if arguments[-1] is not None else losses * 1.001

    rank_step.take_gradients = spoiled  # type: ignore[assignment]


def plant_scale_of_tied_gradients() -> None:
    """With tied weights, gradients are one in a million too large on ranks of several layers' models."""
    real = Unwrapped.backward

    def spoiled(self: Unwrapped, loss: Tensor) -> None:
        model = self.case.model
        real(self, loss * (1 + 1e-6) if model.tied and model.layers > 1 else loss)

    Unwrapped.backward = spoiled  # type: ignore[method-assign]


def plant_forgotten_rank() -> None:
    """The last rank steps a little further, where there are two data ranks."""
    real = Unwrapped.parameters

    def spoiled(self: Unwrapped) -> dict[str, Tensor]:
        found = real(self)
        import torch.distributed as dist

        if self.case.data > 1 and dist.get_rank() == self.case.world - 1:
            found["embedding.weight"] = found["embedding.weight"] + 1e-3
        return found

    Unwrapped.parameters = spoiled  # type: ignore[method-assign]


def plant_death() -> None:
    """Rank 0 dies with two micro-batches."""
    real = rank_step.loaded

    def spoiled(case: TrainingCase, inner: Inner = ring_inner) -> Any:
        import torch.distributed as dist

        if case.accumulation > 1 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(case, inner)

    rank_step.loaded = spoiled


def plant_sleep() -> None:
    """Rank 1 never begins a Case with clipping."""
    real = rank_step.loaded

    def spoiled(case: TrainingCase, inner: Inner = ring_inner) -> Any:
        import torch.distributed as dist

        if case.clipping is not None and dist.get_rank() == 1:
            time.sleep(3600)
        return real(case, inner)

    rank_step.loaded = spoiled


def plant_eager_steps() -> None:
    """What is to be compiled runs as it is, and says nothing."""
    Graphs.compiled = lambda self, what: what  # type: ignore[method-assign]


def plant_digest_by_sum() -> None:
    """Tensors that hold the same bytes in another order have the same digest."""
    batch._digest = lambda x: str(int(batch._bytes(x.contiguous()).sum()))


def plant_digest_of_sums_of_rows() -> None:
    """Tensors whose rows hold the same numbers in another order have the same digest."""
    batch._digest = lambda x: str(x.long().sum(1).tolist())


def plant_no_catching_up() -> None:
    """After an error on a group of a batch each rank goes on from its own number of calls."""
    _Numbers.catch_up = lambda self, number: None  # type: ignore[method-assign]
