"""TRL's GRPO and RLOO with sharded sequences: a step generates, scores and trains as in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from ring.integrations.transformers import prepare
from tests.ring.integrations.trainers.test_trainer import assert_same
from tests.support import trl_runs
from tests.support.ranks import Ranks
from tests.support.trainer_runs import VOCABULARY, Run, llama

pytestmark = pytest.mark.ranks


class Other(GRPOTrainer):  # type: ignore[misc]
    """A trainer that generates in a way of its own."""

    def _generate_single_turn(self, *_: Any, **__: Any) -> Any: ...


KINDS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig), "other": (Other, GRPOConfig)
}  # fmt: skip


def second_of_context() -> int:
    """Return 1 on the second rank of a context group, whose answers and rewards are those of the first."""
    return dist.get_rank() % 2 if dist.is_initialized() else 0


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a reward that depends on each word and place, and is another one on the second rank of a context group."""
    return [
        sum(int(word[4:]) * ((i + second_of_context()) % 3) for i, word in enumerate(text.split())) / 20
        for text in completions
    ]


def answers(rows: list[list[int]], data_rank: int) -> list[list[int]]:
    """Return answers of drawn lengths, others at each place in the batch and on the second rank of a context group."""
    given = []
    for place, row in enumerate(rows, len(rows) * data_rank):
        draw = torch.Generator().manual_seed(sum(row) + 100 * place + 7 * second_of_context())
        length = int(torch.randint(1, 9, (), generator=draw))
        given.append(torch.randint(2, VOCABULARY, (length,), generator=draw).tolist())
    return given


class AnsweringForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """A model that gives these answers."""

    def generate(self, input_ids: Tensor, **_: Any) -> Tensor:
        """Return prompts and answers, filled up with the last word."""
        rows: list[list[int]] = input_ids.tolist()
        given = answers(rows, self.config.data_rank)
        return torch.tensor([row + one + [1] * (8 - len(one)) for row, one in zip(rows, given, strict=True)])


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout_func with these answers."""
    rows = trainer.processing_class(prompts)["input_ids"]
    given = answers(rows, trainer.accelerator.process_index)
    return {"prompt_ids": rows, "completion_ids": given, "logprobs": [[0.0] * len(one) for one in given]}


def _prompts(number: int) -> Dataset:
    return Dataset.from_list([{"prompt": text} for text in trl_runs.texts(number, 2)])


def _trainer(run: Run, folder: str) -> Any:
    kind, config = KINDS[run.model]
    settings = {
        "max_steps": 3, "num_generations": 4, "beta": 0.1, "max_completion_length": 8, "epsilon": 0.01,
        "shuffle_dataset": False, "log_completions": True, "per_device_eval_batch_size": 8,
    }  # fmt: skip
    options: dict[str, Any] = {"train_dataset": _prompts(8), "eval_dataset": _prompts(run.held), "reward_funcs": reward}
    if run.collator == "stream":
        options["eval_dataset"] = options["eval_dataset"].to_iterable_dataset()
    if run.collator == "rollouts":
        options["rollout_func"] = rollouts
    made: Any = AnsweringForCausalLM if run.collator == "answers" else LlamaForCausalLM
    model = made.from_pretrained(f"{folder}/model", dtype=torch.float64)
    if run.collator == "prepared":
        prepare(model, compare=False)
    trainer = trl_runs.trainer_of(run, folder, kind, config, model, settings=settings, **options)
    model.config.data_rank = trainer.accelerator.process_index
    return trainer


def _trained(run: Run, folder: str) -> dict[str, Any]:
    return trl_runs.trained(_trainer(run, folder))


GRPO = partial(Run, batch=4, model="grpo")
RUNS = {
    "generates": GRPO(2, 2),
    "rloo generates": GRPO(2, 2, model="rloo"),
    "adapters": GRPO(2, 2, "adapters"),
    "data ranks": GRPO(4, 2, "answers", batch=8, held=4),
    "rloo on data ranks": GRPO(4, 2, "answers", batch=8, held=4, model="rloo", settings={"num_iterations": 2}),
    "sequences weighed": GRPO(4, 2, "answers", held=4, settings={
        "importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}),
    "by length": GRPO(3, 3, settings={
        "loss_type": "dr_grpo", "steps_per_generation": 2, "eval_strategy": "steps", "eval_steps": 2}),
    "rollouts": GRPO(2, 2, "rollouts", held=4),
    "by batch": GRPO(2, 2, settings={"loss_type": "bnpo", "gradient_accumulation_steps": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", trl_runs.slow_but(("generates", "data ranks"), RUNS))
def test_a_training_is_that_of_one_process(name: str, ranks: Ranks, tmp_path: Path) -> None:
    run = RUNS[name]
    llama().save_pretrained(tmp_path / "model")
    expected = _trained(run, str(tmp_path))
    assert any(log.get("loss", 0) and log.get("grad_norm", 0) > 1e-3 for log in expected["logs"])
    for got in ranks(run.world).run(_trained, run, str(tmp_path)):
        assert_same(got, expected, 1e-5)


REFUSED: dict[str, tuple[Run, str]] = {
    "groups": (GRPO(2, 2, settings={"num_generations": 8}), "per_device_train_batch_size must give whole groups of 8"),
    "groups of an evaluation": (GRPO(2, 2, settings={"per_device_eval_batch_size": 6}),
        "per_device_eval_batch_size must give whole groups of 4"),
    "repeated": (GRPO(2, 1, settings={"eval_strategy": "steps"}), "eval_dataset must have 8 completions or a multiple"),
    "repeated later": (GRPO(2, 1, model="rloo"), "so that none is repeated, got 20"),
    "without a length": (GRPO(2, 1, "stream", held=4, settings={"accelerator_config": {"dispatch_batches": False}}),
        "so that none is repeated, got IterableDataset"),
    "prepared": (GRPO(2, 2, "prepared"), "model must be given to a trainer that generates before prepare"),
    "continuous": (GRPO(2, 2, settings={"use_transformers_continuous_batching": True}),
        "use_transformers_continuous_batching must"),
    "same bits": (GRPO(2, 2, same_bits=16), "loss_type must be 'nll' with same_bits, got 'dapo'"),
    "same bits of RLOO": (GRPO(2, 2, same_bits=16, model="rloo"), "compute_loss must be that of transformers' Train"),
    "other": (GRPO(2, 2, model="other"), "trainer that generates must be TRL's GRPOTrainer or RLOOTrainer, got Other"),
}  # fmt: skip


def _refused(folder: str, name: str) -> str:
    run, _ = REFUSED[name]
    with pytest.raises((ValueError, NotImplementedError)) as refused:
        trainer = _trainer(run, folder)
        assert "eval_strategy" not in run.settings  # then a training is refused before its first step
        trainer.evaluate()
    dist.barrier()
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_refused_on_every_rank(name: str, ranks: Ranks, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    (said,) = set(ranks(2).run(_refused, str(tmp_path), name))
    assert REFUSED[name][1] in said
