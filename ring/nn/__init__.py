"""Training with the ring: modules, batches and losses. README.md beside this file shows a training step."""

from ring.nn.context import ContextParallel

__all__ = ["ContextParallel"]
