"""Rows of a shard, or slots of a message, as a strided view wherever that is possible.

Segments of equal length that lie at equal distances are folded into one batch: (folds, length) rows at
start + fold * fold_step + i * step. All other rows are listed. Packed documents of equal length are folded at any
distances, then listed: one call and a copy take less time than many calls. For kernels that take sequences of several
lengths in one call, documents of any length are concatenated.

The example (see `ring.plan`): rank 0 holds ranges 0 and 2 of block 0, two rows in each of two segments. They differ
only in the segment, so they are one batch of two folds.

    start  step  length  fold_step  folds  rows of fold 0  rows of fold 1
    0      2     2       4          2      0 2             4 6
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ring.plan.ranges import Ints, group_starts, ragged_arange

# Fold scattered entries as strided views only if a view takes so many on average.
_MEMBERS_OF_A_FOLD = 4
_OBJECT = 512  # bytes of a small Python object, or of a tensor without its data


@dataclass(frozen=True, eq=False)
class Rows:
    """Indices (folds, length), computed from the steps or listed in `index`, (folds, length) int64.

    These are the rows of the first group of heads; the rows of group i lie i * head_step further on.
    """

    start: int
    step: int
    length: int
    fold_step: int = 0
    folds: int = 1
    index: torch.Tensor | None = None
    head_step: int = 0

    @classmethod
    def of(cls, index: Ints) -> Rows:
        """Build rows from a (folds, length) array, as a regular grid if they are one."""
        folds, length = index.shape
        start = int(index[0, 0])
        step = int(index[0, 1]) - start if length > 1 else 1
        fold_step = int(index[1, 0]) - start if folds > 1 else 0
        rows = cls(start, step, length, fold_step, folds)
        if step > 0 and fold_step >= 0 and np.array_equal(rows.listed(), index):
            return rows
        return replace(rows, index=torch.from_numpy(np.ascontiguousarray(index)))

    def listed(self) -> Ints:
        """Return all indices, (folds, length)."""
        if self.index is not None:
            return self.index.numpy()
        fold = self.fold_step * np.arange(self.folds)[:, None]
        return self.start + fold + self.step * np.arange(self.length)

    @property
    def nbytes(self) -> int:
        """Approximate bytes."""
        return _OBJECT + (0 if self.index is None else self.index.nbytes)

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for equal rows."""
        index = None if self.index is None else self.index.numpy().tobytes()
        return (self.start, self.step, self.length, self.fold_step, self.folds, self.head_step, index)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Concatenate rows with equal numbers of folds along their length. Rows that continue each other stay unlisted."""
    if len(parts) == 1:
        return parts[0]
    return _continued(parts) or Rows.of(np.concatenate([part.listed() for part in parts], axis=1))


def _continued(parts: Sequence[Rows]) -> Rows | None:
    """Return rows as one strided view if each part begins a step after the end of the part before; else None."""
    first = parts[0]
    step = first.step if first.length > 1 else parts[1].start - first.start
    end = first.start
    for part in parts:
        continues = part.index is None and part.start == end and (part.length == 1 or part.step == step)
        if not continues or step < 1 or part.fold_step != first.fold_step:
            return None
        end += part.length * step
    length = sum(part.length for part in parts)
    return Rows(first.start, step, length, first.fold_step if first.folds > 1 else 0, first.folds)


class FoldKind(Enum):
    """Arrangement of the entries that share a call."""

    EVEN = auto()  # a fold each, with first rows at equal distances
    LISTED = auto()  # a fold each, with first rows anywhere
    VARLEN = auto()  # concatenated in a single fold; lengths and steps may differ


class Fold(NamedTuple):
    """Entries that share a call; if EVEN or LISTED, they have equal steps and lengths."""

    members: Ints
    left_step: int = 0
    right_step: int = 0
    kind: FoldKind = FoldKind.EVEN

    def rows(self, start: Ints, fold_step: int, step: Ints, length: Ints) -> Rows:
        """Return the rows of all members. start, step, length: of all entries."""
        first, members = self.members[0], self.members
        if self.kind is FoldKind.EVEN and step[first] > 0:
            return Rows(int(start[first]), int(step[first]), int(length[first]), fold_step, folds=len(members))
        if self.kind is not FoldKind.VARLEN:
            return Rows.of(start[members][:, None] + step[first] * np.arange(length[first]))
        lengths = length[members]
        listed = np.repeat(start[members], lengths) + ragged_arange(lengths) * np.repeat(step[members], lengths)
        return Rows.of(listed[None])


def folds(signature: Sequence[Ints], segment: Ints, left: Ints, right: Ints, most: Ints) -> Iterator[Fold]:
    """Group entries of equal signature, in ascending order of segment, into folds of at most `most` members each.

    left, right: where an entry begins, such as its first query row and key row. A fold has at most one entry of each
    segment, so its rows are disjoint and can be written in place.
    """
    order, begins, d_left, d_right = _even_folds(signature, segment, left, right)
    yield from _cut_folds(order, begins, d_left, d_right, most, np.arange(len(begins) - 1))


def _even_folds(signature: Sequence[Ints], segment: Ints, left: Ints, right: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the order of entries by signature and segment, where the folds begin in it, with the end, and the
    distances on the left and right between neighbours in it.
    """
    order = np.lexsort((segment, *reversed(signature)))
    breaks = np.diff(segment[order]) == 0
    for column in signature:
        breaks |= np.diff(column[order]) != 0
    d_left, d_right = np.diff(left[order]), np.diff(right[order])
    breaks |= (d_left <= 0) | (d_right <= 0)
    # An entry also opens a fold if its distance differs from the one before: left starts 0 4 8 20 24 with equal
    # signatures are the folds (0 4 8), (20 24). The first distance of a fold has none to compare with.
    uneven = ~breaks[:-1] & ((np.diff(d_left) != 0) | (np.diff(d_right) != 0))
    begin_a_fold = np.ones(len(order) + 1, bool)
    begin_a_fold[1:-1] = breaks
    begin_a_fold[2:-1] |= uneven
    return order, np.flatnonzero(begin_a_fold), d_left, d_right


