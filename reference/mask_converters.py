"""Converters between slices and the masks of other libraries, all of one sequence.

    Pattern.slices(slices_from_magi(q_ranges, k_ranges, attn_type_map))
    magi_from_slices(Pattern.spans(images, documents, window=1023), tokens)

Slices as in `reference.slices`: (q0, q1, k0, k1, low, high). Intervals of rows (keys that a query sees) or of columns
(queries that see a key) become slices line by line: an end that stays makes a straight edge, one that moves by one a
diagonal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch

from reference.pattern import Pattern, slices_seen
from reference.slices import Slice, check_range, check_slices_fit, checked_slices, meet
from reference.validators import integer, is_integer, plain

FULL, CAUSAL, INVERSE_CAUSAL, BI_CAUSAL = range(4)  # MagiAttention's attn_type_map
MOST_TOKENS = 4096  # of a mask function, which is evaluated for every pair
MOST_INTERVALS = 4  # of keys that one query sees
MOST_SLICES = 4096  # of a mask function

Integers = Sequence[int] | np.ndarray | torch.Tensor
Ranges = Sequence[Sequence[int]] | np.ndarray | torch.Tensor
Interval = tuple[int, int]


# --- MagiAttention ----------------------------------------------------------------------------------------------------


def slices_from_magi(q_ranges: Ranges, k_ranges: Ranges, attn_type_map: Integers) -> tuple[Slice, ...]:
    """Return the slices of MagiAttention's flexible masks (arXiv 2505.13211).

    Args:
        q_ranges: (slices, 2) half-open ranges of queries.
        k_ranges: (slices, 2) half-open ranges of keys.
        attn_type_map: (slices,) with 0 full, 1 causal, 2 inverse causal, 3 bi-causal.

    Raises:
        ValueError: they are no such integers, have unequal lengths, or two slices see the same pair.
    """
    queries, keys, kinds = _ranges("q_ranges", q_ranges), _ranges("k_ranges", k_ranges), _listed(attn_type_map)
    if not len(queries) == len(keys) == len(kinds):
        raise ValueError(
            "q_ranges, k_ranges and attn_type_map must have an entry for each slice, got "
            f"{len(queries)}, {len(keys)} and {len(kinds)}"
        )
    slices = []
    for (q0, q1), (k0, k1), kind in zip(queries, keys, kinds, strict=True):
        if type(kind) is not int or not FULL <= kind <= BI_CAUSAL:
            raise ValueError(f"attn_type_map must hold 0 full, 1 causal, 2 inverse causal or 3 bi-causal, got {kind!r}")
        low = k0 - q0 if kind in (INVERSE_CAUSAL, BI_CAUSAL) else None
        high = k1 - q1 if kind in (CAUSAL, BI_CAUSAL) else None
        slices.append(Slice(q0, q1, k0, k1, low, high))
    return _checked(slices)


class MagiSlices(NamedTuple):
    """MagiAttention's three arguments, as lists."""

    q_ranges: list[list[int]]
    k_ranges: list[list[int]]
    attn_type_map: list[int]


def magi_from_slices(slices: Sequence[Slice] | Pattern, tokens: int) -> MagiSlices:
    """Return MagiAttention's arguments for slices. A band whose bounds touch no corner is cut into at most three.

    Args:
        slices: disjoint, six numbers each; or a pattern of one branch without segments and rates, with its documents,
            window and causality, which its `branches[0].slices` do not have.
        tokens: of the sequence, where open ends lie.

    Raises:
        ValueError: slices overlap or reach beyond the sequence, or a pattern has several branches, rates or segments.
    """
    magi = MagiSlices([], [], [])
    for one in _checked(slices, integer("tokens", plain(tokens), 0)):
        for queries, keys, kind in _with_corners(_trimmed(one, tokens)):
            magi.q_ranges.append(list(queries))
            magi.k_ranges.append(list(keys))
            magi.attn_type_map.append(kind)
    return magi


def _with_corners(one: Slice) -> Iterator[tuple[Interval, Interval, int]]:
    """Cut a trimmed slice by queries where a bound leaves its keys: (queries, keys, MagiAttention's type)."""
    q0, q1, k0, k1, low, high = one.limits
    inner = {min(max(cut, q0), q1) for cut in (k0 - low, k1 - high)}  # from there on, low and not high hides keys
    for begin, end in pairwise(sorted({q0, q1, *inner})):
        hides_first, hides_last = end - 1 + low > k0, begin + high < k1 - 1
        keys = begin + low if hides_first else k0, end + high if hides_last else k1
        yield (begin, end), keys, (INVERSE_CAUSAL if hides_first else 0) + (CAUSAL if hides_last else 0)


