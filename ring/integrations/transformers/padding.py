"""Turns the padding of a batch, which Hugging Face's tokenizers mark with zeros in attention_mask, into documents.

Padding before and behind a document that is the same in all rows becomes documents of its own, so that tokens and
padding do not see each other. Other padding is taken on the right under causal attention, where no token sees it.
Outputs at padding have no meaning, as in one process; their labels must be ignored ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.documents import Documents, documents_from_cu_seqlens
from ring.comm.group import device_for
from ring.nn.context import ContextParallel
from ring.nn.sequence import gather

ALLOWED = "attention_mask must be None or this rank's shard of a mask of zeros at padding and ones"


def check_mask(mask: object, context: ContextParallel) -> None:
    """Raise for anything but a (B, N) mask of zeros and ones, on this rank alone."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"attention_mask must be None in a compiled model, got {type(mask).__name__}: compile its layers instead, "
            "or leave the mask out if there is no padding"
        )
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != context.tokens:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(f"{ALLOWED}, (batch, {context.tokens}), got {got}: the pattern is the mask")
    check_values(mask)


def check_values(mask: Tensor) -> None:
    """Raise for anything but zeros and ones."""
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise NotImplementedError(f"{ALLOWED}, got other values: packed documents need a handle with their lengths")


def whole(context: ContextParallel, x: Tensor) -> Tensor:
    """Return x (B, n) of all ranks on x's device, over a group that may have a backend for another alone."""
    return gather(context, x.to(device_for(context.transport, x.device))).to(x.device)


def without_padding(real: Tensor, context: ContextParallel, is_own: bool) -> tuple[ContextParallel, bool]:
    """Return a handle whose documents separate tokens from padding, and True where it does not need to.

    True: padding is on the right, as causal attention alone may have it. real: (B, n), of the mask of all ranks, so
    that they decide alike. is_own: the attention is the model's, and no pattern whose segments would move.

    Raises NotImplementedError, on every rank, for other padding.
    """
    if bool(real.all()):
        return context, False
    split = separated(real, context.documents, is_own)
    return (context, True) if split is None else (context.with_documents(split), False)


def separated(real: Tensor, documents: Documents | None, is_own: bool) -> tuple[int, ...] | None:
    """Return documents that separate tokens from padding, None for padding on the right.

    real: (B, n) bool, whole. is_own: as of `without_padding`. Raises NotImplementedError for other padding.
    """
    split = _split(real[0], documents) if is_own and bool((real == real[:1]).all()) else None
    if split is not None or bool((real[:, 1:] <= real[:, :-1]).all()):
        return split
    raise NotImplementedError(
        "attention_mask must have its zeros on the right, or, without a pattern, in the same places of every row "
        "before or behind the tokens of a document, got others: let the tokenizer pad on the right, or call the model "
        "for each row"
    )


def _split(real: Tensor, documents: Documents | None) -> tuple[int, ...] | None:
    """Lengths of the documents, each cut where tokens and padding meet: real (n,) bool. None if padding is between."""
    real, n = real.cpu(), len(real)
    ends = torch.tensor([n] if documents is None else documents).cumsum(0)
    changes = (real[1:] != real[:-1]).nonzero()[:, 0] + 1
    edges = torch.cat((torch.tensor([0, n]), changes, ends)).unique()
    starts = edges[:-1]
    owners = torch.searchsorted(ends, starts[real[starts]], right=True)  # documents of the parts with tokens
    return documents_from_cu_seqlens(edges, n) if len(owners.unique()) == len(owners) else None
