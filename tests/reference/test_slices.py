"""Each mask equals its definition, written as a predicate of query and key."""

import itertools
import json
import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from reference.pattern import Branch, Pattern, multiplicity
from reference.slices import Slice, checked_slices, common_pair, holds_a_pair, meet, overlaps

N = 24
DOCUMENTS = (7, 0, 12, 5)
BEGINS = [b for b, length in zip((0, 7, 7, 19), DOCUMENTS, strict=True) for _ in range(length)]
SPANS = [(2, 5), (5, 5), (6, 13), (20, 24)]
FRAMES = [4, 0, 1, 7, 12]
PARENTS, LENGTHS = [None, 0, 1, 1, 0, 4, -1, 6], [4, 3, 2, 0, 5, 4, 1, 5]
TREE = Pattern.tree(PARENTS, LENGTHS)
NODE = [node for node, length in enumerate(LENGTHS) for _ in range(length)]


def ancestors(node: int) -> set[int]:
    parent = PARENTS[node]
    return {node} if parent in (None, -1) else {node} | ancestors(parent)


def inside(spans: list[tuple[int, int]], *positions: int) -> bool:
    return any(all(a <= x < b for x in positions) for a, b in spans)


def frame(i: int) -> int:
    return next(f for f, end in enumerate(itertools.accumulate(FRAMES)) if i < end)


def clean_and_noisy(i: int, j: int) -> bool:
    f, g, half = (i % 12) // 3, (j % 12) // 3, 12
    if i < half:
        return j < half and g <= f
    return (j >= half and g == f) or (j < half and g < f)


# Document, half and frame of each token.
COPIES = [
    (document, noisy, frame) for document, frames in enumerate(((3, 0, 2), (4, 3))) for noisy in (False, True)
    for frame, length in enumerate(frames) for _ in range(length)
]  # fmt: skip


def clean_and_noisy_of_documents(i: int, j: int) -> bool:
    (a, noisy, f), (b, copy, g) = COPIES[i], COPIES[j]
    return a == b and ((g == f and copy == noisy) or (g < f and not copy))


# A row for each mask: the pattern, and what its query i sees.
MASKS = {
    "prefix 0": (Pattern.prefix(0), lambda i, j: j <= i),
    "prefix": (Pattern.prefix(9), lambda i, j: j <= i or max(i, j) < 9),
    "prefix n": (Pattern.prefix(N), lambda i, j: True),
    "prefix of documents": (
        Pattern.prefix([3, 0, 12, 1], DOCUMENTS),
        lambda i, j: BEGINS[i] == BEGINS[j]
        and (j <= i or max(i, j) - BEGINS[i] < {0: 3, 7: 12, 19: 1}[BEGINS[i]]),
    ),
    "spans": (Pattern.spans(SPANS), lambda i, j: j <= i or inside(SPANS, i, j)),
    "no spans": (Pattern.spans([]), lambda i, j: j <= i),
    "spans in a window": (Pattern.spans(SPANS, window=3), lambda i, j: 0 <= i - j <= 3 or inside(SPANS, i, j)),
    "spans in documents": (
        Pattern.spans([(2, 5), (7, 13), (20, 24)], DOCUMENTS, window=4),
        lambda i, j: BEGINS[i] == BEGINS[j] and (0 <= i - j <= 4 or inside([(2, 5), (7, 13), (20, 24)], i, j)),
    ),
    "frames": (Pattern.frames(FRAMES), lambda i, j: frame(j) <= frame(i)),
    "frames of a token": (Pattern.frames([1] * N), lambda i, j: j <= i),
    "noisy frames of documents": (Pattern.frames([3, 0, 2, 4, 3], (10, 14), True), clean_and_noisy_of_documents),
    "clean and noisy frames": (Pattern.frames([3, 3, 3, 3], noisy=True), clean_and_noisy),
    "first tokens": (Pattern.first_tokens(2, 3), lambda i, j: 0 <= i - j <= 3 or (j <= i and j < 2)),
    "first tokens of documents": (
        Pattern.first_tokens(2, 1, DOCUMENTS),
        lambda i, j: BEGINS[i] == BEGINS[j] and (0 <= i - j <= 1 or (j <= i and j - BEGINS[i] < 2)),
    ),
    "tree": (Pattern.tree(PARENTS, LENGTHS), lambda i, j: j <= i and NODE[j] in ancestors(NODE[i])),
    "full": (Pattern.slices([((3, 9), (11, 20), "full")]), lambda i, j: 3 <= i < 9 and 11 <= j < 20),
    "causal": (
        Pattern.slices([((3, 9), (11, 20), "causal")]), lambda i, j: 3 <= i < 9 and 11 <= j < 20 and j - 20 <= i - 9
    ),
    "anticausal": (
        Pattern.slices([((3, 9), (11, 20), "anticausal")]), lambda i, j: 3 <= i < 9 and 11 <= j < 20 and j - 11 >= i - 3
    ),
    "both": (
        Pattern.slices([((3, 9), (11, 20), "both")]),
        lambda i, j: 3 <= i < 9 and 11 <= j < 20 and i + 8 <= j <= i + 11,
    ),
    "a band": (
        Pattern.slices([((3, 21), (1, 20), (-4, 2))]), lambda i, j: 3 <= i < 21 and 1 <= j < 20 and -4 <= j - i <= 2
    ),
    "slices in a window": (
        Pattern.slices([((0, 9), (0, N), "full"), ((9, N), (4, N), "full")], window=5),
        lambda i, j: abs(i - j) <= 5 and (i < 9 or j >= 4),
    ),
}  # fmt: skip