def _trimmed(one: Slice, tokens: int) -> Slice:
    """Return the slice without queries that see no key, and keys that no query sees."""
    q0, q1, k0, k1, low, high = one.limits
    q1, k1 = min(q1, tokens), min(k1, tokens)
    q0, q1 = max(q0, k0 - high), min(q1, k1 - low)
    return one._replace(q0=q0, q1=q1, k0=max(k0, q0 + low), k1=min(k1, q1 + high))


# --- FlashMask --------------------------------------------------------------------------------------------------------


def slices_from_flashmask(startend_row_indices: object, causal: bool) -> tuple[Slice, ...]:
    """Return the slices of PaddlePaddle's FlashMask (arXiv 2410.01359), of one batch entry and one head.

    Args:
        startend_row_indices: (keys, 1, 2 or 4), or (1, 1, keys, ...), integers: queries that do not see a key.
            Causal: from the first number on, or from the first up to the second. Not causal: from the first on and
            before the second; or from the first up to the second, and from the third up to the fourth.
        causal: True hides every key from the queries before it, too.

    Raises:
        ValueError: they are no such integers.
    """
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    rows = _indices(startend_row_indices, causal)
    tokens = len(rows)
    columns = (_seen(_hidden(row, key, tokens, causal), tokens) for key, row in enumerate(rows))
    return _checked(list(slices_of_columns(columns)))


def flashmask_from_slices(slices: Sequence[Slice] | Pattern, tokens: int) -> tuple[torch.Tensor, bool]:
    """Return startend_row_indices, (1, 1, tokens, 1, 2 or 4) int32, and `causal`: the shortest form that says it.

    Args:
        slices: disjoint, six numbers each; or a pattern of one branch without segments and rates, with its documents,
            window and causality, which its `branches[0].slices` do not have.
        tokens: of the sequence.

    Raises:
        ValueError: slices overlap or reach beyond the sequence, the pattern has several branches, rates or segments, or
            a key is hidden from more than two intervals of queries.
    """
    seen_by = _columns(_checked(slices, integer("tokens", plain(tokens), 0)), tokens)
    columns = [_seen(seen, tokens) for seen in seen_by]  # hidden from these
    for causal, form in ((True, _below), (True, _within), (False, _outside), (False, _two)):
        rows = [form(key, hidden, tokens) for key, hidden in enumerate(columns)]
        if None not in rows:
            width = {_below: 1, _within: 2, _outside: 2, _two: 4}[form]
            return torch.tensor(rows, dtype=torch.int32).reshape(1, 1, tokens, width), causal
    key = rows.index(None)
    raise ValueError(
        f"slices must hide a key from at most two intervals of queries to be a FlashMask, got {columns[key]} for key "
        f"{key}"
    )


def _indices(value: object, causal: bool) -> list[list[int]]:
    array = _array("startend_row_indices", value)
    if array.ndim == 4 and array.shape[:2] == (1, 1):
        array = array[0, 0]
    widths = (1, 2) if causal else (2, 4)
    if array.ndim != 2 or array.dtype.kind not in "iu" or array.shape[1] not in widths:
        raise ValueError(
            f"startend_row_indices must be integers (keys, {widths[0]} or {widths[1]}) with causal={causal}, of one "
            f"batch entry and one head, got {array.dtype} of shape {array.shape}"
        )
    rows: list[list[int]] = array.tolist()
    return rows


def _hidden(row: list[int], key: int, tokens: int, causal: bool) -> list[Interval]:
    """Queries that do not see a key, in intervals that may overlap."""
    if causal:
        return [(0, key), (row[0], tokens if len(row) == 1 else row[1])]
    return [(row[0], tokens), (0, row[1])] if len(row) == 2 else [(row[0], row[1]), (row[2], row[3])]


def _below(key: int, hidden: list[Interval], tokens: int) -> list[int] | None:
    row = _within(key, hidden, tokens)
    return row[:1] if row is not None and row[1] in (row[0], tokens) else None


def _within(key: int, hidden: list[Interval], tokens: int) -> list[int] | None:
    """LTS and LTE of a causal mask: the queries before the key, and one interval of later ones."""
    if key and (not hidden or hidden[0][0] > 0 or hidden[0][1] < key):
        return None
    later = [(max(begin, key), end) for begin, end in hidden if end > key]
    return [tokens, tokens] if not later else list(later[0]) if len(later) == 1 else None


def _outside(key: int, hidden: list[Interval], tokens: int) -> list[int] | None:
    """LTS and UTE: the last queries and the first."""
    if hidden == [(0, tokens)]:
        return [0, tokens]
    first = hidden[0][1] if hidden and hidden[0][0] == 0 else 0
    last = hidden[-1][0] if hidden and hidden[-1][1] == tokens else tokens
    return [last, first] if len(hidden) == (first > 0) + (last < tokens) else None


