"""Packed documents: a sequence that consists of several documents, none of which sees another.

A pattern takes the lengths of consecutive documents. Trainers mostly use one of two other forms, which the helpers here
convert:

    lengths          3, 0, 4
    cu_seqlens       0, 3, 3, 7            start of each document, and end of the last one
    positions        0 1 2 0 1 2 3         position of each token within its document; cannot represent empty ones
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from reference.validators import is_integer

_SHOWN = 6  # entries of a list that a message shows


class Documents(tuple[int, ...]):
    """Lengths of consecutive documents: a tuple that computes its hash and sum once.

    Patterns are cache keys, and may have ten thousand documents.
    """

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of all documents together."""
        return sum(self)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or (isinstance(other, Documents) and self._hash != other._hash):
            return self is other
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def checked_documents(documents: object) -> Documents | None:
    """Return None or `Documents`. Raises ValueError for anything but None, a tuple or a list of ints >= 0."""
    if documents is None or isinstance(documents, Documents):
        return documents
    allowed = "documents must be None or a tuple of lengths, integers >= 0"
    if not isinstance(documents, (tuple, list)):
        raise ValueError(f"{allowed}, got {describe(documents)}; for cu_seqlens use documents_from_cu_seqlens")
    if not set(map(type, documents)) <= {int} or min(documents, default=0) < 0:
        for number, length in enumerate(documents):
            if not is_integer(length) or length < 0:
                raise ValueError(f"{allowed}, got {describe(length)} as number {number} of {first_few(documents)}")
    return Documents(documents)


def check_tokens(documents: Documents | None, tokens: int) -> None:
    """Raise ValueError unless the documents add up to `tokens`."""
    if documents is not None and documents.tokens != tokens:
        edges = len(documents) > 1 and documents[0] == 0 and documents[-1] == tokens
        hint = f"; these are cu_seqlens? Write documents_from_cu_seqlens(documents, {tokens})" if edges else ""
        raise ValueError(
            f"documents must add up to the {tokens} tokens of the sequence, got {_number(documents.tokens)} in "
            f"{len(documents)} documents, {first_few(documents)}{hint}"
        )


def begins(documents: Documents, positions: torch.Tensor) -> torch.Tensor:
    """Start of the document of each position: int64 >= 0 of any shape -> the same shape.

    Raises ValueError for a position beyond the last document."""
    ends = torch.tensor(documents, dtype=torch.int64, device=positions.device).cumsum(0)
    if positions.numel() and int(positions.max()) >= documents.tokens:
        raise ValueError(
            f"documents must hold every position, got position {int(positions.max())} and {documents.tokens} tokens in "
            f"{len(documents)} documents, {first_few(documents)}"
        )
    starts = torch.cat([ends.new_zeros(1), ends])
    return starts[torch.searchsorted(ends, positions.contiguous(), right=True)]


def documents_from_cu_seqlens(cu_seqlens: Sequence[int] | np.ndarray | torch.Tensor, n: int) -> tuple[int, ...]:
    """Return the lengths of documents that begin at cu_seqlens[:-1] and end at cu_seqlens[1:], as in flash attention.

    Args:
        cu_seqlens: ascending integers from 0 to n; equal neighbours are an empty document.
        n: number of tokens.

    Raises:
        ValueError: cu_seqlens are no such integers.
    """
    edges = _integers("cu_seqlens", cu_seqlens)
    if not len(edges) or edges[0] != 0 or edges[-1] != n:
        raise ValueError(f"cu_seqlens must go from 0 to the number of tokens, {n}, got {first_few(edges.tolist())}")
    lengths = np.diff(edges)
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        raise ValueError(f"cu_seqlens must ascend, got {edges[at]} and then {edges[at + 1]} at number {at + 1}")
    return Documents(lengths.tolist())


def documents_from_positions(positions: Sequence[int] | np.ndarray | torch.Tensor) -> tuple[int, ...]:
    """Return the lengths of documents from the position of every token within its document, 0, 1, 2, ...

    Args:
        positions: (N,) integers, or (1, N) as collators that flatten a batch return them.

    Raises:
        ValueError: a position is neither 0 nor the previous one plus 1.
    """
    if isinstance(positions, (np.ndarray, torch.Tensor)) and positions.ndim == 2 and len(positions) == 1:
        positions = positions[0]
    entries = _integers("positions", positions)
    starts = entries == 0
    follows = np.zeros_like(starts)
    follows[1:] = entries[1:] == entries[:-1] + 1
    if not (starts | follows).all():
        at = int(np.argmin(starts | follows))
        got = f"{entries[at - 1]} and then {entries[at]}" if at else f"{entries[at]} as the first"
        raise ValueError(f"positions must be 0 or the previous one plus 1, got {got} at number {at}")
    return Documents(np.diff(np.append(np.flatnonzero(starts), len(entries))).tolist())


def first_few(entries: Sequence[object]) -> str:
    """Format a list of any length for an error message."""
    shown = ", ".join(describe(entry) for entry in entries[:_SHOWN])
    return f"({shown}, ...)" if len(entries) > _SHOWN else f"({shown})"


def _integers(name: str, entries: Sequence[int] | np.ndarray | torch.Tensor) -> np.ndarray:
    """Convert to a one-dimensional int64 array; ValueError for anything else."""
    array = np.asarray(entries.detach().cpu() if isinstance(entries, torch.Tensor) else entries)
    if array.ndim == 1 and not array.size:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be one row of integers, got {array.ndim} dimensions of {array.dtype}")
    return array.astype(np.int64)


def describe(value: object) -> str:
    """Format a value for an error message: numbers and short text as they are, anything else by its type."""
    if is_integer(value):
        return _number(value)
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, str) and len(value) < 40):
        return repr(value)
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def _number(value: int) -> str:
    """Format an integer; Python refuses to print more than 4300 digits."""
    return repr(value) if abs(value) <= 10**100 else "an integer of too many digits"
