"""Tokens and labels of all ranks in a step, rebuilt from the Case alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from verification.models.model_case import ModelCase
from verification.models.step_case import StepCase

IGNORED = -100  # as in torch.nn.functional.cross_entropy
VOCABULARY = 11  # token ids are below this


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The batch of one step, each tensor (data, accumulation, batch, n): tokens, int64; labels, int64, already shifted,
    the next token or IGNORED; ignored, bool, True where the label is dropped, beside ends of documents; padding, bool.
    """

    tokens: Tensor
    labels: Tensor
    ignored: Tensor
    padding: Tensor

    @property
    def labelled(self) -> int:
        return int((self.labels != IGNORED).sum())


def global_batch(case: StepCase, step: int) -> GlobalBatch:
    """Return the batch of all ranks in that step."""
    generator = torch.Generator().manual_seed(case.seed * 1009 + step + 1)
    shape = (case.data, case.accumulation, case.batch, case.tokens)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    ignored, padding = _ignored(case, generator, shape), _padding(case, step, shape)
    tokens.masked_fill_(padding, 0)
    ignored |= padding
    ignored[..., :-1] |= padding[..., 1:]  # the next token is padding
    labels = torch.full_like(tokens, IGNORED)
    labels[..., :-1] = tokens[..., 1:]
    last = [end - 1 for end in accumulate(case.at(step).documents) if end]
    labels[..., last] = IGNORED  # the next token belongs to another document
    return GlobalBatch(tokens, labels.masked_fill(ignored, IGNORED), ignored, padding)


def held_out(case: ModelCase) -> tuple[ModelCase, int]:
    """Return a Case and its step whose batch is the evaluation's: `held` sequences, which lack labels."""
    alone = replace(case, world=1, data=1, cuts=None, accumulation=1, batch=case.held, labels="some")
    return alone, case.steps


def _ignored(case: StepCase, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Mask of the labels to drop, (data, accumulation, batch, n) bool."""
    out = torch.zeros(shape, dtype=torch.bool)
    if case.labels == "some":
        return torch.randint(2**24, shape, generator=generator) < 2**24 / 3  # whatever the default dtype is
    if case.labels == "shards" and case.context > 1:
        out[..., torch.from_numpy(case.shards().positions[case.seed % case.context].copy())] = True
    elif case.labels == "ranks" and case.data > 1:
        out[case.seed % case.data] = True
    elif case.labels == "ranks" and case.accumulation > 1:
        out[:, case.seed % case.accumulation] = True
    elif case.labels == "none":
        out[:] = True
    return out


def _padding(case: StepCase, step: int, shape: tuple[int, ...]) -> Tensor:
    """Mask of the tokens that only fill a row, (data, accumulation, batch, n) bool: up to half of it, at its end."""
    if not case.padded:
        return torch.zeros(shape, dtype=torch.bool)
    generator = torch.Generator().manual_seed(case.seed * 1013 + step)
    padded = torch.randint(case.tokens // 2 + 1, (*shape[:3], 1), generator=generator)
    return torch.arange(case.tokens) >= case.tokens - padded
