"""Coverage of a sample of Cases: the number of Cases with each named feature, a predicate of the Case alone.

It shows a strategy that no longer draws a feature, and a run that was too short to test one. Masks are those of
`reference.fast_oracle`, one branch at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.call_limits import MIN_ROWS
from reference.fast_oracle import multiplicity
from reference.head_groups import ALL_TO_ALL, AUTO, BY_HOST
from reference.pattern import Branch, Pattern
from reference.shards import Shards
from reference.slices import Slice
from verification.case import AGAIN, CPU_KERNELS, DTYPES, EXCHANGES, LSE, ORDERS, ORDERS_BY_CHUNK, VALUES, Case
from verification.check.workspace_limits import MIN_BLOCK
from verification.report.text import listing, paragraph
from verification.wording import counted

RARE = 0.02  # of all Cases
_LISTED = ("hilbert", "shuffled", "permuted", "swapped")
HUGE = 100.0  # 16-bit scores of this size, or their differences, have no digits left after the point

Has = Callable[[Any], bool]  # of a Case or a TrainingCase
Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]


@lru_cache(maxsize=64)
def _pairs(branch: Branch, heads: int, tokens: int, documents: tuple[int, ...] | None, causal: bool = False) -> Flags:
    return np.asarray(multiplicity(Pattern((branch,), causal, documents), heads, tokens) > 0)


def _visible(case: Case, branch: Branch) -> Flags:
    """Return the branch's mask (H, n, n), with the Case's documents and causality."""
    return _pairs(branch, case.heads, case.tokens, case.pattern.documents, case.pattern.causal)


def _selected(case: Case) -> Flags:
    """Return (branches, H, n): True if the position sees a key in the branch."""
    return np.stack([_visible(case, branch).any(2) for branch in case.pattern.branches])


def _keys_by_rank(case: Case, branch: Branch) -> NDArray[np.float32]:
    """Return (H, n, p): the number of keys of each rank that a row sees in this branch."""
    on_rank = (case.shards().holder[:, None] == np.arange(len(case.ranks))).astype(np.float32)
    return _visible(case, branch).astype(np.float32) @ on_rank  # products of floats are fast


def _most_ranks(case: Case, branch: Branch) -> int:
    """Return the largest number of ranks whose keys one row sees."""
    return int((_keys_by_rank(case, branch) > 0).sum(-1).max())


def _begins(case: Case, length: int | None) -> Ints:
    """Return (n,): the start of each position's segment, or of its document if length is None."""
    return np.asarray(_pairs(Branch(length), 1, case.tokens, case.pattern.documents)[0].argmax(1))


def _any(has: Callable[[Case, Branch], bool]) -> Has:
    """Return a predicate: `has` holds for some branch."""
    return lambda case: any(has(case, branch) for branch in case.pattern.branches)


def _counts(case: Case) -> tuple[int, ...]:
    return case.shards().counts


def _length(case: Case, branch: Branch) -> int:
    """Return the segment length of the branch; without segments, that of the sequence."""
    return branch.segment_length or case.tokens


def _documents(case: Case) -> tuple[int, ...]:
    """Return the lengths of the documents; without any, the whole sequence is one."""
    return (case.tokens,) if case.pattern.documents is None else case.pattern.documents


def _tails(case: Case, branch: Branch) -> list[int]:
    """Return the tokens of each document's short last segment; 0 if there is none, or no other segment."""
    length = _length(case, branch)
    return [tokens % length if tokens > length else 0 for tokens in _documents(case)]


def _offsets(case: Case, branch: Branch) -> list[int]:
    """Return the offsets of the query heads that the branch serves."""
    return [offset for offset in branch.offsets(case.heads) if offset is not None]


def _windows(case: Case) -> set[int | None]:
    return {branch.window for branch in case.pattern.branches}


def _several(case: Case) -> bool:
    """Return True if more than one document has tokens."""
    return sum(length > 0 for length in _documents(case)) > 1


def _ends_by_a_shard(case: Case, edges: Iterable[int | None], shifts: Collection[int] = (-1, 0, 1)) -> bool:
    """Return True if an edge lies within one token of a shard's end, but not at an end of the sequence."""
    ends = set((np.flatnonzero(np.diff(case.shards().holder)) + 1).tolist())
    inner = [edge for edge in edges if edge is not None and 0 < edge < case.tokens]
    return any(edge + shift in ends for edge in inner for shift in shifts)


