"""Whole sequences of a step, and the same tokens as one process trains on them: each document in a row of its own.

The one process then needs no masks of documents: rows are padded at the end, which causal attention never sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verification.models.model_case import ModelCase
from verification.models.setup import Part, WholeBatch
from verification.training.inputs import IGNORED, global_batch

Ints = NDArray[np.int64]


def whole_batches(case: ModelCase, step: int) -> list[list[WholeBatch]]:
    """Return the micro-batches of a step, by data rank."""
    tokens, labels, padding = _tensors(case, step)
    positions = torch.cat([torch.arange(length) for length in case.documents])
    return [
        [
            WholeBatch(tokens[d, m], labels[d, m], positions, case.packed, padding[d, m])
            for m in range(case.accumulation)
        ]
        for d in range(case.data)
    ]


def labelled(case: ModelCase, step: int) -> int:
    """Number of labels of a step, over all ranks."""
    return int((_tensors(case, step)[1] != IGNORED).sum())


def _tensors(case: ModelCase, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and padding, each (data, accumulation, batch, n)."""
    drawn: Any = case  # has all that inputs of a TrainingCase depend on
    batch = global_batch(drawn, step)
    padding = torch.zeros_like(batch.tokens, dtype=torch.bool)
    if not case.padding:
        return batch.tokens, batch.labels, padding
    generator = torch.Generator().manual_seed(case.seed * 1013 + step)
    padded = torch.randint(case.tokens // 2 + 1, (*batch.tokens.shape[:3], 1), generator=generator)
    padding |= torch.arange(case.tokens) >= case.tokens - padded
    last = torch.arange(case.tokens) == case.tokens - padded - 1  # its next token is padding
    return batch.tokens.masked_fill(padding, 0), batch.labels.masked_fill(padding | last, IGNORED), padding


@dataclass(frozen=True, eq=False)
class Rows:
    """Places of tokens in the rows of the one process: sequence s, position i -> row `row[s, i]`, column `column[i]`.
    Sequences are numbered by data rank, micro-batch and place in the batch."""

    row: Ints
    column: Ints
    rows: int
    length: int

    @classmethod
    def of(cls, case: ModelCase) -> Rows:
        lengths = [length for length in case.documents if length]
        document = np.repeat(np.arange(len(lengths)), lengths)
        column = np.concatenate([np.arange(length) for length in lengths])
        sequences = case.data * case.accumulation * case.batch
        row = np.arange(sequences)[:, None] * len(lengths) + document
        return cls(row, column, sequences * len(lengths), max(lengths))

    def sequences(self, case: ModelCase, data_rank: int, number: int) -> Ints:
        """Sequences of a micro-batch of a data rank."""
        return np.arange(case.batch) + (data_rank * case.accumulation + number) * case.batch

    def alone(self, case: ModelCase, step: int) -> Part:
        """Return the tokens of all ranks in these rows."""
        drawn = [x.flatten(0, 2) for x in _tensors(case, step)[:2]]
        row, column = torch.from_numpy(self.row), torch.from_numpy(self.column)
        tokens, labels = (torch.full((self.rows, self.length), empty) for empty in (0, IGNORED))
        for filled, x in zip((tokens, labels), drawn, strict=True):
            filled[row, column.expand_as(row)] = x
        return Part(tokens, labels, torch.arange(self.length), None)
