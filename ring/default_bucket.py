"""The default bucket, chosen by a memory budget: maximum key/value tokens per receive buffer and kernel call."""

from __future__ import annotations

import torch

from ring.layout import Layout
from ring.precision import accumulator_dtype

# Share of the memory of the largest shard's q, k, v and output that receive and gradient buffers may take.
SHARE = 0.1
# A kernel call on fewer tokens costs more to start than to run. Shorter shards form one bucket: the buffers are small.
# GPUs need more tokens to keep all multiprocessors busy, so a shard of a medium sequence forms one bucket.
MIN_BUCKET = 1024
MIN_BUCKET_ON_GPUS = 2**16
# Elements of a tensor in one GPU kernel call: some kernels count them in 32 bits. On an H200 the last rows and keys of
# calls of cuDNN, FlashAttention-2 and -4 on so many were those of calls on these rows and keys alone.
MAX_ELEMENTS = 2**31


def default_bucket(
    layout: Layout, heads: int, kv_heads: int, dtype: torch.dtype, device: str = "cpu", key_layout: Layout | None = None
) -> int:
    """Key/value tokens per receive buffer and kernel call for `bucket=None`; the same on every rank. device: its type.
    key_layout: of the keys; None: `layout`.

    A token takes space in two receive buffers, in the working dtype, and in backward in three gradient buffers, in the
    accumulator's. The budget is a share of the largest shards of queries and of keys, so memory stays O(n / p). Batch
    and head dims cancel. (The math kernel bounds its scores by itself, by the size of its queries.)
    """
    item, work = dtype.itemsize, accumulator_dtype(dtype).itemsize
    queries, keys = (max(x.counts) for x in (layout, layout if key_layout is None else key_layout))
    shard = 2 * (queries * heads + keys * kv_heads) * item  # q, k, v and output
    token = 2 * kv_heads * (2 * item + 3 * work)
    return max(MIN_BUCKET_ON_GPUS if device == "cuda" else MIN_BUCKET, int(SHARE * shard / token))


def default_local_bucket(batch: int, heads: int, widest: int, bucket: int, device: str = "cpu") -> int:
    """Local key tokens, of several segments, per kernel call of so many query heads for `bucket=None`. widest: the
    larger head dim, of keys or values.

    GPUs allow more than a bucket: local keys need no receive buffer, results are kept until the merge in any case, and
    a single result for the whole shard needs no merge.
    """
    return max(bucket, MAX_ELEMENTS // (batch * heads * widest)) if device == "cuda" else bucket
