"""Values of whole sequences, with gradients: shards gathered, and sums and means along the sequence.

    whole = gather(context, hidden)                              # (B, N, D) -> (B, n, D) on every rank
    pooled = sequence_mean(context, hidden)                      # (B, N, D) -> (B, D), without the whole in memory

Scale of gradients. Rank r computes a loss l_r. Each backward here sums over all ranks of the context what they ask for,
the adjoint of the copies that the forward sent. So the gradients of all ranks of the batch, R = data x context, add up
to that of the sum of all l_r; DDP, FSDP and `average_gradients` divide by R. What is trained is therefore

    L = mean of l_r over all ranks

A loss that every context rank computes from the same whole values is the same number on each, so the mean over R ranks
is the mean over data ranks: parameters before and behind the gather get the gradient of it, without a factor.
`cross_entropy` and `token_mean` have R times this rank's summand as l_r, so such losses may be added.

Every context rank computes the loss and runs its backward. If only some ranks do, the others do not come to the
backward, and that is an error on every rank. A loss that some ranks multiply by 0 counts as such in the mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ring.comm.call_order import NumberedCall
from ring.comm.transport import Message, Outgoing
from ring.consensus import agree_backward
from ring.layout import Layout
from ring.nn.context import ContextParallel
from ring.nn.same_weights.chunk_rows import chunks_of_ranks
from ring.precision import accumulator_dtype
from ring.validation import wants_gradients

MASKS = (torch.bool, torch.uint8, torch.int32, torch.int64)


def gather(context: ContextParallel, x: Tensor, dim: int = 1) -> Tensor:
    """Return the whole tensor on every rank. Call it, and its backward, on every rank of the context group.

    The gradient of a shard is the sum of what all ranks ask for: see the module.

    Args:
        context: handle of the sharded sequence.
        x: any shape and dtype, with this rank's tokens along `dim`.
        dim: dimension of the tokens.

    Raises:
        ValueError, NotImplementedError: on every rank, if x has other tokens, or another shape or dtype than on others,
            or requires a gradient on some ranks only.
    """
    with context.transport.calls.lock():
        call = _agree(context, "gather", x, dim)
        return _gathered(context, call, context.layout, x, dim % x.dim())


def sequence_sum(context: ContextParallel, x: Tensor, dim: int = 1, *, mask: Tensor | None = None) -> Tensor:
    """Return sums over all tokens of a sequence, with the same bits and gradient on every rank of the context group.

    Args:
        context: handle of the sharded sequence. If it has documents, each of them is a sequence. With `same_bits` sums
            are those of chunks, and have the same bits on any number of ranks.
        x: any shape, with this rank's tokens along `dim`; real, integers or bool.
        dim: dimension of the tokens.
        mask: this rank's shard of the tokens that count, of x's shape up to `dim`, as (B, N); bool, or integers 0 and
            1. Others do not count, not even if infinite or NaN. None: every token counts, padding too.

    Returns:
        x without `dim`; with documents `dim` has one entry a document. In x's dtype, and int64 for integers and bool;
        16 bits are summed in fp32.

    Raises:
        ValueError, NotImplementedError: as `gather`.
    """
    return _sums(context, "sequence_sum", x, dim, mask).to(x.dtype if x.is_floating_point() else torch.int64)


def sequence_mean(context: ContextParallel, x: Tensor, dim: int = 1, *, mask: Tensor | None = None) -> Tensor:
    """Return means over all tokens of a sequence, as `sequence_sum` returns sums. Without tokens that count they are 0.

    Args:
        context: handle of the sharded sequence. If it has documents, each of them is a sequence.
        x: any shape, with this rank's tokens along `dim`; real.
        dim: dimension of the tokens.
        mask: of `sequence_sum`: the attention mask of padded rows, which are counted as tokens without it.

    Raises:
        ValueError, NotImplementedError: as `gather`, and for x that is not real.
    """
    sums = _sums(context, "sequence_mean", x, dim, mask)
    if mask is not None:
        counts = sequence_sum(context, mask.bool(), dim).clamp(min=1).to(sums.dtype)
        return (sums / counts.view(*counts.shape, *[1] * (sums.dim() - counts.dim()))).to(x.dtype)
    if context.documents is None:
        return (sums / max(1, context.layout.n)).to(x.dtype)
    lengths = torch.tensor(context.documents, dtype=sums.dtype, device=x.device).clamp(min=1)
    return (sums / lengths.view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))).to(x.dtype)


def _sums(context: ContextParallel, operation: str, x: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """Sums in the dtype of accumulators. The ranks exchange one row of sums each."""
    with context.transport.calls.lock():
        call = _agree(context, operation, x, dim, mask)
        dim %= x.dim()
        if mask is not None:
            x = x.masked_fill(~mask.bool().view(*mask.shape, *[1] * (x.dim() - mask.dim())), 0)
        wide = x.to(accumulator_dtype(x.dtype) if x.is_floating_point() else torch.int64)
        if context.same_bits is not None:
            return _by_chunks(context, call, wide, dim)
        local = wide.sum(dim) if context.documents is None else _by_document(context, wide, dim)
        rows = Layout.contiguous(context.world_size, context.world_size)  # one a rank
        return _gathered(context, call, rows, local[None], 0).sum(0)


def _by_chunks(context: ContextParallel, call: NumberedCall, x: Tensor, dim: int) -> Tensor:
    """Sums over the binary tree of the chunks of a sequence or document, the same bits on any number of ranks."""
    every = chunks_of_ranks(context)
    order = Layout.from_cuts(
        [number for one in every for number in one.numbers], [*accumulate((len(x.numbers) for x in every), initial=0)]
    )
    # Row by row of what comes before `dim`: the order in which a device sums may depend on the number of sums.
    before, own = x.flatten(0, dim - 1) if dim else x[None], every[context.rank].rows
    local = [torch.stack([row[begin:end].contiguous().sum(0) for begin, end in own]) for row in before if own]
    stacked = torch.stack(local, 1) if own else x.new_zeros(0, len(before), *x.shape[dim + 1 :])  # (chunks, rows, ...)
    chunks = iter(_gathered(context, call, order, stacked, 0))
    lengths = (context.layout.n,) if context.documents is None else context.documents
    counts = [-(-length // context.same_bits) for length in lengths if context.same_bits]
    sums = [_tree_sum(list(islice(chunks, count))) if count else x.new_zeros(stacked.shape[1:]) for count in counts]
    shape = x.shape[:dim], x.shape[dim + 1 :]
    if context.documents is None:
        return sums[0].view(*shape[0], *shape[1])
    return torch.stack(sums, 1).view(*shape[0], len(sums), *shape[1])


def _tree_sum(parts: list[Tensor]) -> Tensor:
    """Sum of neighbours, then of pairs of neighbours, and so on; an odd one waits."""
    while len(parts) > 1:
        pairs = (parts[at : at + 2] for at in range(0, len(parts), 2))
        parts = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return parts[0]


def _by_document(context: ContextParallel, x: Tensor, dim: int) -> Tensor:
    """Sums over this rank's tokens of each document, along `dim`."""
    assert context.documents is not None
    ends = torch.tensor(context.documents, dtype=torch.int64).cumsum(0)
    numbers = torch.searchsorted(ends, context.layout.positions(context.rank), right=True).to(x.device)
    sums = x.new_zeros([len(ends) if i == dim else size for i, size in enumerate(x.shape)])
    return sums.index_add(dim, numbers, x)


