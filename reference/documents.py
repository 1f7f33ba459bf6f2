"""Documents: a sequence that is packed from several, none of which sees another.

A pattern names the lengths of consecutive documents. Trainers mostly have them in one of two other forms, from which
the helpers here make lengths:

    lengths          3, 0, 4
    cu_seqlens       0, 3, 3, 7            where each begins, and where the last one ends
    positions        0 1 2 0 1 2 3         of the tokens within their documents; they cannot tell of an empty one
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from reference.validators import is_integer

_SHOWN = 6  # entries of a list that a message shows


class Documents(tuple[int, ...]):
    """The lengths of consecutive documents: a tuple, whose hash and sum are computed once.

    Patterns are keys of caches, and there may be ten thousand documents.
    """

    @cached_property
    def tokens(self) -> int:
        """Of all documents together."""
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
    """`documents` as a pattern keeps them. Raises ValueError for anything but None, a tuple or a list of ints >= 0."""
    if documents is None or isinstance(documents, Documents):
        return documents
    allowed = "documents must be None or a tuple of lengths, integers >= 0"
    if not isinstance(documents, (tuple, list)):
        raise ValueError(f"{allowed}, got {told(documents)}; of cu_seqlens, documents_from_cu_seqlens makes them")
    if not set(map(type, documents)) <= {int} or min(documents, default=0) < 0:
        for number, length in enumerate(documents):
            if not is_integer(length) or length < 0:
                raise ValueError(f"{allowed}, got {told(length)} as number {number} of {first_few(documents)}")
    return Documents(documents)


def check_tokens(documents: Documents | None, tokens: int) -> None:
    """Raises ValueError unless the documents have so many tokens together."""
    if documents is not None and documents.tokens != tokens:
        edges = len(documents) > 1 and documents[0] == 0 and documents[-1] == tokens
        instead = f"; these are cu_seqlens? Write documents_from_cu_seqlens(documents, {tokens})" if edges else ""
        raise ValueError(
            f"documents must add up to the {tokens} tokens of the sequence, got {_number(documents.tokens)} in "
            f"{len(documents)} documents, {first_few(documents)}{instead}"
        )


def begins(documents: Documents, positions: torch.Tensor) -> torch.Tensor:
    """Where the document of each position begins: int64 >= 0 of any shape -> the same shape.

    Raises ValueError for a position behind the last document."""
    ends = torch.tensor(documents, dtype=torch.int64, device=positions.device).cumsum(0)
    if positions.numel() and int(positions.max()) >= documents.tokens:
        raise ValueError(
            f"documents must hold every position, got position {int(positions.max())} and {documents.tokens} tokens in "
            f"{len(documents)} documents, {first_few(documents)}"
        )
    starts = torch.cat([ends.new_zeros(1), ends])
    return starts[torch.searchsorted(ends, positions.contiguous(), right=True)]


def documents_from_cu_seqlens(cu_seqlens: Sequence[int] | np.ndarray | torch.Tensor, n: int) -> tuple[int, ...]:
    """The lengths of documents that begin at cu_seqlens[:-1] and end at cu_seqlens[1:], as flash attention has them.

    Raises ValueError unless these are ascending integers from 0 to n (equal ones are empty documents)."""
    edges = _integers("cu_seqlens", cu_seqlens)
    if not len(edges) or edges[0] != 0 or edges[-1] != n:
        raise ValueError(f"cu_seqlens must go from 0 to the number of tokens, {n}, got {first_few(edges.tolist())}")
    lengths = np.diff(edges)
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        raise ValueError(f"cu_seqlens must ascend, got {edges[at]} and then {edges[at + 1]} at number {at + 1}")
    return Documents(lengths.tolist())


def documents_from_positions(positions: Sequence[int] | np.ndarray | torch.Tensor) -> tuple[int, ...]:
    """The lengths of documents from the position of every token within its own: 0, 1, 2, ... in each of them, (N,), or
    (1, N) as collators that flatten a batch give them.

    Raises ValueError for positions that neither follow the one before by one nor are 0."""
    if isinstance(positions, (np.ndarray, torch.Tensor)) and positions.ndim == 2 and len(positions) == 1:
        positions = positions[0]
    given = _integers("positions", positions)
    first = given == 0
    follows = np.zeros_like(first)
    follows[1:] = given[1:] == given[:-1] + 1
    if not (first | follows).all():
        at = int(np.argmin(first | follows))
        before = f"{given[at - 1]} and then {given[at]}" if at else f"{given[at]} as the first"
        raise ValueError(f"positions must be 0 or one more than the one before, got {before} at number {at}")
    return Documents(np.diff(np.append(np.flatnonzero(first), len(given))).tolist())


def first_few(entries: Sequence[object]) -> str:
    """A list as a message shows it, however long it is."""
    shown = ", ".join(told(entry) for entry in entries[:_SHOWN])
    return f"({shown}, ...)" if len(entries) > _SHOWN else f"({shown})"


def _integers(name: str, given: Sequence[int] | np.ndarray | torch.Tensor) -> np.ndarray:
    """One row of integers, int64; ValueError for anything else."""
    found = np.asarray(given.detach().cpu() if isinstance(given, torch.Tensor) else given)
    if found.ndim == 1 and not found.size:
        return found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"{name} must be one row of integers, got {found.ndim} dimensions of {found.dtype}")
    return found.astype(np.int64)


def told(value: object) -> str:
    """A value as a message shows it: numbers and short text by themselves, anything else by its type."""
    if is_integer(value):
        return _number(value)
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, str) and len(value) < 40):
        return repr(value)
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def _number(value: int) -> str:
    """Python refuses to write integers of some thousand digits."""
    return repr(value) if abs(value) <= 10**100 else "an integer of too many digits"
