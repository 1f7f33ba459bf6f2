"""TRL's GRPOTrainer: alone on one rank, and with `ContextParallelTrainer` on more.

    python -m verification model verification.models.trainers.trl_grpo:Llama

A row is a prompt and its completion, which a rollout function hands out; two rows are a group. The seed chooses the
kind of loss. The reference model also takes the place of the older policy, so that ratios are clipped in every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from ring.integrations.trainers.trainer import ContextParallelTrainer
from ring.nn import ContextParallel
from ring.nn.sequence import gather
from verification.models import ModelCase, Part, Run, WholeBatch
from verification.models.setup import Steps
from verification.models.trainers import trl_reward
from verification.models.trainers.small_llama import small_llama
from verification.models.trainers.transformers_trainer import Row
from verification.models.trainers.trl_reward import lengths_of
from verification.models.trainers.trl_sft import PADDING, words

KINDS = ("grpo", "dapo", "dr_grpo", "bnpo")
CLIPPED, PENALTY, GROUP = 0.05, 0.1, 2


class Clipped(GRPOTrainer):  # type: ignore[misc]
    """The trainer, with an older policy that differs."""

    def _compute_loss(self, model: Any, inputs: Row) -> Any:
        return super()._compute_loss(model, inputs | {"old_per_token_logps": inputs["ref_per_token_logps"]})


class Sharded(ContextParallelTrainer, Clipped):
    """The class that a user writes."""


class Llama(trl_reward.Llama):
    """A Llama that answers."""

    classes = (Clipped, Sharded)

    def __init__(self) -> None:
        self.references: WeakKeyDictionary[nn.Module, LlamaForCausalLM] = WeakKeyDictionary()  # by the model

    def build(self, context: ContextParallel | None) -> Any:
        """Return the model, which the trainer prepares."""
        return small_llama()

    def claims(self, case: ModelCase) -> ModelCase:
        """Return the nearest ModelCase with a prompt and its completion in each row, and whole groups in a batch."""
        case = super().claims(case)
        return replace(case, tokens=max(2, case.tokens), batch=case.batch + case.batch % GROUP)

    def loss(self, model: Any, part: Part, run: Run) -> Tensor:
        """Return the loss of the step, in one process."""
        tokens, lengths, case = part.tokens, lengths_of(part.tokens, 2)[:, None], run.case
        if model not in self.references:  # before its first step
            self.references[model] = sharper(deepcopy(model))
        logits, real = model(tokens).logits, part.positions < lengths
        run.see(logits * real[..., None])
        with torch.no_grad():
            before = logprobs(self.references[model](tokens).logits, tokens)
        now, mask = logprobs(logits, tokens), (real & (part.positions >= lengths // 3))[:, 1:]
        log_ratio = now - before
        kind, by_sequence = kind_of(case)
        if by_sequence:
            log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1))[:, None]
        ratio = log_ratio.exp()
        rewards = torch.tensor([reward(x[m].tolist()) for x, m in zip(tokens[:, 1:], mask, strict=True)])
        better = (rewards.view(-1, GROUP) - rewards.view(-1, GROUP).mean(1, keepdim=True)).view(-1, 1)
        each = -torch.min(ratio * better, ratio.clamp(1 - CLIPPED, 1 + CLIPPED) * better)
        each = each + PENALTY * ratio * ((before - now).exp() - (before - now) - 1)
        sums, counts = (each * mask).sum(1), mask.sum(1)
        if kind == "grpo":
            return (sums / counts).mean()
        if kind == "bnpo":
            return (sums.view(-1, case.batch).sum(1) / counts.view(-1, case.batch).sum(1)).mean()
        return sums.sum() / (counts.sum() if kind == "dapo" else len(tokens) * case.tokens)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Steps, run: Run) -> Any:
        """Take all steps, with micro-batches as they are drawn."""
        with patch.object(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch):
            return super().train(model, optimizer, steps, run)

    def dealt(self, steps: Steps) -> Iterable[WholeBatch]:
        """Return the micro-batches in the order of the dataset: a data rank has those of a step together."""
        return chain.from_iterable(chain.from_iterable(ranks) for ranks in steps)

    def watch(self, model: Any, run: Run) -> None:
        """See the logits of each micro-batch, of rows that begin with their prompts."""

        @torch.no_grad()
        def see(module: nn.Module, _: Any, kwargs: Row, output: Any) -> None:
            if module.training:
                context, tokens = kwargs.get("context"), kwargs["input_ids"]
                logits = functional.linear(output.last_hidden_state, model.lm_head.weight)
                if context is not None:
                    tokens, logits = (gather(context, x[:, : context.tokens]) for x in (tokens, logits))
                whole = torch.zeros(len(tokens), run.case.tokens, logits.shape[-1])
                for row, real, found in zip(whole, tokens != PADDING, logits, strict=True):
                    row[: real.sum()] = found[real]
                run.see(whole, torch.arange(run.case.tokens))

        model.model.register_forward_hook(see, with_kwargs=True)

    def rows(self, batch: WholeBatch) -> list[Row]:
        """Return the rows of a micro-batch."""
        lengths = lengths_of(batch.tokens, 2).tolist()
        return [{"tokens": row[:length].tolist()} for row, length in zip(batch.tokens, lengths, strict=True)]

    def arguments(self, settings: Row, rows: list[Row], run: Run) -> Row:
        """Return the trainer's arguments, with a function that hands out the rows."""
        halves = [(row["tokens"], max(1, len(row["tokens"]) // 3)) for row in rows]

        def rollout(prompts: list[str], _: Any) -> Row:
            group = [halves[GROUP * int(x) + place % GROUP] for place, x in enumerate(prompts)]
            answers = [x[cut:] for x, cut in group]
            return {
                "prompt_ids": [x[:cut] for x, cut in group], "completion_ids": answers,
                "logprobs": [[0.0] * len(x) for x in answers],
            }  # fmt: skip

        kind, by_sequence = kind_of(run.case)
        config = GRPOConfig(
            **settings, bf16=False, beta=PENALTY, epsilon=CLIPPED, scale_rewards="none", num_generations=GROUP,
            loss_type=kind, importance_sampling_level="sequence" if by_sequence else "token", shuffle_dataset=False,
            max_completion_length=run.case.tokens,
        )  # fmt: skip
        return {
            "args": config, "processing_class": words(), "rollout_func": rollout,
            "reward_funcs": lambda completion_ids, **_: [reward(x) for x in completion_ids],
        }  # fmt: skip

    def dataset(self, rows: list[Row]) -> Dataset:
        """Return a prompt for each group of rows, its number."""
        return Dataset.from_list([{"prompt": str(x)} for x in range(len(rows) // GROUP)])

    def trainer(self, model: nn.Module, *arguments: Any, **options: Any) -> GRPOTrainer:
        """Return the GRPOTrainer, with its reference model."""
        del options["compute_metrics"]
        with patch.object(grpo_trainer, "create_model_from_path", lambda *_, **__: deepcopy(model)):
            trainer = super().trainer(model, *arguments, **options)
        sharper(trainer.ref_model)
        return trainer


def kind_of(case: Any) -> tuple[str, bool]:
    """Return the kind of loss, and whether ratios are those of sequences."""
    return KINDS[case.seed % 4], case.seed // 4 % 2 == 1


def sharper(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the reference model, changed in place, so that it is another one than the model at first."""
    with torch.no_grad():
        model.lm_head.weight *= 1.5
    return model


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return those of all tokens but the first, (B, n - 1)."""
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def reward(completion: list[int]) -> float:
    """Return a number that depends on each token."""
    return float(sum(completion) % 7)
