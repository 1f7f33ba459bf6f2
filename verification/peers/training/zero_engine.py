"""DeepSpeed's engine on a rank, by `ring.nn.frameworks.deepspeed`, with the methods of the other wrappers."""

from __future__ import annotations

import io
import logging
import os
import warnings
from contextlib import redirect_stdout
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it once, when imported
os.environ.setdefault("LOCAL_RANK", "0")  # set by torchrun and DeepSpeed's launcher

from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from ring.nn import ContextParallel
from ring.nn.frameworks import deepspeed
from verification.training.inputs import optimiser_settings
from verification.training.rank.ring_model import LanguageModel
from verification.training.rank.wrapping import TrainableModel
from verification.training.training_case import TrainingCase

# Silence DeepSpeed's messages for every new engine and step.
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)

HALF = {"bf16": {"enabled": True}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}


class Zero(TrainableModel):
    """ZeRO of that stage. One call reduces gradients, clips and steps: it is made at the end of backward."""

    def __init__(self, stage: int, model: LanguageModel, case: TrainingCase) -> None:
        self.stage = stage
        super().__init__(model, case)

    def wrap(self, model: nn.Module) -> nn.Module:
        deepspeed.without_compiler()
        config: dict[str, Any] = {
            "zero_optimization": {"stage": self.stage}, "gradient_clipping": self.case.clipping or 0.0,
            "zero_allow_untested_optimizer": True, **(HALF if self.case.dtype == "bfloat16" else {}),
        }  # fmt: skip
        kind, settings = optimiser_settings(self.case)
        with redirect_stdout(io.StringIO()):  # in bf16 every new engine prints its memory
            self.engine: Any = deepspeed.initialize(model, kind(model.parameters(), **settings), self.mesh, config)
        return self.engine

    def logits(self, tokens: Tensor, positions: Tensor, context: ContextParallel) -> Tensor:
        out: Tensor = self.engine(tokens, positions, context)
        return out

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def end_of_backward(self) -> None:
        self.engine.step()

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of step one before clipping, from the optimizer's first moment, then a multiple of them."""
        name, share = ("momentum_buffer", 1.0) if self.case.optimiser == "sgd" else ("exp_avg", 1 - 0.9)
        max_norm = self.case.clipping
        clipped = 1.0 if max_norm is None else min(1.0, max_norm / (float(self.engine.get_global_grad_norm()) + 1e-6))
        return {key: safe_get_full_optimizer_state(x, name) / (share * clipped) for key, x in self.named.items()}

    def parameters(self) -> dict[str, Tensor]:
        return {name: safe_get_full_fp32_param(x) for name, x in self.named.items()}

    def step(self) -> Tensor | None:
        """Return the norm of the step made at the end of backward; None without clipping."""
        return None if self.case.clipping is None else self.engine.get_global_grad_norm()
