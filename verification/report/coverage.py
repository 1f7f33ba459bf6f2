"""What a sample of Cases covers: named features, told from the Case by definition, and how many Cases have each.

    coverage = Coverage()
    coverage.add(case)
    coverage.to_dict()     feature -> Cases
    coverage.rarest()      for a terminal: the features that few Cases have, or none
    coverage.lines()       for a terminal: all features

A strategy that no longer draws a feature shows here, and so does a run that was too short to say anything about one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.limits import LEAST_ROWS
from reference.pattern import Branch, Pattern
from verification.case import AGAIN, DTYPES, EXCHANGES, KERNELS, LSE, ORDERS, VALUES, Case
from verification.report.text import listing, paragraph
from verification.run.workspace import LEAST_BLOCK
from verification.wording import counted

Has = Callable[[Any], bool]  # of a Case, or of what takes its place
RARE = 0.02  # of all Cases
HUGE = 100.0  # of this size, a score of 16 bits or a difference of two would lose all digits after the point


# --- branches, one query head at a time -------------------------------------------------------------------------------


def _length(case: Case, branch: Branch) -> int:
    """Of the branch's segments; of the whole sequence where it has none."""
    return case.tokens if branch.segment_length is None else branch.segment_length


def _documents(case: Case) -> tuple[int, ...]:
    """Their lengths; the whole sequence is one where there are none."""
    return (case.tokens,) if case.pattern.documents is None else case.pattern.documents


def _tails(case: Case, branch: Branch) -> list[int]:
    """Of each document: tokens of a last segment that is shorter than the others; 0 if there is none, or only that."""
    length = _length(case, branch)
    return [tokens % length if tokens > length else 0 for tokens in _documents(case)]


def _offsets(case: Case, branch: Branch) -> list[int]:
    """Of the query heads that the branch serves."""
    return [offset for offset in branch.offsets(case.heads) if offset is not None]


def _phases(case: Case, branch: Branch) -> int:
    """The most different offsets among the query heads of one key/value head."""
    offsets, share = branch.offsets(case.heads), case.heads // case.kv_heads
    groups = (offsets[first : first + share] for first in range(0, case.heads, share))
    return max(len({offset for offset in group if offset is not None}) for group in groups)


def _serving(case: Case) -> list[int]:
    """Branches for each query head."""
    every = [branch.offsets(case.heads) for branch in case.pattern.branches]
    return [sum(offsets[head] is not None for offsets in every) for head in range(case.heads)]


def _any_branch(has: Callable[[Case, Branch], bool]) -> Has:
    return lambda case: any(has(case, branch) for branch in case.pattern.branches)


# --- pairs ------------------------------------------------------------------------------------------------------------


def _begins(documents: Sequence[int]) -> NDArray[np.int64]:
    """Of the document of each position."""
    lengths = np.asarray(documents)
    return np.repeat(np.cumsum(lengths) - lengths, lengths)


