"""Masks as data: slices, which are rectangles of queries and keys with a band of distances.

A slice (q0, q1, k0, k1, low, high) sees the pair of query i and key j of one sequence if

    q0 <= i < q1,  k0 <= j < k1,  low <= j - i <= high

An end of None is open: the slice reaches to the end of the sequence. A bound of None hides nothing. A branch of
`reference.pattern` multiplies its grid with the sum of its slices, which are disjoint. So causality is the one slice
(0, None, 0, None, None, 0), and a causal window of w the slice (0, None, 0, None, -w, 0).

Bounds are distances, and do not depend on where the ranges end. So a slice cut in two is two slices with the same
bounds, and two slices meet in a slice. MagiAttention's kinds (arXiv 2505.13211) are bounds that touch the corners of a
rectangle:

    kind        low      high
    full        None     None
    causal      None     k1 - q1    the last query sees up to the last key
    anticausal  k0 - q0  None       the first query sees from the first key on
    both        k0 - q0  k1 - q1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from reference.validators import is_integer, plain

_FAR = 2**61  # in place of None: beyond every position and distance, and sums of two fit 64 bits
_MOST = 2**41  # of ends and bounds

Span = tuple[int, int]


class Slice(NamedTuple):
    """Pairs of queries q0 <= i < q1 and keys k0 <= j < k1 with low <= j - i <= high. None: no end, or no bound."""

    q0: int = 0
    q1: int | None = None
    k0: int = 0
    k1: int | None = None
    low: int | None = None
    high: int | None = None

    @property
    def limits(self) -> tuple[int, int, int, int, int, int]:
        """The six numbers, with ends and bounds beyond every sequence in place of None."""
        q0, q1, k0, k1, low, high = self
        ends = (q0, _FAR if q1 is None else q1, k0, _FAR if k1 is None else k1)
        return (*ends, -_FAR if low is None else max(low, -_FAR), _FAR if high is None else min(high, _FAR))

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return True for each pair that the slice sees; positions broadcast against each other."""
        q0, q1, k0, k1, low, high = self.limits
        distance = keys - queries
        inside = (queries >= q0) & (queries < q1) & (keys >= k0) & (keys < k1)
        return inside & (distance >= low) & (distance <= high)


def meet(a: Slice, b: Slice) -> Slice | None:
    """Return the slice of the pairs that both see; None if there is none."""
    lows, highs = [x for x in (a.low, b.low) if x is not None], [x for x in (a.high, b.high) if x is not None]
    q1, k1 = ([x for x in ends if x is not None] for ends in ((a.q1, b.q1), (a.k1, b.k1)))
    both = Slice(
        max(a.q0, b.q0), min(q1, default=None), max(a.k0, b.k0), min(k1, default=None),
        max(lows, default=None), min(highs, default=None),
    )  # fmt: skip
    return both if holds_a_pair(both) else None


def transposed(one: Slice) -> Slice:
    """Return the slice with queries and keys exchanged: it sees (j, i) if the slice sees (i, j)."""
    q0, q1, k0, k1, low, high = one
    return Slice(k0, k1, q0, q1, None if high is None else -high, None if low is None else -low)


def holds_a_pair(one: Slice) -> bool:
    """Return True if the slice sees some pair: every distance between the corners occurs."""
    q0, q1, k0, k1, low, high = one.limits
    return q0 < q1 and k0 < k1 and max(low, k0 - q1 + 1) <= min(high, k1 - 1 - q0)


def looks_ahead(one: Slice) -> bool:
    """Return True if the slice lets a query see a later key."""
    return meet(one, Slice(low=_AFTER)) is not None


