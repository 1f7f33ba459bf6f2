"""Lightning's Trainer over data x context, with `ReplicatedStrategy` (DDP) or `ShardedStrategy` (FSDP2).

    python -m verification model verification.models.trainers.lightning_trainer:Llama

Lightning deals the rows to data ranks, accumulates, clips, takes the steps, saves and resumes, and evaluates. A step is
an epoch: Lightning resumes at the start of one.
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

from ring.integrations.trainers.lightning import ReplicatedStrategy, ShardedStrategy
from ring.integrations.transformers import prepare
from ring.nn import ContextParallel, count_labels, cross_entropy, shard_batch, token_mean
from verification.models import ModelCase, Run, Setup, WholeBatch
from verification.models.setup import Steps, distribute, probabilities, recompute_layers
from verification.models.step_case import StepCase
from verification.models.trainers.schedule import follow, linear
from verification.models.trainers.small_llama import small_llama


class Module(LightningModule):  # type: ignore[misc]
    """The module that a user writes.

    epochs: rows and labels of each. losses: of each micro-batch, with its number of labels.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: Sequence[TensorDataset], run: Run
    ) -> None:
        super().__init__()
        self.net, self.optimizer, self.epochs, self.run = model, optimizer, epochs, run
        self.losses: list[tuple[float, int]] = []

    def configure_model(self) -> None:
        """Leave the model as `Setup.wrap` sharded it, before the optimizer got its parameters."""

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and its schedule."""
        return [self.optimizer], [linear(self.optimizer, self.run.case.steps)]

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the rows of an epoch."""
        return DataLoader(self.epochs[self.current_epoch], batch_size=self.run.case.batch)

    def logits(self, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, int]:
        """Return this rank's logits and labels, and the number of labels on all ranks."""
        assert self.run.context is not None
        batch = shard_batch(self.run.context, *rows, documents=self.run.case.lengths)
        logits = self.net(batch.tokens, position_ids=batch.positions[None], context=batch.context).logits
        assert batch.labels is not None
        return logits, batch.labels, count_labels(batch.labels, self.device_mesh)

    def training_step(self, rows: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a micro-batch, weighted by its labels."""
        logits, labels, labelled = self.logits(rows)
        loss = cross_entropy(self.run.see(logits), labels, self.device_mesh)
        self.losses.append((loss.item(), labelled))
        return self.trainer.strategy.weighted(loss, labelled)

    def validation_step(self, rows: tuple[Tensor, Tensor], index: int) -> None:
        """Log means over all labels: of the loss, and of the probability of labels."""
        logits, labels, labelled = self.logits(rows)
        values = {
            "loss": cross_entropy(logits, labels, self.device_mesh),
            "probability": token_mean(probabilities(logits, labels), labels, self.device_mesh),
        }
        self.log_dict(values, batch_size=labelled)


class Llama(Setup):
    """A Llama that Lightning trains."""

    evaluates = resumes = True

    def build(self, context: ContextParallel | None) -> LlamaForCausalLM:
        """Return the model, prepared on ranks."""
        return small_llama() if context is None else prepare(small_llama(), context.transport)

    def claims(self, case: ModelCase) -> ModelCase:
        """Return the nearest ModelCase with a wrapper of Lightning's strategies and their mesh, and an evaluation in
        which data ranks repeat no sequence."""
        case = replace(case, arrangement="contiguous", wrapper="fsdp2" if case.fully_sharded else "ddp")
        return replace(case, held=case.held - case.held % case.data)

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        """Return the model, sharded for `ShardedStrategy`; the other one wraps it."""
        recompute_layers(model, self.layers(model), run)
        return distribute(model, self.layers(model), run) if run.case.fully_sharded else model

    def optimizer(self, parameters: Sequence[nn.Parameter], run: Run) -> torch.optim.Optimizer:
        """Return the optimizer, which Lightning schedules on ranks."""
        optimizer = super().optimizer(parameters, run)
        return follow(optimizer, run.case.steps) if run.mesh is None else optimizer

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Steps, run: Run
    ) -> list[tuple[float, None]]:
        """Take all steps. Lightning logs no norms: those after clipping show in the gradients."""
        case = run.case
        module = Module(model, optimizer, [epoch(ranks, number, case) for number, ranks in enumerate(steps)], run)
        strategy = ShardedStrategy if case.fully_sharded else ReplicatedStrategy
        trainer = Trainer(
            accelerator=case.device.replace("cuda", "gpu"), devices=case.world, strategy=strategy(case.context),
            plugins=[TorchElasticEnvironment()], max_epochs=run.saves_after or len(steps),
            reload_dataloaders_every_n_epochs=1, check_val_every_n_epoch=len(steps), num_sanity_val_steps=0,
            accumulate_grad_batches=case.accumulation, gradient_clip_val=case.clipping, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        checkpoint = f"{run.folder}/checkpoint"
        held = run.held and DataLoader(TensorDataset(run.held.tokens, run.held.labels), case.batch)
        trainer.fit(module, val_dataloaders=held, ckpt_path=checkpoint if run.resumes_after else None)
        if run.saves_after:
            trainer.save_checkpoint(checkpoint)
        if run.held is not None:
            run.evaluation = {name: trainer.callback_metrics[name] for name in ("loss", "probability")}
        ends = range(case.accumulation, len(module.losses) + 1, case.accumulation)
        return [(mean(module.losses[end - case.accumulation : end]), None) for end in ends]


def epoch(step: Sequence[Sequence[WholeBatch]], number: int, case: StepCase) -> TensorDataset:
    """Return the rows of a step, in places from which Lightning deals them to the data ranks that have them: it
    shuffles by torch's sampler, which deals rows in turn."""
    batches = list(zip(*step, strict=True))
    sampler: Any = DistributedSampler(cast(Any, range(len(batches) * case.data * case.batch)), 1, 0)
    sampler.set_epoch(number)
    places = torch.tensor(list(sampler)).argsort()
    return TensorDataset(
        *(
            torch.cat([torch.stack([getattr(x, name) for x in batch], 1).flatten(0, 1) for batch in batches])[places]
            for name in ("tokens", "labels")
        )
    )


def mean(losses: Sequence[tuple[float, int]]) -> float:
    """Return the mean over all labels of the micro-batches of a step."""
    return sum(loss * labelled for loss, labelled in losses) / sum(labelled for _, labelled in losses)