def _two(key: int, hidden: list[Interval], tokens: int) -> list[int] | None:
    return [x for ends in (hidden + [(0, 0)] * 2)[:2] for x in ends] if len(hidden) <= 2 else None


def _columns(slices: Sequence[Slice], tokens: int) -> list[list[Interval]]:
    """Intervals of queries that see each key."""
    columns: list[list[Interval]] = [[] for _ in range(tokens)]
    for one in slices:
        q0, q1, k0, k1, low, high = one.limits
        for key in range(k0, min(k1, tokens)):
            columns[key].append((max(q0, key - high), min(q1, tokens, key - low + 1)))
    return columns


def _seen(hidden: Iterable[Interval], tokens: int) -> list[Interval]:
    """Return the intervals of 0 .. tokens between those given, in order."""
    between, last = [], 0
    for begin, end in sorted((max(begin, 0), min(end, tokens)) for begin, end in hidden):
        if begin < end:
            if last < begin:
                between.append((last, begin))
            last = max(last, end)
    return [*between, (last, tokens)] if last < tokens else between


# --- functions, and lines of intervals --------------------------------------------------------------------------------


def slices_from_function(sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tokens: int) -> tuple[Slice, ...]:
    """Return the slices that equal a mask function. It is called once, with all pairs of a short sequence.

    The slices are of this sequence alone: a function that reads data (document ids, scores, routing) must be converted
    again for each batch, and nothing here can tell that it does.

    Args:
        sees: of queries (tokens, 1) and keys (1, tokens), int64, returns a bool tensor (tokens, tokens). For a mask_mod
            of FlexAttention give `lambda q, k: mask_mod(b, h, q, k)`, for each batch entry and head that differs.
        tokens: of the sequence, at most 4096.

    Raises:
        ValueError: tokens are out of range, the function returns anything else, or its mask is none of few slices.
    """
    tokens = plain(tokens)
    if type(tokens) is not int or not 0 <= tokens <= MOST_TOKENS:
        raise ValueError(f"tokens of a mask function must be 0 to {MOST_TOKENS}, got {tokens!r}: write slices instead")
    if not callable(sees):
        raise ValueError(f"a mask function must take queries and keys, got {sees!r}")
    places = torch.arange(tokens)
    mask = sees(places[:, None], places[None])
    shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else ()
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or any(x not in (1, tokens) for x in shape[-2:]):
        raise ValueError(f"a mask function must return a bool tensor ({tokens}, {tokens}), got {_got(mask)}")
    seen = mask.detach().cpu().broadcast_to(tokens, tokens).numpy()
    edges = np.diff(seen.astype(np.int8), axis=1, prepend=0, append=0)
    slices = []
    for one in slices_of_rows(_row_intervals(edges)):
        slices.append(one)
        if len(slices) > MOST_SLICES:
            raise ValueError(
                f"a mask function must be at most {MOST_SLICES} slices, got more, one of them at query {one.q0} and "
                f"key {one.k0}"
            )
    return _checked(slices)


def _row_intervals(edges: np.ndarray) -> Iterator[list[Interval]]:
    for query, row in enumerate(edges):
        begins, ends = np.flatnonzero(row == 1).tolist(), np.flatnonzero(row == -1).tolist()
        if len(begins) > MOST_INTERVALS:
            raise ValueError(
                f"a mask function must give a query at most {MOST_INTERVALS} intervals of keys, got another at query "
                f"{query} and key {begins[MOST_INTERVALS]}"
            )
        yield list(zip(begins, ends, strict=True))


class _Run(NamedTuple):
    """Intervals of consecutive lines: the first, and how far its ends move with each line; None for one line."""

    line: int
    begin: int
    end: int
    moves: Interval | None = None
    lines: int = 1

    @property
    def next_one(self) -> Interval:
        """The interval that continues the run."""
        begins, ends = self.moves or (0, 0)
        return self.begin + begins * self.lines, self.end + ends * self.lines

    @property
    def slice_of_rows(self) -> Slice:
        """The slice, where lines are queries."""
        begins, ends = self.moves or (0, 0)
        return Slice(
            self.line, self.line + self.lines, self.begin, self.end + ends * (self.lines - 1),
            self.begin - self.line if begins else None, self.end - 1 - self.line if ends else None,
        )  # fmt: skip


def slices_of_rows(rows: Iterable[list[Interval]]) -> Iterator[Slice]:
    """Yield the slices of the intervals of keys that each query sees: straight and diagonal edges become one slice."""
    runs: dict[Interval, _Run] = {}  # by the interval that continues each
    for line, intervals in enumerate(chain(rows, [[]])):
        continued = {}
        for begin, end in intervals:
            run = _continued(runs, begin, end) or _Run(line, begin, end)
            continued[run.next_one] = run
        yield from (run.slice_of_rows for run in runs.values())
        runs = continued


