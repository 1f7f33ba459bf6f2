"""Settings of transformers' Trainer that would train wrongly over a context group, each with what to write instead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForMaskedLMLoss, ForTokenClassification

from ring.integrations.transformers.call import is_given

# Arguments that must keep their defaults.
LEFT_OUT = {
    "parallelism_config": "context_size shards sequences; cp_size and sp_size would shard them in ways of their own",
    "deepspeed": "use the modules of ring.integrations.deepspeed in a loop of your own",
    "torch_compile": "the Trainer compiles the wrapped model; compile its layers before it gets the model",
    "neftune_noise_alpha": "its noise depends on the number of tokens of a rank",
    "use_liger_kernel": "it replaces the loss by one over the tokens of a rank",
    "auto_find_batch_size": "ranks would try different batches",
    "eval_use_gather_object": "it gathers the results of every rank of a context group",
    "predict_with_generate": "generate on one rank, within transformers.restored(model)",
}
GENERATING = (  # methods of TRL's trainers
    "_generate_and_score_completions", "_generate_vllm", "generate_on_policy_outputs", "_generate_student_completions"
)  # fmt: skip
OF_TOKENS = (ForMaskedLMLoss, ForTokenClassification)  # losses whose labels are those of the tokens themselves
STRATEGIES = ("random", "sequential")


def check_settings(args: Any, context_size: object) -> None:
    """Raise for settings that are not supported.

    Args:
        args: the TrainingArguments.
        context_size: number of ranks that share sequences.

    Raises:
        ValueError, NotImplementedError: an argument, by name.
    """
    if not isinstance(context_size, int) or isinstance(context_size, bool) or context_size < 1:
        raise ValueError(f"context_size must be a positive integer, got {context_size!r}")
    for name, reason in LEFT_OUT.items():
        if is_given(getattr(args, name, None)):
            raise NotImplementedError(
                f"{name} must be left out with context_size: {reason}, got {getattr(args, name)!r}"
            )
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise NotImplementedError(f"deepspeed must be left out with context_size: {LEFT_OUT['deepspeed']}")
    if args.train_sampling_strategy not in STRATEGIES:
        raise NotImplementedError(
            f"train_sampling_strategy must be one of {', '.join(STRATEGIES)}, since others draw on each rank, got "
            f"{args.train_sampling_strategy!r}"
        )
    if args.label_names not in (None, ["labels"]):
        raise NotImplementedError(f"label_names must be ['labels'], got {args.label_names}")
    if args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches:
        raise NotImplementedError(
            "accelerator_config must have neither split_batches nor dispatch_batches, so that each data rank reads its "
            "batches whole"
        )
    version = (args.fsdp_plugin_args or {}).get("fsdp_version", 2)
    if version != 2:
        raise NotImplementedError(f"fsdp_config must have version 2, got {version}")


def check_trainer(trainer: Any) -> None:
    """Raise for a trainer, as those of TRL, that calls the model itself and not the one that `compute_loss` gets.

    Args:
        trainer: with its model.

    Raises:
        NotImplementedError: the trainer or its setting, by name.
    """
    if any(hasattr(trainer, method) for method in GENERATING):
        raise NotImplementedError(
            f"trainer must not generate with the model that it trains, got {type(trainer).__name__}: generate within "
            "transformers.restored(model), and train in a loop of your own, with sequence_logprobs"
        )
    if getattr(trainer, "aux_loss_enabled", False):
        raise NotImplementedError(
            "router_aux_loss_coef must be 0.0 in the trainer's arguments: its auxiliary loss would be over the tokens "
            f"of a rank, got {trainer.router_aux_loss_coef}"
        )
    if is_peft_model(trainer.model) and getattr(trainer, "ref_model", trainer) is None:
        raise NotImplementedError(
            "ref_model must be given with adapters, as a model of its own with the weights of the base model: the "
            "trainer would call the sharded model without its adapters, on whole sequences"
        )


def check_head(model: PreTrainedModel, shifts: bool) -> None:
    """Raise for a model whose loss is not a mean over tokens.

    Args:
        model: with its head, without adapters.
        shifts: True for the loss of causal language models.

    Raises:
        NotImplementedError: the model's class, by name.
    """
    if model.loss_type is None and not model.config.is_encoder_decoder and model.get_output_embeddings() is not None:
        raise NotImplementedError(
            f"model must have a loss type, which says if labels are shifted, got {type(model).__name__} without: write "
            "model.loss_type = 'ForCausalLM' for a causal language model, 'ForMaskedLM' for a masked one"
        )
    if model.config.is_encoder_decoder or not (shifts or LOSS_MAPPING.get(model.loss_type) in OF_TOKENS):
        raise NotImplementedError(
            "model must be a language model, causal or masked, or a token classifier, got "
            f"{type(model).__name__}: its loss is not a mean over tokens, or has labels of another sequence"
        )


def check_adapters(configs: Mapping[str, Any]) -> None:
    """Raise for adapters of PEFT that see more than a token.

    Args:
        configs: by the adapter's name.

    Raises:
        NotImplementedError: an adapter, by name.
    """
    for name, config in configs.items():
        if config.peft_type != "LORA" or config.alora_invocation_tokens is not None:
            kind = config.peft_type.value if config.peft_type != "LORA" else "LORA with alora_invocation_tokens"
            raise NotImplementedError(
                f"adapters of PEFT must be LORA, since prompts and invocations lie in one shard, got {kind} in {name!r}"
            )


def check_world(world: int, context_size: int) -> None:
    """Raise unless the context groups are of this size.

    Args:
        world: number of processes, 0 without a process group.
        context_size: of a context group.
    """
    if not world:
        raise ValueError(
            "context_size needs torch.distributed: start the script with torchrun (with use_cpu=True on CPUs), or take "
            "transformers' Trainer for one process"
        )
    if world % context_size:
        raise ValueError(f"context_size must divide the {world} ranks, got {context_size}")
