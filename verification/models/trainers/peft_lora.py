"""LoRA adapters of PEFT in transformers' Trainer: alone on one rank, and with `ContextParallelTrainer` on more.

python -m verification model verification.models.trainers.peft_lora:Llama
"""

from __future__ import annotations

from peft import LoraConfig, PeftModel, get_peft_model

from ring.nn import ContextParallel
from verification.models.trainers import transformers_trainer


class Llama(transformers_trainer.Llama):
    """A Llama whose adapters are trained."""

    def build(self, context: ContextParallel | None) -> PeftModel:
        """Return the model with adapters, which are no zeros."""
        return get_peft_model(super().build(context), LoraConfig(r=2, init_lora_weights=False))
