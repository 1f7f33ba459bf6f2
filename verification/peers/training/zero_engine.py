"""DeepSpeed's engine on a rank, by `ring.nn.frameworks.deepspeed`, with the calls of the other wrappers."""

from __future__ import annotations

import io
import logging
import os
import warnings
from contextlib import redirect_stdout
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks at it once, when it is imported
os.environ.setdefault("LOCAL_RANK", "0")  # as torchrun and DeepSpeed's launcher set it

from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from ring.nn import ContextParallel
from ring.nn.frameworks import deepspeed
from verification.training.inputs import optimiser_settings
from verification.training.rank.ring_model import LanguageModel
from verification.training.rank.wrapping import Unwrapped
from verification.training.training_case import TrainingCase

# What DeepSpeed says of every new engine and every step.
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)

HALF = {"bf16": {"enabled": True}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}


class Zero(Unwrapped):
    """ZeRO of that stage. DeepSpeed reduces gradients, clips and steps in one call: here at the end of backward."""

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
        with redirect_stdout(io.StringIO()):  # in bf16 every new engine prints what memory there is
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
        """Of step one, before clipping: from the optimizer's first moment, which is all gradient then."""
        name, share = ("momentum_buffer", 1.0) if self.case.optimiser == "sgd" else ("exp_avg", 1 - 0.9)
        most = self.case.clipping
        clipped = 1.0 if most is None else min(1.0, most / (float(self.engine.get_global_grad_norm()) + 1e-6))
        return {key: safe_get_full_optimizer_state(x, name) / (share * clipped) for key, x in self.named.items()}

    def parameters(self) -> dict[str, Tensor]:
        return {name: safe_get_full_fp32_param(x) for name, x in self.named.items()}

    def step(self) -> Tensor | None:
        """The norm of the step that was made."""
        return None if self.case.clipping is None else self.engine.get_global_grad_norm()
