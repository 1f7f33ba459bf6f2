"""The variable-length kernel of GPUs beside the math kernel and the oracle."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from reference import Pattern
from reference.oracle import attention_and_gradients
from ring import Layout, ring_attention
from ring.compute import kernel_calls
from ring.compute.kernel_counts import count_kernels
from ring.compute.kernels import FLASH, MATH, fa4
from ring.compute.kernels.kernel import SavedRows, Scores
from ring.layout import Run
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Sequences, Tile
from ring.strided_view import batched
from tests.support.gpu_tiles import LENGTHS_OF_DOCUMENTS, WINDOWS, check_windows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROWS, KEYS = (1, 5, 64, 1, 130, 17), (3, 1, 64, 200, 129, 16)


@pytest.fixture(autouse=True)
def _without_fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" chooses among torch's kernels, if FlashAttention-4 is installed or not."""
    monkeypatch.setattr(fa4, "installed_version", lambda: None)


def tile_of(mask: Mask, groups: int, share: int) -> Tile:
    keys = KEYS if mask is Mask.FULL else ROWS
    sequences = Sequences.of(np.array(ROWS), np.array(keys))
    rows, key_rows = Rows(0, 1, sum(ROWS)), Rows(0, 1, sum(keys))
    heads = Heads(groups, share, 0, share, 1), Heads(groups, 1, 0, 1, 1)
    return Tile(rows, key_rows, *heads, mask, sequences=sequences)


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("dim", [8, 40, 128])
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL, Mask.ANTICAUSAL])
@pytest.mark.parametrize("batch, groups, share", [(1, 1, 1), (3, 2, 1), (2, 2, 4)])
def test_equals_the_math_kernel_within_rounding(
    batch: int, groups: int, share: int, mask: Mask, dim: int, dtype: torch.dtype
) -> None:
    tile = tile_of(mask, groups, share)
    generator = torch.Generator("cuda").manual_seed(dim)

    def drawn(share: int, length: int) -> torch.Tensor:
        shape = (1, batch, groups, share, length, dim)
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    q, dout = drawn(share, tile.query_rows.length), drawn(share, tile.query_rows.length)
    k, v = drawn(1, tile.key_rows.length), drawn(1, tile.key_rows.length)
    out, lse = kernel_calls.forward(FLASH, batched(q), batched(k), batched(v), tile, Scores(dim**-0.5))
    exact, exact_lse = kernel_calls.forward(MATH, q.double(), k.double(), v.double(), tile, Scores(dim**-0.5))
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    close(out, exact, 4 * UNIT[dtype])
    close(lse, exact_lse, 1e-4)
    # The global lse and out of a larger whole, half of which is elsewhere.
    whole, whole_lse = exact.to(dtype), exact_lse.float() + 0.7
    saved = SavedRows(batched(dout), batched(whole), whole_lse.flatten(2, 3).flatten(0, 1).unsqueeze(-1), None)
    found = kernel_calls.backward(FLASH, batched(q), batched(k), batched(v), saved, tile, Scores(dim**-0.5))
    delta = (dout.double() * whole.double()).sum(-1)
    double = SavedRows(dout.double(), whole.double(), whole_lse.double(), delta)
    wanted = kernel_calls.backward(MATH, q.double(), k.double(), v.double(), double, tile, Scores(dim**-0.5))
    for x, y in zip(found, wanted, strict=True):
        close(x, y, 8 * UNIT[dtype])


def close(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert found.shape == exact.shape
    error = (found.double() - exact).abs().max() / exact.abs().max().clamp(min=1.0)
    assert error <= tolerance, float(error)


@pytest.mark.parametrize(("dim", "share"), [(40, 1), (64, 4), (128, 1), (128, 4), (256, 4)])
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL])
@pytest.mark.parametrize("lengths", [None, LENGTHS_OF_DOCUMENTS], ids=["one", "several"])
def test_windows(lengths: tuple[int, ...] | None, mask: Mask, dim: int, share: int) -> None:
    """Windows of one sequence, or of several."""
    for window in WINDOWS:
        check_windows("flash", lengths, mask, window, (dim, dim), share)


@pytest.mark.parametrize(("dim", "share"), [(40, 1), (64, 4), (128, 4), (256, 4)])
@pytest.mark.parametrize("lengths", [None, LENGTHS_OF_DOCUMENTS], ids=["one", "several"])
def test_anticausal_rows(lengths: tuple[int, ...] | None, dim: int, share: int) -> None:
    check_windows("flash", lengths, Mask.ANTICAUSAL, None, (dim, dim), share)


LENGTHS = (300, 7, 1, 0, 64, 64, 90, 2100, 64, 64, 33, 2, 150)
PATTERNS = (
    Pattern.dense(True, LENGTHS),
    Pattern.longnet((64, None), (1, 3), 8, True, documents=LENGTHS),
    Pattern.dense(True, LENGTHS, window=50),
)


def layout_of(order: str) -> Layout:
    """A layout of one rank: rows in order; documents by turns, so that neighbours lie apart; the same as a list."""
    n, edges = sum(LENGTHS), np.cumsum((0, *LENGTHS)).tolist()
    runs = [Run(a, 1, b - a) for a, b in pairwise(edges) if b > a]
    by_turns = (*runs[::2], *runs[1::2])
    if order == "by turns":
        return Layout(n, (0, n), by_turns, None)
    if order == "listed":
        return Layout(
            n, (0, n), None, np.concatenate([np.arange(run.start, run.start + run.length) for run in by_turns])
        )
    return Layout.contiguous(n, 1)


@pytest.mark.parametrize(
    ("kernel", "hidden"), [("auto", False), ("flash", False), ("cudnn", False), ("math", False), ("math", True)]
)
@pytest.mark.parametrize("order", ["contiguous", "by turns", "listed"])
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_documents_equal_the_oracle(batch: int, order: str, kernel: str, hidden: bool) -> None:
    """Long and short documents, of which some are alike, in dense and in dilated attention.

    hidden: keys of two documents and the first of the others are, as padding is: a component is -inf, in which every
    query has 1; its gradients are not seen.
    """
    layout, generator = layout_of(order), torch.Generator("cuda").manual_seed(2)
    for pattern in PATTERNS:
        q, k, v, dout = (
            torch.randn(batch, sum(LENGTHS), heads, 32, device="cuda", generator=generator).bfloat16()
            for heads in (8, 2, 2, 8)
        )
        if hidden:
            q[..., 0], k[..., 0] = 1.0, 0.0
            for number, (begin, end) in enumerate(pairwise(np.cumsum((0, *LENGTHS)).tolist())):
                k[:, begin : end if number in (1, 7) else min(begin + 5, end), :, 0] = -torch.inf
        leaves = [layout.shard(x, 0).clone().requires_grad_() for x in (q, k, v)]
        with count_kernels() as picked:
            mine = ring_attention(leaves[0], leaves[1], leaves[2], pattern, layout, kernel=kernel)
            assert isinstance(mine, torch.Tensor)
            found = [mine.detach(), *torch.autograd.grad(mine, leaves, layout.shard(dout, 0))]
        assert order == "listed" or (picked["flash"] > 0) == (kernel in ("auto", "flash"))
        out, _, *grads = attention_and_gradients(q.double(), k.double(), v.double(), pattern, dout.double())
        if hidden:
            grads[0][..., 0] = found[1][..., 0] = 0.0
        for x, y in zip(found, (out, *grads), strict=True):
            torch.testing.assert_close(x.double(), layout.shard(y, 0), rtol=2.0**-5, atol=2.0**-5)
