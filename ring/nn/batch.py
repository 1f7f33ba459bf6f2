"""Batches: shards all tensors that run along the sequence by one layout.

    batch = shard_batch(context, tokens, next_tokens(tokens))     # whole tensors, the same on all ranks of the context
    logits = model(batch.tokens, batch.context, batch.positions)

Shift labels before sharding: afterwards the next token may be on another rank. For sequences packed from documents,
`shard_batch(..., documents=lengths)` counts positions within each document, and ignores the label of its last token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from reference.documents import Documents, check_tokens, checked_documents
from reference.pattern import Pattern
from reference.slices import sees_at
from ring.nn.context import ContextParallel
from ring.validation import is_dtensor

IGNORED = -100  # the label of a token that has none, as in torch's cross_entropy
INTEGERS = (torch.int64, torch.int32)
ONE_ROW = (
    "rows that are packed from different documents are one long row; write tokens.reshape(1, -1), labels alike, "
    "documents=all lengths in order, and a layout for all of these tokens"
)
AHEAD = 8  # greatest distance of labels that are recognised where they cross the end of a document


@dataclass(frozen=True)
class Batch:
    """This rank's shard of a batch, in the order of the layout.

    Args:
        tokens: (B, N) int64 or int32.
        labels: (B, N) int64 or int32, or None.
        positions: (N,) int64 on the tokens' device: the context's global positions, or those within each document.
        context: argument of modules; has the documents, if there are any.
        others: the other tensors by name, (B, N, ...).
    """

    tokens: Tensor
    labels: Tensor | None
    positions: Tensor
    context: ContextParallel
    others: dict[str, Tensor] = field(default_factory=dict)


def next_tokens(
    tokens: Tensor, ignored: int = IGNORED, *, ahead: int = 1, documents: tuple[int, ...] | None = None
) -> Tensor:
    """Return the labels of a language model, (B, n) int64: the token after each. Shard them afterwards.

    Args:
        tokens: (B, n) int64 or int32, the whole sequence.
        ignored: label of the last `ahead` columns of each document, after which there is no such token in it.
        ahead: distance to the label's token, >= 1: more than 1 for multi-token prediction. Do not shift twice instead:
            the second shift would carry the first token of a document into the one before.
        documents: lengths of the documents that every row is packed from; None: one document.

    Raises:
        ValueError: tokens have another shape or dtype, ahead is no such integer, or documents do not add up to n.
    """
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in INTEGERS:
        raise ValueError(f"tokens must be a (batch, tokens) int64 or int32 tensor, got {_describe(tokens)}")
    if not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 1:
        raise ValueError(f"ahead must be an integer >= 1, got {ahead!r}")
    n = tokens.shape[1]
    lengths = Documents((n,)) if documents is None else _one_list(documents)
    check_tokens(lengths, n)
    labels = tokens.new_full(tokens.shape, ignored, dtype=torch.int64)
    labels[:, : max(0, n - ahead)] = tokens[:, ahead:]
    return labels.masked_fill(~_stays(lengths, ahead, tokens.device), ignored)


def _stays(documents: Documents, ahead: int, device: torch.device) -> Tensor:
    """(n,) bool: the token so far ahead is in the same document."""
    lengths = torch.tensor(documents, dtype=torch.int64)
    ends = lengths.cumsum(0).repeat_interleave(lengths)  # of the document of each token
    return (torch.arange(len(ends)) + ahead < ends).to(device)


def _one_list(documents: object) -> Documents:
    """Return the lengths, which are not None. ValueError for lists of lengths, one for each row."""
    rows = documents if isinstance(documents, (tuple, list, Tensor)) else ()
    if any(isinstance(row, (tuple, list)) or (isinstance(row, Tensor) and row.dim()) for row in rows):
        raise ValueError(f"documents must be one list of lengths, for all rows, got {len(rows)} lists: {ONE_ROW}")
    lengths = checked_documents(documents)
    assert lengths is not None
    return lengths


def shard_batch(
    context: ContextParallel,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    documents: tuple[int, ...] | None = None,
    pattern: Pattern | None = None,
    unshifted: Collection[str] = (),
    **others: Tensor,
) -> Batch:
    """Return this rank's shard of a batch of whole sequences. Call it on every rank of the context group.

    Args:
        context: handle of the sharded sequence.
        tokens: (B, n) int64 or int32, n from the layout; like all tensors here the same on all ranks.
        labels: None, or (B, n) int64 or int32: the next tokens (`next_tokens`), -100 for no label. Labels that equal
            the tokens are refused if two or more are labelled, unless they are the next tokens too. Labels further
            ahead: next_tokens(tokens, ahead=k, documents=lengths).
        positions: None, or 0 .. n - 1, (n,) or (B, n), int64 or int32, since the pattern depends on these; with
            documents 0 .. length - 1 in each; with a tree the depths, with noisy frames those of
            the clean ones.
        documents: lengths of the documents that every row is packed from, the same as the pattern's, if it has any;
            None: the pattern's or context's. The batch has -100 as the label of the last token of each, since the next
            token is in another document.
        pattern: one with slices for this batch, in all its rows, as `Pattern.tree`; None: the context's, if it has
            one. It replaces the plain attention of the modules. The batch of a tree has its depths as positions, and
            -100 as the label of a token whose next one in the sequence does not continue it. A label that is the next
            token is -100, too, where its token sees that one, as in a prefix, image or frame.
        unshifted: names of others that say something of each token itself, not of a later one: masks, classes, labels
            of a masked language model.
        others: other tensors along the sequence, (B, n, ...), any dtype. Further labels, as of multi-token prediction,
            are next_tokens(tokens, ahead=k, documents=lengths), -100 at `pattern.sees_ahead(n, k)`. Labels and integers
            (B, n) that are the tokens up to AHEAD positions ahead, also across the end of a document or where the
            pattern shows them to the token that they label, are refused, except those in `unshifted`.

    Raises:
        ValueError, NotImplementedError: an argument is wrong on some rank, or the ranks of the context have different
            tensors. Every rank raises the same error. A context with check=False does not compare ranks.
    """

    def check() -> tuple[dict[str, object], ContextParallel]:
        integers = {"tokens": tokens} | ({} if labels is None else {"labels": labels})
        lengths = None if documents is None else _row_lengths(documents, tokens)
        packed = context
        if pattern is not None:
            packed = context.with_pattern(pattern, lengths)
        elif lengths is not None:
            packed = context.with_documents(lengths)
        _check_batch(packed, integers, positions, others)
        listed = isinstance(unshifted, Collection) and not isinstance(unshifted, str)
        if not listed or not set(unshifted) <= set(others):
            raise ValueError(f"unshifted must be names of other tensors that are given, {[*others]}, got {unshifted!r}")
        runs = _runs(packed)
        if runs is not None or packed.pattern is not None:
            runs = runs or Documents((packed.layout.n,))
            for name, x in integers.items() | others.items():
                if name not in ("tokens", *unshifted) and x.shape == tokens.shape and x.dtype in INTEGERS:
                    kept = _predicted(x, tokens, packed) if name == "labels" else x
                    _check_ahead(tokens, runs, packed.pattern, name, kept)
        return _signature(packed, integers | others) if context.check else {}, packed

    context = context.agree("shard_batch", check)
    return Batch(
        tokens=context.shard(tokens),
        labels=None if labels is None else context.shard(_predicted(labels, tokens, context)),
        positions=context.positions_on(tokens.device),
        context=context,
        others={name: context.shard(x) for name, x in others.items()},
    )


def _row_lengths(documents: object, tokens: object) -> Documents:
    """Return the lengths. ValueError for those of all rows, one after the other."""
    lengths = _one_list(documents)
    if isinstance(tokens, Tensor) and tokens.dim() == 2 and len(tokens) > 1 and lengths.tokens == tokens.numel():
        raise ValueError(f"documents must add up to the {tokens.shape[1]} tokens of each row, got all rows': {ONE_ROW}")
    return lengths


def _predicted(labels: Tensor, tokens: Tensor, context: ContextParallel) -> Tensor:
    """Labels without those of the last tokens of documents, and those that are the next token, which the mask shows."""
    runs = _runs(context)
    if runs is not None:
        labels = labels.masked_fill(~_stays(runs, 1, labels.device), IGNORED)
    if context.pattern is not None:
        sees = context.pattern.sees_ahead(context.layout.n, 1).to(labels.device)
        labels = labels.masked_fill(sees & (labels == tokens.roll(-1, 1)), IGNORED)
    return labels


def _runs(context: ContextParallel) -> Documents | None:
    """Lengths of the documents, in a tree of the runs of tokens that continue each other: labels stay within them."""
    if context.pattern is None or not context.pattern.depths:
        return context.documents
    n = context.layout.n
    continued = np.append(sees_at(context.pattern.branches[0].slices or (), n, -1)[1:], False)[:n]
    if context.documents is not None:
        continued &= _stays(context.documents, 1, torch.device("cpu")).numpy()
    return Documents(np.diff(np.flatnonzero(~continued) + 1, prepend=0).tolist())


def _check_batch(
    context: ContextParallel, integers: dict[str, Tensor], positions: Tensor | None, others: dict[str, Tensor]
) -> None:
    n, tokens = context.layout.n, integers["tokens"]
    for name, x in integers.items():
        _check_plain(name, x)
        if x.dim() != 2 or x.dtype not in INTEGERS:
            raise ValueError(f"{name} must be a (batch, tokens) int64 or int32 tensor, got {_describe(x)}")
    if positions is not None:
        _check_positions(positions, tokens, context)
    for name, x in (integers | others).items():
        _check_plain(name, x)
        if x.dim() < 2 or x.shape[1] != n:
            local = x.dim() > 1 and x.shape[1] == context.tokens
            hint = ": pass the whole tensor, shard_batch shards it" if local else ""
            raise ValueError(f"{name} must have the layout's {n} tokens along dimension 1, got {_describe(x)}{hint}")
        if not x.shape[0]:
            raise ValueError(f"{name} must have at least one sequence on every rank, got {_describe(x)}")
        if x.shape[0] != tokens.shape[0]:
            raise ValueError(f"{name} must have tokens' batch size, {tokens.shape[0]}, got {_describe(x)}")
        if x.device != tokens.device:
            raise ValueError(f"{name} must be on tokens' device {tokens.device}, got {x.device}")
    if "labels" in integers:
        _check_shifted(tokens, integers["labels"])


def _check_plain(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or is_dtensor(x) or x.layout is not torch.strided:
        raise ValueError(f"{name} must be a plain dense tensor of whole sequences, got {type(x)!r}")


def _check_positions(positions: Tensor, tokens: Tensor, context: ContextParallel) -> None:
    n, documents = context.layout.n, context.documents
    _check_plain("positions", positions)
    if positions.dtype not in INTEGERS or positions.shape not in ((n,), (1, n), (tokens.shape[0], n)):
        raise ValueError(f"positions must be int64 or int32 of shape ({n},), or of tokens, got {_describe(positions)}")
    if positions.device != tokens.device:
        raise ValueError(f"positions must be on tokens' device {tokens.device}, got {positions.device}")
    own = context.pattern is not None and (context.pattern.depths or context.pattern.copies)
    whole = Pattern.dense(documents=documents) if context.pattern is None else context.pattern
    expected = whole.positions(n).to(tokens.device)
    if not torch.equal(positions.long(), expected.expand(positions.shape)):
        allowed = f"0 .. {n - 1}" if documents is None else "0, 1, ... in each document"
        allowed = "depths, or those of clean frames" if own else allowed
        differ = positions.dim() == 2 and not torch.equal(positions, positions[:1].expand_as(positions))
        got = f"other ones in each row: {ONE_ROW}" if differ else "others"
        raise ValueError(f"positions must be None or {allowed}, on which the pattern depends, got {got}")


def _check_shifted(tokens: Tensor, labels: Tensor) -> None:
    counts = labels != IGNORED
    if int(counts.sum()) > 1 and bool((labels == tokens)[counts].all()):
        if not bool((labels == next_tokens(tokens))[counts].all()):
            raise ValueError(
                "labels must be the next tokens, shifted before they are sharded (next_tokens), got the tokens "
                "themselves"
            )


def _check_ahead(tokens: Tensor, documents: Documents, pattern: Pattern | None, name: str, x: Tensor) -> None:
    """Refuse integers that are the tokens of later positions, some of another document, or seen by those they label."""
    n, labelled, facts = tokens.shape[1], x != IGNORED, []
    for ahead in range(min(AHEAD + 1, n)):
        counts, crossing = labelled[:, : n - ahead], ~_stays(documents, ahead, x.device)[: n - ahead]
        same = ((x[:, : n - ahead] == tokens[:, ahead:]) | ~counts).all() & (counts.sum() > 1)
        if pattern is not None and ahead:
            crossing |= pattern.sees_ahead(n, ahead)[: n - ahead].to(x.device)
        facts.append(torch.stack((same, (counts & crossing).any())))
    for ahead, (same, crosses) in enumerate(torch.stack(facts).tolist() if facts else ()):
        if same and crosses:
            raise ValueError(
                f"{name} must not cross the ends of documents, got the tokens {ahead} ahead, also those of the next "
                f"document, or that a token sees; write next_tokens(tokens, ahead={ahead}, documents=lengths), in a "
                "tree with the lengths of runs whose tokens continue each other, and .masked_fill(pattern.sees_ahead("
                f"{n}, {ahead}), {IGNORED})"
            )
        if same:
            return


def _signature(context: ContextParallel, tensors: dict[str, Tensor]) -> dict[str, object]:
    """Values that must be equal on all ranks, by the name of the argument."""
    layout = context.layout
    common: dict[str, object] = {
        "the tensors given": list(tensors),
        "the context's layout": f"{layout.n} tokens, cuts {layout.cuts}, order {layout.digest.hex()}",
        "documents": context.documents,
        "pattern": None if context.pattern is None else _text_digest(context.pattern),
    }
    return common | {name: f"{_describe(x)}, digest {_digest(x)}" for name, x in tensors.items()}


def _text_digest(pattern: Pattern) -> str:
    return f"digest {hashlib.blake2b(repr(pattern.to_dict()).encode(), digest_size=8).hexdigest()}"


def _digest(x: Tensor) -> str:
    flat = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=8).hexdigest()


def _describe(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x))
