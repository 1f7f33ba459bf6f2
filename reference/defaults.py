"""What an argument that is left out stands for: the values that documentation gives, said without any code of the ring.

`bucket` and `scale` of a call, and sizes of modules, follow from others: these are functions.
"""

from __future__ import annotations

from typing import Any

from reference.shards import default_bucket

Arguments = dict[str, Any]
ROTARY_THETA = 10000.0
IGNORED_LABEL = -100  # as in torch's cross_entropy

# Of `ContextParallel`: models take what they need from its owner.
CONTEXT: Arguments = {"exchange": "direct", "bucket": None, "kernel": "auto", "check": True, "documents": None}

BRANCH: Arguments = {"segment_length": None, "dilation_rate": 1, "offset": 0, "heads": None, "window": None}
PATTERN: Arguments = {"causal": False, "documents": None}
DENSE: Arguments = PATTERN | {"window": None}
LONGNET: Arguments = {"causal": False, "offsets": "paper", "documents": None}
LONGNET_OF_TORCHSCALE: Arguments = {"causal": True, "offsets": "torchscale"}


def call(largest: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Arguments:
    """Of `ring_attention` on CPUs. largest: tokens of the largest shard; itemsize: bytes of the working type."""
    return {
        "exchange": "ring",
        "bucket": default_bucket(largest, heads, kv_heads, itemsize),
        "kernel": "auto",
        "scale": head_dim**-0.5,
        "return_lse": False,
        "check": True,
        "name": None,
    }


def self_attention(dim: int, heads: int) -> Arguments:
    """Of `SelfAttention`: as many key/value heads as heads, which share the dimension; Llama's, but for its norms."""
    return {
        "kv_heads": heads, "head_dim": dim // heads, "bias": False, "rotary_theta": ROTARY_THETA, "qk_norm": False,
        "inner_norm_eps": None,
    }  # fmt: skip


def longnet_block(dim: int, heads: int) -> Arguments:
    """Of `LongNetBlock`: a decoder's, with the feed-forward and the norms of torchscale."""
    return {
        "ffn_dim": 4 * dim, "kv_heads": heads, "causal": True, "subln": True, "rotary_theta": ROTARY_THETA,
        "norm_eps": 1e-5,
    }  # fmt: skip
