"""What ranks of a pool are asked to do with batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ring.nn import Batch, gather, next_tokens, shard_batch
from tests.support.nn_ranks import TOKENS, context_of, data_index, drawn, mesh_of, said
from tests.support.nn_refusals import whole_tokens
from verification.run.programs import in_second_thread

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def sharded_and_gathered(shards: str, mesh: str) -> bool:
    """Whether the shards are what the layout says, and all of them together what was given."""
    context = context_of(shards, mesh_of(mesh)["context"])
    tokens = whole_tokens(data_index(mesh), torch.int32)
    given: dict[str, Any] = {
        "tokens": tokens,
        "labels": next_tokens(tokens),
        "weights": drawn(0, 2, TOKENS, 3),
        "mask": tokens > 3,
    }
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    batch = shard_batch(context, **given, positions=positions)
    assert batch.context is context and batch.positions is context.positions_on(tokens.device)
    assert batch.labels is not None
    found = {"tokens": batch.tokens, "labels": batch.labels} | batch.others
    mine = context.layout.positions(context.rank)
    right = torch.equal(batch.positions, mine) and list(found) == list(given)
    right = right and all(
        torch.equal(x, given[name][:, mine]) and x.dtype == given[name].dtype for name, x in found.items()
    )
    return right and all(torch.equal(gather(context, x), given[name]) for name, x in found.items())


def gathered(shards: str, dim: int) -> bool:
    """Every dtype, along any dimension; from a tensor that has other strides, and one that requires gradients."""
    context = context_of(shards)
    for dtype in DTYPES:
        shape = [3, 2, 4]
        shape[dim] = TOKENS
        whole = (5 * drawn(1, *shape)).to(dtype)
        x = context.shard(whole.transpose(0, 1).contiguous().transpose(0, 1), dim)
        if dtype.is_floating_point:
            x.requires_grad_()
        found = gather(context, x, dim)
        if not torch.equal(found, whole) or found.dtype != dtype or found.requires_grad:
            return False
    return True


def without_agreement() -> bool:
    """check=False: the ranks do not compare. Each has other data, as nobody notices."""
    checked = context_of("even")
    context = type(checked)(checked.layout, check=False)
    tokens = whole_tokens(dist.get_rank())
    batch = shard_batch(context, tokens)
    together = gather(context, batch.tokens)
    return torch.equal(batch.tokens, context.shard(tokens)) and together.shape == tokens.shape


def gathered_in_a_second_thread(culprit: int) -> tuple[int, str]:
    """This rank's number of the two that share a sequence, and what is said where one of them gathers in a second
    thread.
    """
    context = context_of("even", mesh_of("2x2")["context"])
    mine = context.shard(drawn(0, 2, TOKENS, 3))
    gather(context, mine)

    def whole() -> torch.Tensor:
        return gather(context, mine)

    return context.rank, said(lambda: in_second_thread(whole) if context.rank == culprit else whole())


def a_batch_without_labels() -> bool:
    batch: Batch = shard_batch(context_of("empty"), whole_tokens())
    return batch.labels is None and batch.others == {} and batch.tokens.shape[1] == batch.context.tokens
