"""transformers' Trainer: alone on one rank, and `ContextParallelTrainer` on more.

    python -m verification model verification.models.trainers.transformers_trainer:Llama

The Trainer deals the rows to data ranks, accumulates, clips, takes the steps, saves and resumes, and evaluates. It gets
masks of padding, and the positions of packed documents. Losses and norms are those that it logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import EvalPrediction, LlamaModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from ring.integrations.trainers.trainer import ContextParallelTrainer
from ring.integrations.transformers import prepare
from ring.nn import ContextParallel
from ring.nn.sequence import gather
from verification.models import ModelCase, Part, Run, Setup, WholeBatch
from verification.models.batches import IGNORED
from verification.models.setup import Loss, Steps, probabilities
from verification.models.trainers.schedule import follow
from verification.models.trainers.small_llama import small_llama

Row = dict[str, Any]


class Llama(Setup):
    """A Llama that the Trainer wraps."""

    evaluates = resumes = True
    classes: tuple[Any, Any] = (Trainer, ContextParallelTrainer)  # in one process, on ranks

    def build(self, context: ContextParallel | None) -> Any:
        """Return the model, prepared where several ranks train it."""
        model = small_llama()
        return model if context is None or dist.get_world_size() == 1 else prepare(model, context.transport)

    def claims(self, case: ModelCase) -> ModelCase:
        """Return the nearest ModelCase as the Trainer trains: under DDP, in the order that it chooses."""
        checkpointing = "none" if case.checkpointing == "none" else "non-reentrant"
        case = replace(case, arrangement="contiguous", order="zigzag", cuts=None, exchange="direct")
        return replace(case, wrapper="ddp", checkpointing=checkpointing)

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        """Return the model: the Trainer wraps it."""
        return model

    def optimizer(self, parameters: Sequence[nn.Parameter], run: Run) -> torch.optim.Optimizer:
        """Return the optimizer, which the Trainer schedules on ranks."""
        optimizer = super().optimizer(parameters, run)
        return follow(optimizer, run.case.steps) if run.mesh is None else optimizer

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Steps, run: Run
    ) -> list[tuple[float, float | None]]:
        """Take all steps."""
        case, rows = run.case, [row for batch in self.dealt(steps) for row in self.rows(batch)]
        settings = {
            "output_dir": run.folder, "use_cpu": case.device == "cpu", "report_to": "none", "disable_tqdm": True,
            "save_strategy": "steps" if run.saves_after else "no", "save_steps": run.saves_after or run.resumes_after,
            "logging_steps": 1, "logging_nan_inf_filter": False, "train_sampling_strategy": "sequential",
            "per_device_train_batch_size": case.batch, "per_device_eval_batch_size": case.batch,
            "gradient_accumulation_steps": case.accumulation, "max_steps": len(steps),
            "gradient_checkpointing": case.checkpointing != "none", "max_grad_norm": case.clipping or 0.0,
        }  # fmt: skip
        options = {"optimizers": (optimizer, None), "compute_metrics": probability}
        trainer = self.trainer(model, settings, rows, run, callbacks=[Interrupted()], **options)
        trainer.remove_callback(PrinterCallback)
        logging.disable_progress_bar()
        self.watch(model, run)
        checkpoint = f"{run.folder}/checkpoint-{run.resumes_after}"
        trainer.train(resume_from_checkpoint=checkpoint if run.resumes_after else None)
        if run.held is not None:
            values = trainer.evaluate(self.dataset(self.rows(run.held)))
            run.evaluation = {"loss": values["eval_loss"], "probability": values["eval_probability"]}
        logs = [log for log in trainer.state.log_history if "loss" in log and log["step"] > run.resumes_after]
        return [(log["loss"], None if case.clipping is None else log["grad_norm"]) for log in logs]

    def evaluate(self, model: nn.Module, parts: Sequence[Part], run: Run) -> dict[str, Loss]:
        """Evaluate in one process: the Trainer's loss is a mean over sequences, of the means of their batches."""
        total, sequences = torch.zeros(()), sum(len(part.tokens) for part in parts)
        values = super().evaluate(model, parts, run)
        for part in parts:
            run.labelled = int((part.labels != IGNORED).sum())
            total += self.loss(model, part, run) * len(part.tokens) / sequences
        return values | {"loss": total}

    def dealt(self, steps: Steps) -> Iterable[WholeBatch]:
        """Return the micro-batches in the order of the dataset: accelerate deals them to data ranks in turn."""
        return chain.from_iterable(chain.from_iterable(zip(*ranks, strict=True)) for ranks in steps)

    def watch(self, model: Any, run: Run) -> None:
        """See the logits of each micro-batch."""
        watch(model, run)

    def dataset(self, rows: list[Row]) -> Any:
        """Return the rows as a dataset."""
        return rows

    def rows(self, batch: WholeBatch) -> list[Row]:
        """Return the rows of a micro-batch, as a dataset has them."""
        columns = {"input_ids": batch.tokens, "labels": not_shifted(batch.labels)}
        if batch.documents is not None:
            columns["position_ids"] = batch.positions.expand_as(batch.tokens)
        elif batch.padding.any():
            columns["attention_mask"] = (~batch.padding).long()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def arguments(self, settings: Row, rows: list[Row], run: Run) -> Row:
        """Return the trainer's arguments beside the model and its dataset."""
        return {"args": TrainingArguments(**settings)}

    def trainer(self, model: nn.Module, settings: Row, rows: list[Row], run: Run, **options: Any) -> Any:
        """Return the trainer: the sharded one on several ranks."""
        options |= {"train_dataset": self.dataset(rows)} | self.arguments(settings, rows, run)
        if run.case.world == 1:
            return self.classes[0](model, **options)
        return self.classes[1](model, **options, context_size=run.case.context)


class Interrupted(TrainerCallback):  # type: ignore[misc]
    """Ends the training after its checkpoint."""

    def on_save(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        """Stop."""
        control.should_training_stop = True


def probability(prediction: EvalPrediction) -> dict[str, float]:
    """Return the mean probability of all labels."""
    logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)[:, 1:]
    return {"probability": float(probabilities(logits[:, :-1], labels)[labels != IGNORED].mean())}


def not_shifted(labels: Tensor) -> Tensor:
    """Return the label of each token itself, as the models of transformers take labels."""
    return functional.pad(labels[:, :-1], (1, 0), value=IGNORED)


def watch(model: Any, run: Run) -> None:
    """See the logits of each micro-batch, also where the trainer computes losses without them."""
    (backbone,) = (module for module in model.modules() if isinstance(module, LlamaModel))

    @torch.no_grad()
    def see(module: nn.Module, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not module.training:
            return
        logits = functional.linear(output.last_hidden_state, model.get_output_embeddings().weight)
        context, shape = kwargs.get("context"), (run.case.batch, run.case.tokens, -1)
        if context is not None and len(logits) == run.case.batch:
            run.see(logits[:, : context.tokens], context.layout.positions(context.rank))
        else:  # rows that were joined to a long one
            whole = logits if context is None else gather(context, logits[:, : context.tokens])
            run.see(whole.reshape(shape), torch.arange(run.case.tokens))

    backbone.register_forward_hook(see, with_kwargs=True)
