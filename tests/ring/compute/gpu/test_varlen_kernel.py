"""The variable-length kernel: the lists of sequences that it takes, and on a GPU its numbers beside the math kernel's.

python -m pytest tests/ring/compute/gpu/test_varlen_kernel.py
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from reference import Pattern
from reference.oracle import attention_and_gradients
from ring import Layout, ring_attention
from ring.compute import kernels
from ring.compute.gpu.varlen_kernel import over_batch
from ring.compute.kernel_counts import picked_kernels
from ring.compute.math_kernel import SavedRows
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Sequences, Tile
from ring.strided_view import batched

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROWS, KEYS = (1, 5, 64, 1, 130, 17), (3, 1, 64, 200, 129, 16)


def test_each_row_of_the_batch_brings_its_sequences() -> None:
    found = over_batch(np.array([0, 3, 4, 9]), 3)
    assert found.dtype == np.int32 and found.tolist() == [0, 3, 4, 9, 12, 13, 18, 21, 22, 27]
    assert over_batch(np.array([0, 2]), 1).tolist() == [0, 2]


def tile_of(mask: Mask, groups: int, share: int) -> Tile:
    keys = ROWS if mask is Mask.CAUSAL else KEYS
    sequences = Sequences.of(np.array(ROWS), np.array(keys))
    rows, key_rows = Rows(0, 1, sum(ROWS)), Rows(0, 1, sum(keys))
    heads = Heads(groups, share, 0, share, 1), Heads(groups, 1, 0, 1, 1)
    return Tile(rows, key_rows, *heads, mask, sequences=sequences)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("dim", [8, 40, 128])
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.CAUSAL])
@pytest.mark.parametrize("batch, groups, share", [(1, 1, 1), (3, 2, 1), (2, 2, 4)])
def test_it_is_the_math_kernel_to_within_rounding(
    batch: int, groups: int, share: int, mask: Mask, dim: int, dtype: torch.dtype
) -> None:
    tile = tile_of(mask, groups, share)
    generator = torch.Generator("cuda").manual_seed(dim)

    def drawn(share: int, length: int) -> torch.Tensor:
        shape = (1, batch, groups, share, length, dim)
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    q, dout = drawn(share, tile.query_rows.length), drawn(share, tile.query_rows.length)
    k, v = drawn(1, tile.key_rows.length), drawn(1, tile.key_rows.length)
    out, lse = kernels.forward("flash", batched(q), batched(k), batched(v), tile, dim**-0.5)
    exact, exact_lse = kernels.forward("math", q.double(), k.double(), v.double(), tile, dim**-0.5)
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    close(out, exact, 4 * UNIT[dtype])
    close(lse, exact_lse, 1e-4)
    # The global lse and out of a larger whole, half of which is elsewhere.
    whole, whole_lse = exact.to(dtype), exact_lse.float() + 0.7
    saved = SavedRows(batched(dout), batched(whole), whole_lse.flatten(2, 3).flatten(0, 1).unsqueeze(-1), None)
    found = kernels.backward("flash", batched(q), batched(k), batched(v), saved, tile, dim**-0.5)
    delta = (dout.double() * whole.double()).sum(-1)
    double = SavedRows(dout.double(), whole.double(), whole_lse.double(), delta)
    wanted = kernels.backward("math", q.double(), k.double(), v.double(), double, tile, dim**-0.5)
    for x, y in zip(found, wanted, strict=True):
        close(x, y, 8 * UNIT[dtype])


def close(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert found.shape == exact.shape
    error = (found.double() - exact).abs().max() / exact.abs().max().clamp(min=1.0)
    assert error <= tolerance, float(error)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kernel", ["auto", "flash", "cudnn", "math"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_documents_are_the_oracle_s(batch: int, order: str, kernel: str) -> None:
    """Long and short documents, of which some are alike, in all and in dilated branches; order as for several ranks."""
    lengths = (300, 7, 1, 0, 64, 64, 90, 2100, 64, 64, 33, 2, 150)
    n = sum(lengths)
    edges = [0, *np.cumsum(lengths).tolist()]
    for pattern in (Pattern.dense(True, lengths), Pattern.longnet((64, None), (1, 3), 8, True, documents=lengths)):
        layout = Layout.balanced(pattern, n, 1) if order == "balanced" else getattr(Layout, order)(n, 1)
        if order == "zigzag":  # rows whose documents do not follow each other
            pieces = [list(range(a, b)) for a, b in pairwise(edges)]
            listed = [x for piece in (*pieces[::2], *pieces[1::2]) for x in piece]
            layout = Layout.from_cuts(listed, (0, n))
        generator = torch.Generator("cuda").manual_seed(n)
        shapes = [(batch, n, heads, 32) for heads in (8, 2, 2, 8)]
        q, k, v, dout = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes)
        leaves = [layout.shard(x, 0).clone().requires_grad_() for x in (q, k, v)]
        with picked_kernels() as picked:
            one, two, three = leaves
            out, lse = ring_attention(one, two, three, pattern, layout, kernel=kernel, return_lse=True)
            found = [out, lse, *torch.autograd.grad(out, leaves, layout.shard(dout, 0))]
        assert kernel not in ("auto", "flash") or picked["flash"]
        assert kernel != "cudnn" or not picked["flash"]
        wanted = attention_and_gradients(q.double(), k.double(), v.double(), pattern, dout.double())
        for number, (x, y) in enumerate(zip(found, wanted, strict=True)):
            exact = layout.shard(y, 0, dim=2 if number == 1 else 1)
            torch.testing.assert_close(x.double(), exact, rtol=2.0**-5, atol=2.0**-5)
