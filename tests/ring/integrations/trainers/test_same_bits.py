"""`ContextParallelTrainer(..., same_bits=16)`: one model, moments and logs on any data x context."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

from ring.integrations.trainers.call import Whole, _filled_up
from tests.support.nn_ranks import said
from tests.support.ranks import Ranks
from tests.support.trainer_runs import Run, padded, results, trainer_of

pytestmark = pytest.mark.ranks
# By world and context: sequences of a step's micro-batch over all data ranks; a step has twelve.
WORLDS = {(2, 2): 3, (2, 1): 6, (3, 3): 12, (3, 1): 6, (4, 2): 12, (4, 4): 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "equal": ("equal", {"logging_steps": 2}),
    "padded, recomputed, bf16": ("padded", {"gradient_checkpointing": True, "bf16": True}),
    "packed, not clipped": ("packed", {"max_grad_norm": 0.0}),
}


def _run(world: int, context: int, batch: int, kind: str, **changes: Any) -> Run:
    collator, settings = KINDS[kind]
    if collator == "packed":  # its micro-batches are sequences: the same ones on any ranks
        batch = 2 * world // context
    steps = {"gradient_accumulation_steps": 12 // batch, "per_device_eval_batch_size": 2, "num_train_epochs": 2}
    settings, held = steps | settings | changes, 12 if collator == "packed" else 8
    return Run(world, context, collator, batch=batch, sequences=24, held=held, settings=settings, same_bits=16)


def _trained(run: Run, folder: str, resumed: str | None = None) -> dict[str, Any]:
    """Return a digest of weights and moments, and logs without the operations on padding."""
    trainer = trainer_of(run, folder)
    trainer.train(resume_from_checkpoint=resumed)
    trainer.evaluate()
    states = trainer.optimizer.state_dict()["state"].values()
    tensors = [*trainer.model.parameters(), *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))]
    logs = [{k: v for k, v in log.items() if k != "total_flos"} for log in results(trainer)["logs"]]
    return {"logs": logs, "digest": sha256(b"".join(x.detach().numpy().tobytes() for x in tensors)).hexdigest()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_ranks_train_and_log_the_same(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    (wanted,) = ranks(1).run(_trained, _run(1, 1, 2, kind), str(tmp_path))
    for (world, context), batch in WORLDS.items():
        for found in ranks(world).run(_trained, _run(world, context, batch, kind), str(tmp_path)):
            assert found == wanted, (world, context)


def test_a_checkpoint_is_resumed_on_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2}
    (wanted,) = ranks(1).run(_trained, _run(1, 1, 2, "equal", **saved), str(tmp_path / "1"))
    checkpoint = str(tmp_path / "1" / "checkpoint-2")
    for found in ranks(3).run(_trained, _run(3, 3, 4, "equal", **saved), str(tmp_path / "3"), checkpoint):
        wanted["logs"][-2]["train_loss"] = found["logs"][-2]["train_loss"]  # of the steps since the checkpoint
        assert found == wanted
    saved_weights = [LlamaForCausalLM.from_pretrained(tmp_path / x / "checkpoint-4").state_dict() for x in "13"]
    assert all(torch.equal(x, y) for x, y in zip(*(x.values() for x in saved_weights), strict=True))


def left(rows: Any) -> dict[str, Tensor]:
    batch = padded(rows)
    return batch | {"attention_mask": (torch.arange(23) > 0).long().expand_as(batch["labels"])}


def _refused(folder: str) -> str:
    trainer = trainer_of(Run(2, 1, batch=4, same_bits=16), folder)
    trainer.data_collator = left
    answer = said(trainer.train)
    dist.barrier()
    return answer


def test_padding_on_the_left_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for answer in ranks(2).run(_refused, str(tmp_path)):
        assert "attention_mask must have its zeros on the right of each row with same_bits" in answer


def test_rows_are_not_filled_beyond_learned_positions() -> None:
    batch = Whole(torch.zeros(2, 23, dtype=torch.int64), None, None, None, None)
    assert _filled_up(batch, 16, 3, 48).tokens.shape == (2, 48)
    with pytest.raises(ValueError, match="same_bits must be a shorter chunk: rows of 23 tokens are filled up"):
        _filled_up(batch, 16, 3, 47)
