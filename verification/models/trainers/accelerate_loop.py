"""A loop of one's own with accelerate, which wraps the model in DDP, accumulates and clips.

python -m verification model verification.models.trainers.accelerate_loop:Llama
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import nn

from ring.integrations.transformers import prepare
from ring.nn import ContextParallel
from verification.models import ModelCase, Run, Setup
from verification.models.setup import Steps, recompute_layers
from verification.models.trainers.small_llama import small_llama


class Llama(Setup):
    """A Llama that accelerate wraps."""

    def build(self, context: ContextParallel | None) -> nn.Module:
        """Return the model, prepared on ranks."""
        return small_llama() if context is None else prepare(small_llama(), context.transport)

    def claims(self, case: ModelCase) -> ModelCase:
        """Return the nearest ModelCase with accelerate's wrapper on CPUs."""
        return replace(case, wrapper="ddp")

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        """Return the model with its checkpointing: accelerate wraps it."""
        recompute_layers(model, self.layers(model), run)
        return model

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Steps, run: Run
    ) -> Iterator[tuple[float, torch.Tensor | None]]:
        """Take all steps."""
        assert run.mesh is not None
        number, data_rank = run.case.accumulation, run.mesh.get_local_rank("data")
        accelerator = Accelerator(cpu=run.case.device == "cpu", gradient_accumulation_steps=number)
        model, optimizer = accelerator.prepare(model, optimizer)
        for batches in steps:
            parts, total, norm = [self.shard(batch, run) for batch in batches[data_rank]], 0.0, None
            run.labelled = self.count(parts, run)
            for part in parts:
                with accelerator.accumulate(model):
                    loss = self.loss(model, part, run)
                    accelerator.backward(loss * number)  # which it divides by their number
                    if accelerator.sync_gradients and run.case.clipping is not None:
                        norm = accelerator.clip_grad_norm_(model.parameters(), run.case.clipping)
                    optimizer.step()
                    optimizer.zero_grad()
                total += loss.item()
            yield total, norm