def _agree(context: ContextParallel, operation: str, x: Tensor, dim: int, mask: Tensor | None = None) -> NumberedCall:
    """Validate a call on every rank, and return its number for the backward."""

    def check() -> tuple[dict[str, object], None]:
        _check(context, operation, x, dim, mask is not None)
        if mask is not None:
            _check_mask(mask, x, tuple(x.shape[: dim % x.dim() + 1]))
        other = [size for i, size in enumerate(x.shape) if i != dim % x.dim()]
        return {
            "dim": dim % x.dim(), "other dimensions": other, "dtype": str(x.dtype), "device type": x.device.type,
            "requires_grad": wants_gradients(x), "mask": mask is not None,
            "documents": None if operation == "gather" else context.documents,
        }, None  # fmt: skip

    context.agree(operation, check)
    calls = context.transport.calls
    return NumberedCall(calls, calls.number, operation)


def _check(context: ContextParallel, operation: str, x: Tensor, dim: int, masked: bool) -> None:
    if not isinstance(x, Tensor) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x))
        raise ValueError(f"x must be a tensor with dimension {dim!r}, got {got}")
    shape = tuple("local tokens" if i == dim % x.dim() else f"dimension {i}" for i in range(x.dim()))
    context.check_local("x", x, shape, dim)
    if operation == "sequence_mean" and not masked and context.pattern is not None and context.pattern.depths:
        raise ValueError(
            "mask must be given where the handle has a tree, whose paths share tokens, got None, a mean over all: "
            "write sequence_mean(context, x, mask=own), own True for this rank's tokens of a path"
        )
    if operation == "sequence_mean" and not x.is_floating_point():
        raise ValueError(f"x must be real, got {x.dtype}; write x.float()")
    if operation == "sequence_sum" and x.is_complex():
        raise ValueError(f"x must be real, integer or bool, got {x.dtype}")


