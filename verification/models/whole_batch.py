"""Whole sequences of a step, and the same tokens as one process trains on them: each document in a row of its own.

The one process then needs no masks of documents: rows are padded at the end, which causal attention never sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from verification.models.batches import IGNORED, global_batch, held_out
from verification.models.model_case import ModelCase
from verification.models.setup import Part, WholeBatch
from verification.models.step_case import StepCase

Ints = NDArray[np.int64]


def whole_batches(case: StepCase, step: int) -> list[list[WholeBatch]]:
    """Return the micro-batches of a step, by data rank."""
    batch, at = global_batch(case, step), case.at(step)
    tensors = [x.to(case.device) for x in (batch.tokens, batch.labels, batch.padding, batch.ignored)]
    positions = at.positions().to(case.device)
    return [
        [
            WholeBatch(tokens, labels, positions, at.lengths, padding, ignored)
            for tokens, labels, padding, ignored in zip(*(x[data_rank] for x in tensors), strict=True)
        ]
        for data_rank in range(case.data)
    ]


def dealt_batches(drawn: StepCase, case: StepCase, step: int) -> list[list[WholeBatch]]:
    """Return the micro-batches of a step of `drawn`, by data rank of a Case that divides its sequences anew. They are
    numbered micro-batch by micro-batch, data rank by data rank."""
    by_rank = whole_batches(drawn, step)
    whole = [batches[number] for number in range(drawn.accumulation) for batches in by_rank]
    rows = [
        torch.cat([getattr(batch, name) for batch in whole]).split(case.batch)
        for name in ("tokens", "labels", "padding", "ignored")
    ]
    dealt = [
        WholeBatch(tokens, labels, whole[0].positions, whole[0].documents, padding, ignored)
        for tokens, labels, padding, ignored in zip(*rows, strict=True)
    ]
    return [dealt[data_rank :: case.data] for data_rank in range(case.data)]


def held_batch(case: ModelCase) -> WholeBatch | None:
    """Return the sequences of the evaluation; None without one."""
    return whole_batches(*held_out(case))[0][0] if case.held else None


def held_parts(case: ModelCase) -> list[Part]:
    """Return the sequences of the evaluation as the one process gets them, in batches."""
    alone, step = held_out(case)
    rows = Rows.of(alone)
    part, size = rows.alone(alone, step), case.batch * (rows.rows // case.held)
    batches = zip(part.tokens.split(size), part.labels.split(size), strict=True)
    return [Part(tokens, labels, part.positions, None) for tokens, labels in batches]


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
        batch = global_batch(case, step)
        drawn = [x.flatten(0, 2) for x in (batch.tokens, batch.labels)]
        row, column = torch.from_numpy(self.row), torch.from_numpy(self.column)
        tokens, labels = (torch.full((self.rows, self.length), empty) for empty in (0, IGNORED))
        for filled, x in zip((tokens, labels), drawn, strict=True):
            filled[row, column.expand_as(row)] = x
        return Part(tokens, labels, torch.arange(self.length), None)
