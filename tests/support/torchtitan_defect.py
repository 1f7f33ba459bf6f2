"""torchtitan's Llama with a mistake; imports torchtitan, which is in a folder of its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from scripts.torchtitan_llama import Llama
from verification.models import Part, Run


class LocalPositions(Llama):
    """Counts positions from the start of each shard."""

    def logits(self, model: nn.Module, part: Part, run: Run) -> Tensor:
        return super().logits(model, replace(part, positions=torch.arange(len(part.positions))), run)