def _cut_folds(order: Ints, begins: Ints, d_left: Ints, d_right: Ints, most: Ints, which: Ints) -> Iterator[Fold]:
    """Yield some of the folds of `_even_folds`, in parts of at most `most` members."""
    for begin, end in zip(begins[which].tolist(), begins[which + 1].tolist(), strict=True):
        limit = int(most[order[begin]])
        for at in range(begin, end, limit):
            stop = min(at + limit, end)
            several = stop - at > 1
            yield Fold(order[at:stop], int(d_left[at]) if several else 0, int(d_right[at]) if several else 0)


def gathered_folds(
    signature: Sequence[Ints], segment: Ints, left: Ints, right: Ints, most: Ints, most_gathered: Ints
) -> Iterator[Fold]:
    """Group entries like `folds`, but make one fold of equal signatures at any distances where `folds` would make many.
    most_gathered: most members of such a fold.
    """
    order, begins, d_left, d_right = _even_folds(signature, segment, left, right)
    first, kind = order[begins[:-1]], _numbered(signature, order)
    parts = -(-np.diff(begins) // most[first])
    scattered = np.bincount(kind[first], parts) > 1 + np.bincount(kind) // _MEMBERS_OF_A_FOLD
    yield from _cut_folds(order, begins, d_left, d_right, most, np.flatnonzero(~scattered[kind[first]]))
    for layer in _layers(kind, segment, np.flatnonzero(scattered[kind])):
        limit = int(most_gathered[layer[0]])
        for at in range(0, len(layer), limit):
            members = layer[at : at + limit]
            yield Fold(members, kind=FoldKind.EVEN if len(members) == 1 else FoldKind.LISTED)


def _numbered(columns: Sequence[Ints], order: Ints) -> Ints:
    """Number the entries alike that are equal in all columns. order: in which such entries are neighbours."""
    number = np.empty_like(order)
    number[order] = np.cumsum(group_starts(*(column[order] for column in columns))) - 1
    return number


def varlen_folds(
    call: Sequence[Ints], signature: Sequence[Ints], segment: Ints, left: Ints, right: Ints, most: Ints,
    lengths: tuple[Ints, Ints], longest: int, limits: tuple[int, int],
) -> Iterator[Fold]:  # fmt: skip
    """Group entries like `folds`, but entries of small folds share calls with all that are equal in `call`. Entries
    longer than `longest` share none where they are at least half of the work.

    lengths: of every entry on the left and right; limits: the most of each that a call takes in total.
    """
    kind, work, long = _numbered(call, np.lexsort(call[::-1])), lengths[0] * lengths[1], np.maximum(*lengths) > longest
    short = ~long | (2 * np.bincount(kind, work * long) < np.bincount(kind, work))[kind]
    order, begins, d_left, d_right = _even_folds(signature, segment, left, right)
    small = short[order[begins[:-1]]] & (np.diff(begins) < _MEMBERS_OF_A_FOLD)
    left_over = [order[np.repeat(small, np.diff(begins))]]
    for fold in _cut_folds(order, begins, d_left, d_right, most, np.flatnonzero(~small)):
        if short[fold.members[0]] and len(fold.members) < _MEMBERS_OF_A_FOLD:
            left_over.append(fold.members)
        else:
            yield fold
    for layer in _layers(kind, segment, np.sort(np.concatenate(left_over))):
        ends, at = [np.cumsum(length[layer]) for length in lengths], 0
        while at < len(layer):
            before = [0 if not at else end[at - 1] for end in ends]
            stops = [np.searchsorted(end, b + m, side="right") for end, b, m in zip(ends, before, limits, strict=True)]
            stop = max(int(min(stops)), at + 1)
            yield Fold(layer[at:stop], kind=FoldKind.EVEN if stop == at + 1 else FoldKind.VARLEN)
            at = stop


def _layers(kind: Ints, segment: Ints, which: Ints) -> Iterator[Ints]:
    """Yield groups of the entries `which`, of one kind and different segments in ascending order: the first entry of
    each segment, then the second of each, and so on.
    """
    order = which[np.lexsort((segment[which], kind[which]))]
    first = np.flatnonzero(group_starts(kind[order], segment[order]))
    layer = ragged_arange(np.diff(np.append(first, len(order))))
    by_layer = np.lexsort((layer, kind[order]))
    order, begins = order[by_layer], np.flatnonzero(group_starts(kind[order][by_layer], layer[by_layer]))
    for begin, end in pairwise([*begins.tolist(), len(order)]):
        yield order[begin:end]