def seen(pattern: Pattern, n: int = N, heads: int = 1) -> torch.Tensor:
    places = torch.arange(n)
    return multiplicity(pattern, places, places, heads)


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_equals_its_definition(mask: str) -> None:
    pattern, sees = MASKS[mask]
    assert seen(pattern)[0].tolist() == [[int(sees(i, j)) for j in range(N)] for i in range(N)]


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_survives_json_and_pickle(mask: str) -> None:
    pattern = MASKS[mask][0]
    assert (
        Pattern.from_dict(json.loads(json.dumps(pattern.to_dict()))) == pattern == pickle.loads(pickle.dumps(pattern))
    )
    assert hash(Pattern.from_dict(pattern.to_dict())) == hash(pattern)


def test_slices_multiply_the_grid_of_a_branch() -> None:
    slices = MASKS["spans"][0].branches[0].slices
    grid = Pattern((Branch(8, 2, (0, 1)),))
    dilated = Pattern((Branch(8, 2, (0, 1), slices=slices),))
    assert torch.equal(seen(dilated, heads=2), seen(grid, heads=2) * seen(MASKS["spans"][0], heads=2))


def test_overlapping_slices_count_twice_where_asked() -> None:
    slices = [((0, 9), (0, 9), "full"), ((4, 12), (4, 12), "full"), ((0, 2), (8, 9), "full")]
    with pytest.raises(ValueError, match=r"slices must see a pair once.*query 4 and key 4"):
        Pattern.slices(slices[:2])
    c = seen(Pattern.slices(slices, counted=True))[0]
    assert c[5, 5] == 2 and c[0, 8] == 2 and c[0, 0] == 1 and c[0, 10] == 0


def test_slices_meet_in_the_pairs_that_both_see() -> None:
    places = torch.arange(6)
    ends, bands = (
        ((0, None, 0, 3), (2, 4, 1, None), (1, 5, 1, 5), (3, 3, 0, 6)),
        ((None, 0), (-2, 1), (1, None), (0, -1)),
    )
    some = [Slice(*corners, *band) for corners in ends for band in (*bands, (None, None))]
    dense = {one: one.sees(places[:, None], places) for one in some}
    for a, b in itertools.product(some, repeat=2):
        both = dense[a] & dense[b]
        met = meet(a, b)
        found = torch.zeros_like(both) if met is None else met.sees(places[:, None], places)
        assert torch.equal(both, found)
        if met is not None and both.any():
            i, j = common_pair(a, b)
            assert a.sees(torch.tensor(i), torch.tensor(j)) and b.sees(torch.tensor(i), torch.tensor(j))
    bounded = [meet(one, Slice(0, 6, 0, 6)) or Slice(0, 0) for one in some]
    bounded = list(filter(holds_a_pair, set(bounded)))
    both_see = [pair for pair in itertools.combinations(bounded, 2) if meet(*pair) is not None]
    assert {frozenset(pair) for pair in overlaps(bounded)} == set(map(frozenset, both_see))