def _after_a_tail(case: Case, branch: Branch) -> bool:
    """Return True if a document begins behind the short last segment of another."""
    ends = accumulate(_documents(case))
    return any(tail > 0 and end < case.tokens for tail, end in zip(_tails(case, branch), ends, strict=True))


def _has_dead_rows(case: Case) -> bool:
    return not _selected(case).any(0).all()


def _grouped(case: Case) -> Flags:
    """Return (branches, Hk, H / Hk, n): True if a position sees this key in the branch."""
    seen = np.stack([_visible(case, branch).any(1) for branch in case.pattern.branches])
    return seen.reshape(len(case.pattern.branches), case.kv_heads, -1, case.tokens)


def _keys_shared(case: Case) -> bool:
    """Return True if two query heads share a key, each in a branch that does not serve the other."""
    serves, read = np.asarray(_grouped(case).any(3)), np.asarray(_grouped(case).any(2))
    pairs = combinations(range(len(read)), 2)
    return any((read[a] & read[b])[~(serves[a] & serves[b]).any(1)].any() for a, b in pairs)


def _phases(case: Case, branch: Branch) -> int:
    """Return the largest number of different offsets among the query heads of one key/value head."""
    offsets, share = branch.offsets(case.heads), case.heads // case.kv_heads
    groups = (offsets[first : first + share] for first in range(0, case.heads, share))
    return max(len(set(group) - {None}) for group in groups)


def _hides(case: Case, branch: Branch) -> bool:
    """Return True if the window hides a key from some row."""
    return not np.array_equal(_visible(case, branch), _visible(case, replace(branch, window=None)))


def _any_window(has: Callable[[Case, Branch, int], bool]) -> Has:
    """Return a predicate: `has` holds for some branch whose window hides a key, and for that window."""
    return _any(lambda case, b: b.window is not None and _hides(case, b) and has(case, b, b.window))


def _cut(case: Case, branch: Branch, window: int, inner: Ints, outer: Ints | int) -> bool:
    """Return True if some row's window starts before the row's part. inner, outer: starts of the parts, and of what
    contains these."""
    row = _visible(case, branch).any((0, 2))
    return bool((row & (inner > outer) & (np.arange(case.tokens) - window < inner)).any())


def _rows_cut(case: Case, branch: Branch) -> bool:
    """Return True if a rank has more rows of one segment's grid than a kernel call takes."""
    return bool(_keys_by_rank(case, replace(branch, window=None)).max() > max(case.tokens_per_call, MIN_ROWS))


def _sliced(has: Callable[[Case, Branch, tuple[Slice, ...]], bool]) -> Has:
    """Return a predicate: `has` holds for some branch with slices of its own, and for these."""
    return _any(lambda case, b: b.slices is not None and has(case, b, b.slices))


def _any_slice(has: Callable[[Case, Slice], bool]) -> Has:
    """Return a predicate: `has` holds for some slice of some branch."""
    return _sliced(lambda case, b, slices: any(has(case, one) for one in slices))


def _edges(case: Case) -> list[int | None]:
    """Return the ends of all slices of queries and keys; None for open ones."""
    return [end for b in case.pattern.branches for one in b.slices or () for end in one[:4]]


def _shards_of(case: Case, one: Slice) -> int:
    """Return the number of ranks that hold queries of a slice."""
    return len(set(case.shards().holder[one.q0 : one.q1].tolist()))


def _intervals(case: Case, branch: Branch) -> int:
    """Return the most intervals of keys that a row sees."""
    visible = _visible(case, branch)
    return int((visible[..., :1].sum(-1) + (visible[..., 1:] & ~visible[..., :-1]).sum(-1)).max())


def _rank_without_a_key(case: Case) -> bool:
    """Return True if a rank has rows, and none of them sees a key."""
    sees = np.asarray(_selected(case).any((0, 1)))
    return any(len(rows) and not sees[rows].any() for rows in case.shards().positions)


