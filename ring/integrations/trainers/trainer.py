"""transformers' Trainer over data x context: each sequence is sharded over `context_size` ranks.

    trainer = ContextParallelTrainer(model, args, train_dataset=..., context_size=4)       # for Trainer(model, ...)

Everything else of the script stays as it is; start it with torchrun. Steps, logs, evaluations and checkpoints are those
of a Trainer whose processes are the data ranks. TRL's SFTTrainer and other subclasses of Trainer:

    class Sharded(ContextParallelTrainer, SFTTrainer): ...

Each rank of a context group reads the same whole batches, of any length, padded or packed; the model is called with
the rank's shard. `compute_loss_func` and label smoothing get logits of the whole sequence, as predictions do.
With `same_bits=4096` any number of ranks trains the same model, bit by bit. TRAINERS.md in this folder has the limits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ring.extras import optional_imports

with optional_imports(__name__):
    from accelerate.utils import is_peft_model
    from transformers import PreTrainedModel, Trainer

from reference.documents import Documents
from ring.integrations.trainers.accelerator import DataAccelerator, check_dataset, check_loader
from ring.integrations.trainers.call import ShardedCall
from ring.integrations.trainers.refusals import (
    check_adapters,
    check_head,
    check_settings,
    check_trainer,
    check_world,
    has_own_loss,
)
from ring.integrations.trainers.rollouts import Rollouts, generates
from ring.integrations.trainers.scores import score_tokens, scores_sequences
from ring.integrations.transformers import prepare
from ring.integrations.transformers.call import prepared_call
from ring.layout import Layout
from ring.nn.batch import IGNORED
from ring.nn.batch_group import BatchRanks
from ring.nn.context import ContextParallel
from ring.nn.same_weights.wrapper import SameWeights


class ContextParallelTrainer(Rollouts, Trainer):  # type: ignore[misc]
    """A Trainer of a language model, causal or masked, or of a token classifier, whose sequences are sharded.

    Args:
        args: of transformers' `Trainer`. A model that is prepared already is not compared again. Adapters of PEFT must
            be LoRA.
        context_size: number of neighbouring ranks that share sequences; a divisor of all ranks.
        same_bits: tokens of a chunk, for `SameWeights`: parameters, moments, norms and logged losses then have the same
            bits on any number of ranks whose steps have the same sequences. None: off.
        options: of transformers' `Trainer`.

    Raises:
        ValueError, NotImplementedError: a setting that would train wrongly, by name, or a model that `prepare` refuses.
    """

    mesh: DeviceMesh

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        sharded = [issubclass(base, ContextParallelTrainer) for base in cls.__bases__]
        first = sharded.index(True)
        if any(issubclass(base, Trainer) for base in cls.__bases__[:first]):
            bases = ", ".join(base.__name__ for base in (cls.__bases__[first], *cls.__bases__[:first]))
            raise TypeError(f"ContextParallelTrainer must precede other trainers: write class {cls.__name__}({bases})")

    def __init__(self, *args: Any, context_size: int, same_bits: int | None = None, **options: Any) -> None:
        self.context_size, self.same_bits = context_size, same_bits
        self._evaluates = False
        self._losses: list[float] = []  # of the step's sequences so far, with same_bits
        self._mean_loss: float | None = None  # of the steps since the last log, for the next
        self._draws: torch.Generator | None = None
        super().__init__(*args, **options)
        self._check()
        self._handle: Callable[[int, Documents | None], ContextParallel] = lru_cache(64)(self._context)
        if prepared_call(self._attending()) is None:
            prepare(self._attending(), self.mesh["context"])
        if scores_sequences(self._inner()):
            score_tokens(self._inner())
        self._begin_rollouts()

    def _inner(self) -> PreTrainedModel:
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def _attending(self) -> PreTrainedModel:
        """Return the model that is prepared: the one below a head that scores whole sequences."""
        inner = self._inner()
        return inner.base_model if scores_sequences(inner) else inner

    def _context(self, tokens: int, documents: Documents | None) -> ContextParallel:
        group, ranks = self.mesh["context"], self.context_size
        if self.same_bits is None:
            return ContextParallel(Layout.zigzag(tokens, ranks), group)
        layout = Layout.whole_chunks(tokens, ranks, self.same_bits, documents)
        return ContextParallel(layout, group, same_bits=self.same_bits)

    def _check(self) -> None:
        if is_peft_model(self.model):
            check_adapters(self.model.peft_config)
        elif self.model_init is not None or not isinstance(self.model, PreTrainedModel):
            got = "model_init" if self.model_init is not None else f"a {type(self.model).__name__}"
            raise NotImplementedError(f"model must be given as a PreTrainedModel, got {got}")
        check_trainer(self)
        if not (scores_sequences(self._inner()) and has_own_loss(self)):
            check_head(self._inner(), self._loss_shifts_labels)
        if self.model.config.output_hidden_states:
            raise NotImplementedError("config.output_hidden_states must be False: predictions are logits alone")
        dispatch = self.args.accelerator_config.dispatch_batches
        held = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval_dataset": self.eval_dataset}
        for name, dataset in {"train_dataset": self.train_dataset, **held}.items():
            check_dataset(name, dataset, dispatch)

    # --- the accelerator ----------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Check the settings, make the mesh, and let the accelerator read and count data by data ranks."""
        check_settings(self.args, self.context_size, self.same_bits)
        super().create_accelerator_and_postprocess()
        if "RANK" in os.environ and not dist.is_initialized():  # accelerate joins no group of one process on CPUs
            dist.init_process_group()
        check_world(dist.get_world_size() if dist.is_initialized() else 0, self.context_size)
        sizes = (dist.get_world_size() // self.context_size, self.context_size)
        if self.args.fsdp and not self.is_fsdp_enabled:
            raise NotImplementedError("fsdp needs GPUs: accelerate ignores it on CPUs, got use_cpu=True")
        sharing: dict[str, object] = {"context_size": self.context_size, "same_bits": self.same_bits}
        BatchRanks(None).agree(type(self).__name__, lambda: (sharing, None))
        self.mesh = init_device_mesh(self.args.device.type, sizes, mesh_dim_names=("data", "context"))
        self.accelerator = DataAccelerator(self.mesh, self.same_bits is not None, **self._accelerator_options)
        self.gather_function = self.accelerator.gather_for_metrics
        self._set_generation_batch()

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        self._accelerator_options: dict[str, Any] = super()._build_accelerator_args(**options)
        return self._accelerator_options

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of sequences of a step.

        Args:
            args: the TrainingArguments.
        """
        return int(super().get_total_train_batch_size(args)) // self.context_size

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Return this rank's share of a batch's operations, which the Trainer adds up over all ranks.

        Args:
            inputs: the whole batch.
        """
        return float(super().floating_point_ops(inputs)) / self.context_size

    # --- the loss -----------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Return the loss of a micro-batch, after its backward; with `same_bits` that of the step, after its last.

        Args:
            model: wrapped. Every `compute_loss`, also one of a subclass, gets a call of it that takes whole batches.
            inputs: the whole batch.
            num_items_in_batch: labels of the step.
        """
        check_loader("get_train_dataloader", self.callback_handler.train_dataloader)
        call = self._sharded(model, self._own_loss())
        if call.chunk is not None and num_items_in_batch is None:
            raise ValueError("batch must have labels with same_bits, since they are counted over the step")
        loss: Tensor = super().training_step(call, inputs, num_items_in_batch)
        if not isinstance(call.model, SameWeights):
            return loss
        self._losses += map(float, call.model.token_sums.of_sequences)
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(loss)
        total, self._losses = math.fsum(self._losses), []  # of any micro-batches, since it is rounded once
        return torch.full_like(loss, total / max(1, int(num_items_in_batch)))

    def _own_loss(self) -> bool:
        """True for a `compute_loss` of a subclass, which may read logits."""
        return type(self).compute_loss is not ContextParallelTrainer.compute_loss

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **options: Any) -> Any:
        """Return the loss of the data rank, on every rank of its context group, as `Trainer` does.

        Args:
            model: wrapped.
            inputs: the whole batch.
            return_outputs: True: with the outputs, whose logits are whole.
            options: of the Trainer.
        """
        call = self._sharded(model, return_outputs)
        call = replace(call, whole=call.whole and return_outputs)
        if call.chunk is None:
            return super().compute_loss(call, inputs, return_outputs, **options)
        # Among the inputs, since with the argument trainers multiply losses by the data ranks, for the mean of DDP.
        inputs = {**inputs, "num_items_in_batch": options.pop("num_items_in_batch", None)}
        output = super().compute_loss(call, inputs, return_outputs, **options)
        return (call.losses[0], output[1]) if return_outputs else call.losses[0]

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the mean loss of a batch, its logits and its labels, whole, on every rank of its context group.

        Args:
            model: the model.
            inputs: the whole batch.
            prediction_loss_only: True: the loss alone.
            ignore_keys: of the outputs.

        Raises:
            ValueError: sequences that accelerate repeats to fill the last batches cannot be told from the others.
        """
        self._evaluates = True
        try:
            check_loader("get_eval_dataloader", self.callback_handler.eval_dataloader)
            whole = not prediction_loss_only or self._own_loss()
            call, inputs = self._sharded(model, whole), self._without_repeated(inputs)
            loss, *others = super().prediction_step(call, inputs, prediction_loss_only, ignore_keys)
            if generates(
                self
            ):  # the Trainer counts prompts, not completions, and so leaves out some data ranks' losses
                loss = self.accelerator.gather(loss).mean()
            return (loss, *others)
        finally:
            self._evaluates = False

    def _sharded(self, model: Any, whole: bool) -> ShardedCall:
        if isinstance(model, ShardedCall):
            return model
        if self._draws is None:
            self._draws = torch.Generator().manual_seed((torch.initial_seed() + self.state.global_step) % 2**63)
        model = self.accelerator.same_weights(self.model) or model
        shifts, chunk = self._loss_shifts_labels or scores_sequences(self._inner()), self.same_bits
        return ShardedCall(model, self.mesh, self._handle, shifts, whole, self.model, self._draws, chunk)

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **options: Any) -> None:
        """Log the loss. With `same_bits` it is equal on all ranks; the Trainer's mean over them would be rounded."""
        steps = self.state.global_step - self._globalstep_last_logged
        if self.same_bits is None or not self.control.should_log or not steps:
            super()._maybe_log_save_evaluate(tr_loss, *args, **options)
            return
        loss, before = tr_loss.item(), float(self._total_loss_scalar)
        self._mean_loss = loss / steps
        super()._maybe_log_save_evaluate(tr_loss, *args, **options)
        self._total_loss_scalar: float = before + loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log values, and with `same_bits` the loss that any ranks have.

        Args:
            logs: by name.
            args, options: of the Trainer.
        """
        if self._mean_loss is not None:
            logs["loss"], self._mean_loss = self._mean_loss, None
        super().log(logs, *args, **options)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Count labels over the data ranks; in evaluation as if all had as many, since each batch has its own mean."""
        counted = self._evaluates and {"labels", "shift_labels"} & set(batch_samples[0])
        if not counted or not self.args.average_tokens_across_devices:
            return super()._get_num_items_in_batch(batch_samples, device)
        first = int(self._loss_shifts_labels)
        (labels,) = (batch.get("shift_labels", batch["labels"][:, first:]) for batch in batch_samples)
        return (labels != IGNORED).sum() * self.accelerator.num_processes

    def _without_repeated(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Ignore the labels of sequences that fill the last batches of data ranks: the gathered results end before."""
        state, ranks = self.accelerator.gradient_state, self.accelerator.num_processes
        if ranks == 1 or not state.end_of_dataloader or state.remainder == 0 or not isinstance(inputs, Mapping):
            return inputs
        if getattr(state.active_dataloader, "_drop_last", False) or not ("labels" in inputs or has_own_loss(self)):
            return inputs
        size = self.args.eval_batch_size
        if state.remainder < 0 or len(inputs.get("labels", ())) != size:
            raise ValueError(
                f"eval_dataset must have a length that is a multiple of {ranks * size}, for {ranks} data ranks with "
                "batches of that size, where it has no length, its batches are packed into one row, or a loss is of "
                "whole sequences"
            )
        real = max(0, state.remainder - size * self.accelerator.process_index)
        rows = torch.arange(size, device=inputs["labels"].device)[:, None]
        names = {"labels", "shift_labels"} & set(inputs)
        return {**inputs, **{name: inputs[name].masked_fill(rows >= real, IGNORED) for name in names}}
