"""Lightning's Trainer over data x context: logs of epochs, whose last step is shorter, are those of one process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ring import Layout
from ring.integrations.trainers.lightning import ReplicatedStrategy, ShardedStrategy
from ring.integrations.wrappers import fsdp
from ring.nn import IGNORED, ContextParallel, LongNetBlock, count_labels, cross_entropy, next_tokens, shard_batch
from tests.support.framework_example import EXACT, VOCABULARY, SmallModel, dense_logits, optimizer_for, plain
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks
TOKENS = 23


@dataclass(frozen=True)
class Run:
    """context: ranks that share sequences. batch: sequences of a data rank. steps: of how many micro-batches each."""

    world: int
    context: int
    accumulation: int = 1
    batch: int = 2
    micro_batches: int = 4
    clip: float | None = None

    @property
    def data(self) -> int:
        return self.world // self.context

    def sequences(self, seed: int) -> tuple[Tensor, Tensor]:
        """Draw all sequences of an epoch, with ever fewer labels."""
        draw = torch.Generator().manual_seed(seed)
        number = self.micro_batches * self.data * self.batch
        tokens = torch.randint(VOCABULARY, (number, TOKENS), generator=draw)
        labels = next_tokens(tokens)
        kept = torch.linspace(0.9, 0.05, number)[:, None]
        labels[torch.rand(labels.shape, generator=draw) > kept] = IGNORED
        return tokens, labels

    def rows_of_steps(self, epoch: int) -> list[Tensor]:
        """Rows of each step: Lightning shuffles them by torch's sampler, with one seed on all ranks."""
        drawn = []
        for rank in range(self.data):
            sampler = DistributedSampler(range(self.micro_batches * self.data * self.batch), self.data, rank)  # type: ignore[var-annotated,arg-type]
            sampler.set_epoch(epoch)
            drawn.append(torch.tensor(list(sampler)))
        rows = torch.stack([x.view(self.micro_batches, self.batch) for x in drawn], 1).flatten(1)
        return [x.flatten() for x in rows.split(self.accumulation)]

    def loader(self, seed: int) -> Any:
        return DataLoader(TensorDataset(*self.sequences(seed)), batch_size=self.batch)


class Module(LightningModule):  # type: ignore[misc]
    """The small model, with a step that is sharded."""

    def __init__(self, run: Run, sharded: bool) -> None:
        super().__init__()
        self.net, self.run, self.sharded = SmallModel(), run, sharded
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_model(self) -> None:
        if self.sharded:
            fsdp.shard(self.net, self.device_mesh, LongNetBlock)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_for(self.net)

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        grads = [x.grad for x in self.parameters() if x.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        self.norms.append(float(norm.full_tensor() if self.sharded else norm))  # type: ignore[attr-defined]
        super().configure_gradient_clipping(optimizer, **options)

    def loss(self, whole: list[Tensor]) -> tuple[Tensor, int]:
        context = ContextParallel(Layout.zigzag(TOKENS, self.run.context), self.device_mesh["context"])
        batch = shard_batch(context, *whole)
        logits = self.net(batch.tokens, batch.context)
        assert batch.labels is not None
        return cross_entropy(logits, batch.labels, self.device_mesh), count_labels(batch.labels, self.device_mesh)

    def training_step(self, whole: list[Tensor], index: int) -> Tensor:
        loss, labelled = self.loss(whole)
        self.log("train", loss, batch_size=labelled, on_step=False, on_epoch=True, sync_dist=True)
        return self.trainer.strategy.weighted(loss, labelled)

    def validation_step(self, whole: list[Tensor], index: int) -> None:
        loss, labelled = self.loss(whole)
        self.log("held", loss, batch_size=labelled)


def trainer_of(run: Run, strategy: Any, folder: str, **options: Any) -> Trainer:
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(run.world), LOCAL_WORLD_SIZE=str(run.world))
    return Trainer(
        accelerator="cpu", devices=run.world, strategy=strategy, plugins=[TorchElasticEnvironment()], max_epochs=2,
        accumulate_grad_batches=run.accumulation, gradient_clip_val=run.clip, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        num_sanity_val_steps=0, **options,
    )  # fmt: skip


def _train(run: Run, kind: str, folder: str) -> dict[str, Any]:
    strategy = {"ddp": ReplicatedStrategy, "fsdp": ShardedStrategy}[kind](run.context)
    module = Module(run, kind == "fsdp")
    trainer = trainer_of(run, strategy, folder)
    trainer.fit(module, run.loader(1), run.loader(2))
    logged = {name: float(trainer.callback_metrics[name]) for name in ("train", "held")}
    return {"norms": module.norms, **logged, **plain(dict(module.net.named_parameters()))}


def alone(run: Run) -> dict[str, Any]:
    model, norms = SmallModel(), []
    optimizer = optimizer_for(model)
    (tokens, labels), (held, held_labels) = run.sequences(1), run.sequences(2)
    for epoch in range(2):
        summed = 0.0
        for rows in run.rows_of_steps(epoch):
            x, y = tokens[rows], labels[rows]
            loss = functional.cross_entropy(dense_logits(model, x).flatten(0, 1), y.flatten())
            loss.backward()
            summed += loss.item() * int((y != IGNORED).sum())
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), run.clip or torch.inf)))
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        found = functional.cross_entropy(dense_logits(model, held).flatten(0, 1), held_labels.flatten())
    logged = {"train": summed / int((labels != IGNORED).sum()), "held": found.item()}
    return {"norms": norms, **logged, **plain(dict(model.named_parameters()))}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_epochs_with_a_short_last_step_train_as_one_process(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    run = Run(4, 2, accumulation=3, clip=0.1)
    exact = alone(run)
    for found in ranks(run.world).run(_train, run, kind, str(tmp_path), timeout=300.0):
        torch.testing.assert_close(found, exact, rtol=0.0, atol=EXACT)


class Unweighted(Module):
    """Returns the micro-batch's mean, as in one process."""

    def training_step(self, whole: list[Tensor], index: int) -> Tensor:
        return self.loss(whole)[0]


class Manual(Module):
    """Optimizes manually."""

    def __init__(self, run: Run, sharded: bool) -> None:
        super().__init__(run, sharded)
        self.automatic_optimization = False


REFUSED: list[tuple[Any, Any, str]] = [
    (Unweighted, 2, "training_step must return strategy.weighted(mean, labelled), called once"),
    (Manual, 2, "weighted is for automatic optimization"),
    (Module, 3, "context_size must divide the 2 ranks, got 3"),
    (Module, 0, "context_size must be a positive integer, got 0"),
    (Module, True, "context_size must be a positive integer, got True"),
]


def _refuse(folder: str) -> None:
    run = Run(2, 2)
    for kind, size, words in REFUSED:
        for strategy in (ReplicatedStrategy, ShardedStrategy):
            with pytest.raises(ValueError) as caught:
                trainer_of(run, strategy(size), folder).fit(kind(run, strategy is ShardedStrategy), run.loader(1))
            assert words in str(caught.value)


def test_wrong_lightning_runs_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_refuse, str(tmp_path), timeout=300.0)
