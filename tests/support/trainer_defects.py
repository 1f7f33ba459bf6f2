"""Trainers with a mistake, each of which `python -m verification model` finds."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from ring.integrations.trainers import call as trainer_call
from ring.integrations.trainers.accelerator import DataAccelerator
from ring.integrations.trainers.lightning import ReplicatedStrategy
from verification.models import Part, Run, WholeBatch
from verification.models.trainers import (
    accelerate_loop,
    lightning_trainer,
    peft_lora,
    transformers_trainer,
    trl_grpo,
    trl_reward,
    trl_sft,
)


class DividedTwice(transformers_trainer.Llama):
    """Divides each micro-batch's share of the mean by their number."""

    evaluates = resumes = False

    def trainer(self, *arguments: Any, **options: Any) -> Any:
        trainer = super().trainer(*arguments, **options)
        loss_of, number = trainer.compute_loss, trainer.args.gradient_accumulation_steps
        trainer.compute_loss = lambda *args, **kwargs: loss_of(*args, **kwargs) / number
        return trainer


class FirstDataRank(DataAccelerator):
    """Every data rank reads the batches of the first."""

    process_index = 0


class SameBatches(transformers_trainer.Llama):
    """All data ranks train on the same batches."""

    def trainer(self, model: Any, settings: Any, rows: Any, run: Run, **options: Any) -> Any:
        trainer = super().trainer(model, settings, rows, run, **options)
        trainer.accelerator.__class__ = FirstDataRank
        return trainer


class Unfrozen(peft_lora.Llama):
    """Trains a weight beside the adapters on ranks."""

    def wrap(self, model: Any, run: Run) -> Any:
        model.get_output_embeddings().weight.requires_grad_()
        return model


class SharesDividedTwice(accelerate_loop.Llama):
    """Forgets that accelerate divides a loss by the number of micro-batches."""

    def loss(self, model: Any, part: Part, run: Run) -> Tensor:
        loss = super().loss(model, part, run)
        return loss if run.mesh is None else loss / run.case.accumulation


class DocumentsJoined(trl_sft.Llama):
    """Loses the lengths of documents, which then see each other."""

    def rows(self, batch: WholeBatch) -> Any:
        return [{name: x for name, x in row.items() if name != "seq_lengths"} for row in super().rows(batch)]


class MeanOfMeans(lightning_trainer.Llama):
    """Weighs micro-batches alike, however many labels they have."""

    def train(self, model: Any, optimizer: Any, steps: Any, run: Run) -> Any:
        weighted = ReplicatedStrategy.weighted

        def alike(strategy: Any, mean: Tensor, labelled: int) -> Tensor:
            return weighted(strategy, mean, 1)

        with patch.object(ReplicatedStrategy, "weighted", alike):
            return super().train(model, optimizer, steps, run)


class MeanOfRanks(transformers_trainer.Llama):
    """Evaluates the mean of the ranks' means."""

    def train(self, model: Any, optimizer: Any, steps: Any, run: Run) -> Any:
        over_tokens = trainer_call.cross_entropy

        def mean_of_means(logits: Tensor, labels: Tensor, over: DeviceMesh, **options: Any) -> Tensor:
            if model.training:
                return over_tokens(logits, labels, over, **options)
            mean = functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).nan_to_num()
            dist.all_reduce(mean, group=over.get_group())
            return mean / over.size()

        with patch.object(trainer_call, "cross_entropy", mean_of_means):
            return super().train(model, optimizer, steps, run)


class EvaluatedByBatches(lightning_trainer.Llama):
    """Logs the loss without its number of labels."""

    def train(self, model: Any, optimizer: Any, steps: Any, run: Run) -> Any:
        log = lightning_trainer.Module.log_dict

        def alike(module: Any, values: Any, batch_size: int) -> None:
            log(module, values)

        with patch.object(lightning_trainer.Module, "log_dict", alike):
            return super().train(model, optimizer, steps, run)


class WithoutMomenta(transformers_trainer.Llama):
    """Resumes without the optimizer's state."""

    def trainer(self, model: Any, settings: Any, *arguments: Any, **options: Any) -> Any:
        return super().trainer(model, settings | {"save_only_model": True}, *arguments, **options)


class LastOfShard(trl_reward.Llama):
    """Takes the score of the last token of each shard, and their mean."""

    def train(self, model: Any, optimizer: Any, steps: Any, run: Run) -> Any:
        of_last_tokens = trainer_call.of_last_tokens

        def of_shards(scores: Tensor, *arguments: Any) -> Tensor:
            parts = scores.chunk(run.case.context, 1)
            lasts = [x[:, -1] for x in parts] if len(parts) > 1 else [of_last_tokens(scores, *arguments)]
            return torch.stack(lasts).mean(0)

        with patch.object(trainer_call, "of_last_tokens", of_shards):
            return super().train(model, optimizer, steps, run)


class PaddingScored(trl_reward.Llama):
    """Takes the score of the last token of a row, also if it is padding."""

    def train(self, model: Any, optimizer: Any, steps: Any, run: Run) -> Any:
        with patch.object(trainer_call, "of_last_tokens", lambda scores, *_: scores[:, -1]):
            return super().train(model, optimizer, steps, run)


class NotRolledBack(trl_grpo.Llama):
    """Leaves log-probs where rows that begin with their prompts have them."""

    def train(self, model: Any, optimizer: Any, steps: Any, run: Run) -> Any:
        rolled = trainer_call._rolled

        def there_alone(x: Tensor, places: Any) -> Tensor:
            return x if x.is_floating_point() else rolled(x, places)

        with patch.object(trainer_call, "_rolled", there_alone):
            return super().train(model, optimizer, steps, run)


class RewardsOfFirst(trl_grpo.Llama):
    """Gives every data rank the advantages of the first."""

    def trainer(self, model: Any, settings: Any, rows: Any, run: Run, **options: Any) -> Any:
        trainer = super().trainer(model, settings, rows, run, **options)
        gather = trainer.accelerator.gather
        trainer.accelerator.gather = lambda x: gather(x).roll(len(x), 0) if x.dim() == 2 else gather(x)
        return trainer


class TokensOfRank(trl_grpo.Llama):
    """Divides by the completion tokens of this data rank alone."""

    def trainer(self, model: Any, settings: Any, rows: Any, run: Run, **options: Any) -> Any:
        trainer = super().trainer(model, settings, rows, run, **options)
        gather, ranks = trainer.accelerator.gather, run.case.data
        trainer.accelerator.gather = lambda x: x.expand(ranks) if x.dim() == 0 else gather(x)
        return trainer
