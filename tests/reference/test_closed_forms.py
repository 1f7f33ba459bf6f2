"""`reference.closed_forms` against the exact counts of `reference.cost`."""

from collections.abc import Callable

import numpy as np
import pytest

from reference.closed_forms import dense_slots, segment_pairs, segment_slots
from reference.cost import Setting, buffers, flops, sent
from reference.pattern import Branch, Pattern
from reference.remote_rows import blocks
from reference.shards import shards


def orders(n: int, p: int) -> dict[str, list[np.ndarray]]:
    return {order: list(shards(order, n, p, None).positions) for order in ("contiguous", "striped", "zigzag")}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [2, 6, 24])
def test_dense_closed_forms(p: int, length: int, causal: bool) -> None:
    n, imbalance = p * length, {}
    for order, positions in orders(n, p).items():
        s, other = (Setting(Pattern.dense(causal), positions, 2, 6, 3, 5, 2, value_dim) for value_dim in (None, 3))
        for exchange in ("ring", "direct", "gather"):
            slots = dense_slots(n, p, 3, causal, order, exchange)
            assert sent(s, exchange).forward.sum() == slots * 2 * 2 * 5 * 2
            assert sent(s, exchange).backward_gradients.sum() == slots * 2 * 2 * 5 * 4
            assert sent(other, exchange).forward.sum() == slots * 2 * (5 + 3) * 2
        assert sum(flops(s).pairs) == segment_pairs(n, n, 1, 6, causal)
        assert flops(s).total == segment_pairs(n, n, 1, 6, causal) * 2 * 5 * (4 + 10)
        imbalance[order] = flops(s).imbalance
        held = buffers(s, "ring", n)
        assert p == 1 or causal or (held.backward == (2 * 2 + 1 * 2 + (2 + 2) * 4) * length * 3 * 2 * 2 * 5).all()
    assert imbalance["zigzag"] == 1.0  # chunk i and its mirror image see the same number of keys together
    # The last of p contiguous shards sees (p-1) L^2 + L (L+1)/2 pairs, the mean is n (n+1) / 2p.
    uneven = (2 * (p - 1) * length + length + 1) / (n + 1) if causal else 1.0
    assert imbalance["contiguous"] == pytest.approx(uneven, rel=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exchange", ["direct", "ring"])
@pytest.mark.parametrize("p", [2, 4, 6])
@pytest.mark.parametrize("r", [1, 2, 3, 4])
def test_segment_closed_forms(exchange: str, causal: bool, p: int, r: int) -> None:
    length, kv_heads = 12, 6
    n, positions = p * length, orders(p * length, p)["contiguous"]
    offsets = tuple(h % r for h in range(kv_heads))
    for w in (length // 3, length, *(m * length for m in range(2, p + 1) if p % m == 0)):
        s = Setting(Pattern((Branch(w, r, offsets),), causal), positions, 1, kv_heads, kv_heads, 1)
        widths = sum(block.width for block in blocks(s, 0))
        total = sent(s, exchange).forward.sum()
        assert total == segment_slots(n, p, w, r, widths, causal, exchange) * 8
        assert w > length or not sent(s, exchange).backward.any()
        dense = Setting(Pattern((Branch(w),), causal), positions, 1, kv_heads, kv_heads, 1)
        assert r * total == sent(dense, exchange).forward.sum()
        assert w % r or sum(flops(s).pairs) == segment_pairs(n, w, r, kv_heads, causal)


@pytest.mark.parametrize(
    "call",
    [
        lambda: dense_slots(10, 4, 1, True, "contiguous", "ring"),
        lambda: dense_slots(6, 2, 1, True, "zigzag", "ring"),
        lambda: dense_slots(8, 2, 1, True, "hilbert", "ring"),
        lambda: segment_slots(24, 4, 18, 1, 1, False, "ring"),
        lambda: segment_slots(24, 4, 13, 1, 1, False, "ring"),
        lambda: segment_slots(24, 4, 12, 1, 1, False, "gather"),
        lambda: segment_slots(24, 4, 12, 4, 1, False, "ring"),
        lambda: segment_pairs(10, 4, 2, 1, False),
    ],
)
def test_closed_forms_refuse_other_patterns(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        call()