def test_positions_of_a_tree_are_depths() -> None:
    pattern = Pattern.tree(PARENTS, LENGTHS)
    starts = {node: sum(LENGTHS[above] for above in ancestors(node) - {node}) for node in range(len(LENGTHS))}
    within = [NODE[:i].count(NODE[i]) for i in range(N)]
    assert pattern.positions(N).tolist() == [starts[NODE[i]] + within[i] for i in range(N)]
    noisy = MASKS["noisy frames of documents"][0].positions(N).tolist()
    assert noisy == [*range(5), *range(5), *range(7), *range(7)]
    assert Pattern.prefix(3, DOCUMENTS).positions(N).tolist() == [i - BEGINS[i] for i in range(N)]


NUMPY = {
    "prefix": lambda x: Pattern.prefix(x([3, 2]), (6, 7)),
    "spans": lambda x: Pattern.spans(x([(2, 5), (7, 9)]), window=x([1])[0]),
    "frames": lambda x: Pattern.frames(x([4, 2]), noisy=True),
    "first tokens": lambda x: Pattern.first_tokens(*x([2, 3])),
    "tree": lambda x: Pattern.tree(x([-1, 0]), x([3, 4])),
    "slices": lambda x: Pattern.slices([(tuple(x([0, 8])), x([0, 8]), "causal"), tuple(x([8, 9, 0, 3, -9, 0]))]),
}


@pytest.mark.parametrize("kind", NUMPY)
def test_integers_of_numpy_and_torch_are_integers(kind: str) -> None:
    patterns = [NUMPY[kind](x) for x in (np.array, torch.tensor, list)]
    assert patterns[0] == patterns[1] == patterns[2]
    assert json.dumps(patterns[0].to_dict()) == json.dumps(patterns[2].to_dict())


def test_a_path_of_2000_nodes_takes_seconds() -> None:
    begin = time.process_time()
    pattern = Pattern.tree([None, *range(1999)], [1] * 2000)
    assert pattern.positions(2000).tolist() == list(range(2000))
    assert time.process_time() - begin < 5  # pairs of slices, one by one, take a minute


