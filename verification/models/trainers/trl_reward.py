"""TRL's RewardTrainer: alone on one rank, and with `ContextParallelTrainer` on more.

    python -m verification model verification.models.trainers.trl_reward:Llama

A row is the chosen answer; half of it, backwards and one token on, is the rejected one. The one process takes scores at
the last tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from ring.integrations.trainers.trainer import ContextParallelTrainer
from ring.nn import ContextParallel
from verification.models import ModelCase, Part, Run, WholeBatch
from verification.models.trainers import trl_sft
from verification.models.trainers.small_llama import small_llama
from verification.models.trainers.transformers_trainer import Row
from verification.models.trainers.trl_sft import PADDING, words


class Sharded(ContextParallelTrainer, RewardTrainer):  # type: ignore[misc]
    """The class that a user writes."""


class Llama(trl_sft.Llama):
    """A Llama that scores answers."""

    classes, evaluates = (RewardTrainer, Sharded), False

    def build(self, context: ContextParallel | None) -> Any:
        """Return the model, which the trainer prepares."""
        config = small_llama().config
        config.num_labels, config.pad_token_id = 1, PADDING
        return LlamaForSequenceClassification(config)

    def claims(self, case: ModelCase) -> ModelCase:
        """Return the nearest ModelCase with a sequence in each row."""
        return replace(super().claims(case), packed=None)

    def loss(self, model: Any, part: Part, run: Run) -> Tensor:
        """Return the mean over all pairs, in one process."""
        lengths, scores = lengths_of(part.tokens), model.score(model.model(part.tokens).last_hidden_state)
        run.see(scores * (part.positions < lengths[:, None])[..., None])
        total = torch.zeros(())
        for tokens, length, score in zip(part.tokens, lengths.tolist(), scores[..., 0], strict=True):
            other = rejected(tokens[:length])
            worse = model.score(model.model(other[None]).last_hidden_state)[0, -1, 0]
            total = total - functional.logsigmoid(score[length - 1] - worse - margin(tokens)) / len(part.tokens)
        return total

    def watch(self, model: Any, run: Run) -> None:
        """See the scores of chosen answers, which precede the others in a batch."""

        @torch.no_grad()
        def see(_: nn.Module, args: Any, kwargs: Row, output: Any) -> None:
            context, rows = kwargs.get("context"), run.case.batch
            tokens = kwargs["input_ids"] if context is not None else args[0]
            held = torch.arange(run.case.tokens) if context is None else context.layout.positions(context.rank)
            real = tokens[:rows, : len(held)] != PADDING
            run.see(model.score(output.last_hidden_state)[:rows, : len(held)] * real[..., None], held)

        model.model.register_forward_hook(see, with_kwargs=True)

    def rows(self, batch: WholeBatch) -> list[Row]:
        """Return the pairs of a micro-batch."""
        rows = [tokens[:length] for tokens, length in zip(batch.tokens, lengths_of(batch.tokens), strict=True)]
        return [{"chosen_ids": x.tolist(), "rejected_ids": rejected(x).tolist(), "margin": margin(x)} for x in rows]

    def arguments(self, settings: Row, rows: list[Row], run: Run) -> Row:
        """Return the trainer's arguments."""
        config = RewardConfig(**settings, bf16=False, max_length=None, pad_to_multiple_of=run.case.tokens)
        return {"args": config, "processing_class": words()}


def lengths_of(tokens: Tensor, least: int = 1) -> Tensor:
    """Return the lengths (B,) of rows without the zeros at their end, which may be padding."""
    return (torch.arange(1, tokens.shape[1] + 1) * (tokens != 0)).amax(1).clamp(min=least)


def rejected(tokens: Tensor) -> Tensor:
    """Return the worse answer (m,) for the better one (n,): of other tokens, as equal ones have no gradient."""
    return (tokens.flip(0)[: max(1, len(tokens) // 2)] + 1) % PADDING


def margin(tokens: Tensor) -> float:
    """Return by how much an answer (n,) is better."""
    return int(tokens[0]) / 16
