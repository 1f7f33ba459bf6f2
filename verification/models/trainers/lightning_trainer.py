"""Lightning's Trainer over data x context, with `ReplicatedStrategy` (DDP) or `ShardedStrategy` (FSDP2).

    python -m verification model verification.models.trainers.lightning_trainer:Llama

Lightning deals the rows to data ranks, accumulates, clips and takes the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaForCausalLM

from ring.nn import ContextParallel, count_labels, cross_entropy, shard_batch
from ring.nn.frameworks.lightning import ReplicatedStrategy, ShardedStrategy
from ring.nn.frameworks.transformers import prepare
from verification.models import ModelCase, Run, Setup, WholeBatch
from verification.models.setup import distribute, recompute_layers
from verification.models.trainers.small_llama import small_llama


class Module(LightningModule):  # type: ignore[misc]
    """The module that a user writes. losses: of each micro-batch, with its number of labels."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, run: Run) -> None:
        super().__init__()
        self.net, self.optimizer, self.run = model, optimizer, run
        self.losses: list[tuple[float, int]] = []

    def configure_model(self) -> None:
        """Leave the model as `Setup.wrap` sharded it, before the optimizer got its parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self.optimizer

    def training_step(self, rows: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a micro-batch, weighted by its labels."""
        assert self.run.context is not None
        batch = shard_batch(self.run.context, *rows, documents=self.run.case.lengths)
        logits = self.net(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
        assert batch.labels is not None
        loss = cross_entropy(self.run.see(logits), batch.labels, self.device_mesh)
        self.losses.append((loss.item(), labelled := count_labels(batch.labels, self.device_mesh)))
        return self.trainer.strategy.weighted(loss, labelled)


class Llama(Setup):
    """A Llama that Lightning trains."""

    def build(self, context: ContextParallel | None) -> LlamaForCausalLM:
        """Return the model, prepared on ranks."""
        return small_llama() if context is None else prepare(small_llama(), context.transport)

    def claims(self, case: ModelCase) -> ModelCase:
        """Return the nearest ModelCase with a wrapper of Lightning's strategies, and with their mesh."""
        return replace(case, arrangement="contiguous", wrapper="fsdp2" if case.fully_sharded else "ddp")

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        """Return the model, sharded for `ShardedStrategy`; the other one wraps it."""
        recompute_layers(model, self.layers(model), run)
        return distribute(model, self.layers(model), run) if run.case.fully_sharded else model

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer,
        steps: Sequence[Sequence[Sequence[WholeBatch]]], run: Run,
    ) -> list[tuple[float, None]]:  # fmt: skip
        """Take all steps. Lightning logs no norms: those after clipping show in the gradients."""
        case, module = run.case, Module(model, optimizer, run)
        batches = [batch for ranks in steps for batch in zip(*ranks, strict=True)]
        # Lightning shuffles by torch's sampler, which deals rows to data ranks in turn.
        number = len(batches) * case.data * case.batch
        places = torch.tensor(list(DistributedSampler(cast(Any, range(number)), 1, 0))).argsort()
        rows = TensorDataset(*(
            torch.cat([torch.stack([getattr(x, name) for x in batch], 1).flatten(0, 1) for batch in batches])[places]
            for name in ("tokens", "labels")
        ))  # fmt: skip
        strategy = ShardedStrategy if case.fully_sharded else ReplicatedStrategy
        trainer = Trainer(
            accelerator=case.device.replace("cuda", "gpu"), devices=case.world, strategy=strategy(case.context),
            plugins=[TorchElasticEnvironment()], max_epochs=1, accumulate_grad_batches=case.accumulation,
            gradient_clip_val=case.clipping, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(rows, batch_size=case.batch))
        ends = range(case.accumulation, len(batches) + 1, case.accumulation)
        return [(mean(module.losses[end - case.accumulation : end]), None) for end in ends]


def mean(losses: Sequence[tuple[float, int]]) -> float:
    """Return the mean over all labels of the micro-batches of a step."""
    return sum(loss * labelled for loss, labelled in losses) / sum(labelled for _, labelled in losses)
