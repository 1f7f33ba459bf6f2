"""The log-sum-exp merge against one softmax over everything, in fp64, and at its edges."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring.compute.accumulator import Accumulator, merge
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.precision import accumulator_dtype

INF, NAN = float("inf"), float("nan")
Part = tuple[torch.Tensor, torch.Tensor]  # out (rows, D), lse (rows,)


def average(scores: torch.Tensor, values: torch.Tensor) -> Part:
    """softmax(scores) values and log-sum-exp: scores (rows, keys), values (keys, D), in fp64."""
    scores, values = scores.double(), values.double()
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -INF)
    return torch.softmax(scores, -1).masked_fill(lse[:, None] == -INF, 0.0) @ values, lse


def one(out: float, lse: float, dtype: torch.dtype = torch.float64) -> Part:
    return torch.tensor([[out]], dtype=dtype), torch.tensor([lse], dtype=dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 12),
    st.lists(st.integers(0, 12), max_size=5),
    st.sampled_from((0.0, 1e-3, 1.0, 30.0, 1e4)),
    st.sampled_from((torch.float64, torch.float32)),
    st.integers(0, 99),
)
def test_a_chain_of_merges_is_one_softmax(keys: int, cuts: list[int], spread: float, dtype: Any, seed: int) -> None:
    scores = (spread * normal(3, keys, seed=seed)).to(dtype)
    scores[1, ::2] = -INF  # a row that sees some of them
    scores[2] = -INF  # a row that sees none
    values = normal(keys, 2, seed=seed + 1).to(dtype)
    edges = [0, *sorted(min(cut, keys) for cut in cuts), keys]
    parts = [average(scores[:, a:b], values[a:b]) for a, b in itertools.pairwise(edges)]
    out, lse = torch.zeros(3, 2, dtype=dtype), torch.full((3,), -INF, dtype=dtype)
    for part, part_lse in parts:
        out, lse = merge(out, lse, part.to(dtype), part_lse.to(dtype))
    assert out.dtype is dtype and lse.dtype is dtype
    wanted_out, wanted_lse = average(scores, values)
    # mu and g(b) of a chain of p merges: p u (2 |lse| + 2 |score| + 4); the parts themselves are rounded once.
    u = torch.finfo(dtype).eps / 2
    size = max([1.0, *scores[scores.isfinite()].abs().tolist()])
    bound = (len(parts) + 1) * u * (4 * size + 4)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=bound)
    largest = max(1.0, *values.abs().flatten().tolist()) if keys else 1.0
    torch.testing.assert_close(out.double(), wanted_out, rtol=0, atol=2 * bound * largest)
    assert out[2].eq(0).all() and lse[2] == -INF


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("gap", (-1e4, -700.0, -20.0, 0.0, 1e-3, 100.0, 700.0, 1e4))
@pytest.mark.parametrize("base", (0.0, 1e4, -1e4))
def test_gaps_of_any_size(base: float, gap: float, dtype: torch.dtype) -> None:
    a, b = one(1.0, base, dtype), one(-3.0, base + gap, dtype)
    scores, values = torch.stack([a[1], b[1]], -1).double(), torch.tensor([[1.0], [-3.0]], dtype=torch.float64)
    (wanted,), (wanted_lse,) = average(scores, values)
    u = torch.finfo(dtype).eps / 2
    out, lse = merge(*a, *b)
    assert (out, lse) == merge(*b, *a)
    assert abs(out.item() - wanted.item()) <= 16 * u
    assert abs(lse.item() - wanted_lse.item()) <= 4 * u * max(1.0, abs(wanted_lse.item()))


@pytest.mark.parametrize("lse", (0.0, 1e4, -1e4, 3e38, -3e38, 5e-324, -INF))
def test_merge_of_empty_parts_is_empty(lse: float) -> None:
    """A side without keys has weight exactly 0, whatever its out, and leaves the other bit for bit as it is."""
    out, nothing = one(0.0 if lse == -INF else 0.1, lse), one(1e300, -INF)
    for merged in (merge(*out, *nothing), merge(*nothing, *out)):
        assert merged[0].equal(out[0]) and merged[1].equal(out[1])


@pytest.mark.parametrize("bad", (NAN, INF))
def test_nan_and_infinity_propagate(bad: float) -> None:
    """Compare with one softmax over all keys, where 0 * NaN is NaN: the division of keys into parts has no effect."""
    fine = one(1.0, 0.0)
    for weight in (0.0, -1e6):
        for pair in ((fine, one(bad, weight)), (one(bad, weight), fine)):
            out, lse = merge(*pair[0], *pair[1])
            assert not out.isfinite().any() and lse.isfinite().all() and (weight == 0 or out.isnan().all())
    for pair in ((fine, one(1.0, bad)), (one(1.0, bad), fine), (one(1.0, bad), one(0.0, -INF))):
        out, lse = merge(*pair[0], *pair[1])
        assert out.isnan().all() and (lse.isnan().all() or lse.item() == bad)
    clean = [normal(3, 2), normal(3, seed=1), normal(3, 2, seed=2), normal(3, seed=3)]
    dirty = [x.index_fill(0, torch.tensor(1), bad) for x in clean]
    for x, y in zip(merge(*clean), merge(*clean[:2], *dirty[2:]), strict=True):
        assert x[[0, 2]].equal(y[[0, 2]]) and not y[1].isfinite().any()


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_the_accumulator_is_never_16_bits(dtype: torch.dtype) -> None:
    work = torch.float64 if dtype is torch.float64 else torch.float32
    accumulator = Accumulator(torch.zeros(2, 5, 4, 3, dtype=dtype))
    assert accumulator_dtype(dtype) is accumulator.out.dtype is accumulator.lse.dtype is work
    assert accumulator.out.shape == (2, 5, 4, 3) and accumulator.out.eq(0).all()
    assert accumulator.lse.shape == (2, 4, 5) and accumulator.lse.eq(-INF).all()


@pytest.mark.parametrize("listed", (False, True))
def test_accumulator_merges_tiles_in_place(listed: bool) -> None:
    """Tiles of some rows and heads, in turn: the rest stays as it was."""
    accumulator = Accumulator(torch.zeros(2, 8, 4, 3, dtype=torch.float64))
    nothing = torch.zeros(2, 3, dtype=torch.float64), torch.full((2,), -INF, dtype=torch.float64)
    wanted = dict.fromkeys(np.ndindex(8, 4), nothing)
    index = torch.tensor([[4, 0, 5], [1, 7, 2]]) if listed else None
    rows = Rows(4, 1, 3, 0, 2, index) if listed else Rows(1, 1, 3, 3, 2)
    for seed, heads in enumerate((Heads.of(((0, 1), (2, 3))), Heads.of(((0,), (3,))), Heads.of(((2,),)))):
        out = normal(2, 2, heads.groups, heads.per_group, 3, 3, seed=seed)
        lse = 3 * normal(*out.shape[:-1], seed=seed + 3)
        accumulator.merge(rows, heads, out, lse)
        for (f, i), row in np.ndenumerate(rows.listed()):
            for (g, p), head in np.ndenumerate(heads.listed()):
                wanted[row, head] = merge(*wanted[row, head], out[f, :, g, p, i], lse[f, :, g, p, i])
    for (row, head), (out, lse) in wanted.items():
        torch.testing.assert_close(accumulator.out[:, row, head], out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(accumulator.lse[:, head, row], lse, rtol=1e-13, atol=1e-13)
