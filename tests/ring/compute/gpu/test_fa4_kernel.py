"""FlashAttention-4 beside the math kernel: head dims, lengths, softcaps, gradients of lse, sequences, repeated bits."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

import ring.execute
from reference import Pattern
from ring import Layout, count_kernels, lowering
from ring.caching.bounded_cache import BoundedCache
from ring.compute import kernel_calls
from ring.compute.kernels import FA4, fa4
from ring.compute.kernels.kernel import HOPPER, Scores
from ring.plan.tile import Mask, Sequences
from ring.precision import accumulator_dtype
from tests.support.attention_cases import call, plain
from tests.support.gpu_tiles import LENGTHS_OF_DOCUMENTS, UNIT, WINDOWS, check_kernel, check_windows, tensors, tile_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(FA4.missing() is not None, reason=str(FA4.missing())),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != HOPPER, reason="needs a GPU of Hopper"
    ),
]
EQUAL = ((32, 32), (64, 64), (96, 96), (128, 128), (160, 160), (192, 192), (256, 256))
DIMS = [*((dims, share) for dims in EQUAL for share in (1, 4)), ((192, 128), 1)]  # query heads of a key/value head
LENGTHS = ((130, 130), (1, 300), (300, 1), (520, 77))


@pytest.mark.parametrize(("dims", "share"), DIMS, ids=str)
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL])
def test_equals_the_math_kernel_within_rounding(dims: tuple[int, int], share: int, mask: Mask) -> None:
    assert FA4.takes_dims(HOPPER, *dims, share)
    for queries, keys in LENGTHS if mask is Mask.FULL else ((130, 130), (1, 1), (700, 700)):
        q, k, v, dout = tensors(torch.bfloat16, 2, 1, 2, share, queries, keys, *dims)
        check_kernel("fa4", q, k, v, dout, tile_of(mask, queries, keys, 2, 2, share), (dims, share, queries, keys))


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_softcaps_and_gradients_of_lse(dtype: torch.dtype, softcap: float | None, with_dlse: bool) -> None:
    q, k, v, dout = tensors(dtype, 1, 2, 2, 2, 200, 200, 64)
    tile = tile_of(Mask.CAUSAL, 200, 200, 1, 2, 2)
    check_kernel("fa4", q, k, v, dout, tile, (softcap, with_dlse), softcap, with_dlse)


@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL])
@pytest.mark.parametrize("batch", [1, 3])
def test_sequences_of_several_lengths(batch: int, mask: Mask) -> None:
    rows = np.array((1, 5, 64, 1, 130, 17))
    keys = rows if mask is Mask.CAUSAL else np.array((3, 1, 64, 200, 129, 16))
    tile = tile_of(mask, int(rows.sum()), int(keys.sum()), 1, 2, 2, Sequences.of(rows, keys))
    q, k, v, dout = tensors(torch.bfloat16, 1, batch, 2, 2, int(rows.sum()), int(keys.sum()), 64)
    check_kernel("fa4", q, k, v, dout, tile, (batch, mask), with_dlse=batch == 3)


@pytest.mark.parametrize(("dims", "share"), [*DIMS[2:4], *DIMS[6:8], *DIMS[-3:]], ids=str)
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL])
@pytest.mark.parametrize("lengths", [None, LENGTHS_OF_DOCUMENTS], ids=["one", "several"])
def test_windows(lengths: tuple[int, ...] | None, mask: Mask, dims: tuple[int, int], share: int) -> None:
    """Windows of one sequence, or of several."""
    for window in WINDOWS:
        check_windows("fa4", lengths, mask, window, dims, share)


@pytest.mark.parametrize(("dims", "share"), [*DIMS[2:4], *DIMS[6:8], *DIMS[-3:]], ids=str)
@pytest.mark.parametrize("lengths", [None, LENGTHS_OF_DOCUMENTS], ids=["one", "several"])
def test_anticausal_rows(lengths: tuple[int, ...] | None, dims: tuple[int, int], share: int) -> None:
    check_windows("fa4", lengths, Mask.ANTICAUSAL, None, dims, share)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("pattern", [
    Pattern.dense(True), Pattern.longnet((64, None), (1, 4), 4, True), Pattern.dense(True, documents=(100, 7, 0, 405)),
    Pattern.dense(False, window=60), Pattern.dense(True, window=60, documents=(100, 7, 0, 405)),
], ids=("dense", "longnet", "packed", "window", "packed window"))  # fmt: skip
def test_named_kernel_equals_the_math_kernel(pattern: Pattern, softcap: float | None) -> None:
    """With sinks and gradients through lse, ten times, so that the last calls are replayed graphs."""
    torch.manual_seed(1)
    layout = Layout.contiguous(512, 1)
    q, k, v, dout = (torch.randn(1, 512, heads, 64, device="cuda") for heads in (4, 2, 2, 4))
    dlse, sinks = torch.randn(1, 4, 512, device="cuda"), torch.randn(4, device="cuda")

    def results(kernel: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in (q, k, v)]
        leaves.append(sinks.to(accumulator_dtype(dtype)).requires_grad_())
        out, lse = call(*leaves[:3], pattern, layout, kernel=kernel, sinks=leaves[3], softcap=softcap)
        seen = lse.isfinite()
        grads = torch.autograd.grad((out * dout.to(dtype)).sum() + (lse * dlse)[seen].sum(), leaves)
        return [out, lse.masked_fill(~seen, 0.0), *grads]

    exact = results("math", torch.float64)
    with count_kernels() as count:
        first = results("fa4", torch.bfloat16)
    assert count["fa4"] > 0
    for _ in range(10):
        last = results("fa4", torch.bfloat16)
    for found in (first, last):
        for x, y in zip(found, exact, strict=True):
            assert (x.double() - y).abs().max() <= 2.0**-5 * y.abs().max().clamp(min=1.0)


def test_bits_repeat_where_they_must() -> None:
    q, k, v, dout = (torch.randn(1, 2048, heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2, 8))

    def grads() -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = plain(*leaves, Pattern.dense(True), Layout.contiguous(2048, 1), kernel="fa4")
        return torch.autograd.grad(out, leaves, dout)

    torch.use_deterministic_algorithms(True)
    try:
        first = grads()
        assert all(torch.equal(x, y) for _ in range(5) for x, y in zip(first, grads(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("batch, kv_heads", [(1, 8), (2, 8), (1, 2)])
def test_gradients_in_place_equal_merged_ones(batch: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are split by rows, since the bucket is 256, and by heads, since the workspace is small."""
    pattern, layout = Pattern.longnet((256, 1024), (1, 4), 8, causal=True), Layout.contiguous(1024, 1)
    q, k, v, dout = (
        torch.randn(batch, 1024, heads, 128, device="cuda").bfloat16() for heads in (8, kv_heads, kv_heads, 8)
    )
    from ring.compute.gpu.gpu_accumulator import CombinedSum  # not at the top: torch for CPUs has no Triton

    monkeypatch.setattr(kernel_calls, "MAX_WORKSPACE", 2**20)
    taken: list[bool] = []
    place = CombinedSum.place

    def counted(*args: Any) -> torch.Tensor | None:
        taken.append((memory := place(*args)) is not None)
        return memory

    monkeypatch.setattr(CombinedSum, "place", counted)

    def grads() -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(ring.execute, "_programs", BoundedCache(8))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(plain(*leaves, pattern, layout, kernel="fa4", bucket=256), leaves, dout)

    torch.use_deterministic_algorithms(True)
    try:
        in_place, count = grads(), len(taken)
        monkeypatch.setattr(lowering, "cover", lambda *_: frozenset())
        assert all(torch.equal(x, y) for x, y in zip(in_place, grads(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(taken) == count > 8 and (all(taken) or batch > 1), "with a batch some folds are no view"


def test_a_compilation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    fa4._called.clear()
    q, k, v, _ = (x.flatten(2, 3).flatten(0, 1) for x in tensors(torch.float16, 1, 1, 3, 3, 150, 150, 32))
    with caplog.at_level(logging.INFO, "ring"):
        fa4.forward(q, k, v, tile_of(Mask.FULL, 150, 150, 1, 3, 3), Scores(0.3, 7.0))
    assert "FlashAttention-4 compiled a kernel" in caplog.text and "float16" in caplog.text
