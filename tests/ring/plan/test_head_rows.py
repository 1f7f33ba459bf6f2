"""The order of rows in a block of heads."""

from __future__ import annotations

import pytest
import torch

from ring import Layout
from ring.plan.head_rows import block_layout, block_places

TWO = Layout.zigzag(8, 2)  # 0 1 6 7 | 2 3 4 5


def test_rows_of_all_ranks_lie_in_order_of_position() -> None:
    assert block_layout(TWO, [range(2)]) == Layout.contiguous(8, 1)
    assert block_places(TWO, [range(2)], range(2)) == ((range(2), range(6, 8)), (range(2, 6),))
    assert block_places(Layout.striped(6, 2), [range(2)], range(2)) == ((range(0, 6, 2),), (range(1, 7, 2),))


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        pytest.param(Layout.zigzag(16, 4), [range(2), range(2, 4)], id="others have the same heads"),
        pytest.param(Layout.from_cuts(torch.randperm(64), (0, 20, 64)), [range(2)], id="listed"),
        pytest.param(Layout.zigzag(60, 2, documents=[6] * 10), [range(2)], id="many runs"),
    ],
)
def test_other_rows_lie_shard_after_shard(layout: Layout, groups: list[range]) -> None:
    assert block_layout(layout, groups) == layout.joined(groups)
    first, second = layout.counts[:2]
    assert block_places(layout, groups, groups[0]) == ((range(first),), (range(first, first + second),))
