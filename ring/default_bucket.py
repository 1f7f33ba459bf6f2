"""The bucket that a memory budget allows: how many key/value tokens are received, and computed on, at a time."""

from __future__ import annotations

import torch

from ring.layout import Layout
from ring.precision import accumulator_dtype

# The part that receive and gradient buffers may take, of the memory of the largest shard's q, k, v and output.
SHARE = 0.1
# Below this a kernel call costs more to start than to run: shorter shards are computed on whole, and their buffers are
# small anyway. On GPUs, than to keep all multiprocessors busy for a while; there it is also what several GPUs hold of a
# sequence of middle length, which then is received at once.
MIN_BUCKET = 1024
MIN_BUCKET_ON_GPUS = 2**16
# Numbers of a tensor of one kernel call on GPUs: some kernels count them in 32 bits.
MAX_ELEMENTS = 2**30


def default_bucket(layout: Layout, heads: int, kv_heads: int, dtype: torch.dtype, device: str = "cpu") -> int:
    """Key/value tokens per receive buffer and kernel call for `bucket=None`; the same on every rank. device: its type.

    A token of a bucket takes two receive buffers in the working type and, in backward, three gradient buffers in the
    accumulator's. The budget is a share of the largest shard, so that memory stays O(n / p). Batch and head dim are
    factors of both, and cancel. (The math kernel bounds its scores by itself, by the size of its queries.)
    """
    item, work = dtype.itemsize, accumulator_dtype(dtype).itemsize
    shard = max(layout.counts) * 2 * (heads + kv_heads) * item  # q, k, v and output
    token = 2 * kv_heads * (2 * item + 3 * work)
    return max(MIN_BUCKET_ON_GPUS if device == "cuda" else MIN_BUCKET, int(SHARE * shard / token))


def default_local_bucket(q: torch.Tensor, bucket: int) -> int:
    """Tokens of several segments of the own keys per kernel call for `bucket=None`. q: (B, N, H, D).

    On GPUs more than a bucket: own keys need no receive buffer, what a call returns is kept there until the merge in
    any case, and a result that alone covers the whole shard need not be merged.
    """
    batch, _, heads, dim = q.shape
    return max(bucket, MAX_ELEMENTS // (batch * heads * dim)) if q.is_cuda else bucket
