"""Rows of a shard, or slots of a message, as a strided view wherever that is possible.

Segments of equal length that lie at equal distances are folded into one batch: (folds, length) rows at
start + fold * fold_step + i * step. Anything else is listed. Packed documents of equal length may lie at any distances;
they are folded too, and then listed, since one call and a copy take less time than many calls. For kernels that take
sequences of several lengths in one call, documents of any length are put one behind the other.

The example (see `ring.plan`): rank 0 holds ranges 0 and 2 of block 0, two rows in each of two segments. They are equal
but for the segment, so they are one fold.

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

from ring.plan.ranges import Ints, counter, opens

# Entries that lie scattered are folded as strided views only if a view takes as many as this on average.
_MEMBERS_OF_A_FOLD = 4
_OBJECT = 512  # bytes of a small object of Python, or of a tensor without its numbers


@dataclass(frozen=True, eq=False)
class Rows:
    """(folds, length) indices, computed from the steps or, if there is `index`, listed in it: (folds, length) int64.

    These are the rows of the first group of heads; those of group i lie i * head_step further on.
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
        """The rows listed in a (folds, length) array, as a regular grid if they are one."""
        folds, length = index.shape
        start = int(index[0, 0])
        step = int(index[0, 1]) - start if length > 1 else 1
        fold_step = int(index[1, 0]) - start if folds > 1 else 0
        rows = cls(start, step, length, fold_step, folds)
        if step > 0 and fold_step >= 0 and np.array_equal(rows.listed(), index):
            return rows
        return replace(rows, index=torch.from_numpy(np.ascontiguousarray(index)))

    def listed(self) -> Ints:
        """All indices, (folds, length)."""
        if self.index is not None:
            return self.index.numpy()
        fold = self.fold_step * np.arange(self.folds)[:, None]
        return self.start + fold + self.step * np.arange(self.length)

    @property
    def nbytes(self) -> int:
        """About what they take."""
        return _OBJECT + (0 if self.index is None else self.index.nbytes)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal rows."""
        index = None if self.index is None else self.index.numpy().tobytes()
        return (self.start, self.step, self.length, self.fold_step, self.folds, self.head_step, index)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Rows of equal folds, side by side along their length. Those that continue each other are not listed for it."""
    if len(parts) == 1:
        return parts[0]
    return _continued(parts) or Rows.of(np.concatenate([part.listed() for part in parts], axis=1))


def _continued(parts: Sequence[Rows]) -> Rows | None:
    """Several rows as one strided view, where each begins a step behind the end of the one before; else None."""
    first = parts[0]
    step = first.step if first.length > 1 else parts[1].start - first.start
    end = first.start
    for part in parts:
        goes_on = part.index is None and part.start == end and (part.length == 1 or part.step == step)
        if not goes_on or step < 1 or part.fold_step != first.fold_step:
            return None
        end += part.length * step
    length = sum(part.length for part in parts)
    return Rows(first.start, step, length, first.fold_step if first.folds > 1 else 0, first.folds)


class How(Enum):
    """How entries share a call."""

    EVEN = auto()  # a fold each; the first rows lie at equal distances
    LISTED = auto()  # a fold each; the first rows lie anywhere
    VARLEN = auto()  # one behind the other in a single fold; their lengths and steps may differ


class Fold(NamedTuple):
    """Entries that share a call. Those of EVEN and LISTED have equal steps and lengths."""

    members: Ints
    left_step: int = 0
    right_step: int = 0
    how: How = How.EVEN

    def rows(self, start: Ints, fold_step: int, step: Ints, length: Ints) -> Rows:
        """Of all members. start, step, length: of all entries."""
        one, several = self.members[0], self.members
        if self.how is How.EVEN and step[one] > 0:
            return Rows(int(start[one]), int(step[one]), int(length[one]), fold_step=fold_step, folds=len(several))
        if self.how is not How.VARLEN:
            return Rows.of(start[several][:, None] + step[one] * np.arange(length[one]))
        lengths = length[several]
        listed = np.repeat(start[several], lengths) + counter(lengths) * np.repeat(step[several], lengths)
        return Rows.of(listed[None])


