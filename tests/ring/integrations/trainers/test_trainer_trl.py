"""TRL's SFTTrainer with sharded sequences, padded and packed: what it logs is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from tests.ring.integrations.trainers.test_trainer import assert_same
from tests.support import trl_runs
from tests.support.ranks import Ranks
from tests.support.trainer_runs import Run, Sequences, in_fp64, llama
from tests.support.trl_runs import trainer_of

pytestmark = pytest.mark.ranks

# TRL projects to logits in fp32, so gradients have its rounding: 2^-24 of sums of 32 products, below 1e-5 of a norm. A
# step of Adam with eps 1e-3 is no steeper than 10 gradients at a rate of 0.01, so weights of 0.02 to 1 keep it.
IN_FP32 = 1e-5
RUNS = {
    "packed": Run(2, 2, settings={"packing": True, "eval_packing": True}),
    "packed on data ranks": Run(4, 2, sequences=14, settings={"packing": True}),
    "packed, ends cut off": Run(4, 4, settings={"packing": True, "packing_strategy": "bfd_split", "max_length": 16}),
    "without padding": Run(2, 2, settings={"padding_free": True, "max_length": None}),
    "weighted tokens": Run(2, 2, settings={"packing": True, "loss_type": "dft"}),
    "smoothed labels": Run(2, 2, settings={"packing": True, "label_smoothing_factor": 0.1}),
    "a loss of one's own": Run(2, 2, loss="own", settings={"packing": True}),
    "adapters, packed": Run(4, 2, "adapters", sequences=14, settings={"packing": True}),
    "adapters, recomputed": Run(2, 2, "adapters", settings={"activation_checkpointing": True}),
}


def _trained(run: Run, folder: str) -> dict[str, Any]:
    train, held = (Dataset.from_list(Sequences(n, seed, False).rows) for seed, n in ((1, run.sequences), (2, run.held)))
    trainer = trainer_of(
        run, folder, SFTTrainer, SFTConfig, llama(), train_dataset=train, eval_dataset=held,
        settings={"gradient_accumulation_steps": 2, "max_length": 32},
        compute_loss_func=in_fp64 if run.loss == "own" else None,
    )  # fmt: skip
    # Otherwise accelerate repeats a sequence, for a data rank without one.
    assert len(trainer.train_dataset) % run.data == 0
    return trl_runs.trained(trainer)


# Means of a batch's means, or counts of its padding: one batch for each data rank has others.
OF_BATCHES = ("eval_entropy", "eval_mean_token_accuracy", "total_flos")


@pytest.mark.parametrize("name", RUNS)
def test_a_training_is_that_of_one_process(name: str, ranks: Ranks, tmp_path: Path) -> None:
    run = RUNS[name]
    expected = _trained(run, str(tmp_path / "alone"))
    assert all(torch.isfinite(weight).all() for weight in expected["weights"].values())
    for log in expected["logs"] if run.data > 1 else ():
        for key in OF_BATCHES:
            log.pop(key, None)
    for got in ranks(run.world).run(_trained, run, str(tmp_path / "sharded")):
        assert_same(got, expected, IN_FP32)


@pytest.mark.slow
@pytest.mark.parametrize(("sequences", "settings"), [(48, {"packing": True}), (36, {"activation_checkpointing": True})])
def test_any_ranks_train_and_log_the_same(
    sequences: int, settings: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    found = []
    for world, context, batch in ((1, 1, 2), (3, 3, 2), (4, 2, 4)):
        own = settings | {"gradient_accumulation_steps": 12 // batch}
        run = Run(world, context, batch=batch, sequences=sequences, held=4, settings=own, same_bits=16)
        found += ranks(world).run(_trained, run, str(tmp_path))
    for one in found:
        assert_same(one["weights"], found[0]["weights"], 0.0)
        for log, other in zip(one["logs"], found[0]["logs"], strict=True):
            assert all(log.get(name) == other.get(name) for name in ("loss", "grad_norm", "eval_loss", "train_loss"))


PREFERENCES = {"DPO": (DPOTrainer, DPOConfig), "KTO": (KTOTrainer, KTOConfig)}


def _preferred(run: Run, folder: str) -> dict[str, Any]:
    texts = trl_runs.texts(24, 3)
    rows: list[dict[str, Any]] = [
        {"prompt": f"{a} "}
        | ({"chosen": b, "rejected": c} if run.model == "DPO" else {"completion": b, "label": bool(len(c) % 2)})
        for a, b, c in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    ]
    reference = llama()
    with torch.no_grad():
        reference.lm_head.weight *= 2
    data, settings = Dataset.from_list(rows), {"max_steps": 2}
    kind, config = PREFERENCES[run.model]
    return trl_runs.trained(
        trainer_of(run, folder, kind, config, llama(), ref_model=reference, train_dataset=data, settings=settings)
    )


@pytest.mark.parametrize("collator", ["equal", "adapters"])
@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_are_those_of_one_process(name: str, collator: str, ranks: Ranks, tmp_path: Path) -> None:
    run = Run(2, 2, collator, batch=4, model=name)
    expected = _preferred(run, str(tmp_path / "alone"))
    for got in ranks(2).run(_preferred, run, str(tmp_path / "sharded")):
        assert_same(got, expected, IN_FP32)
