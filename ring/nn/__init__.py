"""Training with the ring: modules, batches and losses. README.md beside this file shows a training step.

    context         the handle of a sharded sequence, which every module's forward takes
    batch           shards tokens, labels and what else runs along the sequence; puts results together again
    ring_attention  the attention as a module, in the place of scaled_dot_product_attention
    rotary          rotary positions, global ones
    self_attention  projections, rotary positions, the ring
    longnet_block   LongNet's block, under torchscale's names
    batch_ranks     the ranks that share a global batch
    loss            the mean over all labelled tokens of the global batch
    gradients       their average, where no wrapper computes it; clipping by their norm

Nothing here patches torch or a model, and no argument is taken and ignored.
"""

from ring.nn.batch import IGNORED, Batch, gather, next_tokens, shard_batch
from ring.nn.context import ContextParallel
from ring.nn.gradients import average_gradients, clip_grad_norm
from ring.nn.longnet_block import LongNetBlock, longnet_pattern
from ring.nn.loss import count_labels, cross_entropy, token_mean
from ring.nn.ring_attention import RingAttention
from ring.nn.rotary import rotary
from ring.nn.self_attention import SelfAttention

__all__ = [
    "IGNORED",
    "Batch",
    "ContextParallel",
    "LongNetBlock",
    "RingAttention",
    "SelfAttention",
    "average_gradients",
    "clip_grad_norm",
    "count_labels",
    "cross_entropy",
    "gather",
    "longnet_pattern",
    "next_tokens",
    "rotary",
    "shard_batch",
    "token_mean",
]