def folds(signature: Sequence[Ints], segment: Ints, left: Ints, right: Ints, most: Ints) -> Iterator[Fold]:
    """Group entries of equal signature, in ascending order of segment, into folds of at most `most` members each.

    left, right: where an entry begins, its first query row and key row, say. Two members are never of one segment, so
    their rows are disjoint and a fold can be written in place.
    """
    order = np.lexsort((segment, *reversed(signature)))
    if not len(order):
        return
    apart = np.diff(segment[order]) == 0
    for column in signature:
        apart |= np.diff(column[order]) != 0
    d_left, d_right = np.diff(left[order]), np.diff(right[order])
    apart |= (d_left <= 0) | (d_right <= 0)
    # A member also opens a fold if it lies at another distance than the one before it: left starts 0 4 8 20 24 with
    # equal signatures are the folds (0 4 8), (20 24). A first distance is never uneven: there is none to compare with.
    uneven = ~apart[:-1] & ((np.diff(d_left) != 0) | (np.diff(d_right) != 0))
    begin_a_fold = np.concatenate(([True], apart))
    begin_a_fold[2:] |= uneven
    begins = np.flatnonzero(begin_a_fold)
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(order)], strict=True):
        limit = int(most[order[begin]])
        for at in range(begin, end, limit):
            stop = min(at + limit, end)
            several = stop - at > 1
            yield Fold(order[at:stop], int(d_left[at]) if several else 0, int(d_right[at]) if several else 0)


def gathered_folds(
    signature: Sequence[Ints], segment: Ints, left: Ints, right: Ints, most: Ints, most_gathered: Ints
) -> Iterator[Fold]:
    """As `folds`, but entries of equal signature become one fold, at whatever distances they lie, where `folds` would
    make many of them. most_gathered: members of such a fold at most.
    """
    even = list(folds(signature, segment, left, right, most))
    order = np.lexsort((segment, *reversed(signature)))
    kind = np.cumsum(opens(*(column[order] for column in signature))) - 1
    number = np.empty_like(kind)
    number[order] = kind
    of_fold = number[[fold.members[0] for fold in even]]
    scattered = np.bincount(of_fold) > 1 + np.bincount(kind) // _MEMBERS_OF_A_FOLD
    yield from (fold for fold, among in zip(even, scattered[of_fold].tolist(), strict=True) if not among)
    for layer in _layers(number, segment, np.flatnonzero(scattered[number])):
        limit = int(most_gathered[layer[0]])
        for at in range(0, len(layer), limit):
            members = layer[at : at + limit]
            yield Fold(members, how=How.EVEN if len(members) == 1 else How.LISTED)


def varlen_folds(
    call: Sequence[Ints], signature: Sequence[Ints], segment: Ints, left: Ints, right: Ints, most: Ints,
    lengths: tuple[Ints, Ints], longest: int, limits: tuple[int, int],
) -> Iterator[Fold]:  # fmt: skip
    """As `folds` of the signature, but entries of which a fold would take few share calls with those that are equal in
    `call`; except for entries longer than `longest` where these are most of the work.

    lengths: of every entry on the left and right; limits: the sum of each in a call, at most.
    """
    _, kind = np.unique(np.stack(call), axis=1, return_inverse=True)
    kind, work, long = kind.reshape(-1), lengths[0] * lengths[1], np.maximum(*lengths) > longest
    short = ~long | (2 * np.bincount(kind, work * long) < np.bincount(kind, work))[kind]
    left_over = []
    for fold in folds(signature, segment, left, right, most):
        if short[fold.members[0]] and len(fold.members) < _MEMBERS_OF_A_FOLD:
            left_over.append(fold.members)
        else:
            yield fold
    if not left_over:
        return
    for layer in _layers(kind, segment, np.sort(np.concatenate(left_over))):
        ends, at = [np.cumsum(length[layer]) for length in lengths], 0
        while at < len(layer):
            before = [0 if not at else end[at - 1] for end in ends]
            stops = [np.searchsorted(end, b + m, side="right") for end, b, m in zip(ends, before, limits, strict=True)]
            stop = max(int(min(stops)), at + 1)
            yield Fold(layer[at:stop], how=How.EVEN if stop == at + 1 else How.VARLEN)
            at = stop


def _layers(kind: Ints, segment: Ints, which: Ints) -> Iterator[Ints]:
    """Some entries, in groups of one kind and of different segments in ascending order: the first entry of each
    segment, then the second of each, and so on.
    """
    order = which[np.lexsort((segment[which], kind[which]))]
    first = np.flatnonzero(opens(kind[order], segment[order]))
    layer = counter(np.diff(np.append(first, len(order))))
    by_layer = np.lexsort((layer, kind[order]))
    order, begins = order[by_layer], np.flatnonzero(opens(kind[order][by_layer], layer[by_layer]))
    for begin, end in pairwise([*begins.tolist(), len(order)]):
        yield order[begin:end]
