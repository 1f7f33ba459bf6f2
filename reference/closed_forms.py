"""Costs of regular cases in closed form, each with its derivation: an independent check of the counts of `cost`."""

from __future__ import annotations

from reference import validators


def dense_slots(n: int, p: int, kv_heads: int, causal: bool, order: str, exchange: str) -> int:
    """Return the slots that the whole group sends in forward: dense attention over p equal shards of L = n/p rows.

    Not causal, or gather: every row to all p - 1 others, n (p-1). Causal, direct and ring:
    contiguous  shard s is needed by the ranks after it, the farthest p-1-s away: L sum (p-1-s) = n (p-1) / 2.
    striped     a row is needed by all others, but the last row of rank s by the ranks after s only (the
                farthest p-1-s away): n (p-1) - p (p-1) / 2.
    zigzag      chunks of c = n/2p rows. The early one of rank s is needed by all; the late one by the s ranks
                before s, the farthest of which along the ring is s-1, at distance p-1:
                direct c p (p-1) * 3/2; ring c (p-1) (p + p-1).

    Args:
        n, p: numbers of tokens and of ranks.
        kv_heads: number of key/value heads.
        causal: True for causal attention.
        order: "contiguous", "striped" or "zigzag".
        exchange: "ring", "direct" or "gather".

    Raises:
        ValueError: shards or chunks are unequal, or the order has no closed form.
    """
    if n % (2 * p if order == "zigzag" else p) or order not in ("contiguous", "striped", "zigzag"):
        raise ValueError(f"no closed form for n={n}, p={p}, order={order!r}")
    if validators.choice("exchange", exchange, ("ring", "direct", "gather")) == "gather" or not causal:
        return kv_heads * n * (p - 1)
    if order == "contiguous":
        return kv_heads * n * (p - 1) // 2
    if order == "striped":
        return kv_heads * (n * (p - 1) - p * (p - 1) // 2)
    return kv_heads * (n // (2 * p)) * (p - 1) * (3 * p if exchange == "direct" else 4 * p - 2) // 2


def segment_slots(n: int, p: int, w: int, r: int, widths: int, causal: bool, exchange: str) -> int:
    """Return the slots that the whole group sends in forward: one branch, contiguous shards of L = n/p rows.

    w divides L: no segment leaves its rank, 0.
    w = m L, m divides p, r divides L: a rank holds L/r selected rows of each block, a segment spans m ranks.
        direct  m (m-1) ordered pairs per segment, p/m segments: p (m-1) L/r = n (m-1)/r, 1/r of the same
                segments undilated; half as much if causal.
        ring    causal: rank i of the segment sends its rows m-1-i far, in total as direct. Else the first sends
                them m-1 far, but the rows of the others must reach their predecessor, p-1 far: (m-1) p per
                segment, p/m times direct.

    Args:
        n, p: numbers of tokens and of ranks.
        w, r: segment length and dilation rate.
        widths: the sum of the widths of the branch's blocks.
        causal: True for causal attention.
        exchange: "ring" or "direct".

    Raises:
        ValueError: any other case.
    """
    length, m = n // p, w // max(1, n // p)
    if n % p == 0 and length % w == 0:
        return 0
    if n % p or w != m * length or p % m or length % r or exchange not in ("direct", "ring"):
        raise ValueError(f"no closed form for n={n}, p={p}, w={w}, r={r}, exchange={exchange!r}")
    direct = widths * n * (m - 1) // r
    return direct // 2 if causal else direct * p // m if exchange == "ring" else direct


def segment_pairs(n: int, w: int, r: int, heads: int, causal: bool) -> int:
    """Return the pairs of one branch, r dividing w dividing n: n/w segments of g = w/r rows, each g^2 or g (g+1)/2.

    Dense attention is w = n, r = 1: n^2 or n (n+1)/2 per head.

    Args:
        n, w, r: number of tokens, segment length and dilation rate.
        heads: number of query heads.
        causal: True for causal attention.

    Raises:
        ValueError: r does not divide w, or w does not divide n.
    """
    if n % w or w % r:
        raise ValueError(f"no closed form for n={n}, w={w}, r={r}")
    g = w // r
    return heads * (n // w) * (g * (g + 1) // 2 if causal else g * g)