def _continued(runs: dict[Interval, _Run], begin: int, end: int) -> _Run | None:
    """Remove the run that the interval continues, and return it longer by a line."""
    known = runs.get((begin, end))
    if known is not None and known.moves is not None:
        del runs[begin, end]
        return known._replace(lines=known.lines + 1)
    for begins, ends in product((0, 1), repeat=2):
        before = begin - begins, end - ends
        if before in runs and runs[before].moves is None:
            return runs.pop(before)._replace(moves=(begins, ends), lines=2)
    return None


def slices_of_columns(columns: Iterable[list[Interval]]) -> Iterator[Slice]:
    """Yield the slices of the intervals of queries that see each key."""
    for one in slices_of_rows(columns):
        high, low = (None if bound is None else -bound for bound in (one.low, one.high))
        yield Slice(one.k0, one.k1, one.q0, one.q1, low, high)


# --- token types ------------------------------------------------------------------------------------------------------


def spans_from_token_types(token_type_ids: Integers | Ranges, types: Sequence[int] = (1,)) -> list[Interval]:
    """Return the spans of consecutive tokens of some types, for `Pattern.spans`, as of the images of Gemma 3.

    Two images without a token between them are one span, as in these models.

    Args:
        token_type_ids: (tokens,) or (1, tokens) integers, of the whole sequence.
        types: that see both ways: (1,) in Gemma 3, (1, 2) for images and videos in Gemma 4.

    Raises:
        ValueError: the types are of several rows, or no integers.
    """
    array = _array("token_type_ids", token_type_ids)
    if not isinstance(types, (list, tuple)) or not all(map(is_integer, types)):
        raise ValueError(f"types must be a list of integers, as (1,), got {types!r}")
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"token_type_ids must be integers of one row, (tokens,) or (1, tokens), got {array.dtype} of shape "
            f"{array.shape}: rows with other images have other masks"
        )
    edges = np.diff(np.isin(array, types).astype(np.int8), prepend=0, append=0)
    return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))


# --- arguments --------------------------------------------------------------------------------------------------------


def _of_pattern(pattern: Pattern, tokens: int) -> list[Slice]:
    """Return the slices of a pattern of one grid that is everything: in its documents, window and causality."""
    pattern.validate_tokens(tokens)
    grids = [(b.segment_length, b.dilation_rate, b.heads) for b in pattern.branches]
    if grids != [(None, 1, None)]:
        raise ValueError(
            "pattern must have one branch for all heads, without segments and rates, to be slices, got "
            f"{len(grids)} with (segment_length, dilation_rate, heads) {grids}"
        )
    edges = [0, tokens] if pattern.packed is None else list(accumulate(pattern.packed, initial=0))
    slices = []
    for one in slices_seen(pattern.branches[0], pattern.causal):
        q0, q1, k0, k1, _, _ = one.limits
        first, last = bisect_right(edges, max(q0, k0)) - 1, bisect_left(edges, min(q1, k1, tokens))
        squares = (Slice(a, b, a, b) for a, b in pairwise(edges[max(first, 0) : last + 1]))
        slices += [both for square in squares if (both := meet(one, square)) is not None]
    return slices


def _checked(slices: object, tokens: int | None = None) -> tuple[Slice, ...]:
    if isinstance(slices, Pattern) and tokens is not None:
        slices = _of_pattern(slices, tokens)
    disjoint = checked_slices(slices)
    if disjoint is None:
        raise ValueError("slices must be a list of (q0, q1, k0, k1, low, high), got None")
    if tokens is not None:
        check_slices_fit(disjoint, tokens, tokens)
        disjoint = checked_slices([one for x in disjoint if (one := meet(x, Slice(0, tokens, 0, tokens)))])
        assert disjoint is not None
    return disjoint


def _array(name: str, value: object) -> np.ndarray:
    """Return an array of a tensor or list; ValueError for rows of unequal length."""
    try:
        return np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    except ValueError:
        raise ValueError(f"{name} must be integers in rows of equal length, got {value!r}") from None


def _ranges(name: str, ranges: object) -> list[Interval]:
    listed = _listed(ranges)
    for ends in listed:
        if not isinstance(ends, (list, tuple)) or len(ends) != 2 or ends[1] is None:
            raise ValueError(f"{name} must hold half-open ranges (begin, end), got {ends!r}")
        check_range(f"a range of {name}", *ends)
    return [(begin, end) for begin, end in listed]


def _listed(entries: object) -> list[Any]:
    entries = plain(entries)
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"a list or tensor of integers is needed, got {entries!r}")
    return list(entries)


def _got(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
