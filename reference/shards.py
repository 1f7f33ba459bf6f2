"""Positions of each rank and the default bucket: independent checks of `ring.layout` and `ring.default_bucket`.

The algorithms differ from theirs. Shards follow from the rank of each position, not from runs and cuts; Hilbert's curve
is built from its four quarters, not from the bits of an index; the bucket is a quotient of integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]
# The arguments of `shards`.
Division = tuple[str, int, int, tuple[int, ...] | None, int, tuple[int, ...] | None, int | None]
BY_DOCUMENT = " by document"  # suffix of an order that is applied to each document
BY_CHUNK = ("chunks", "dealt chunks")  # orders of whole chunks
HANDS = 3  # of a rank in the order "dealt"
MIN_BUCKET = 1024  # fewest tokens of a default bucket
MIN_BUCKET_ON_GPUS = 65536


@dataclass(frozen=True, eq=False)
class Shards:
    """One division of the positions 0 .. n - 1 among p ranks.

    Args:
        positions: of each rank in local order, (counts[rank],) int64 each.
        place: index of each position in the concatenated shards, (n,).
        holder: rank of each position, (n,).
    """

    positions: tuple[Ints, ...]
    place: Ints
    holder: Ints

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(len(part) for part in self.positions)


@lru_cache(maxsize=256)
def shards(
    order: str, n: int, p: int, cuts: tuple[int, ...] | None, seed: int = 0, documents: tuple[int, ...] | None = None,
    chunk: int | None = None,
) -> Shards:  # fmt: skip
    """Return the shards of p ranks.

    contiguous  position x belongs to the greatest rank r for which r n / p, rounded down, is <= x
    zigzag      the same for 2 p chunks; rank r has the r-th from the front and the r-th from the back
    striped     position x belongs to rank x mod p
    spliced     the even positions contiguous, then the odd ones striped
    stepped     the first half of the positions contiguous, the rest striped
    paired      contiguous chunks, alternately for the first and the second half of the ranks
    hilbert     the curve through the smallest square of side 2^k that holds all positions row by row, cut evenly
    shuffled    a random permutation, cut evenly
    permuted    up to 2 p ranges of random length, in random order, cut evenly
    swapped     contiguous, with up to 3 pairs of positions swapped
    dealt       like cards into 3 p hands, position x into hand x mod 3 p; rank r has three hands, one after the other

    contiguous by document, zigzag by document: each document is divided separately. In zigzag order documents of less
    than 2 p tokens stay whole; each, the longest first, goes to the rank that has the fewest tokens so far.

    chunks        the chunks of all documents, cut evenly into 2 p groups, the first ones larger by one; rank r has the
                  r-th from the front and the r-th from the back
    dealt chunks  the chunks in random order, cut at random: shards are unequal, some are empty

    The first three, those by document, and "chunks" keep a rank's positions ascending.

    Args:
        order: one of these.
        n, p: numbers of tokens and of ranks.
        cuts: p + 1 offsets into the order; None: the order's own.
        seed: for "shuffled", "permuted", "swapped", "dealt chunks".
        documents: lengths of consecutive documents, n in all, for orders "by document" and of chunks; None: one.
        chunk: length of a chunk, for orders of chunks.

    Raises:
        ValueError: the order is unknown.
    """
    positions = np.arange(n)
    listings = {
        "hilbert": lambda: _hilbert(n), "shuffled": lambda: shuffled(n, seed),
        "permuted": lambda: permuted(n, p, seed), "swapped": lambda: swapped(n, seed),
    }  # fmt: skip
    if order in BY_CHUNK and chunk is not None:
        edges = np.flatnonzero(np.diff(_chunk_numbers(n, chunk, documents), prepend=-1))
        chunks = np.split(positions, edges[1:])
        owned = _dealt(order, len(chunks), p, seed)
        parts = [np.concatenate([positions[:0], *(chunks[number] for number in numbers)]) for numbers in owned]
    elif order in listings:
        ordered = listings[order]()
        parts = [ordered[_part(positions, n, p) == rank] for rank in range(p)]
    else:
        base, by_document, _ = order.partition(BY_DOCUMENT)
        owner = _owner_by_document(base, documents or (n,), p) if by_document else _owner(base, positions, n, p)
        every = {"spliced": 2, "dealt": HANDS * p}.get(order, 1)
        groups = [positions[start::every] for start in range(every)]
        parts = [np.concatenate([x[owner[x] == rank] for x in groups]) for rank in range(p)]
    if cuts is not None:
        ordered = np.concatenate(parts)
        parts = [ordered[cuts[rank] : cuts[rank + 1]] for rank in range(p)]
    place, holder = np.empty_like(positions), np.empty_like(positions)
    start = 0
    for rank, part in enumerate(parts):
        place[part] = start + np.arange(len(part))
        holder[part] = rank
        start += len(part)
    for x in (*parts, place, holder):
        x.flags.writeable = False  # cached: all callers share it
    return Shards(tuple(parts), place, holder)


def _chunk_numbers(n: int, chunk: int, documents: tuple[int, ...] | None) -> Ints:
    """The number of each position's chunk, (n,): a chunk begins at every multiple of its length in a document."""
    begins = np.concatenate([np.arange(length) % chunk == 0 for length in documents or (n,)])
    return np.cumsum(begins) - 1


