"""What a sample of Cases covers: named features, told from the Case by definition, and how many Cases have each.

    coverage = Coverage()
    coverage.add(case)
    coverage.to_dict()     feature -> Cases
    coverage.rarest()      for a terminal: the features that few Cases have, or none
    coverage.lines()       for a terminal: all features

A strategy that no longer draws a feature shows here, and so does a run that was too short to say anything about one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from reference.limits import LEAST_ROWS
from reference.pattern import Branch
from verification.case import AGAIN, DTYPES, EXCHANGES, KERNELS, LSE, ORDERS, VALUES, Case
from verification.report.pattern_features import PATTERN_GROUPS, Has, any_branch, grids, selected
from verification.report.text import listing, paragraph
from verification.run.workspace import LEAST_BLOCK
from verification.wording import counted

RARE = 0.02  # of all Cases
HUGE = 100.0  # of this size, a score of 16 bits or a difference of two would lose all digits after the point


# --- what a Case comes to ---------------------------------------------------------------------------------------------


def _counts(case: Case) -> tuple[int, ...]:
    return case.shards().counts


def _phases(case: Case, branch: Branch) -> int:
    """The most different offsets among the query heads of one key/value head."""
    offsets, share = branch.offsets(case.heads), case.heads // case.kv_heads
    groups = (offsets[first : first + share] for first in range(0, case.heads, share))
    return max(len({offset for offset in group if offset is not None}) for group in groups)


def _keys_shared(case: Case) -> bool:
    """A key is read by two query heads of its key/value head, each by a branch that leaves the other out."""
    branches = selected(case.pattern, case.heads, case.tokens)
    grouped = branches.reshape(len(branches), case.kv_heads, -1, case.tokens)  # (branches, Hk, H / Hk, n)
    serves, read = np.asarray(grouped.any(3)), np.asarray(grouped.any(2))
    for one, other in combinations(range(len(branches)), 2):
        apart = ~(serves[one] & serves[other]).any(1)
        if bool((read[one] & read[other])[apart].any()):
            return True
    return False


def _rows_cut(case: Case) -> bool:
    """A rank holds more rows of one segment's grid than a kernel call takes: they are taken in parts."""
    most, holder = max(case.tokens_per_call, LEAST_ROWS), np.asarray(case.shards().holder)
    for branch in case.pattern.branches:
        for at, segment in grids(case, branch):
            for rank in np.unique(holder[at]):
                if np.bincount(segment[holder[at] == rank]).max() > most:
                    return True
    return False


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
    **PATTERN_GROUPS,
    "heads and sizes": {
        "MHA": lambda case: 1 < case.heads == case.kv_heads,
        "GQA": lambda case: 1 < case.kv_heads < case.heads,
        "MQA": lambda case: 1 == case.kv_heads < case.heads,
        "branches of other heads read one key": _keys_shared,
        "several phases per key/value head": any_branch(lambda case, b: _phases(case, b) > 1),
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