def _scores_are_large(case: Case) -> bool:
    """Return True if a kernel call's scores would need more memory than the rank's queries or keys, and are computed in
    blocks of rows. False unless memory is measured and the pattern is dense."""
    if not case.measured or case.kernel != "math" or case.pattern.branches != (Branch(),):
        return False
    rows = min(max(_counts(case)), max(case.tokens_per_call, MIN_ROWS))
    keys = min(case.tokens_per_call, max(_counts(case)))
    return rows > MIN_BLOCK and rows * keys > max(_counts(case)) * case.head_dim


def _descends(case: Case) -> bool:
    """Return True if some rank has two runs of at least two adjacent positions in descending order."""
    for positions in case.shards().positions:
        runs = [x for x in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1) if len(x) > 1]
        if any(after[0] < before[0] for before, after in pairwise(runs)):
            return True
    return False


def _crosses(has: Has, case: Case) -> bool:
    return case.keys is not None and has(case)


def _some_rank(some: Shards, none: Shards) -> bool:
    """Return True if a rank has tokens of the one and none of the other."""
    return any(a > 0 == b for a, b in zip(some.counts, none.counts, strict=True))


GROUPS: dict[str, dict[str, Has]] = {
    "ranks and tokens": {
        "subgroup": lambda case: len(case.ranks) < case.world,
        "subgroup without rank 0": lambda case: case.ranks[0] > 0,
        "several hosts": lambda case: case.hosts > 1,
        "empty shard": lambda case: 0 in _counts(case),
        "fewer tokens than ranks": lambda case: case.tokens < len(case.ranks),
        "ranks do not divide tokens": lambda case: bool(case.tokens % len(case.ranks)),
        "uneven cuts": lambda case: case.cuts is not None and max(_counts(case)) - min(_counts(case)) > 1,
        "one token": lambda case: case.tokens == 1,
        "more than 32 tokens": lambda case: case.tokens > 32,
    },
    "pattern": {
        "dense": lambda case: case.pattern.branches == (Branch(),),
        "causal": lambda case: case.pattern.causal,
        "not causal": lambda case: not case.pattern.causal,
        "segments": _any(lambda case, b: _length(case, b) < max(_documents(case))),
        "segment on several ranks": _any(lambda case, b: _most_ranks(case, Branch(b.segment_length)) > 1),
        "w > n": _any(lambda case, b: _length(case, b) > case.tokens),
        "short tail": _any(lambda case, b: any(_tails(case, b))),
        "offset past a short tail": _any(lambda case, b: any(0 < x <= max(_offsets(case, b)) for x in _tails(case, b))),
        "dilation": _any(lambda case, b: b.dilation_rate > 1),
        "r > w": _any(lambda case, b: b.dilation_rate > _length(case, b)),
        "r does not divide w": _any(lambda case, b: bool(_length(case, b) % b.dilation_rate)),
        "offset": _any(lambda case, b: any(_offsets(case, b))),
        "offset past the segment": _any(lambda case, b: max(_offsets(case, b)) >= _length(case, b)),
        "offsets by head": _any(lambda case, b: len(set(_offsets(case, b))) > 1),
        "one branch": lambda case: len(case.pattern.branches) == 1,
        "several branches": lambda case: len(case.pattern.branches) > 1,
        "several branches on a row": lambda case: bool((_selected(case).sum(0) > 1).any()),
        "branch for some heads only": _any(lambda case, b: len(_offsets(case, b)) < case.heads),
        "head without branch": lambda case: any(
            all(b.offsets(case.heads)[head] is None for b in case.pattern.branches) for head in range(case.heads)
        ),
        "dead row": _has_dead_rows,
        "dead key": lambda case: not _grouped(case).any((0, 2)).all(),
        "nothing but dead rows": lambda case: not _selected(case).any(),
    },
    "documents": {
        "documents": lambda case: case.pattern.documents is not None,
        "no documents": lambda case: case.pattern.documents is None,
        "several documents": _several,
        "empty document": lambda case: 0 in _documents(case),
        "document of one token": lambda case: _several(case) and 1 in _documents(case),
        "equal documents": lambda case: max(Counter(x for x in _documents(case) if x > 1).values(), default=0) > 1,
        "document on several ranks": lambda case: _several(case) and _most_ranks(case, Branch()) > 1,
        "document on three ranks": lambda case: _several(case) and _most_ranks(case, Branch()) > 2,
        "document that ends by a shard's end": lambda case: _ends_by_a_shard(case, accumulate(_documents(case))),
        "document after a short tail": _any(_after_a_tail),
    },
    "windows": {
        "window": lambda case: _windows(case) != {None},
        "no window": lambda case: _windows(case) == {None},
        "window 0": lambda case: 0 in _windows(case),
        "window that hides nothing": _any(lambda case, b: b.window is not None and not _hides(case, b)),
        "window that is not causal": _any_window(lambda case, b, w: not case.pattern.causal),
        "window with dilation": _any_window(lambda case, b, w: b.dilation_rate > 1),
        "window that ends between steps": _any_window(lambda case, b, w: w % b.dilation_rate > 0),
        "window cut by a segment": _any_window(
            lambda case, b, w: _cut(case, b, w, _begins(case, b.segment_length), _begins(case, None))
        ),
        "window cut by a document": _any_window(lambda case, b, w: _cut(case, b, w, _begins(case, None), 0)),
        "window over a shard's end": _any_window(lambda case, b, w: _most_ranks(case, b) > 1),
        "window on three ranks": _any_window(lambda case, b, w: _most_ranks(case, b) > 2),
        "window in some branches only": lambda case: None in _windows(case) != {None},
        "several windows": lambda case: len(_windows(case) - {None}) > 1,
    },
    "slices": {
        "slices": lambda case: case.pattern.has_slices,
        "no slices": lambda case: not case.pattern.has_slices,
        "several slices": _sliced(lambda case, b, slices: len(slices) > 1),
        "no pair in slices": _sliced(lambda case, b, slices: not _visible(case, b).any()),
        "slices in some branches only": lambda case: len({b.slices is None for b in case.pattern.branches}) > 1,
        "heads with different slices": lambda case: (
            len({b.slices for b in case.pattern.branches if b.heads is not None and b.slices is not None}) > 1
        ),
        "slices with dilation": _sliced(lambda case, b, slices: b.dilation_rate > 1),
        "slices with segments": _sliced(lambda case, b, slices: _length(case, b) < case.tokens),
        "slices with a window": _sliced(lambda case, b, slices: b.window is not None and _hides(case, b)),
        "slices with documents": lambda case: case.pattern.has_slices and _several(case),
        "slices of later keys": _sliced(lambda case, b, slices: bool(np.triu(_visible(case, b), 1).any())),
        "band away from the diagonal": _any_slice(
            lambda case, one: None not in one[4:] and not (one.limits[4] <= 0 <= one.limits[5])
        ),
        "two bands in a listed layout": _sliced(
            lambda case, b, slices: case.order in _LISTED and sum(one.high is not None for one in slices) > 1
        ),
        "two intervals of keys": _sliced(lambda case, b, slices: _intervals(case, b) > 1),
        "slice that ends with a shard": lambda case: _ends_by_a_shard(case, _edges(case), (0,)),
        "slice that ends beside a shard's end": lambda case: _ends_by_a_shard(case, _edges(case), (-1, 1)),
        "slice on two shards": _any_slice(lambda case, one: one.q1 is not None and _shards_of(case, one) == 2),
        "slice on three shards": _any_slice(lambda case, one: one.q1 is not None and _shards_of(case, one) > 2),
        "slice longer than a shard": _any_slice(
            lambda case, one: (one.q1 or 0) - one.q0 > max(_counts(case)) and len(case.ranks) > 1
        ),
        "rank whose rows see no key of slices": lambda case: case.pattern.has_slices and _rank_without_a_key(case),
    },
    "same bits": {
        "chunks of the same bits": lambda case: case.same_bits is not None,
        "several chunks on a rank": lambda case: 0 < (case.same_bits or 0) < max(_counts(case)),
        "chunks of several documents": lambda case: case.same_bits is not None and _several(case),
    },
    "heads and sizes": {
        "MHA": lambda case: 1 < case.heads == case.kv_heads,
        "GQA": lambda case: 1 < case.kv_heads < case.heads,
        "MQA": lambda case: 1 == case.kv_heads < case.heads,
        "branches of other heads read one key": _keys_shared,
        "several phases per key/value head": _any(lambda case, b: _phases(case, b) > 1),
        "several batches": lambda case: case.batch > 1,
        "head dim 1": lambda case: case.head_dim == 1,
        "head dim no power of two": lambda case: case.head_dim.bit_count() > 1,
        "head dim >= 32": lambda case: case.head_dim >= 32,
    },
    "scores and values": {
        "values of fewer dims than keys": lambda case: case.dims[1] < case.head_dim,
        "values of more dims than keys": lambda case: case.dims[1] > case.head_dim,
        "softcap": lambda case: case.softcap is not None,
        "softcap of 1 or less": lambda case: case.softcap is not None and case.softcap <= 1,
        "sinks": lambda case: case.sinks is not None,
        "large sinks": lambda case: case.sinks == "large",
        "sinks of -inf": lambda case: case.sinks == "some",
        "sinks wider than q": lambda case: case.sinks is not None and case.sinks_dtype != case.torch_dtype,
        "row that sees a sink alone": lambda case: case.sinks is not None and _has_dead_rows(case),
        "sinks and softcap": lambda case: case.sinks is not None and case.softcap is not None,
    },
    "buckets": {
        "bucket by default": lambda case: case.bucket is None,
        "bucket of one token": lambda case: case.bucket == 1,
        "bucket below a shard": lambda case: case.tokens_per_call < max(_counts(case)),
        "bucket beyond a shard": lambda case: case.tokens_per_call > min(_counts(case)),
        "bucket beyond the sequence": lambda case: case.tokens_per_call > case.tokens,
        "query rows cut": _any(_rows_cut),
    },
    "numbers": {
        "explicit scale": lambda case: case.scale is not None,
        "scale <= 0": lambda case: case.softmax_scale <= 0,
        "huge scores": lambda case: (
            case.values == "huge" or case.score_scale * abs(case.softmax_scale) * case.head_dim**0.5 >= HUGE / 4
        ),
        "strided": lambda case: case.strided,
        "scores larger than queries": _scores_are_large,
        "descending stretches": _descends,
        "measured": lambda case: case.measured,
    },
}


