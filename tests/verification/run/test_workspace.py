"""The workspace of a call: the meter, the limits on paper, and kernels that take too much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from reference.pattern import Pattern
from ring import Layout, ring_attention
from ring.comm.transport import SoloTransport
from ring.compute import math_kernel
from ring.plan import tiling
from tests.support.drawing import draw_many
from tests.support.plain_case import plain
from verification.case import Case
from verification.check.checks import check_workspace
from verification.check.expectation import expect
from verification.draw.cases import cases
from verification.failures import WrongResult
from verification.run.caches import clear_caches
from verification.run.rank import observe
from verification.run.workspace import Meter, Workspace, WorkspaceLimits, limits

case = partial(
    plain, 2, tokens=100, cuts=(0, 60, 100), batch=2, heads=6, kv_heads=3, dtype="bfloat16", bucket=20, measured=True
)  # fmt: skip


def test_limits_on_paper() -> None:
    rows, scores, keys = 2 * 60 * 6 * 4 * 4, 2 * 20 * 6 * 8 * 4, 2 * 20 * 3 * 4 * 4
    assert rows > scores > keys
    assert limits(case(), 0, 0, 0) == WorkspaceLimits(2 * 6 * 20, 2 * 3 * 20, rows, rows)
    assert limits(case(bucket=3), 0, 0, 0) == WorkspaceLimits(2 * 6 * 16, 2 * 3 * 3, rows, rows)
    assert limits(case(cuts=(0, 99, 100)), 1, 7, 9999) == WorkspaceLimits(2 * 6 * 20, 2 * 3 * 20, scores, 9999)
    assert limits(case(cuts=(0, 100, 100), kv_heads=6, head_dim=9), 1, 0, 0).forward == 2 * 20 * 6 * 9 * 4
    assert limits(case(cuts=(0, 99, 100), bucket=200, dtype="float64"), 1, 0, 0).forward == 2 * 100 * 6 * 8 * 8


def test_the_meter_sees_products_and_what_is_made() -> None:
    q, k, before = torch.randn(2, 3, 10, 4), torch.randn(2, 3, 7, 4), torch.randn(1000)
    with Meter(head_dim=4) as meter:
        q @ k.mT
        assert meter.take() == Workspace(2 * 3 * 10 * 7 * 4, frozenset({(6 * 7, 6 * 10)}))
        before[1:].view(3, 333).mul_(2)  # a view, and in place: nothing is made
        torch.arange(5000)
        assert meter.take() == Workspace(0, frozenset())
        mask = before > 0
        assert meter.take().largest == 1000 == mask.numel()
        q[0, 0] @ k[0, 0].T
        torch.baddbmm(torch.zeros(3, 10, 7), q[0], k[0].mT)
        torch.randn(5, 6) @ torch.randn(6, 7)  # no product of vectors of the head dim
        assert meter.take().products == {(7, 10), (21, 30)}
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
        assert (6 * 7, 6 * 10) in meter.take().products


@pytest.mark.parametrize("bucket", (4, 10))
def test_the_meter_looks_into_the_operator_that_a_forward_is(bucket: int) -> None:
    """And sees what it would see without: products of the tiles, tensors of the size of the output."""
    q, k = torch.randn(1, 10, 3, 4), torch.randn(1, 10, 1, 4)
    with Meter(head_dim=4) as meter:
        ring_attention(q, k, k, Pattern.dense(), Layout.contiguous(10, 1), bucket=bucket, kernel="math")
    seen = meter.take()
    assert seen.products and all(few <= 3 * 10 and many <= 3 * 16 for few, many in seen.products)
    assert max(few for few, _ in seen.products) == bucket
    assert 4 * 3 * 10 * 4 <= seen.largest <= 4 * 3 * 10 * max(4, bucket) and meter.peak > meter.held


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    """On one rank, where every kernel call is one's own; the simplest kernels, which all of them share."""
    return [replace(one, measured=True) for one in draw_many(cases(1), 200)]


def refused(drawn: list[Case], enough: int) -> int:
    """On how many of the Cases the check fails; counts up to `enough`."""
    count = 0
    for one in drawn:
        try:
            assert check_workspace(one, expect(one), [observe(SoloTransport(), one, None, False)]) == {}
        except WrongResult as failure:
            assert str(failure).startswith("workspace: ")
            count += 1
        if count == enough:
            break
    return count


@pytest.fixture
def planless() -> Iterator[None]:
    """No plan outlives a defect, or meets one that it was not made with."""
    clear_caches(("ring",))
    yield
    clear_caches(("ring",))


@pytest.mark.slow
def test_the_ring_stays_within(drawn: list[Case], planless: None) -> None:
    assert refused(drawn, 1) == 0


def wide_folds(real: Callable[..., Any]) -> Callable[..., Any]:
    def wider(ranges: Any, keys: Any, mask: Any, found: Any, folded: int, limits: Any) -> Any:
        return real(ranges, keys, mask, found, 2 * folded, limits)

    return wider


@pytest.mark.parametrize(
    ("place", "name", "defect"),
    [
        pytest.param(math_kernel, "_row_blocks", lambda q, k: iter([slice(0, q.shape[-2])]), id="scores at once"),
        pytest.param(tiling._Keys, "cut", lambda keys, most: keys, id="keys not cut"),
        pytest.param(tiling, "_drafts", wide_folds(tiling._drafts), id="folds beyond the bucket"),
        pytest.param(tiling, "LEAST_ROWS", 10**6, id="rows not cut"),
    ],
)
def test_what_takes_too_much_is_refused(
    place: Any, name: str, defect: Any, drawn: list[Case], planless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, defect)
    assert refused(drawn, 2) == 2
