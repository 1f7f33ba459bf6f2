"""`reference.oracle` against sums on paper."""

from math import inf, log
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import Branch, Pattern, attention, gradients
from tests.support.oracle_loops import assert_all_close


def column(*values: float) -> Tensor:
    """One batch, one head, one dimension."""
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)


def by_hand(pattern: Pattern, out: list[float], lse: list[float]) -> None:
    """q = 1, k = log 1, log 2, log 3, ..., v = 1, 2, 3, ... and scale 1: the weight of key j is j + 1."""
    n = len(out)
    k = column(*(log(j + 1) for j in range(n)))
    got = attention(column(*[1.0] * n), k, column(*(j + 1.0 for j in range(n))), pattern, scale=1.0)
    assert_all_close([t.flatten() for t in got], [out, lse])


def test_by_hand_dense_and_causal() -> None:
    by_hand(Pattern.dense(), [14 / 6] * 3, [log(6)] * 3)  # (1 + 4 + 9) / (1 + 2 + 3)
    by_hand(Pattern.dense(causal=True), [1, 5 / 3, 14 / 6], [0, log(3), log(6)])


def test_by_hand_short_tail_and_offset_beyond_it() -> None:
    lse = [log(3), log(3), log(7), log(7), log(5)]
    by_hand(Pattern((Branch(2),)), [5 / 3, 5 / 3, 25 / 7, 25 / 7, 5], lse)
    by_hand(Pattern((Branch(2, 2, 1),)), [0, 2, 0, 4, 0], [-inf, log(2), -inf, log(4), -inf])


def test_by_hand_rate_beyond_the_segment() -> None:
    by_hand(Pattern((Branch(2, 3),)), [1, 0, 3, 0, 5], [0, -inf, log(3), -inf, log(5)])
    by_hand(Pattern((Branch(2, 3, 2),)), [0] * 5, [-inf] * 5)


def test_by_hand_two_branches_count_a_pair_twice() -> None:
    # Row 0 sees weights 1 + 2 within {0, 1} and 1 + 3 on the even positions: 1 counts twice.
    pattern = Pattern((Branch(2), Branch(4, 2)))
    by_hand(pattern, [15 / 7, 5 / 3, 35 / 11, 25 / 7], [log(7), log(3), log(11), log(7)])


def test_by_hand_gradients() -> None:
    # One query, weights 1 and 3 of v = 0 and 4: P = (1/4, 3/4), O = 3, dO = 1, so dP - D = (-3, 1).
    args = (column(1.0), column(0.0, log(3)), column(0.0, 4.0), Pattern.dense(), column(1.0))
    at: dict[str, Any] = {"q_positions": torch.tensor([0]), "scale": 1.0}
    wanted = [column(0.75 * log(3)), column(-0.75, 0.75), column(0.25, 0.75)]
    assert_all_close(gradients(*args, **at), wanted)
    wanted = [column(2.25 * log(3)), column(-0.25, 2.25), column(0.25, 0.75)]  # dlse = 2 adds 2 P to dS
    assert_all_close(gradients(*args, torch.full((1, 1, 1), 2.0), **at), wanted)


@pytest.mark.parametrize("size", [-1e300, -1e10, -1e8, 1e8, 1e10, 1e300])
def test_any_finite_score_is_a_score(size: float) -> None:
    """No value stands for "nothing": scores all alike share the weight, however large."""
    one, k, v = column(1.0), column(*[size] * 8), column(1.0, 9.0, 2.0, 9.0, 6.0, 9.0, 7.0, 9.0)
    at: dict[str, Any] = {"q_positions": torch.tensor([0]), "scale": 1.0}
    pattern = Pattern((Branch(None, 2),))
    out, lse = attention(one, k, v, pattern, **at)
    assert (out == 4).all() and (lse == size + log(4)).all()
    assert gradients(one, k, v, pattern, one, **at)[2].equal(column(*[0.25, 0.0] * 4))
