"""Settings of transformers' Trainer that would train wrongly over a context group, each with what to write instead."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sized
from operator import attrgetter
from typing import Any

from accelerate.utils import is_peft_model
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForMaskedLMLoss, ForTokenClassification

from ring.integrations.trainers.rollouts import check_rollouts, generates
from ring.integrations.transformers.call import is_given
from ring.settings import Settings

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
GENERATING = ("_generate_vllm", "generate_on_policy_outputs", "_generate_student_completions")  # of TRL
LEFT_OUT_OF_SAME_BITS = {
    "fsdp": "SameWeights holds whole parameters on each rank",
    "fp16": "its scale follows overflows; write bf16=True",
    "label_smoothing_factor": "its loss is summed in another order",
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
                    "SameWeights is in the place of DDP"),
}  # fmt: skip
OF_TOKENS = (ForMaskedLMLoss, ForTokenClassification)  # losses whose labels are those of the tokens themselves
WITH_SAME_BITS = {  # values of arguments, without which results depend on the ranks
    "average_tokens_across_devices": True, "accelerator_config.use_seedable_sampler": True, "loss_type": "nll",
}  # fmt: skip
OF_STEPS = {"ring.integrations.trainers.trainer", "transformers.trainer", "trl.trainer.sft_trainer"}  # of known losses
STRATEGIES = ("random", "sequential")


def check_settings(args: Any, context_size: object, same_bits: int | None) -> None:
    """Raise for settings that are not supported.

    Args:
        args: the TrainingArguments.
        context_size: number of ranks that share sequences.
        same_bits: tokens of a chunk, or None.

    Raises:
        ValueError, NotImplementedError: an argument, by name.
    """
    if not isinstance(context_size, int) or isinstance(context_size, bool) or context_size < 1:
        raise ValueError(f"context_size must be a positive integer, got {context_size!r}")
    Settings(same_bits=same_bits).validate()
    for name, reason in (LEFT_OUT | (LEFT_OUT_OF_SAME_BITS if same_bits else {})).items():
        if is_given(getattr(args, name, None)):
            flag = "context_size" if name in LEFT_OUT else "same_bits"
            raise NotImplementedError(f"{name} must be left out with {flag}: {reason}, got {getattr(args, name)!r}")
    for name, value in WITH_SAME_BITS.items() if same_bits else ():
        if hasattr(args, name.split(".")[0]) and (got := attrgetter(name)(args)) != value:
            raise NotImplementedError(f"{name} must be {value!r} with same_bits, got {got!r}")
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
    if generates(trainer) or any(hasattr(trainer, method) for method in GENERATING):
        check_rollouts(trainer)
    if getattr(trainer, "aux_loss_enabled", False):
        raise NotImplementedError(
            "router_aux_loss_coef must be 0.0 in the trainer's arguments: its auxiliary loss would be over the tokens "
            f"of a rank, got {trainer.router_aux_loss_coef}"
        )
    unused = generates(trainer)  # then adapters are switched off within a sharded call
    if is_peft_model(trainer.model) and not unused and getattr(trainer, "ref_model", trainer) is None:
        raise NotImplementedError(
            "ref_model must be given with adapters, as a model of its own with the weights of the base model: the "
            "trainer would call the sharded model without its adapters, on whole sequences"
        )
    if trainer.same_bits is not None:
        _check_same_steps(trainer)


def _check_same_steps(trainer: Any) -> None:
    """Raise for a trainer whose steps other ranks would not make."""
    methods = {"compute_loss", "training_step"}
    owners = [x for x in type(trainer).__mro__ if methods & vars(x).keys() and x.__module__ not in OF_STEPS]
    if owners or trainer.compute_loss_func is not None:
        raise NotImplementedError(
            "compute_loss must be that of transformers' Trainer or TRL's SFTTrainer with same_bits, got that of "
            f"{owners[0].__name__ if owners else 'compute_loss_func'}: write a loop of your own, with SameWeights"
        )
    if not (trainer.model_accepts_loss_kwargs and trainer._loss_shifts_labels):
        raise NotImplementedError(
            "model must be a causal language model with same_bits, whose forward accepts num_items_in_batch, got "
            f"{type(trainer.model).__name__}"
        )
    data, drops = trainer.train_dataset, trainer.args.dataloader_drop_last
    ranks = trainer.mesh["data"].size()
    number, batch = len(data) if isinstance(data, Sized) else 0, trainer.args.train_batch_size * ranks
    if isinstance(data, IterableDataset) or (number % batch and (ranks > 1 or drops)):
        raise ValueError(
            f"train_dataset must have a length that is a multiple of {batch}, per_device_train_batch_size times data "
            f"ranks, with same_bits, so that no sequence is repeated or left out, got {number or type(data).__name__}"
        )


def has_own_loss(trainer: Any) -> bool:
    """True if `compute_loss` is another one than transformers' Trainer has.

    Args:
        trainer: of any class.
    """
    plain = ("ring.integrations.", "transformers.trainer")
    return any("compute_loss" in vars(x) and not x.__module__.startswith(plain) for x in type(trainer).__mro__)


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