def _check_mask(mask: object, x: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor) or mask.shape != shape or mask.dtype not in MASKS or mask.device != x.device:
        got = f"{mask.dtype} of shape {tuple(mask.shape)} on {mask.device}" if isinstance(mask, Tensor) else type(mask)
        raise ValueError(f"mask must be None, or bool or integers of shape {shape} on x's device {x.device}, got {got}")
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("mask must be 1 for tokens that count, and 0 for others, got other values")


# --- the exchange -----------------------------------------------------------------------------------------------------


def _gathered(context: ContextParallel, call: NumberedCall, layout: Layout, x: Tensor, dim: int) -> Tensor:
    if wants_gradients(x):
        whole: Tensor = _Gather.apply(x, context, call, layout, dim)
        return whole
    return _whole(context, call, layout, x, dim)


class _Gather(torch.autograd.Function):
    """The whole tensor. Backward: this rank's rows of the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel, call: NumberedCall, layout: Layout, dim: int) -> Tensor:
        ctx.arguments = context, call, layout, dim
        return _whole(context, call, layout, x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        context, call, layout, dim = ctx.arguments
        with call.calls.lock():
            agree_backward(call, context.transport, context.check)
            return _sum_of_shards(context, layout, grad, dim), None, None, None, None


def _whole(context: ContextParallel, call: NumberedCall, layout: Layout, x: Tensor, dim: int) -> Tensor:
    if context.world_size > 1:
        call.calls.enter(call.forward)
    shapes = [[count if i == dim else size for i, size in enumerate(x.shape)] for count in layout.counts]
    kind = ("gather", layout, dim, x.dtype, *(rows for i, rows in enumerate(x.shape) if i != dim))
    same = [(0, x.numel())] * context.world_size
    return layout.unshard(_exchanged(context, kind, x.reshape(-1), same, shapes), dim)


def _sum_of_shards(context: ContextParallel, layout: Layout, grad: Tensor, dim: int) -> Tensor:
    """Sum the ranks' gradients of the whole, and return this rank's rows."""
    shards = [layout.shard(grad, rank, dim) for rank in range(context.world_size)]
    own = shards[context.rank].shape
    kind = ("gather, backward", layout, dim, grad.dtype, *(rows for i, rows in enumerate(own) if i != dim))
    spans = list(pairwise(accumulate((shard.numel() for shard in shards), initial=0)))
    flat = torch.cat([shard.reshape(-1) for shard in shards])
    summands = _exchanged(context, kind, flat, spans, [own] * context.world_size)
    sum_dtype = grad.dtype if grad.is_complex() else accumulator_dtype(grad.dtype)
    return torch.stack(summands).sum(0, dtype=sum_dtype).to(grad.dtype)


def _exchanged(
    context: ContextParallel,
    kind: Hashable,
    flat: Tensor,
    spans: Sequence[tuple[int, int]],
    shapes: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Tensors from all ranks, in rank order, of these shapes. spans: the entries of `flat` that each rank gets."""
    transport, rank, size = context.transport, context.rank, flat.element_size()
    outgoing = [(peer, start * size, stop * size) for peer, (start, stop) in enumerate(spans)]
    outgoing = [(peer, start, stop) for peer, start, stop in outgoing if peer != rank and start < stop]
    transport.prepare(kind, lambda: [Outgoing("rows", flat.nbytes, "rows", peer, *span) for peer, *span in outgoing])
    buffer = transport.empty("rows", flat.shape, flat.dtype, flat.device).copy_(flat)
    received = [
        flat[slice(*spans[rank])].view(tuple(shape)) if peer == rank else flat.new_empty(shape)
        for peer, shape in enumerate(shapes)
    ]
    sends = [Message(peer, _bytes(buffer), "rows", start, stop) for peer, start, stop in outgoing]
    receives = [Message(peer, _bytes(x), "rows") for peer, x in enumerate(received) if peer != rank and x.numel()]
    transport.post(sends, receives).wait()
    return received


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor: (bytes,) uint8."""
    return x.view(-1).view(torch.uint8)
