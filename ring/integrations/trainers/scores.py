"""Heads that score a whole sequence at its last token, as those of reward models: each token of a shard gets a score.

In one process the model itself takes the score of the last token that is no padding. The last token of a shard is
another one, so here a call with a handle returns all scores, and the trainer's call chooses among those of all ranks.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast


def scores_sequences(model: object) -> bool:
    """True for a model whose head scores the last token.

    Args:
        model: without adapters.
    """
    return isinstance(model, GenericForSequenceClassification)


def score_tokens(model: PreTrainedModel) -> None:
    """Let calls with a handle return the score of each token of the shard, (B, N, labels). Others are as before.

    Args:
        model: of `scores_sequences`; changed in place. Idempotent.
    """
    whole = model.forward
    if getattr(whole, "__func__", None) is _forward:
        return
    model._score_of_sequence = whole
    model.forward = MethodType(_forward, model)


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("context") is None:
        return model._score_of_sequence(*args, **kwargs)
    hidden = model.base_model(*args, **kwargs).last_hidden_state
    return SequenceClassifierOutputWithPast(logits=model.score(hidden))


def of_last_tokens(scores: Tensor, tokens: Tensor, padding: int | None) -> Tensor:
    """Return the scores (B, labels) of the last tokens that are no padding, as transformers chooses them.

    Args:
        scores: (B, n, labels), of whole sequences.
        tokens: (B, n).
        padding: the padding token; None without one.

    Raises:
        ValueError: several sequences without a padding token.
    """
    rows, n = tokens.shape
    if padding is None and rows > 1:
        raise ValueError(f"config.pad_token_id must be set for a batch of {rows} sequences, got None")
    places = torch.arange(n, device=tokens.device)
    last = places[-1:] if padding is None else (places * (tokens != padding)).argmax(-1)
    return scores[torch.arange(rows, device=tokens.device), last]