def _on_one_sequence(has: Has) -> Has:
    """Return the predicate for Cases without keys of their own: masks of the others are no squares."""
    return lambda case: case.keys is None and has(case)


GROUPS |= {
    group: {name: _on_one_sequence(has) for name, has in GROUPS[group].items()}
    for group in ("pattern", "documents", "windows", "slices", "heads and sizes", "scores and values", "buckets")
}
GROUPS["cross-attention"] = {
    name: partial(_crosses, has)
    for name, has in {
        "fewer keys than queries": lambda case: case.key_tokens < case.tokens,
        "more keys than queries": lambda case: case.key_tokens > case.tokens,
        "as many keys as queries": lambda case: case.key_tokens == case.tokens,
        "queries alone on a rank": lambda case: _some_rank(case.shards(), case.key_shards()),
        "keys alone on a rank": lambda case: _some_rank(case.key_shards(), case.shards()),
        "causal cross-attention": lambda case: case.pattern.causal,
        "cross-attention with segments": _any(lambda case, b: b.segment_length is not None),
        "cross-attention with a window": lambda case: _windows(case) != {None},
        "cross-attention with slices": lambda case: case.pattern.has_slices,
        "cross-attention with documents": lambda case: case.pattern.documents is not None,
    }.items()
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "order": (*ORDERS, *ORDERS_BY_CHUNK), "exchange": EXCHANGES, "kernel": CPU_KERNELS,
    "dtype": tuple(DTYPES), "values": VALUES, "lse": LSE, "again": AGAIN,
}  # fmt: skip


