"""Features of a Case's pattern: its branches, documents and windows, told by definition. See `coverage`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.pattern import Branch, Pattern
from verification.case import Case

Has = Callable[[Any], bool]  # of a Case, or of what takes its place


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


def _serving(case: Case) -> list[int]:
    """Branches for each query head."""
    every = [branch.offsets(case.heads) for branch in case.pattern.branches]
    return [sum(offsets[head] is not None for offsets in every) for head in range(case.heads)]


def any_branch(has: Callable[[Case, Branch], bool]) -> Has:
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


def grids(case: Case, branch: Branch) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each offset: the positions that the branch selects, and where the segment of each begins."""
    segment, within = _cells(case, branch)
    for offset in set(_offsets(case, branch)):
        at = np.flatnonzero((within >= offset) & ((within - offset) % branch.dilation_rate == 0))
        yield at, segment[at]


@lru_cache(maxsize=64)
def selected(pattern: Pattern, heads: int, tokens: int) -> NDArray[np.bool_]:
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
    return np.asarray(selected(case.pattern, case.heads, case.tokens).any(0))


def _branches_overlap(case: Case) -> bool:
    """Some row sees keys by more than one branch."""
    return bool((selected(case.pattern, case.heads, case.tokens).sum(0) > 1).any())


def _keys_selected(case: Case) -> NDArray[np.bool_]:
    """(Hk, n), likewise: the keys that some row sees."""
    return np.asarray(_rows_selected(case).reshape(case.kv_heads, -1, case.tokens).any(1))


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


# --- windows ----------------------------------------------------------------------------------------------------------


def _any_window(has: Callable[[Case, Branch, int], bool]) -> Has:
    """has: of a branch whose window hides something, and the window."""
    return any_branch(lambda case, b: b.window is not None and _hides(case, b, b.window) and has(case, b, b.window))


def _windows(case: Case) -> set[int | None]:
    """Of all branches; None for a branch without one."""
    return {branch.window for branch in case.pattern.branches}


def _hides(case: Case, branch: Branch, window: int) -> bool:
    """Some row sees less of its segment than it would without the window."""
    return any(bool((at - at[np.searchsorted(at, segment)] > window).any()) for at, segment in grids(case, branch))


def _cut_by_a_segment(case: Case, branch: Branch, window: int) -> bool:
    """The window of some row reaches beyond the row's segment, into an earlier one of its document."""
    begin = _begins(_documents(case))
    return any(bool(((segment > begin[at]) & (at - window < segment)).any()) for at, segment in grids(case, branch))


def _cut_by_a_document(case: Case, branch: Branch, window: int) -> bool:
    """The window of some row reaches beyond the row's document, into an earlier one."""
    begin = _begins(_documents(case))
    return any(bool(((begin[at] > 0) & (at - window < begin[at])).any()) for at, _ in grids(case, branch))


def _ranks_seen(case: Case, branch: Branch, window: int) -> int:
    """The most ranks of which one row sees keys."""
    most, holder = 0, np.asarray(case.shards().holder)
    for at, segment in grids(case, branch):
        first = np.maximum(np.searchsorted(segment, segment), np.searchsorted(at, at - window))
        behind = np.searchsorted(segment, segment, side="right")  # the number of the row behind the last one
        farthest = at if case.pattern.causal else at + window
        behind = np.minimum(behind, np.searchsorted(at, farthest, side="right"))
        held = np.cumsum(holder[at, None] == np.arange(len(case.ranks)), axis=0)
        until = np.vstack((np.zeros(len(case.ranks), np.int64), held))  # keys of each rank, of the first so many
        most = max(most, int((until[behind] > until[first]).sum(1).max(initial=0)))
    return most


# --- features ---------------------------------------------------------------------------------------------------------


PATTERN_GROUPS: dict[str, dict[str, Has]] = {
    "pattern": {
        "dense": lambda case: case.pattern.branches == (Branch(),),
        "causal": lambda case: case.pattern.causal,
        "not causal": lambda case: not case.pattern.causal,
        "segments": any_branch(lambda case, b: _length(case, b) < max(_documents(case))),
        "segment on several ranks": any_branch(_divided),
        "w > n": any_branch(lambda case, b: _length(case, b) > case.tokens),
        "short tail": any_branch(lambda case, b: any(_tails(case, b))),
        "offset past a short tail": any_branch(
            lambda case, b: any(0 < tail <= max(_offsets(case, b)) for tail in _tails(case, b))
        ),
        "dilation": any_branch(lambda case, b: b.dilation_rate > 1),
        "r > w": any_branch(lambda case, b: b.dilation_rate > _length(case, b)),
        "r does not divide w": any_branch(lambda case, b: bool(_length(case, b) % b.dilation_rate)),
        "offset": any_branch(lambda case, b: any(_offsets(case, b))),
        "offset past the segment": any_branch(lambda case, b: max(_offsets(case, b)) >= _length(case, b)),
        "offsets by head": any_branch(lambda case, b: len(set(_offsets(case, b))) > 1),
        "one branch": lambda case: len(case.pattern.branches) == 1,
        "several branches": lambda case: len(case.pattern.branches) > 1,
        "several branches on a row": _branches_overlap,
        "branch for some heads only": any_branch(lambda case, b: len(_offsets(case, b)) < case.heads),
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
        "document after a short tail": any_branch(_after_a_tail),
    },
    "windows": {
        "window": lambda case: _windows(case) != {None},
        "no window": lambda case: _windows(case) == {None},
        "window 0": lambda case: 0 in _windows(case),
        "window that hides nothing": any_branch(lambda case, b: b.window is not None and not _hides(case, b, b.window)),
        "window that is not causal": _any_window(lambda case, b, w: not case.pattern.causal),
        "window with dilation": _any_window(lambda case, b, w: b.dilation_rate > 1),
        "window that ends between steps": _any_window(lambda case, b, w: w % b.dilation_rate > 0),
        "window cut by a segment": _any_window(_cut_by_a_segment),
        "window cut by a document": _any_window(_cut_by_a_document),
        "window over a shard's end": _any_window(lambda case, b, w: _ranks_seen(case, b, w) > 1),
        "window on three ranks": _any_window(lambda case, b, w: _ranks_seen(case, b, w) > 2),
        "window in some branches only": lambda case: None in _windows(case) != {None},
        "several windows": lambda case: len(_windows(case) - {None}) > 1,
    },
}
