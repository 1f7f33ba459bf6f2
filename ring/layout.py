"""Assigns positions to ranks: a layout is an order of the positions plus cuts into it.

The order is a permutation of the n positions; the cuts are p + 1 offsets into the order. Rank r holds
`order[cuts[r]:cuts[r + 1]]`, in that order. Contiguous, zigzag, striped and hilbert are four orders. An order that is a
short list of arithmetic runs is stored as runs. Then every shard is a short list of runs too, and time and memory for
layout and plan do not depend on the number of tokens.

The example used throughout `ring.plan`: `Layout.zigzag(16, 2)` has four chunks of 4 positions; rank 0 holds the first
and the last, rank 1 the two between. The cuts are 0, 8 and 16, and the shards consist of these runs:

    rank  start  step  length  positions
    0     0      1     4       0 1 2 3
    0     12     1     4       12 13 14 15
    1     4      1     8       4 5 6 7 8 9 10 11
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from reference.documents import check_tokens, checked_documents
from reference.pattern import Pattern
from reference.svg import Picture
from ring.balance import owners, zigzag_owners
from ring.layout_picture import layout_picture

MAX_TOKENS = 2**40  # plans count rows, slots and products of rates in 64 bits
# An explicit order with at most this many runs per rank is stored as runs: a plan iterates over them.
_RUNS_PER_RANK = 2
MAX_RUNS = 4096  # of a layout for documents
MAX_BALANCED = 2**28  # tokens of a balanced layout: it computes the work of each


class Run(NamedTuple):
    """The positions start, start + step, ..., `length` of them; step >= 1."""

    start: int
    step: int
    length: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A permutation of the positions 0 .. n - 1 and its division among `world_size` ranks.

    Make one with `contiguous`, `zigzag`, `striped`, `hilbert`, `balanced` or `from_cuts`. Layouts are hashable, and
    equal if they have the same order, both as runs or both listed, and the same cuts.

    Args:
        n: number of tokens, up to 2^40.
        cuts: world size + 1 non-decreasing offsets into the order, from 0 to n.
        runs: the order as arithmetic runs; None: see `listed`.
        listed: the order as positions, (n,) int64; None: see `runs`.

    Raises:
        ValueError: no order is given, or cuts are no tuple. The class methods raise it for numbers of tokens or ranks
            out of range, the others for a rank out of range.
    """

    n: int
    cuts: tuple[int, ...] = ()
    runs: tuple[Run, ...] | None = None  # canonical for the order; None: see `listed`
    listed: np.ndarray | None = field(repr=False, default=None)  # (n,) int64
    number: int = field(init=False, repr=False)  # of this object, in this process

    @classmethod
    def contiguous(cls, n: int, p: int) -> Layout:
        """Rank r holds the positions r n / p to (r + 1) n / p.

        Args:
            n, p: numbers of tokens, 0 to 2^40, and of ranks, at least 1.
        """
        _check_sizes(n, p)
        return cls(n, _even_cuts(n, p), (Run(0, 1, n),) if n else ())

    @classmethod
    def zigzag(cls, n: int, p: int, documents: Sequence[int] | None = None) -> Layout:
        """Rank r holds the chunks r and 2 p - 1 - r of 2 p equal ones: equal causal work (Llama 3, arXiv 2407.21783).

        Args:
            n, p: numbers of tokens, 0 to 2^40, and of ranks, at least 1.
            documents: lengths of consecutive documents, as in `Pattern`; None: one document. Each is divided alone,
                so that all ranks have equal work of each, and need keys of each. Documents of fewer than 2 p tokens
                stay whole: the longest first, each goes to the rank with the fewest tokens so far.

        Raises:
            ValueError: the lengths do not add up to n.
        """
        _check_sizes(n, p)
        lengths = checked_documents(documents)
        check_tokens(lengths, n)
        if lengths is not None:
            return cls._of_owners(zigzag_owners(lengths, p), p)
        return cls._of_groups(n, _even_cuts(n, 2 * p))

    @classmethod
    def _of_groups(cls, n: int, edges: Sequence[int]) -> Layout:
        """Rank r holds the groups r and 2 p - 1 - r of the 2 p between the edges."""
        p = len(edges) // 2
        groups = [c for r in range(p) for c in (r, 2 * p - 1 - r)]
        runs = [Run(edges[c], 1, edges[c + 1] - edges[c]) for c in groups]
        counts = [runs[2 * r].length + runs[2 * r + 1].length for r in range(p)]
        return cls(n, _cuts(counts), tuple(run for run in runs if run.length))

    @classmethod
    def whole_chunks(cls, n: int, p: int, chunk: int, documents: Sequence[int] | None = None) -> Layout:
        """Ranks hold whole chunks, as `ring_attention` needs them with `same_bits=chunk`. All chunks, in order, are cut
        into 2 p groups, the first ones a chunk longer where they do not divide; rank r holds the groups r and
        2 p - 1 - r, as in `zigzag`.

        Args:
            n, p: numbers of tokens, 0 to 2^40, and of ranks, at least 1.
            chunk: tokens of a chunk, counted from the begin of each document, whose last one may be shorter.
            documents: lengths of consecutive documents, as in `Pattern`; None: one document.

        Raises:
            ValueError: the lengths do not add up to n, or a chunk has no tokens.
        """
        _check_sizes(n, p)
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"chunk must be a number of tokens, at least 1, got {chunk!r}")
        lengths = checked_documents(documents)
        check_tokens(lengths, n)
        chunks = (min(chunk, length - at) for length in lengths or (n,) for at in range(0, length, chunk))
        ends = list(accumulate(chunks, initial=0))
        each, more = divmod(len(ends) - 1, 2 * p)
        edges = [ends[group * each + min(group, more)] for group in range(2 * p + 1)]
        return cls._of_groups(n, edges)

    @classmethod
    def striped(cls, n: int, p: int) -> Layout:
        """Rank r holds the positions r, r + p, r + 2 p, ... (striped attention, arXiv 2311.09431).

        Args:
            n, p: numbers of tokens, 0 to 2^40, and of ranks, at least 1.
        """
        _check_sizes(n, p)
        counts = [len(range(r, n, p)) for r in range(p)]
        return cls(n, _cuts(counts), tuple(Run(r, p, counts[r]) for r in range(p) if counts[r]))

    @classmethod
    def hilbert(cls, n: int, p: int) -> Layout:
        """Ranks hold equal shares of the order in which a Hilbert curve visits the positions, which are laid out row by
        row on the smallest square of side 2^k that holds them.

        Args:
            n, p: numbers of tokens, 0 to 2^40, and of ranks, at least 1.
        """
        _check_sizes(n, p)
        order = _hilbert_curve(n)
        return cls(n, _even_cuts(n, p), None, order) if n else cls(n, (0,) * (p + 1), ())

    @classmethod
    def balanced(cls, pattern: Pattern, n: int, p: int, heads: int | None = None, hosts: int = 1) -> Layout:
        """Ranks have nearly equal work for this pattern, whatever the lengths of its documents. Documents stay whole
        where possible, since a document within one rank sends nothing: see `ring.balance`.
        Deterministic: every rank computes the same, without a message. Takes time linear in n.

        Args:
            pattern: the attention mask; its documents, if any, add up to n.
            n, p: numbers of tokens, 0 to 2^28, and of ranks, at least 1.
            heads: number of query heads; None: the number that the pattern implies.
            hosts: number of hosts, each of p / hosts neighbouring ranks. Work is balanced between hosts first, so that
                documents and windows send little from host to host.

        Raises:
            ValueError: the documents do not add up to n, the pattern does not fit the heads, or hosts do not divide p.
        """
        _check_sizes(n, p)
        if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1 or p % hosts:
            raise ValueError(f"hosts must be a number that divides the {p} ranks, got {hosts!r}")
        if n > MAX_BALANCED:
            raise ValueError(f"n must be at most 2**28 for a balanced layout, got {n}")
        pattern.validate_tokens(n)
        if heads is not None:
            pattern.validate(heads)
        return cls._of_owners(owners(pattern, n, p, heads, hosts), p)

    @classmethod
    def _of_owners(cls, owner: np.ndarray, p: int) -> Layout:
        """Ranks hold their positions in ascending order. owner: (n,) the rank of each position."""
        listed = np.argsort(owner, kind="stable")
        runs, cuts = _runs_of(listed, limit=MAX_RUNS), _cuts(np.bincount(owner, minlength=p).tolist())
        return cls(len(owner), cuts, runs, listed if runs is None else None)

    @classmethod
    def from_cuts(cls, order: Sequence[int] | range | np.ndarray | torch.Tensor, cuts: Sequence[int]) -> Layout:
        """Ranks hold the parts of any order, cut at any offsets.

        Args:
            order: a permutation of range(n): integers, n up to 2^40.
            cuts: p + 1 non-decreasing offsets from 0 to n. Equal offsets make empty shards.

        Raises:
            ValueError: `order` is not a permutation, or `cuts` are not such offsets.
        """
        if isinstance(order, range) and order == range(max(order.stop, 0)):  # the identity, without listing it
            n = max(order.stop, 0)
            _check_sizes(n, 1)
            return cls(n, _checked_cuts(cuts, n), (Run(0, 1, n),) if n else ())
        array = order.detach().cpu().numpy() if isinstance(order, torch.Tensor) else order
        listed = np.array(array)  # a copy: the layout must not change with its argument
        if listed.ndim != 1 or (listed.size and listed.dtype.kind not in "iu"):
            raise ValueError(f"order must be one sequence of integers, got {listed.ndim} dimensions of {listed.dtype}")
        listed = listed.astype(np.int64)
        n = len(listed)
        seen = np.zeros(n, dtype=bool)
        seen[listed[(listed >= 0) & (listed < n)]] = True
        if not seen.all():
            hint = "; a token is on one rank: of queries that all ranks hold, pass layout.shard(q, rank)"
            missing = f"position {int(seen.argmin())} is missing{hint * (len(np.unique(listed)) < n)}"
            raise ValueError(f"order must be a permutation of range({n}); {missing}")
        cuts = _checked_cuts(cuts, n)
        runs = _runs_of(listed, limit=_RUNS_PER_RANK * (len(cuts) - 1))
        return cls(n, cuts, runs, None if runs is not None else listed)

    def __post_init__(self) -> None:
        fields: list[object] = [self.n, self.cuts, self.runs, self.listed]
        if not isinstance(fields[1], tuple) or fields[2] is fields[3]:  # Layout("zigzag", n, p), Layout(n, p)
            order = next((name for name in ("zigzag", "striped", "hilbert") if name == fields[0]), "contiguous")
            got = [x for x in fields if isinstance(x, np.ndarray) or x not in (None, ())]
            raise ValueError(f"cuts and an order must be given, got {got}; write Layout.{order}(tokens, ranks)")
        _checked_cuts(self.cuts, self.n)
        if self.runs is not None:
            tokens = sum(run[2] for run in self.runs)
            if tokens != self.n:
                raise ValueError(f"runs must hold the {self.n} positions, got {tokens} in {len(self.runs)} runs")
            object.__setattr__(self, "runs", _merge_runs(self.runs))
        object.__setattr__(self, "number", next(_numbers))
        _by_number[self.number] = self

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.n, self.cuts, self.runs, self.listed)  # so that a copy gets a number of its own

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.cuts) - 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens on each rank."""
        return tuple(b - a for a, b in pairwise(self.cuts))

    def joined(self, groups: Sequence[Sequence[int]]) -> Layout:
        """Return the layout of groups of ranks, each of which holds the shards of its ranks, one after the other.

        Args:
            groups: the ranks, each in one group.
        """
        cuts = _cuts([sum(self.counts[rank] for rank in group) for group in groups])
        ranks = list(itertools.chain(*groups))
        if self.runs is not None:
            return Layout(self.n, cuts, tuple(itertools.chain(*map(self.shard_runs, ranks))))
        assert self.listed is not None
        return Layout(self.n, cuts, None, np.concatenate([self.listed[slice(*self.cuts[r : r + 2])] for r in ranks]))

    def shard_runs(self, rank: int) -> list[Run]:
        """Return the runs that a rank holds, in local order. Only for an order stored as runs.

        Args:
            rank: 0 to world_size - 1.

        Raises:
            ValueError: the order is not stored as runs.
        """
        self._check_rank(rank)
        if self.runs is None:
            raise ValueError(f"order must be stored as runs, got a listed order of {self.n} positions: use positions")
        first, last, offset, shard = self.cuts[rank], self.cuts[rank + 1], 0, []
        for start, step, length in self.runs:
            low, high = max(first - offset, 0), min(last - offset, length)
            if low < high:
                shard.append(Run(start + low * step, step, high - low))
            offset += length
        return shard

    def positions(self, rank: int) -> torch.Tensor:
        """Return the global positions that a rank holds, in local order: (counts[rank],) int64, on the CPU.

        Args:
            rank: 0 to world_size - 1.
        """
        self._check_rank(rank)
        return torch.from_numpy(self.order[self.cuts[rank] : self.cuts[rank + 1]].copy())

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Return the rows of a whole tensor that a rank holds: a new tensor, with length counts[rank] along `dim`.

        Args:
            x: any shape, dtype and device, with length n along `dim`.
            rank: 0 to world_size - 1.
            dim: dimension of the tokens.

        Raises:
            ValueError: x has another length.
        """
        if x.shape[dim] != self.n:
            raise ValueError(f"x must have {self.n} tokens along dim {dim}, got shape {tuple(x.shape)}")
        return x.index_select(dim, self.positions(rank).to(x.device))

    def unshard(self, shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Return the whole tensor, with length n along `dim`, from the shards of all ranks: the inverse of `shard`.

        Args:
            shards: by rank, with `counts` tokens along `dim`.
            dim: dimension of the tokens.

        Raises:
            ValueError: the number of shards, or of their tokens, is not the layout's.
        """
        lengths = tuple(shard.shape[dim] for shard in shards)
        if lengths != self.counts:
            raise ValueError(f"shards must have {self.counts} tokens along dim {dim}, got {lengths}")
        order = torch.from_numpy(self.order).to(shards[0].device)
        gathered = torch.cat(list(shards), dim)
        return torch.empty_like(gathered).index_copy_(dim, order, gathered)

    def picture(self, documents: Sequence[int] | None = None) -> Picture:
        """Draw the positions that each rank holds, in cells of several tokens if they are many.

        Args:
            documents: lengths of consecutive documents, to draw lines between them.

        Returns:
            A row for each rank, or for several if they are many.

        Raises:
            ValueError: the lengths do not add up to n.
        """
        lengths = checked_documents(documents)
        check_tokens(lengths, self.n)
        return layout_picture(self.cuts, self.runs, self.listed, lengths)

    def _repr_html_(self) -> str:
        return self.picture().svg

    @cached_property
    def order(self) -> np.ndarray:
        """All positions, shard after shard, (n,) int64."""
        if self.listed is not None:
            return self.listed
        assert self.runs is not None
        parts = [start + step * np.arange(length, dtype=np.int64) for start, step, length in self.runs]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {rank}")

    @cached_property
    def digest(self) -> bytes:
        """16 bytes by which layouts are compared, also between ranks."""
        order = self.listed.tobytes() if self.listed is not None else repr(self.runs).encode()
        return hashlib.blake2b(order + repr((self.n, self.cuts)).encode(), digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


_numbers = itertools.count()
_by_number: WeakValueDictionary[int, Layout] = WeakValueDictionary()


@lru_cache(maxsize=64)
def numbered_layout(number: int) -> Layout:
    """Look up a layout by its number. Cached for the backward. Raises ValueError if it no longer exists."""
    layout = _by_number.get(number)
    if layout is None:
        raise ValueError(f"layout must be the number of an existing one, got {number}")
    return layout


def _check_sizes(n: int, p: int) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MAX_TOKENS:
        raise ValueError(f"n must be a number of tokens from 0 to 2**40, got {n!r}")
    if not isinstance(p, int) or isinstance(p, bool) or p < 1:
        raise ValueError(f"p must be a world size >= 1, got {p!r}")


def _checked_cuts(cuts: Sequence[int], n: int) -> tuple[int, ...]:
    cuts = tuple(cuts)
    integers = all(isinstance(c, (int, np.integer)) for c in cuts)
    if not integers or len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != n or any(a > b for a, b in pairwise(cuts)):
        raise ValueError(f"cuts must be world size + 1 non-decreasing offsets from 0 to {n}, got {cuts}")
    return tuple(map(int, cuts))


def _even_cuts(n: int, p: int) -> tuple[int, ...]:
    return tuple(r * n // p for r in range(p + 1))


def _cuts(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))


def _runs_of(order: np.ndarray, limit: int) -> tuple[Run, ...] | None:
    """Split an order greedily into ascending runs; None if there are more than `limit`."""
    runs: list[Run] = []
    for run in _greedy_runs(order):
        if len(runs) == limit:
            return None
        runs.append(run)
    return tuple(runs)


def _merge_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Merge runs into those that `_runs_of` would find, without listing positions: a run absorbs its sequel."""
    merged: list[Run] = []
    for run in runs:
        start, step, length = run
        while length:
            last = merged[-1] if merged else None
            if last is not None and last.length == 1 and last.start < start:  # any step continues it
                last = Run(last.start, start - last.start, 1)
            if last is None or start != last.start + last.length * last.step:
                merged.append(Run(start, step if length > 1 else 1, length))
                break
            taken = length if step == last.step else 1
            merged[-1] = Run(last.start, last.step, last.length + taken)
            start, length = start + taken * step, length - taken
    return tuple(merged)


def _greedy_runs(order: np.ndarray) -> Iterator[Run]:
    steps = np.diff(order)
    turns = np.flatnonzero(np.diff(steps)) + 1  # steps[t - 1] != steps[t]: no run continues past element t
    at, n = 0, len(order)
    while at < n:
        if at + 1 == n or steps[at] < 1:
            yield Run(int(order[at]), 1, 1)
            at += 1
            continue
        turn = int(np.searchsorted(turns, at, side="right"))
        end = int(turns[turn]) + 1 if turn < len(turns) else n
        yield Run(int(order[at]), int(steps[at]), end - at)
        at = end


def _hilbert_curve(n: int) -> np.ndarray:
    """Positions below n in the order of the Hilbert curve through the square that has them row by row: (n,) int64."""
    x = y = np.zeros(1, np.int64)
    side = 1
    while side * side < n:  # four squares, of which the first and the last are turned, make one
        x, y = (
            np.concatenate([y, x, x + side, 2 * side - 1 - y]),
            np.concatenate([x, y + side, y + side, side - 1 - x]),
        )
        side *= 2
    positions = y * side + x
    return positions[positions < n]
