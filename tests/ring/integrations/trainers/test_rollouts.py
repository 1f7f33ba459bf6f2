"""TRL's GRPO and RLOO with sharded sequences: a step generates, scores and trains as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from ring.integrations.trainers.trainer import ContextParallelTrainer
from tests.ring.integrations.trainers.test_trainer import assert_same
from tests.support.ranks import Ranks
from tests.support.trainer_runs import VOCABULARY, Run, begin, llama, results

pytestmark = pytest.mark.ranks

KINDS: dict[str, tuple[Any, Any]] = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a reward that depends on each word and place."""
    return [sum(int(word[4:]) * (i % 3) for i, word in enumerate(text.split())) / 20 for text in completions]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return completions that any ranks give to a prompt: of drawn lengths, another at each place in the batch."""
    ids, completions = [], []
    for place, prompt in enumerate(prompts, len(prompts) * trainer.accelerator.process_index):
        ids.append([int(word[4:]) for word in prompt.split()])
        draw = torch.Generator().manual_seed(sum(ids[-1]) + 100 * place)
        length = int(torch.randint(1, 9, (), generator=draw))
        completions.append(torch.randint(2, VOCABULARY, (length,), generator=draw).tolist())
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[0.0] * len(x) for x in completions]}


def trainer_of(run: Run, folder: str, kind: str, adapters: bool = False, **settings: Any) -> Any:
    """Return the trainer: sharded on ranks, TRL's own in one process."""
    begin(run)
    sharded, (trained, config) = dist.is_initialized(), KINDS[kind]
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(VOCABULARY)}, unk_token="word1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    draw = torch.Generator().manual_seed(1)
    prompts = [" ".join(f"word{int(i)}" for i in torch.randint(2, 19, (2 + n % 5,), generator=draw)) for n in range(8)]
    options: dict[str, Any] = {
        "train_dataset": Dataset.from_list([{"prompt": prompt} for prompt in prompts]), "reward_funcs": reward,
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0", eos_token="word1"),
    }  # fmt: skip
    if adapters:
        options["peft_config"] = LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear")
    if "same_bits" in settings:
        options["same_bits"] = settings.pop("same_bits")
    if settings.pop("given", False):
        options["rollout_func"] = rollout
    own = {
        "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "logging_steps": 1, "max_steps": 3,
        "per_device_train_batch_size": run.batch // (run.data if sharded else 1), "num_generations": 4, "beta": 0.1,
        "max_completion_length": 8, "learning_rate": 0.01, "adam_epsilon": 1e-3, "save_strategy": "no", "epsilon": 0.01,
        "disable_tqdm": True, "shuffle_dataset": False, "log_completions": True, "max_grad_norm": 0.5,
    }  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float64)
    if sharded:
        sharded_kind: Any = type("Sharded", (ContextParallelTrainer, trained), {})
        options["context_size"] = run.context
        return sharded_kind(model, args=config(**(own | settings)), **options)
    return trained(model, args=config(**(own | settings)), **options)


def _trained(run: Run, folder: str, kind: str, adapters: bool, settings: dict[str, Any]) -> dict[str, Any]:
    trainer = trainer_of(run, folder, kind, adapters, **settings)
    trainer.train()
    found = results(trainer)
    for log in found["logs"]:
        log.pop("step_time", None)
    found["table"] = {name: list(trainer._logs[name]) for name in ("prompt", "completion", "advantages")}
    return found


RUNS: dict[str, tuple[Run, str, bool, dict[str, Any]]] = {
    "generates": (Run(2, 2, batch=4), "grpo", False, {}),
    "rloo generates": (Run(2, 2, batch=4), "rloo", False, {}),
    "adapters": (Run(2, 2, batch=4), "grpo", True, {}),
    "data ranks": (Run(4, 2, batch=8), "grpo", False, {"given": True}),
    "sequences weighed": (Run(4, 2, batch=4), "grpo", False, {
        "given": True, "importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}),
    "by length": (Run(3, 3, batch=4), "grpo", False, {"loss_type": "dr_grpo", "steps_per_generation": 2}),
    "by batch": (Run(2, 2, batch=4), "grpo", False, {"loss_type": "bnpo", "gradient_accumulation_steps": 2}),
}  # fmt: skip


QUICK = ("generates", "data ranks")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_training_is_that_of_one_process(name: str, ranks: Ranks, tmp_path: Path) -> None:
    run, *others = RUNS[name]
    arguments: Any = others
    llama().save_pretrained(tmp_path / "model")
    expected = _trained(run, str(tmp_path), *arguments)
    assert any(log.get("loss", 0) and log.get("grad_norm", 0) > 1e-3 for log in expected["logs"])
    for got in ranks(run.world).run(_trained, run, str(tmp_path), *arguments):
        assert_same(got, expected, 1e-5)


class Other(GRPOTrainer):  # type: ignore[misc]
    """A trainer that generates in a way of its own."""

    def _generate_single_turn(self, *_: Any, **__: Any) -> Any: ...


KINDS["other"] = (Other, GRPOConfig)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "groups": ("grpo", {"num_generations": 8}, "per_device_train_batch_size must give whole groups of 8 completions"),
    "continuous": ("grpo", {"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching must"),
    "same bits": ("grpo", {"same_bits": 16}, "loss_type must be 'nll' with same_bits, got 'dapo'"),
    "same bits of RLOO": ("rloo", {"same_bits": 16}, "compute_loss must be that of transformers' Trainer or"),
    "other": ("other", {}, "trainer that generates must be TRL's GRPOTrainer or RLOOTrainer, got Other"),
}


def _refused(folder: str, name: str) -> str:
    kind, settings, _ = REFUSED[name]
    with pytest.raises((ValueError, NotImplementedError)) as refused:
        trainer_of(Run(2, 2, batch=4), folder, kind, **settings)
    dist.barrier()
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_refused_on_every_rank(name: str, ranks: Ranks, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    (said,) = set(ranks(2).run(_refused, str(tmp_path), name))
    assert REFUSED[name][2] in said