def holds_whole_chunks(division: Shards, chunk: int, documents: tuple[int, ...] | None = None) -> bool:
    """Return True if each chunk lies in order, in one piece, on one rank.

    Args:
        division: of the positions.
        chunk: length of a chunk, counted from the begin of each document; a last one may be shorter.
        documents: lengths of consecutive documents; None: one.
    """
    inner = np.diff(_chunk_numbers(len(division.place), chunk, documents)) == 0
    return bool((np.diff(division.place)[inner] == 1).all() and (np.diff(division.holder)[inner] == 0).all())


def shuffled(n: int, seed: int) -> Ints:
    """Return a permutation of range(n).

    Args:
        n: number of positions.
        seed: determines the permutation.
    """
    permutation: Ints = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()
    return permutation


def permuted(n: int, p: int, seed: int) -> Ints:
    """Return range(n), cut into min(n, 2 p) ranges in a permuted order. A rank may hold several, later ones first.

    Args:
        n, p: numbers of positions and of ranks.
        seed: determines cuts and order.
    """
    generator = torch.Generator().manual_seed(seed)
    count = min(n, 2 * p)
    inner = torch.randperm(n - 1, generator=generator)[: count - 1].sort().values.numpy() + 1
    ranges = np.split(np.arange(n), inner)
    return np.concatenate([ranges[i] for i in torch.randperm(count, generator=generator).tolist()])


def swapped(n: int, seed: int) -> Ints:
    """Return range(n) with one to three pairs of positions swapped, adjacent or apart. A check of few entries takes it
    for range(n).

    Args:
        n: number of positions.
        seed: determines the pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    ordered = np.arange(n)
    for _ in range(1 + seed % 3):
        first, second = torch.randint(n, (2,), generator=generator).tolist()
        second = min(first + 1, n - 1) if seed % 2 else second
        ordered[[first, second]] = ordered[[second, first]]
    return ordered


def default_bucket(
    largest: int, heads: int, kv_heads: int, itemsize: int, device: str = "cpu", largest_of_keys: int | None = None
) -> int:
    """Return the default tokens of a bucket.

    A token of a bucket takes two receive buffers, for keys and values in the working type, and three gradient buffers
    in the accumulator's type, which has 8 bytes for fp64 and 4 for others. The bucket has as many tokens as fit into a
    tenth of the queries, outputs, keys and values of the largest shards, but at least MIN_BUCKET, and on GPUs 64 Ki.

    Args:
        largest: tokens of the largest shard.
        heads, kv_heads: numbers of query and of key/value heads.
        itemsize: bytes of the working type.
        device: "cpu" or "cuda".
        largest_of_keys: tokens of the largest shard of keys; None: largest.
    """
    accumulator = 8 if itemsize == 8 else 4
    keys = largest if largest_of_keys is None else largest_of_keys
    shard = 2 * (largest * heads + keys * kv_heads) * itemsize
    token = 2 * kv_heads * (2 * itemsize + 3 * accumulator)
    return max(MIN_BUCKET_ON_GPUS if device == "cuda" else MIN_BUCKET, shard // (10 * token))


def _dealt(order: str, count: int, p: int, seed: int) -> list[Ints]:
    """The numbers of the chunks of each rank, in its order."""
    if order == "chunks":
        groups = np.array_split(np.arange(count), 2 * p)
        return [np.concatenate([groups[rank], groups[2 * p - 1 - rank]]) for rank in range(p)]
    generator = torch.Generator().manual_seed(seed)
    numbers: Ints = torch.randperm(count, generator=generator).numpy()
    ends = torch.randint(count + 1, (p - 1,), generator=generator).sort().values.tolist()
    return [numbers[a:b] for a, b in pairwise((0, *ends, count))]


def _part(x: Ints, n: int, parts: int) -> Ints:
    """The part that holds item x of n items cut evenly: the greatest r with r n / parts, rounded down, <= x."""
    return ((x + 1) * parts - 1) // n


def _owner(order: str, x: Ints, n: int, p: int) -> Ints:
    """The rank of each position x."""
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
            "shuffled, permuted, swapped, dealt or, with a chunk, of chunks, dealt chunks"
        )
    owner: Ints = owners[order]()
    return owner


def _owner_by_document(order: str, documents: tuple[int, ...], p: int) -> Ints:
    """The rank of each position of all documents together."""
    whole = [order == "zigzag" and length < 2 * p for length in documents]
    owners = [_owner(order, np.arange(length), length, p) for length in documents]
    tokens = np.zeros(p, np.int64)
    for owner, is_whole in zip(owners, whole, strict=True):
        if not is_whole:
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