def _chosen(name: str, choice: str) -> Has:
    return lambda case: getattr(case, name) == choice


GROUPS |= {name: {f"{name} {x}": _chosen(name, x) for x in choices} for name, choices in _CHOICES.items()}
GROUPS["exchange"] |= {
    "heads among neighbours": lambda case: case.exchange.startswith(f"{ALL_TO_ALL}:"),
    "keys among neighbours": lambda case: f"+{ALL_TO_ALL}:" in case.exchange,
    "keys round neighbours": lambda case: case.exchange.startswith("ring:"),
    "exchange by hosts": lambda case: case.exchange in BY_HOST and case.hosts > 1,
    "exchange auto": _chosen("exchange", AUTO),
}
# Features that the claim of another implementation may leave out, whose absence a reader should know of.
OF_CLAIMS = (
    *("causal", "not causal", "documents", "window", "slices", "segments", "dilation"),
    *("GQA", "several batches", "explicit scale", "scale <= 0", "sinks", "softcap", "values of fewer dims than keys"),
    *("fewer keys than queries", "subgroup", "uneven cuts", "empty shard", "lse returned", "lse differentiated"),
    *(f"dtype {dtype}" for dtype in DTYPES),
)
NOT_LOOKED_AT = ("memory", "bytes sent", "speed", "files written", "warnings")  # of another implementation
SIZES = ("ranks", "data", "context", "tokens", "batch", "heads", "head_dim")  # fields of Cases of any kind
FEATURES: dict[str, Has] = {name: has for features in GROUPS.values() for name, has in features.items()}


