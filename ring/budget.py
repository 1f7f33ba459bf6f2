"""The bucket that a memory budget allows: how many key/value tokens land, and are attended to, at a time."""

from __future__ import annotations

import torch

from ring.accumulator import accumulator_dtype
from ring.layout import Layout

# Of the memory that the largest shard's q, k, v and output take, the part that landings and scores together may take.
SHARE = 0.125
# Below this a kernel call costs more to start than to run.
LEAST = 64


def default_bucket(
    layout: Layout, batch: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kernel: str
) -> int:
    """Key/value tokens per landing and kernel call for `bucket=None`; the same on every rank.

    A token of a bucket takes two landings in the working type and, in backward, three gradient buffers in the
    accumulator's. The math kernel also holds scores, their exponentials and their gradients for it, one per query row
    and head. The budget is a share of the largest shard, so that memory stays O(n / p) whatever the bucket.
    """
    rows = max(layout.counts)
    item, work = dtype.itemsize, accumulator_dtype(dtype).itemsize
    shard = rows * head_dim * 2 * (heads + kv_heads) * batch * item
    token = 2 * batch * kv_heads * head_dim * (2 * item + 3 * work)
    if kernel == "math":
        token += 3 * batch * heads * rows * work
    return max(LEAST, int(SHARE * shard / max(token, 1)))
