"""Training with the ring: modules, batches and losses. README.md in this folder shows a training step.

    context         handle of a sharded sequence, an argument of every module's forward
    batch           shards tokens, labels and other tensors along the sequence
    sequence        gathers shards; sums and means along the sequence, with gradients
    ring_attention  a module that replaces scaled_dot_product_attention
    rotary          rotary positions, by global position
    self_attention  projections, rotary positions, the ring
    longnet_block   LongNet's block, with torchscale's argument names
    batch_group     the ranks that share a global batch
    loss            means over all labelled tokens, and over all sequences, of the global batch
    gradients       average of gradients without a wrapper; clipping by their norm
    same_weights    a model whose training steps have the same bits on any number of ranks
    replicas        parameters of which every rank has a copy
    module_calls    calls of a model's modules, and the first that differs from what it should be

Nothing here patches torch or a model, and no argument is silently ignored.
"""

from ring.nn.batch import IGNORED, Batch, next_tokens, shard_batch
from ring.nn.context import ContextParallel
from ring.nn.gradients import average_gradients, clip_grad_norm
from ring.nn.longnet_block import LongNetBlock, longnet_pattern
from ring.nn.loss import batch_mean, count_labels, cross_entropy, sequence_logprobs, token_mean
from ring.nn.ring_attention import RingAttention
from ring.nn.rotary import rotary
from ring.nn.same_weights.wrapper import SameWeights
from ring.nn.self_attention import SelfAttention
from ring.nn.sequence import gather, sequence_mean, sequence_sum

__all__ = [
    "IGNORED",
    "Batch",
    "ContextParallel",
    "LongNetBlock",
    "RingAttention",
    "SameWeights",
    "SelfAttention",
    "average_gradients",
    "batch_mean",
    "clip_grad_norm",
    "count_labels",
    "cross_entropy",
    "gather",
    "longnet_pattern",
    "next_tokens",
    "rotary",
    "sequence_logprobs",
    "sequence_mean",
    "sequence_sum",
    "shard_batch",
    "token_mean",
]
