"""Batches: what runs along the sequence is sharded together, by one layout, and results are put together again.

    batch = shard_batch(context, tokens, next_tokens(tokens))     # whole tensors, the same on all ranks of the context
    logits = model(batch.tokens, batch.context, batch.positions)
    whole = gather(context, logits)

Labels are shifted before they are sharded: after that, the next token may be on another rank. Of sequences that are
packed from documents, `shard_batch(..., documents=lengths)` counts positions within each, and the last token of each
has no label.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference.documents import Documents, begins
from ring.comm.transport import Message, Outgoing
from ring.nn.context import ContextParallel
from ring.validation import is_dtensor

IGNORED = -100  # the label of a token that has none, as in torch's cross_entropy
INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Batch:
    """This rank's shard of a batch, in the order of the layout.

    tokens, labels  (B, N); labels may be None
    positions       (N,) int64, the global positions of the tokens, on their device; the context's own. Of documents
                    those within each of them
    context         what modules take; with the documents, if there are any
    others          what else was given, (B, N, ...)
    """

    tokens: Tensor
    labels: Tensor | None
    positions: Tensor
    context: ContextParallel
    others: dict[str, Tensor] = field(default_factory=dict)


def next_tokens(tokens: Tensor, ignored: int = IGNORED) -> Tensor:
    """The labels of a language model: tokens (B, n) of the whole sequence -> (B, n) int64; the last ones `ignored`.

    ValueError for tokens that are not (B, n) int64 or int32.
    """
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in INTEGERS:
        raise ValueError(f"tokens must be a (batch, tokens) int64 or int32 tensor, got {_given(tokens)}")
    last = tokens.new_full((tokens.shape[0], min(1, tokens.shape[1])), ignored, dtype=torch.int64)
    return torch.cat((tokens[:, 1:].long(), last), 1)


def shard_batch(
    context: ContextParallel,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    documents: tuple[int, ...] | None = None,
    **others: Tensor,
) -> Batch:
    """This rank's shard of a batch of whole sequences. Every rank of the context group calls it, with the same tensors.

    Args:
        tokens: (B, n) int64 or int32, n being the layout's.
        labels: None, or (B, n) int64 or int32: the next tokens (`next_tokens`), -100 where there is none. Labels that
            are the tokens themselves are refused, where two or more are labelled and they are not the next tokens too.
        positions: None, or 0 .. n - 1, (n,) or (B, n), int64 or int32: no others, since the pattern goes by these. Of
            documents 0 .. length - 1 for each of them.
        documents: the lengths of the documents that every row is packed from; None: the context's, if it has any. The
            label of the last token of each is -100 in the batch, whatever was given: the next token is another's.
        others: whatever else runs along the sequence, (B, n, ...), any dtype.

    Raises:
        ValueError, NotImplementedError: an argument is wrong on some rank, or the ranks of the context were given
            different tensors. Every rank raises the same error, and the group can be used again. With check=False of
            the context the ranks do not compare.
    """

    def check() -> dict[str, object]:
        given = {"tokens": tokens} | ({} if labels is None else {"labels": labels})
        packed = context if documents is None else context.with_documents(documents)
        _check_batch(packed, given, positions, others)
        return _signature(packed, given | others) if context.check else {}

    context.agree("shard_batch", check)
    if documents is not None:
        context = context.with_documents(documents)
    return Batch(
        tokens=context.shard(tokens),
        labels=None if labels is None else context.shard(_within_documents(labels, context.documents)),
        positions=context.positions_on(tokens.device),
        context=context,
        others={name: context.shard(x) for name, x in others.items()},
    )


def _within_documents(labels: Tensor, documents: Documents | None) -> Tensor:
    """The labels, but those of the last tokens of documents."""
    if documents is None:
        return labels
    ends = torch.tensor(documents, dtype=torch.int64).cumsum(0)
    last = ends[torch.tensor(documents, dtype=torch.int64) > 0] - 1
    return labels.index_fill(1, last.to(labels.device), IGNORED)


def gather(context: ContextParallel, x: Tensor, dim: int = 1) -> Tensor:
    """The whole tensor on every rank, from the shards of all: x has this rank's tokens along `dim`; any dtype.

    No gradient flows through it. Every rank of the context group calls it.

    Raises ValueError and NotImplementedError, on every rank, for x of another length or of another shape or dtype than
    the other ranks'.
    """

    def check() -> dict[str, object]:
        _check_gathered(context, x, dim)
        other = [size for i, size in enumerate(x.shape) if i != dim % x.dim()]
        return {"dim": dim % x.dim(), "other dimensions": other, "dtype": str(x.dtype), "device type": x.device.type}

    context.agree("gather", check)
    return context.layout.unshard(_all_shards(context, x.detach(), dim % x.dim()), dim)


def _all_shards(context: ContextParallel, mine: Tensor, dim: int) -> list[Tensor]:
    """The shards of all ranks in rank order: each sends its own to all others. Empty ones are not sent."""
    transport, layout = context.transport, context.layout
    shapes = [[count if i == dim else size for i, size in enumerate(mine.shape)] for count in layout.counts]
    peers = [rank for rank in range(context.world_size) if rank != context.rank]
    size = mine.numel() * mine.element_size()
    kind = ("gather", layout, dim, mine.dtype, *(rows for i, rows in enumerate(mine.shape) if i != dim))
    transport.prepare(kind, lambda: [Outgoing("shard", size, "shard", peer, 0, size) for peer in peers if size])
    own = transport.empty("shard", mine.shape, mine.dtype, mine.device).copy_(mine)
    shards = [own if rank == context.rank else mine.new_empty(shape) for rank, shape in enumerate(shapes)]
    sends = [Message(peer, _bytes(own), "shard") for peer in peers if size]
    receives = [Message(peer, _bytes(shards[peer]), "shard") for peer in peers if shards[peer].numel()]
    transport.post(sends, receives).wait()
    return shards


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor: (bytes,) uint8."""
    return x.view(-1).view(torch.uint8)


