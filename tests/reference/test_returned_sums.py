"""`reference.returned_sums` on paper."""

import numpy as np

from reference import Pattern
from reference.cost import Setting
from reference.returned_sums import returned_sums, subtrees


def test_largest_subtrees() -> None:
    assert subtrees([3]) == subtrees([3] * 7) == {3: 1}
    assert subtrees([0, 0, 1, 1, 1]) == {0: 1, 1: 2}
    assert subtrees([0, 1, 1, 0, 2]) == {0: 2, 1: 2, 2: 1}


def test_sums_of_causal_chunks_in_zigzag_order() -> None:
    """Chunks 0 1 6 7 of 3 tokens are rank 0's. Key chunk 1, for one, has the queries 1, 2 3, 4 5, 6 7 as leaves 0 to 6:
    rank 1 returns leaf 1, leaves 2 and 3 in one, and leaf 4."""
    chunks = np.arange(24).reshape(8, 3)
    setting = Setting(Pattern.dense(causal=True), [chunks[[0, 1, 6, 7]].ravel(), chunks[2:6].ravel()], 1, 2, 1, 8)
    of_chunk = [[0, 0, 0, 0, 1, 2, 1, 2], [2, 3, 0, 0, 0, 0, 0, 0]]  # keys of rank 0, then of rank 1
    sums, sizes = returned_sums(setting, 0, 3)
    assert sums.tolist() == np.repeat(of_chunk, 3, axis=1).tolist() and sizes.tolist() == [3] * 24
