"""DeepSpeed's engine on a rank, by `ring.integrations.deepspeed`, as the wrapper of a training step."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it once, when imported
os.environ.setdefault("LOCAL_RANK", "0")  # set by torchrun and DeepSpeed's launcher

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from ring.integrations import deepspeed
from verification.models.recording import arrays, named_parameters
from verification.models.results import Named
from verification.models.setup import Part, Run, recompute_layers
from verification.training.rank.own_setup import OwnSetup
from verification.training.rank.ring_model import LAYERS
from verification.training.training_case import TrainingCase

# Silence DeepSpeed's messages for every new engine and step.
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)

HALF = {"bf16": {"enabled": True}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}


class Zero(OwnSetup):
    """ZeRO of that stage. One call reduces gradients, clips and steps: it is made in place of the reduction."""

    def __init__(self, stage: int, case: TrainingCase) -> None:
        self.stage = stage
        super().__init__(case)

    def wrap(self, model: nn.Module, run: Run) -> nn.Module:
        recompute_layers(model, LAYERS, run)
        self.named = named_parameters(model)
        deepspeed.without_compiler()
        config: dict[str, Any] = {
            "zero_optimization": {"stage": self.stage}, "gradient_clipping": self.case.clipping or 0.0,
            "zero_allow_untested_optimizer": True, **(HALF if self.mixed else {}),
        }  # fmt: skip
        kind, settings = self.case.optimizer
        with redirect_stdout(io.StringIO()):  # in bf16 every new engine prints its memory
            self.engine: Any = deepspeed.initialize(model, kind(model.parameters(), **settings), self.mesh, config)
        return self.engine

    def optimizer(self, parameters: Sequence[nn.Parameter], run: Run) -> torch.optim.Optimizer:
        """Return one that does nothing: the engine has stepped."""
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))])

    def logits(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        return run.see(self.engine(part.tokens, part.positions, part.context))

    def backward(self, model: nn.Module, loss: Tensor, run: Run) -> None:
        self.engine.backward(loss * self.loss_of.part)

    def reduce(self, model: nn.Module, run: Run) -> None:
        self.engine.step()

    def gradients(self, model: nn.Module) -> Named:
        """Gradients of step one, from the optimizer's first moment, then a multiple of them."""
        name, share = ("momentum_buffer", 1.0) if self.case.optimiser == "sgd" else ("exp_avg", 1 - 0.9)
        return arrays({key: safe_get_full_optimizer_state(x, name) / share for key, x in self.named.items()})

    def parameters(self, model: nn.Module) -> Named:
        return arrays({name: safe_get_full_fp32_param(x) for name, x in self.named.items()})

    def clip(self, model: nn.Module, run: Run) -> Tensor | None:
        """Return the norm of the step that the engine made; None without clipping."""
        return None if self.case.clipping is None else self.engine.get_global_grad_norm()