def checked_slices(value: object) -> tuple[Slice, ...] | None:
    """Return slices, given as six numbers each, without those that see no pair; None stays None.

    Raises:
        ValueError: they are anything else, a range is out of order, or two see the same pair.
    """
    if value is None or isinstance(value, DisjointSlices):
        return value
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"slices must be a list of (q0, q1, k0, k1, low, high) or None, got {value!r}")
    slices = tuple(checked_slice(one) for one in value)
    for a, b in overlaps(slices):
        i, j = common_pair(a, b)
        raise ValueError(
            f"slices must see a pair once, got {tuple(a)} and {tuple(b)}, which both see query {i} and key {j}: "
            "cut one of them, or count it twice by Pattern.slices([((q0, q1), (k0, k1), kind), ...], counted=True) "
            'with the kinds "full", "causal", "anticausal" or "both", which are 0 to 3 of MagiAttention'
        )
    return DisjointSlices(one for one in slices if holds_a_pair(one))


class DisjointSlices(tuple[Slice, ...]):
    """Slices that were found disjoint, so that nobody looks again. Hashed once: a tree may have thousands."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (tuple(self),)


def checked_slice(value: object) -> Slice:
    """Return a slice, given as six numbers. Raises ValueError for anything else, or a range out of order."""
    if not isinstance(value, (list, tuple)) or len(value) != 6:
        raise ValueError(f"a slice must be (q0, q1, k0, k1, low, high), got {value!r}; for ((q0, q1), (k0, k1), kind) "
                         "write Pattern.slices([...])")  # fmt: skip
    q0, q1, k0, k1, low, high = map(plain, value)
    for name, begin, end in (("queries", q0, q1), ("keys", k0, k1)):
        check_range(f"the {name} of a slice", begin, end)
    for name, bound in (("low", low), ("high", high)):
        if bound is not None and (not is_integer(bound) or abs(bound) >= _MOST):
            raise ValueError(f"{name} of a slice must be an integer between -2**41 and 2**41, or None, got {bound!r}")
    return Slice(q0, q1, k0, k1, low, high)


def check_range(name: str, begin: object, end: object) -> None:
    """Raise ValueError unless 0 <= begin <= end; an end of None is open."""
    ends_well = end is None or (is_integer(end) and is_integer(begin) and begin <= end < _MOST)
    if not is_integer(begin) or begin < 0 or not ends_well:
        raise ValueError(f"{name} must be a range (begin, end) with 0 <= begin <= end, got {(begin, end)!r}")


def overlaps(slices: Iterable[Slice]) -> Iterator[tuple[Slice, Slice]]:
    """Yield the pairs of slices that see a common pair."""
    ordered = sorted(filter(holds_a_pair, slices), key=lambda one: one.q0)
    table = np.array([one.limits for one in ordered], np.int64).reshape(-1, 6).T
    for index, behind in enumerate(np.searchsorted(table[0], table[1], side="left").tolist()):
        if index + 1 < behind:  # slices that begin before this one's last query
            one, later = table[:, index, None], table[:, index + 1 : behind]
            (q0, _, k0, _, low, _), (_, q1, _, k1, _, high) = np.maximum(one, later), np.minimum(one, later)
            meets = (k0 < k1) & (np.maximum(low, k0 - q1 + 1) <= np.minimum(high, k1 - 1 - q0))
            yield from ((ordered[index], ordered[index + 1 + other]) for other in np.flatnonzero(meets))


def common_pair(a: Slice, b: Slice) -> tuple[int, int]:
    """Return a query and a key that both slices see."""
    both = meet(a, b)
    assert both is not None
    q0, q1, k0, k1, low, high = both.limits
    distance = min(max(0, low, k0 - q1 + 1), high, k1 - 1 - q0)
    query = max(q0, k0 - distance)
    return query, query + distance


def check_slices_fit(slices: Sequence[Slice], tokens: int | None, key_tokens: int) -> None:
    """Raise ValueError if a slice reaches beyond the sequence. One without an end of queries is for any length.

    tokens: None for any number of queries.
    """
    for one in slices:
        if one.q1 is None:
            continue
        for name, begin, end, most in (("queries", one.q0, one.q1, tokens), ("keys", one.k0, one.k1, key_tokens)):
            if most is not None and max(begin, end or 0) > most:
                raise ValueError(
                    f"slices must lie within the {most} tokens of the {name}, got {tuple(one)}: end it, or the prefix, "
                    f"span or range that it is of, at {most}"
                )


# --- constructors -----------------------------------------------------------------------------------------------------

EVERYTHING = Slice()
CAUSAL = Slice(high=0)
_AFTER = 1  # the smallest distance of a later key


def of_kind(queries: Span, keys: Span, kind: object) -> Slice:
    """Return the slice of two half-open ranges and a kind.

    Args:
        queries: (q0, q1).
        keys: (k0, k1).
        kind: "full"; "causal": j - k1 <= i - q1 (ends aligned); "anticausal": j - k0 >= i - q0 (begins aligned);
            "both"; or a band (low, high) in place of it, with low <= j - i <= high.

    Raises:
        ValueError: a range is out of order, or the kind is anything else.
    """
    for name, ends in (("queries", queries), ("keys", keys)):
        if not isinstance(ends, (list, tuple)) or len(ends) != 2:
            raise ValueError(f"{name} of a slice must be a range (begin, end), got {ends!r}")
        check_range(f"the {name} of a slice", *ends)
    (q0, q1), (k0, k1) = queries, keys
    if isinstance(kind, (list, tuple)) and len(kind) == 2:
        return checked_slice((q0, q1, k0, k1, *kind))
    if kind not in ("full", "causal", "anticausal", "both"):
        raise ValueError(
            f'kind of a slice must be "full", "causal", "anticausal", "both" or a band (low, high), got {kind!r}'
        )
    if kind in ("causal", "both") and (q1 is None or k1 is None):
        raise ValueError(f"a slice of kind {kind!r} needs both ends, got {(queries, keys)!r}: write a band (None, 0)")
    return Slice(q0, q1, k0, k1, None if kind in ("full", "causal") else k0 - q0,
                 None if kind in ("full", "anticausal") else k1 - q1)  # fmt: skip


def prefix_slices(prefixes: Sequence[int], begins: Sequence[int] = (0,)) -> list[Slice]:
    """Return causal slices, and for each document one by which its prefix sees both ways (prefix-LM).

    Args:
        prefixes: tokens of each document's prefix.
        begins: first position of each document.

    Raises:
        ValueError: a prefix is no integer >= 0.
    """
    for prefix in prefixes:
        if not is_integer(prefix) or prefix < 0:
            raise ValueError(f"prefix must be an integer >= 0, or one for each document, got {prefix!r}")
    squares = [(begin, begin + prefix) for begin, prefix in zip(begins, prefixes, strict=True)]
    return [CAUSAL, *(Slice(*square, *square, low=_AFTER) for square in squares)]


def span_slices(spans: object, window: int | None = None) -> list[Slice]:
    """Return causal slices with spans that see both ways, such as images in text.

    Args:
        spans: (begin, end) of each, half-open, in order and disjoint.
        window: of the causal part; a span longer than it still sees itself whole. None: no limit.

    Raises:
        ValueError: a span is out of order, or overlaps the one before.
    """
    slices = [CAUSAL if window is None else Slice(low=-window, high=0)]
    for begin, end in _checked_spans(spans):
        slices.append(Slice(begin, end, begin, end, low=_AFTER))
        if window is not None:
            slices.append(Slice(begin, end, begin, end, high=-window - 1))
    return slices


def _checked_spans(spans: object) -> list[Span]:
    if not isinstance(spans, Sequence) or isinstance(spans, str):
        raise ValueError(f"spans must be a list of (begin, end), got {spans!r}")
    last = 0
    for span in spans:
        if not isinstance(span, (list, tuple)) or len(span) != 2 or span[1] is None:
            raise ValueError(f"a span must be (begin, end), got {span!r}")
        check_range("a span", *span)
        if span[0] < last:
            raise ValueError(f"spans must be in order and must not overlap, got {span!r} after one that ends at {last}")
        last = span[1]
    return [(begin, end) for begin, end in spans]


def frame_slices(lengths: object, noisy: bool = False, documents: Sequence[int] | None = None) -> list[Slice]:
    """Return block-causal slices: a token sees its own frame and all frames before.

    Args:
        lengths: tokens of each frame, in order.
        noisy: True for a sequence of clean frames and, after them, their noisy copies. A noisy frame sees itself and
            the clean frames before it.
        documents: with noisy, tokens of each part of the sequence that has clean frames and their copies; None: one.

    Raises:
        ValueError: a length is no integer >= 0, or a document's clean half does not end with a frame.
    """
    edges = _edges("lengths of frames", lengths)
    if not noisy:
        return [CAUSAL, *(Slice(a, b, a, b, low=_AFTER) for a, b in pairwise(edges))]
    slices, begin = list[Slice](), 0
    for document in (2 * edges[-1],) if documents is None else documents:
        half, end = begin + document // 2, begin + document
        own = [begin // 2 + edge for edge in edges if begin <= 2 * edge <= end]  # begin // 2: copies before them
        if document % 2 or {begin, half} - {*own}:
            raise ValueError(
                f"documents must each be whole frames and their noisy copies, got one of {document} tokens at position "
                f"{begin}: write 2 * (the tokens of its frames) for each"
            )
        slices += [Slice(begin, half, begin, half, high=0), *(Slice(a, b, a, b, low=_AFTER) for a, b in pairwise(own))]
        for a, b in pairwise(own):
            copy = a + half - begin, b + half - begin
            slices += [Slice(*copy, *copy), Slice(*copy, begin, a)]
        begin = end
    return slices


def _edges(name: str, lengths: object) -> list[int]:
    if not isinstance(lengths, Sequence) or isinstance(lengths, str):
        raise ValueError(f"{name} must be a list of integers >= 0, got {lengths!r}")
    for length in lengths:
        if not is_integer(length) or length < 0:
            raise ValueError(f"{name} must be integers >= 0, got {length!r}")
    return list(accumulate(lengths, initial=0))


def first_token_slices(count: int, window: int, begins: Sequence[int] = (0,)) -> list[Slice]:
    """Return a causal window, and slices by which every later token sees the first tokens.

    Args:
        count: first tokens, >= 0.
        window: largest distance of another key before its query, >= 0.
        begins: first position of each document.

    Raises:
        ValueError: count or window is no integer >= 0.
    """
    for name, value in (("count", count), ("window", window)):
        if not is_integer(value) or value < 0:
            raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
    edges: list[int | None] = [*begins, None]
    firsts = [
        Slice(begin, end, begin, begin + count if end is None else min(begin + count, end), high=-window - 1)
        for begin, end in pairwise(edges) if begin is not None
    ]  # fmt: skip
    return [Slice(low=-window, high=0), *firsts]


def tree_slices(parents: object, lengths: object) -> list[Slice]:
    """Return the slices of a tree: a token sees the tokens before it in its node, and all of the node's ancestors.

    Args:
        parents: of each node, the number of an earlier node; None or -1 for a root.
        lengths: tokens of each node. The nodes follow each other in the sequence, best depth first: a node and its
            descendants are then neighbours, and see it by one slice.

    Raises:
        ValueError: the lists have unequal lengths, a parent is no earlier node, or a length is no integer >= 0.
    """
    parent, edges = _checked_tree(parents, lengths)
    slices = [Slice(a, b, a, b, high=0) for a, b in pairwise(edges) if a < b]
    runs: dict[int, Span] = {}  # the descendants of a node so far that follow each other
    for node in range(len(parent)):
        begin, end = edges[node], edges[node + 1]
        above = parent[node]
        while above is not None and begin < end:
            first, last = runs.get(above, (begin, begin))
            if last < begin:
                slices.append(Slice(first, last, edges[above], edges[above + 1]))
                first = begin
            runs[above] = first, end
            above = parent[above]
    slices += [Slice(*run, edges[above], edges[above + 1]) for above, run in runs.items()]
    return [one for one in slices if holds_a_pair(one)]


def _checked_tree(parents: object, lengths: object) -> tuple[list[int | None], list[int]]:
    edges = _edges("lengths of a tree's nodes", lengths)
    if not isinstance(parents, Sequence) or isinstance(parents, str) or len(parents) != len(edges) - 1:
        raise ValueError(
            f"parents must be a list with an entry for each of the {len(edges) - 1} nodes, got {parents!r}"
        )
    checked: list[int | None] = []
    for node, parent in enumerate(parents):
        if parent is None or (is_integer(parent) and parent == -1):
            checked.append(None)
        elif is_integer(parent) and 0 <= parent < node:
            checked.append(parent)
        else:
            raise ValueError(
                f"parents must be earlier nodes, so that a tree has no circle, or None for a root, got {parent!r} for "
                f"node {node}"
            )
    return checked, edges


def keys_seen(slices: Iterable[Slice], begin: np.ndarray, end: np.ndarray, rate: int = 1) -> np.ndarray:
    """Return the number of keys that each query of a sequence sees on its own grid, (tokens,) int64.

    Args:
        slices: disjoint ones.
        begin, end: half-open range of the keys of each query's segment, (tokens,) int64.
        rate: of the grid, which holds every key that is a multiple of it away from the query.
    """
    seen = np.zeros(len(begin), np.int64)
    for q0, q1, k0, k1, low, high in (one.limits for one in slices):
        query, some = np.arange(q0, min(q1, len(begin))), slice(q0, min(q1, len(begin)))
        first, behind = begin[some], end[some]
        first = np.maximum(first, k0) if k0 else first
        first = np.maximum(first, query + low) if low > -_FAR else first
        behind = np.minimum(behind, k1) if k1 < _FAR else behind
        behind = np.minimum(behind, query + high + 1) if high < _FAR else behind
        seen[some] += np.maximum((behind - 1 - query) // rate + (query - first) // rate + 1, 0)
    return seen


def sees_paths(slices: Iterable[Slice], tokens: int) -> bool:
    """Return True if each token of a sequence sees itself and all that one earlier token sees, or itself alone: the
    path from a root of a tree. Compares sums of a random number for each key, modulo 2**64.

    Args:
        slices: disjoint ones.
        tokens: of the sequence.
    """
    weights = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, tokens)
    sums, token = np.append(0, np.cumsum(weights)), np.arange(tokens)
    seen, parent = np.zeros(tokens, np.int64), np.full(tokens, -1)
    for q0, q1, k0, k1, low, high in (one.limits for one in slices):
        query = token[q0:q1]
        behind = np.clip(query + high + 1, 0, min(k1, tokens))
        first = np.minimum(np.maximum(query + low, k0), behind)
        seen[q0:q1] += sums[behind] - sums[first]
        latest = behind - 1 - (behind - 1 == query)
        parent[q0:q1] = np.maximum(parent[q0:q1], np.where(latest >= first, latest, -1))
    return bool(((parent < token) & (seen == weights + np.where(parent < 0, 0, seen[parent]))).all())


def sees_at(slices: Iterable[Slice], tokens: int, distance: int) -> np.ndarray:
    """Return True for each token that sees the one at a distance, > 0 for later ones, (tokens,) bool."""
    seen = np.zeros(tokens, bool)
    for q0, q1, k0, k1, low, high in (one.limits for one in slices):
        if low <= distance <= high:
            begin, end = max(q0, k0 - distance, -distance), min(q1, k1 - distance, tokens - distance)
            seen[begin : max(begin, end)] = True
    return seen


def without(one: Slice, others: Iterable[Slice]) -> list[Slice]:
    """Return disjoint slices of the pairs that `one` sees, and none of the others."""
    rest = [one]
    for q0, q1, k0, k1, low, high in others:
        outside = [
            Slice(0, q0), *([] if q1 is None else [Slice(q1)]),
            Slice(q0, q1, 0, k0), *([] if k1 is None else [Slice(q0, q1, k1)]),
            *([] if low is None else [Slice(q0, q1, k0, k1, high=low - 1)]),
            *([] if high is None else [Slice(q0, q1, k0, k1, low=high + 1)]),
        ]  # fmt: skip
        rest = [both for part in rest for piece in outside if (both := meet(part, piece)) is not None]
    return rest
