"""TRL's GRPO and RLOO: each rank generates with the whole model, and trains on its shard of the completions.

The ranks of a context group draw the same prompts, and take completions and rewards of their first rank. Log-probs of
the policy are values of sharded sequences. A reference model is called with whole sequences, on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sized
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from accelerate.utils import set_seed
from torch import Tensor

from ring.integrations.transformers import restored
from ring.integrations.transformers.call import NAME, is_given

GENERATES = "_generate_and_score_completions"
# Methods of which the trainer must have TRL's, between those of this module.
STEPS = (
    GENERATES, "_generate", "_generate_single_turn", "_calculate_rewards", "_get_per_token_logps_and_entropies"
)  # fmt: skip
KNOWN = ("ring.integrations.", "transformers.trainer", "trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
LEFT_OUT = {
    "use_vllm": "its servers take weights from every rank; let transformers generate, or a rollout_func",
    "use_transformers_continuous_batching": "let the model's generate do it",
    "fsdp": "generation needs whole parameters",
    "tools": "every rank of a context group would call them; write a rollout_func",
    "environment_factory": "every rank of a context group would act in its environment; write a rollout_func",
}
OF_TRAINER = {"tools": "tools", "environment_factory": "environment_factories"}  # attributes for arguments


def generates(trainer: object) -> bool:
    """True for a trainer that generates as those of TRL do.

    Args:
        trainer: of any class.
    """
    return any(GENERATES in vars(x) for x in type(trainer).__mro__ if x is not Rollouts)


class Rollouts:
    """Methods of a trainer that generates, before those of TRL; others do not have them called."""

    args: Any
    accelerator: Any
    mesh: Any
    model: Any
    context_size: int
    eval_dataset: Any
    num_generations_eval: int

    def _set_generation_batch(self) -> None:
        """Count the completions of a generation over data ranks, where TRL's configuration counts processes."""
        args = self.args
        if not hasattr(args, "generation_batch_size"):
            return
        completions = args.per_device_train_batch_size * args.steps_per_generation
        args.generation_batch_size = completions * self.accelerator.num_processes
        self._check_groups("train", completions, args.num_generations)

    def _check_groups(self, mode: str, completions: int, group: int) -> None:
        if completions * self.accelerator.num_processes % group:
            raise ValueError(
                f"per_device_{mode}_batch_size must give whole groups of {group} completions, num_generations, "
                f"over {self.accelerator.num_processes} data ranks with {completions} each"
            )

    def _begin_rollouts(self) -> None:
        """Draw the same numbers on the ranks of a context group: TRL's seed is another for each process."""
        if not generates(self):
            return
        set_seed(self.args.seed + self.accelerator.process_index)
        held = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        for dataset in held.values() if self.args.eval_strategy != "no" else ():
            self._check_evaluation(dataset)

    def _check_evaluation(self, dataset: Any) -> None:
        """Raise for batches of other than whole groups, or completions that data ranks would repeat."""
        ranks, size, group = self.accelerator.num_processes, self.args.eval_batch_size, self.num_generations_eval
        self._check_groups("eval", size, group)
        number = len(dataset) * group if isinstance(dataset, Sized) else None
        if ranks > 1 and (number is None or number % (ranks * size)):
            raise ValueError(
                f"eval_dataset must have {ranks * size} completions or a multiple, for {ranks} data ranks with batches "
                f"of {size}, so that none is repeated, got {type(dataset).__name__ if number is None else number}"
            )

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **options: Any) -> Any:
        if generates(self) and description != "Training":
            self._check_evaluation(dataset)
        return super()._get_dataloader(dataset, description, *args, **options)  # type: ignore[misc]

    def _generate(self, prompts: list[Any]) -> Any:
        """Return completions, as the context group's first rank has them before TRL logs their lengths."""
        own = getattr(self, "rollout_func", None)
        if own is None:
            return super()._generate(prompts)  # type: ignore[misc]
        with patch.object(self, "rollout_func", lambda *given: self._of_first_rank(own(*given))):
            return super()._generate(prompts)  # type: ignore[misc]

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        with restored(self._inner()):  # type: ignore[attr-defined]
            return self._of_first_rank(super()._generate_single_turn(*args, **options))  # type: ignore[misc]

    def _of_first_rank(self, rollouts: Any) -> Any:
        """Return the rollouts of the context group's first rank: on GPUs others may have drawn other tokens."""
        held, group = [rollouts], self.mesh.get_group("context")
        dist.broadcast_object_list(held, src=dist.get_global_rank(group, 0), group=group)
        return held[0]

    def _calculate_rewards(self, *args: Any, **options: Any) -> Tensor:
        """Return rewards, of the context group's first rank: functions may judge the same completion differently."""
        rewards: Tensor = super()._calculate_rewards(*args, **options).contiguous()  # type: ignore[misc]
        group = self.mesh.get_group("context")
        dist.broadcast(rewards, src=dist.get_global_rank(group, 0), group=group)
        return rewards

    def _generate_and_score_completions(self, *args: Any, **options: Any) -> Any:
        """Return completions and advantages. TRL gathers some values from all processes, here from data ranks."""
        owner = next(x for x in type(self).__mro__ if GENERATES in vars(x) and x is not Rollouts)
        of_data = self.accelerator
        with patch.multiple(sys.modules[owner.__module__], gather=of_data.gather, gather_object=of_data.gather_objects):
            return super()._generate_and_score_completions(*args, **options)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any) -> Any:
        call = self._sharded(model, False) if model is self.model else model  # type: ignore[attr-defined]
        return super()._get_per_token_logps_and_entropies(call, *args, **options)  # type: ignore[misc]


def check_rollouts(trainer: Any) -> None:
    """Raise for a trainer that generates in another way than GRPO and RLOO, or with settings that are not supported.

    Args:
        trainer: with a method that generates.

    Raises:
        NotImplementedError: the trainer or its setting, by name.
    """
    others = [
        x.__name__ for x in type(trainer).__mro__ if {*STEPS} & vars(x).keys() and not x.__module__.startswith(KNOWN)
    ]
    if not generates(trainer) or others:
        raise NotImplementedError(
            "trainer that generates must be TRL's GRPOTrainer or RLOOTrainer, got "
            f"{', '.join(others) or type(trainer).__name__}: generate within transformers.restored(model), and train "
            "in a loop of your own, with sequence_logprobs"
        )
    reference = getattr(trainer, "ref_model", None)
    if reference is not None and reference.config._attn_implementation == NAME:
        raise ValueError(
            "model must be given to a trainer that generates before prepare, which the trainer calls, got a prepared "
            "one, whose attention the reference model would have"
        )
    for name, reason in LEFT_OUT.items():
        value = getattr(trainer, OF_TRAINER.get(name, name), None) or getattr(trainer.args, name, None)
        if is_given(value) and value != []:
            raise NotImplementedError(f"{name} must be left out of trainers that generate: {reason}, got {value!r}")