def _check_gathered(context: ContextParallel, x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"x must be a tensor with dimension {dim!r}, got {_given(x)}")
    shape = tuple("local tokens" if i == dim % x.dim() else f"dimension {i}" for i in range(x.dim()))
    context.check_local("x", x, shape, dim)


def _check_batch(
    context: ContextParallel, given: dict[str, Tensor], positions: Tensor | None, others: dict[str, Tensor]
) -> None:
    n, tokens = context.layout.n, given["tokens"]
    for name, x in given.items():
        _check_plain(name, x)
        if x.dim() != 2 or x.dtype not in INTEGERS:
            raise ValueError(f"{name} must be a (batch, tokens) int64 or int32 tensor, got {_given(x)}")
    if positions is not None:
        _check_positions(positions, tokens, context)
    for name, x in (given | others).items():
        _check_plain(name, x)
        if x.dim() < 2 or x.shape[1] != n:
            local = x.dim() > 1 and x.shape[1] == context.tokens
            hint = ": it is sharded here, give each rank the whole one" if local else ""
            raise ValueError(f"{name} must have the layout's {n} tokens along dimension 1, got {_given(x)}{hint}")
        if x.shape[0] != tokens.shape[0] or not x.shape[0]:
            raise ValueError(f"{name} must have tokens' batch size, at least 1, {tokens.shape[0]}, got {_given(x)}")
        if x.device != tokens.device:
            raise ValueError(f"{name} must be on tokens' device {tokens.device}, got {x.device}")
    if "labels" in given:
        _check_shifted(tokens, given["labels"])


def _check_plain(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or is_dtensor(x) or x.layout is not torch.strided:
        raise ValueError(f"{name} must be a plain dense tensor of whole sequences, got {type(x)!r}")


def _check_positions(positions: Tensor, tokens: Tensor, context: ContextParallel) -> None:
    n, documents = context.layout.n, context.documents
    _check_plain("positions", positions)
    if positions.dtype not in INTEGERS or positions.shape not in ((n,), (1, n), (tokens.shape[0], n)):
        raise ValueError(f"positions must be int64 or int32 of shape ({n},), or of tokens, got {_given(positions)}")
    if positions.device != tokens.device:
        raise ValueError(f"positions must be on tokens' device {tokens.device}, got {positions.device}")
    expected = torch.arange(n, device=tokens.device)
    if documents is not None:
        expected -= begins(documents, expected)
    if not torch.equal(positions.long(), expected.expand(positions.shape)):
        allowed = f"0 .. {n - 1}" if documents is None else "0, 1, ... in each document"
        raise ValueError(f"positions must be None or {allowed}, by which the pattern goes, got others")


def _check_shifted(tokens: Tensor, labels: Tensor) -> None:
    counts = labels != IGNORED
    if int(counts.sum()) > 1 and bool((labels == tokens)[counts].all()):
        if not bool((labels == next_tokens(tokens))[counts].all()):
            raise ValueError(
                "labels must be the next tokens, shifted before they are sharded (next_tokens), got the tokens "
                "themselves"
            )


def _signature(context: ContextParallel, tensors: dict[str, Tensor]) -> dict[str, object]:
    """What must be the same on every rank, by the name of the argument."""
    layout = context.layout
    whole: dict[str, object] = {
        "the tensors given": list(tensors),
        "the context's layout": f"{layout.n} tokens, cuts {layout.cuts}, order {layout.digest.hex()}",
        "documents": context.documents,
    }
    return whole | {name: f"{_given(x)}, digest {_digest(x)}" for name, x in tensors.items()}


def _digest(x: Tensor) -> str:
    flat = _bytes(x.detach().cpu().contiguous())
    return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()


def _given(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x))