REFUSED = {
    "out of order": (
        lambda: Pattern.slices([((5, 3), (0, 9), "full")]),
        r"queries of a slice must be a range.*\(5, 3\)",
    ),
    "negative": (lambda: Pattern.slices([((0, 3), (-1, 9), "full")]), r"keys of a slice must be a range"),
    "kind": (lambda: Pattern.slices([((0, 3), (0, 9), "lower")]), r'kind of a slice must be "full".*\'lower\''),
    "open causal": (lambda: Pattern.slices([((0, None), (0, 9), "causal")]), "needs both ends"),
    "overlap": (lambda: Pattern.slices([((0, 3), (0, 3), "full")] * 2), "slices must see a pair once"),
    "no triple": (lambda: Pattern.slices([((0, 3), (0, 3))]), r"must be a list of \(\(q0, q1\), \(k0, k1\), kind\)"),
    "beyond": (lambda: Pattern.prefix(9).validate_tokens(8), "slices must lie within the 8 .*end it, or the prefix"),
    "frames do not add up": (lambda: Pattern.frames([3, 4]).validate_tokens(8), "pattern must be for the 8.*frames"),
    "frames and documents": (
        lambda: Pattern.frames([3, 4], (4, 4)),
        "frames must have the 8 tokens of the documents, got 7",
    ),
    "odd noisy document": (
        lambda: Pattern.frames([3, 4], (5, 9), True),
        "documents must each be whole frames.*of 5 tokens",
    ),
    "half a noisy frame": (
        lambda: Pattern.frames([3, 4], (4, 10), True),
        "documents must each be whole frames.*of 4 tokens",
    ),
    "tree does not add up": (lambda: Pattern.tree([None], [4]).validate_tokens(8), "pattern must be for the 8.*nodes"),
    "spans overlap": (lambda: Pattern.spans([(0, 5), (4, 8)]), "spans must be in order and must not overlap"),
    "span out of order": (lambda: Pattern.spans([(5, 3)]), "a span must be a range"),
    "later parent": (lambda: Pattern.tree([None, 2, 0], [1, 1, 1]), "parents must be earlier nodes.*got 2 for node 1"),
    "circle": (lambda: Pattern.tree([0], [1]), "has no circle"),
    "nodes": (lambda: Pattern.tree([None], [1, 2]), "parents must be a list with an entry for each of the 2 nodes"),
    "lengths": (lambda: Pattern.tree([None], [-1]), "lengths of a tree's nodes must be integers >= 0"),
    "frames": (lambda: Pattern.frames([3, True]), "lengths of frames must be integers >= 0"),
    "prefixes": (
        lambda: Pattern.prefix([1, 2], (4,)),
        "prefix must be an integer >= 0, or a list of one for each of 1 documents",
    ),
    "long prefix": (lambda: Pattern.prefix([5], (4,)), "prefix must be at most its document's 4 tokens"),
    "one long prefix": (lambda: Pattern.prefix(7, (10, 0, 4)), "prefix must be at most its document's 4 tokens, got 7"),
    "cut frame": (lambda: Pattern.frames([4, 4], (6, 2)), r"frames must lie within a document, got \(4, 8\).* at 6"),
    "cut span": (lambda: Pattern.spans([(20, 28)], (24, 24)), r"spans must lie within a document.*\(20, 28\).* at 24"),
    "no band": (lambda: Pattern.slices([((0, 8), (0, 8), (3, -3))]), r"slices must see a pair each, got .*\(3, -3\)"),
    "no pair": (lambda: Pattern.slices([((0, 8), (0, 4), "both")]), r"slices must see a pair each, got .* which sees"),
    "first": (lambda: Pattern.first_tokens(-1, 3), "count must be an integer >= 0"),
    "text in prefixes": (lambda: Pattern.prefix(["1"], (4,)), "prefix must be an integer >= 0, got '1'"),  # type: ignore[list-item]
    "documents of frames": (lambda: Pattern.frames([3, 4], 7), "documents must be"),  # type: ignore[arg-type]
    "noisy": (lambda: Pattern.frames([3, 4], noisy=3), "noisy must be True or False, got 3"),  # type: ignore[arg-type]
    "counted": (lambda: Pattern.slices([((0, 3), (0, 3), "full")], counted="no"), "counted must be True or False"),  # type: ignore[arg-type]
    "tokens": (lambda: Pattern.prefix(2).positions(2.5), "tokens must be an integer >= 0, got 2.5"),  # type: ignore[arg-type]
    "documents of a tree": (lambda: replace(TREE, documents=(20, 4)), "documents must be left out.*got 2"),
    "window of a tree": (
        lambda: replace(TREE, branches=(replace(TREE.branches[0], window=3),)),
        r"depths need one branch with slices, without a window.*\(None, 1, 3\)",
    ),
    "rate of a tree": (
        lambda: replace(TREE, branches=(replace(TREE.branches[0], dilation_rate=2),)),
        "depths need one branch with slices",
    ),
    "depths alone": (lambda: Pattern((Branch(),), depths=True), "depths need one branch with slices"),
    "depths of a prefix": (lambda: replace(Pattern.prefix(3, (9,)), depths=True), "depths need the slices of a tree"),
    "depths of any length": (lambda: replace(Pattern.prefix(3), depths=True).positions(9), "depths need the slices"),
    "depths of a window": (lambda: replace(Pattern.first_tokens(2, 3, (9,)), depths=True), "depths need the slices"),
    "no six": (lambda: checked_slices([(1, 2, 3)]), r"a slice must be \(q0, q1, k0, k1, low, high\).*Pattern.slices"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_wrong_mask_is_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        make()