def _cells(case: Case, branch: Branch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each position: the one at which its segment begins, and how far behind it lies."""
    position, begin = np.arange(case.tokens), _begins(_documents(case))
    local = (position - begin) % _length(case, branch)
    return position - local, local


@lru_cache(maxsize=64)
def _selected(pattern: Pattern, heads: int, tokens: int) -> NDArray[np.bool_]:
    """(branches, H, n): whether a branch selects a position for a query head."""
    found = np.zeros((len(pattern.branches), heads, tokens), np.bool_)
    position = np.arange(tokens) - _begins((tokens,) if pattern.documents is None else pattern.documents)
    for number, branch in enumerate(pattern.branches):
        local = position % (branch.segment_length or tokens)
        for head, offset in enumerate(branch.offsets(heads)):
            if offset is not None:
                found[number, head] = (local >= offset) & ((local - offset) % branch.dilation_rate == 0)
    return found


def _rows_selected(case: Case) -> NDArray[np.bool_]:
    """(H, n). A selected position sees itself, so these are the rows that see something."""
    return np.asarray(_selected(case.pattern, case.heads, case.tokens).any(0))


def _branches_overlap(case: Case) -> bool:
    """Some row sees keys by more than one branch."""
    return bool((_selected(case.pattern, case.heads, case.tokens).sum(0) > 1).any())


def _keys_selected(case: Case) -> NDArray[np.bool_]:
    """(Hk, n), likewise: the keys that some row sees."""
    return np.asarray(_rows_selected(case).reshape(case.kv_heads, -1, case.tokens).any(1))


def _keys_shared(case: Case) -> bool:
    """A key is read by two query heads of its key/value head, each by a branch that leaves the other out."""
    branches = _selected(case.pattern, case.heads, case.tokens)
    grouped = branches.reshape(len(branches), case.kv_heads, -1, case.tokens)  # (branches, Hk, H / Hk, n)
    serves, read = np.asarray(grouped.any(3)), np.asarray(grouped.any(2))
    for one, other in combinations(range(len(branches)), 2):
        apart = ~(serves[one] & serves[other]).any(1)
        if bool((read[one] & read[other])[apart].any()):
            return True
    return False


def _rows_cut(case: Case) -> bool:
    """A rank holds more rows of one segment's grid than a kernel call takes: they are taken in parts."""
    most = max(case.tokens_per_call, LEAST_ROWS)
    for branch in case.pattern.branches:
        segments, within = _cells(case, branch)
        for held in case.shards().positions:
            segment, local = segments[held], within[held]
            for offset in set(_offsets(case, branch)):
                chosen = segment[(local >= offset) & ((local - offset) % branch.dilation_rate == 0)]
                if chosen.size and np.bincount(chosen).max() > most:
                    return True
    return False


def _divided(case: Case, branch: Branch) -> bool:
    """Some segment lies with more than one rank."""
    holder, (segment, _) = case.shards().holder, _cells(case, branch)
    return bool(((segment[1:] == segment[:-1]) & (holder[1:] != holder[:-1])).any())


def _several(case: Case) -> bool:
    """More than one document that has tokens."""
    return sum(length > 0 for length in _documents(case)) > 1


def _ranks_of_documents(case: Case) -> int:
    """The most ranks that hold tokens of one of several documents."""
    if not _several(case):
        return 0
    holders = np.split(np.asarray(case.shards().holder), np.cumsum(_documents(case))[:-1])
    return max(len(np.unique(of_document)) for of_document in holders)


def _equal_documents(case: Case) -> bool:
    lengths = [length for length in _documents(case) if length > 1]
    return len(set(lengths)) < len(lengths)


def _after_a_tail(case: Case, branch: Branch) -> bool:
    """A document begins behind a segment that is shorter than the others of its own."""
    ends = accumulate(_documents(case))
    return any(tail > 0 and end < case.tokens for tail, end in zip(_tails(case, branch), ends, strict=True))


def _ends_by_a_shard(case: Case) -> bool:
    """A document ends where a rank's tokens end, or one before or behind, and not with the sequence."""
    ends = set((np.flatnonzero(np.diff(case.shards().holder)) + 1).tolist())
    inner = [end for end in accumulate(_documents(case)) if 0 < end < case.tokens]
    return any(end + moved in ends for end in inner for moved in (-1, 0, 1))


def _scores_are_large(case: Case) -> bool:
    """A kernel call takes so many keys that a score for each would take more than the rank's queries, or than the keys
    themselves: they are computed in blocks of rows. Told where it is measured, of dense patterns."""
    if not case.measured or case.kernel != "math" or case.pattern.branches != (Branch(),):
        return False
    rows = min(max(_counts(case)), max(case.tokens_per_call, LEAST_ROWS))
    keys = min(case.tokens_per_call, max(_counts(case)))
    return rows > LEAST_BLOCK and rows * keys > max(_counts(case)) * case.head_dim


def _descends(case: Case) -> bool:
    """Some rank holds a stretch of neighbours, and after it an earlier one of at least two positions."""
    for held in case.shards().positions:
        ends = np.flatnonzero(np.diff(held) != 1)
        stretches = [x for x in np.split(held, ends + 1) if len(x) > 1]
        if any(after[0] < before[0] for before, after in pairwise(stretches)):
            return True
    return False


# --- features ---------------------------------------------------------------------------------------------------------


def _counts(case: Case) -> tuple[int, ...]:
    return case.shards().counts


def _scores_are_huge(case: Case) -> bool:
    return case.values == "huge" or case.score_scale * abs(case.softmax_scale) * case.head_dim**0.5 >= HUGE / 4


GROUPS: dict[str, dict[str, Has]] = {
    "ranks and tokens": {
        "subgroup": lambda case: len(case.ranks) < case.world,
        "subgroup without rank 0": lambda case: case.ranks[0] > 0,
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
        "segments": _any_branch(lambda case, b: _length(case, b) < max(_documents(case))),
        "segment on several ranks": _any_branch(_divided),
        "w > n": _any_branch(lambda case, b: _length(case, b) > case.tokens),
        "short tail": _any_branch(lambda case, b: any(_tails(case, b))),
        "offset past a short tail": _any_branch(
            lambda case, b: any(0 < tail <= max(_offsets(case, b)) for tail in _tails(case, b))
        ),
        "dilation": _any_branch(lambda case, b: b.dilation_rate > 1),
        "r > w": _any_branch(lambda case, b: b.dilation_rate > _length(case, b)),
        "r does not divide w": _any_branch(lambda case, b: bool(_length(case, b) % b.dilation_rate)),
        "offset": _any_branch(lambda case, b: any(_offsets(case, b))),
        "offset past the segment": _any_branch(lambda case, b: max(_offsets(case, b)) >= _length(case, b)),
        "offsets by head": _any_branch(lambda case, b: len(set(_offsets(case, b))) > 1),
        "one branch": lambda case: len(case.pattern.branches) == 1,
        "several branches": lambda case: len(case.pattern.branches) > 1,
        "several branches on a row": _branches_overlap,
        "branch for some heads only": _any_branch(lambda case, b: len(_offsets(case, b)) < case.heads),
        "head without branch": lambda case: 0 in _serving(case),
        "dead row": lambda case: not _rows_selected(case).all(),
        "dead key": lambda case: not _keys_selected(case).all(),
        "nothing but dead rows": lambda case: not _rows_selected(case).any(),
    },
    "documents": {
        "documents": lambda case: case.pattern.documents is not None,
        "no documents": lambda case: case.pattern.documents is None,
        "several documents": _several,
        "empty document": lambda case: 0 in _documents(case),
        "document of one token": lambda case: _several(case) and 1 in _documents(case),
        "equal documents": _equal_documents,
        "document on several ranks": lambda case: _ranks_of_documents(case) > 1,
        "document on three ranks": lambda case: _ranks_of_documents(case) > 2,
        "document that ends by a shard's end": _ends_by_a_shard,
        "document after a short tail": _any_branch(_after_a_tail),
    },
    "heads and sizes": {
        "MHA": lambda case: 1 < case.heads == case.kv_heads,
        "GQA": lambda case: 1 < case.kv_heads < case.heads,
        "MQA": lambda case: 1 == case.kv_heads < case.heads,
        "branches of other heads read one key": _keys_shared,
        "several phases per key/value head": _any_branch(lambda case, b: _phases(case, b) > 1),
        "several batches": lambda case: case.batch > 1,
        "head dim 1": lambda case: case.head_dim == 1,
        "head dim no power of two": lambda case: case.head_dim.bit_count() > 1,
        "head dim >= 32": lambda case: case.head_dim >= 32,
    },
    "buckets": {
        "bucket by default": lambda case: case.bucket is None,
        "bucket of one token": lambda case: case.bucket == 1,
        "bucket below a shard": lambda case: case.tokens_per_call < max(_counts(case)),
        "bucket beyond a shard": lambda case: case.tokens_per_call > min(_counts(case)),
        "bucket beyond the sequence": lambda case: case.tokens_per_call > case.tokens,
        "query rows cut": _rows_cut,
    },
    "numbers": {
        "explicit scale": lambda case: case.scale is not None,
        "scale <= 0": lambda case: case.softmax_scale <= 0,
        "huge scores": _scores_are_huge,
        "strided": lambda case: case.strided,
        "scores larger than queries": _scores_are_large,
        "descending stretches": _descends,
        "measured": lambda case: case.measured,
    },
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "order": ORDERS,
    "exchange": EXCHANGES,
    "kernel": tuple(kernel for kernel in KERNELS if kernel != "cudnn"),  # which is for GPUs alone
    "dtype": tuple(DTYPES),
    "values": VALUES,
    "lse": LSE,
    "again": AGAIN,
}


def _chosen(name: str, choice: str) -> Has:
    return lambda case: getattr(case, name) == choice


for _name, _choices in _CHOICES.items():
    GROUPS[_name] = {f"{_name} {choice}": _chosen(_name, choice) for choice in _choices}

FEATURES: dict[str, Has] = {name: has for features in GROUPS.values() for name, has in features.items()}


# --- counting ---------------------------------------------------------------------------------------------------------


@dataclass
class Coverage:
    """Counts, Case by Case. groups: the features that are counted, by topic; those of `verification.case.Case`."""

    cases: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    groups: Mapping[str, Mapping[str, Has]] = field(default_factory=lambda: GROUPS)

    def __post_init__(self) -> None:
        self.counts = {name: 0 for features in self.groups.values() for name in features} | self.counts

    def add(self, case: Any) -> None:
        self.cases += 1
        for features in self.groups.values():
            for name, has in features.items():
                self.counts[name] += has(case)

    def add_all(self, other: Coverage) -> None:
        self.cases += other.cases
        self.counts = {name: count + other.counts[name] for name, count in self.counts.items()}

    def to_dict(self) -> dict[str, int]:
        """Feature -> Cases, all features, in their order."""
        return dict(self.counts)

    def rarest(self) -> list[str]:
        """At most 5 lines of 80 columns: the features that no Case has, and those of fewer than RARE of the Cases."""
        missing = [name for name, count in self.counts.items() if not count]
        few = sorted((count, name) for name, count in self.counts.items() if 0 < count < RARE * self.cases)
        had = len(self.counts) - len(missing)
        lines = [f"coverage: {counted(self.cases, 'Case')} had {had} of {len(self.counts)} features"]
        if missing:
            lines += listing("  none had: ", missing, 2)
        if few:
            lines += listing("  few had: ", (f"{name} ({count})" for count, name in few), 2)
        return lines

    def lines(self) -> list[str]:
        """Lines of 80 columns: every feature, with the number of Cases that have it."""
        lines = [f"coverage: of {counted(self.cases, 'Case')} had"]
        for group, features in self.groups.items():
            shown = (f"{name.removeprefix(f'{group} ')}: {self.counts[name]}" for name in features)
            lines += paragraph(f"  {group} - " + ", ".join(shown), hanging="    ")
        return lines


def count(cases: Iterable[Case]) -> dict[str, int]:
    """Feature -> how many of these Cases have it."""
    coverage = Coverage()
    for case in cases:
        coverage.add(case)
    return coverage.to_dict()
