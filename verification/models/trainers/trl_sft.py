"""TRL's SFTTrainer, packed and padded: alone on one rank, and with `ContextParallelTrainer` on more.

    python -m verification model verification.models.trainers.trl_sft:Llama

Rows have the lengths of their documents, as TRL's own packing leaves them. TRL's collator joins the rows of a batch.
"""

from __future__ import annotations

from dataclasses import replace

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ring.integrations.trainers.trainer import ContextParallelTrainer
from verification.models import ModelCase, Run, WholeBatch
from verification.models.trainers import transformers_trainer
from verification.models.trainers.transformers_trainer import Row, not_shifted

PADDING = 18  # a token that no row of rewards and rollouts has


class Sharded(ContextParallelTrainer, SFTTrainer):  # type: ignore[misc]
    """The class that a user writes."""


class Llama(transformers_trainer.Llama):
    """A Llama that the SFTTrainer wraps."""

    classes = (SFTTrainer, Sharded)

    def claims(self, case: ModelCase) -> ModelCase:
        """Return the nearest ModelCase: data ranks must not repeat rows of an evaluation that their batch joins."""
        repeated = case.held % (case.data * case.batch) if case.packed is not None else 0
        return replace(super().claims(case), held=case.held - repeated)

    def dataset(self, rows: list[Row]) -> Dataset:
        """Return the rows as a dataset."""
        return Dataset.from_list(rows)

    def rows(self, batch: WholeBatch) -> list[Row]:
        """Return the rows of a micro-batch: without their padding, which TRL adds."""
        lengths = [length for length in batch.documents or () if length]
        return [
            {"input_ids": tokens[real].tolist(), "labels": labels[real].tolist()}
            | ({} if batch.documents is None else {"seq_lengths": lengths})
            for tokens, labels, real in zip(batch.tokens, not_shifted(batch.labels), ~batch.padding, strict=True)
        ]

    def arguments(self, settings: Row, rows: list[Row], run: Run) -> Row:
        """Return the trainer's arguments."""
        config = SFTConfig(
            **settings, bf16=False, packing=run.case.lengths is not None, pad_to_multiple_of=run.case.tokens,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        return {"args": config, "processing_class": words()}


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 19 words."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(19)}, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=f"w{PADDING}", eos_token="w2")