@dataclass
class Coverage:
    """Number of Cases with each feature, and their largest sizes. groups: features by topic, by default those of
    `verification.case.Case`."""

    cases: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Has]] = field(default_factory=lambda: GROUPS)

    def __post_init__(self) -> None:
        self.counts = {name: 0 for features in self.groups.values() for name in features} | self.counts

    def add(self, case: Any) -> None:
        self.cases += 1
        sizes = {name: getattr(case, name) for name in SIZES if hasattr(case, name)}
        self._enlarge({name: size if isinstance(size, int) else len(size) for name, size in sizes.items()})
        for features in self.groups.values():
            for name, has in features.items():
                self.counts[name] += has(case)

    def add_all(self, other: Coverage) -> None:
        self.cases += other.cases
        self.counts = {name: count + other.counts[name] for name, count in self.counts.items()}
        self._enlarge(other.largest)

    def _enlarge(self, sizes: Mapping[str, int]) -> None:
        self.largest |= {name: max(size, self.largest.get(name, 0)) for name, size in sizes.items()}

    def missing(self) -> list[str]:
        """Return the features of no Case; those of attention out of OF_CLAIMS."""
        return [name for name in (OF_CLAIMS if self.groups is GROUPS else self.counts) if not self.counts[name]]

    def extent(self) -> str:
        """Return the largest sizes, what no Case had, and what is not looked at in another implementation."""
        listed = {"none had": self.missing(), "not looked at": NOT_LOOKED_AT}
        return "; ".join([self.sizes(), *(f"{what} {', '.join(names)}" for what, names in listed.items() if names)])

    def sizes(self) -> str:
        return f"largest drawn: {', '.join(f'{name} {size}' for name, size in self.largest.items())}"

    def to_dict(self) -> dict[str, int]:
        """Return the number of Cases of every feature, in order."""
        return dict(self.counts)

    def rarest(self) -> list[str]:
        """Return at most 5 lines of 80 columns: the features of no Case, and of fewer than RARE of the Cases."""
        missing = [name for name, count in self.counts.items() if not count]
        few = sorted((count, name) for name, count in self.counts.items() if 0 < count < RARE * self.cases)
        had = len(self.counts) - len(missing)
        lines = [f"coverage: {counted(self.cases, 'Case')} had {had} of {len(self.counts)} features"]
        lines += paragraph(f"  {self.sizes()}") if self.largest else []
        if missing:
            lines += listing("  none had: ", missing, 2)
        if few:
            lines += listing("  few had: ", (f"{name} ({count})" for count, name in few), 2)
        return lines

    def lines(self) -> list[str]:
        """Return lines of 80 columns: every feature with its number of Cases."""
        lines = [f"coverage: of {counted(self.cases, 'Case')} had"]
        for group, features in self.groups.items():
            counts = (f"{name.removeprefix(f'{group} ')}: {self.counts[name]}" for name in features)
            lines += paragraph(f"  {group} - " + ", ".join(counts), hanging="    ")
        return lines
