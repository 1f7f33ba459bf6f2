"""Positions of each rank and tokens of a kernel call, against which `ring.layout` and `ring.default_bucket` are
checked.

Nothing is computed here as it is there. Shards follow from the rank of each position, not from runs and cuts; Hilbert's
curve is built from its four quarters, not from the bits of an index; the bucket is a quotient of integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Division = tuple[str, int, int, tuple[int, ...] | None, int, tuple[int, ...] | None]  # the arguments of `shards`
BY_DOCUMENT = " by document"  # at the end of an order: it is that of each document
HANDS = 3  # of a rank, where positions are dealt
LEAST_BUCKET = 1024  # tokens of a default bucket
LEAST_BUCKET_ON_GPUS = 65536


@dataclass(frozen=True, eq=False)
class Shards:
    """One division of the positions 0 .. n - 1 among p ranks.

    positions  per rank, what it holds, in local order: (counts[rank],) each
    place      of each position, where it lies once the shards are laid end to end: (n,)
    holder     of each position, the rank that holds it: (n,)
    """

    positions: tuple[Ints, ...]
    place: Ints
    holder: Ints

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(held) for held in self.positions)


@lru_cache(maxsize=256)
def shards(
    order: str, n: int, p: int, cuts: tuple[int, ...] | None, seed: int = 0, documents: tuple[int, ...] | None = None
) -> Shards:
    """The shards of p ranks. cuts: p + 1 offsets into the order, or None for the order's own. seed: of "shuffled",
    "permuted" and "swapped". documents: the lengths of consecutive ones, n in all, for orders "by document"; None is
    one.

    contiguous  position x belongs to the greatest rank r for which r n / p, rounded down, is <= x
    zigzag      the same for 2 p chunks; rank r has the r-th from the front and the r-th from the back
    striped     position x belongs to rank x mod p
    spliced     the even positions contiguous, then the odd ones striped
    stepped     the first half of the positions contiguous, the rest striped
    paired      contiguous chunks, given by turns to the first and to the second half of the ranks
    hilbert     the curve through the smallest square of side 2^k that holds all positions row by row, cut evenly
    shuffled    a random permutation, cut evenly
    permuted    up to 2 p ranges of random length, in random order, cut evenly
    swapped     contiguous, but for up to 3 pairs of positions that take each other's place
    dealt       like cards into 3 p hands, position x into hand x mod 3 p; rank r has three hands, one after the other

    contiguous by document, zigzag by document: each document is divided like that by itself; but in zigzag order those
    of less than 2 p tokens stay whole, and go, the longest first, to the rank that has the fewest tokens by then

    The first three, and those by document, keep a rank's positions ascending. Raises ValueError for any other order.
    """
    everything = np.arange(n)
    listings = {
        "hilbert": lambda: _hilbert(n), "shuffled": lambda: shuffled(n, seed),
        "permuted": lambda: permuted(n, p, seed), "swapped": lambda: swapped(n, seed),
    }  # fmt: skip
    if order in listings:
        listed = listings[order]()
        held = [listed[_part(everything, n, p) == rank] for rank in range(p)]
    else:
        base, by_document, _ = order.partition(BY_DOCUMENT)
        owner = _owner_by_document(base, documents or (n,), p) if by_document else _owner(base, everything, n, p)
        every = {"spliced": 2, "dealt": HANDS * p}.get(order, 1)
        groups = [everything[first::every] for first in range(every)]
        held = [np.concatenate([x[owner[x] == rank] for x in groups]) for rank in range(p)]
    if cuts is not None:
        listed = np.concatenate(held)
        held = [listed[cuts[rank] : cuts[rank + 1]] for rank in range(p)]
    place, holder = np.empty_like(everything), np.empty_like(everything)
    first = 0
    for rank, mine in enumerate(held):
        place[mine] = first + np.arange(len(mine))
        holder[mine] = rank
        first += len(mine)
    for x in (*held, place, holder):
        x.flags.writeable = False  # it is cached: a change would be seen by all callers
    return Shards(tuple(held), place, holder)


def shuffled(n: int, seed: int) -> Ints:
    """A permutation of range(n) that follows from the seed alone."""
    permutation: Ints = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()
    return permutation


def permuted(n: int, p: int, seed: int) -> Ints:
    """range(n), cut into 2 p ranges (or n, if that is less) and put in another order; both follow from the seed alone.
    A rank may hold several of these ranges, later ones first."""
    generator = torch.Generator().manual_seed(seed)
    count = min(n, 2 * p)
    inner = torch.randperm(n - 1, generator=generator)[: count - 1].sort().values.numpy() + 1
    ranges = np.split(np.arange(n), inner)
    return np.concatenate([ranges[i] for i in torch.randperm(count, generator=generator).tolist()])


def swapped(n: int, seed: int) -> Ints:
    """range(n), where one to three pairs of positions, next to each other or apart, have taken each other's place. It
    follows from the seed alone. What looks at a few entries takes it for range(n)."""
    generator = torch.Generator().manual_seed(seed)
    listed = np.arange(n)
    for _ in range(1 + seed % 3):
        one, other = torch.randint(n, (2,), generator=generator).tolist()
        other = min(one + 1, n - 1) if seed % 2 else other
        listed[[one, other]] = listed[[other, one]]
    return listed


def default_bucket(largest: int, heads: int, kv_heads: int, itemsize: int, device: str = "cpu") -> int:
    """Key/value tokens per kernel call and receive buffer where no bucket is given. largest: tokens of the largest
    shard; itemsize: bytes of the working type.

    A token of a bucket takes two receive buffers, for keys and values in the working type, and three buffers for
    gradients in the accumulator's type, which has 8 bytes for fp64 and 4 for others. The bucket has as many tokens as
    fit into a tenth of the queries, outputs, keys and values of the largest shard, but at least LEAST_BUCKET, and on
    GPUs at least 64 Ki.
    """
    accumulator = 8 if itemsize == 8 else 4
    shard = largest * (2 * heads + 2 * kv_heads) * itemsize
    token = 2 * kv_heads * (2 * itemsize + 3 * accumulator)
    return max(LEAST_BUCKET_ON_GPUS if device == "cuda" else LEAST_BUCKET, shard // (10 * token))


def _part(x: Ints, n: int, parts: int) -> Ints:
    """The part that holds the x-th of n things cut evenly: the greatest r with r n / parts, rounded down, <= x."""
    return ((x + 1) * parts - 1) // n


def _owner(order: str, x: Ints, n: int, p: int) -> Ints:
    """The rank that holds position x."""
    if order == "zigzag":
        chunk = _part(x, n, 2 * p)
        return np.minimum(chunk, 2 * p - 1 - chunk)
    if order == "paired":
        chunk = _part(x, n, p)
        return chunk // 2 + chunk % 2 * ((p + 1) // 2)
    half = (n + 1) // 2
    owners = {
        "contiguous": lambda: _part(x, n, p), "striped": lambda: x % p, "dealt": lambda: x % (HANDS * p) // HANDS,
        "spliced": lambda: np.where(x % 2 == 0, _part(x // 2, half, p), x // 2 % p),
        "stepped": lambda: np.where(x < half, _part(x, half, p), (x - half) % p),
    }  # fmt: skip
    if order not in owners:
        raise ValueError(
            f"order is {order!r}; it must be one of contiguous, zigzag, striped, spliced, stepped, paired, hilbert, "
            "shuffled, permuted, swapped, dealt"
        )
    found: Ints = owners[order]()
    return found


def _owner_by_document(order: str, documents: tuple[int, ...], p: int) -> Ints:
    """Likewise, of all documents laid end to end."""
    whole = [order == "zigzag" and length < 2 * p for length in documents]
    owners = [_owner(order, np.arange(length), length, p) for length in documents]
    tokens = np.zeros(p, np.int64)
    for owner, stays in zip(owners, whole, strict=True):
        if not stays:
            tokens += np.bincount(owner, minlength=p)
    for length, number in sorted((-length, number) for number, length in enumerate(documents) if whole[number]):
        rank = int(np.argmin(tokens))
        owners[number] = np.full(-length, rank)
        tokens[rank] -= length
    return np.concatenate(owners)


def _hilbert(n: int) -> Ints:
    side = 1
    while side * side < n:
        side *= 2
    x, y = _curve(side)
    positions = y * side + x
    return positions[positions < n]


@cache
def _curve(side: int) -> tuple[Ints, Ints]:
    """x and y, (side^2,) each, in the order in which the curve visits a square whose side is a power of two.

    It starts in the corner (0, 0) and ends in (side - 1, 0). The first quarter is the curve of half the side mirrored
    on the rising diagonal, the next two are that curve as it is, the last one is mirrored on the falling diagonal.
    """
    if side == 1:
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    half = side // 2
    x, y = _curve(half)
    return (
        np.concatenate((y, x, x + half, side - 1 - y)),
        np.concatenate((x, y + half, y + half, half - 1 - x)),
    )
