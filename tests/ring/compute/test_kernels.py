"""The kernels, tile by tile, against a dense softmax in fp64 and its gradients by autograd."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from ring.compute import kernels, math_kernel
from ring.compute.kernel_counts import picked_kernels
from ring.compute.math_kernel import SavedRows
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Sequences, Tile
from ring.precision import accumulator_dtype

INF = float("inf")
CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What may go wrong in out and lse, and again in the gradients: inputs are of size 1, with 8 dims and up to 33 keys.
# The fp32 kernels round some tens of operations; torch's 16-bit ones round probabilities and outputs as well.
ROUNDING = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def tolerance(dtype: torch.dtype) -> float:
    """Both kernels work in the accumulator's type, whatever the inputs are."""
    return 400 * ROUNDING[accumulator_dtype(dtype)]


def gradient_tolerance(name: str, dtype: torch.dtype) -> float:
    """The fused kernel forms delta by itself, from an output that was rounded to the inputs' type."""
    return 16 * ROUNDING[dtype] if name == "flash" and dtype.itemsize == 2 else tolerance(dtype)


@dataclass(frozen=True)
class Size:
    folds: int = 2
    batch: int = 2
    groups: int = 2
    share: int = 1
    queries: int = 7
    keys: int = 9
    dim: int = 8

    @property
    def q(self) -> tuple[int, ...]:
        return self.folds, self.batch, self.groups, self.share, self.queries, self.dim

    @property
    def k(self) -> tuple[int, ...]:
        return self.folds, self.batch, self.groups, 1, self.keys, self.dim


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def positions(size: Size, blind: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending positions, in no step at all; the first query row of fold 0 sees nothing if `blind`."""
    generator = torch.Generator().manual_seed(3)
    n = 40 + 2 * max(size.queries, size.keys)

    def some(count: int) -> torch.Tensor:
        return torch.stack([torch.randperm(n, generator=generator)[:count].sort().values for _ in range(size.folds)])

    q, k = some(size.queries), some(size.keys)
    if blind:
        q[0, 0], k[0] = 0, k[0].clamp(min=1)
    return q, k


def tile_of(mask: Mask, size: Size) -> Tile:
    heads = Heads.of(((0,),))
    q, k = positions(size) if mask is Mask.POSITION else (None, None)
    return Tile(Rows(0, 1, size.queries), Rows(0, 1, size.keys), heads, heads, mask, q, k)


def hidden(tile: Tile, size: Size) -> torch.Tensor:
    """(F, 1, 1, 1, Lq, Lk), true where a key is not seen; row by row."""
    found = np.zeros((size.folds, size.queries, size.keys), bool)
    for f, i in np.ndindex(size.folds, size.queries):
        if tile.mask is Mask.CAUSAL:
            found[f, i, i + 1 :] = True
        elif tile.mask is Mask.POSITION:
            assert tile.query_positions is not None and tile.key_positions is not None
            found[f, i] = [key > int(tile.query_positions[f, i]) for key in tile.key_positions[f].tolist()]
    return torch.from_numpy(found)[:, None, None, None]


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, unseen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in fp64, differentiable; a row that sees nothing has out 0, lse -inf, and no gradient."""
    q, k, v = q.double(), k.double(), v.double()
    scores = torch.einsum("fbgpid,fbgpjd->fbgpij", q, k.expand(*q.shape[:4], *k.shape[4:])) * scale
    scores = scores.masked_fill(unseen, -INF)
    dead = unseen.all(-1, keepdim=True)
    safe = scores.masked_fill(dead, 0.0)
    weights = safe.softmax(-1).masked_fill(dead, 0.0)
    lse = safe.logsumexp(-1).masked_fill(dead.squeeze(-1), -INF)
    return torch.einsum("fbgpij,fbgpjd->fbgpid", weights, v.expand(*q.shape[:4], *v.shape[4:])), lse


def names(mask: Mask) -> tuple[str, ...]:
    return ("math",) if mask is Mask.POSITION else ("math", "flash")


def sizes_of(mask: Mask) -> tuple[Size, ...]:
    # So many rows that the math kernel takes them in several blocks, the last of them a short one.
    many = 2 * math_kernel._LEAST_ROWS + 5
    if mask is Mask.CAUSAL:
        square = Size(queries=7, keys=7), Size(share=3, queries=5, keys=5), Size(1, 1, 1, 1, 1, 1, 1)
        return *square, Size(2, 1, 1, 2, many, many, 2)
    return (
        Size(2, 1, 1, 2, many, many + 9, 2),
        Size(),
        Size(share=3),
        Size(folds=1, batch=1, groups=1, queries=1, keys=1),
        Size(queries=1, keys=33, dim=3),
    )


CASES = [(mask, size, name) for mask in Mask for size in sizes_of(mask) for name in names(mask)]
# `choose` gives the fused kernel neither a scale <= 0 nor a gradient through lse: see test_which_kernel_takes_a_tile.
SCALED = [(*case, scale) for case in CASES for scale in (0.35, -0.5, 0.0) if case[2] == "math" or scale > 0]
WITH_DLSE = [(*case, dlse) for case in CASES for dlse in (False, True) if case[2] == "math" or not dlse]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask, size, name, scale", SCALED)
def test_forward(mask: Mask, size: Size, name: str, scale: float, dtype: torch.dtype) -> None:
    q, k, v = (normal(shape, i, dtype) for i, shape in enumerate((size.q, size.k, size.k)))
    tile = tile_of(mask, size)
    out, lse = kernels.forward(name, q, k, v, tile, scale)
    wanted, wanted_lse = dense(q, k, v, hidden(tile, size), scale)
    work = accumulator_dtype(dtype)
    assert out.dtype is work and lse.dtype is work and out.shape == q.shape and lse.shape == q.shape[:-1]
    bound = tolerance(dtype)
    torch.testing.assert_close(out.double(), wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=bound, atol=bound)
    if mask is Mask.POSITION:
        assert out[0, :, :, :, 0].eq(0).all() and lse[0, :, :, :, 0].eq(-INF).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask, size, name, with_dlse", WITH_DLSE)
def test_backward_of_a_part_takes_the_global_softmax(
    mask: Mask, size: Size, name: str, with_dlse: bool, dtype: torch.dtype
) -> None:
    """Two tiles over the same rows: the summands of both are the gradients of one softmax over all their keys."""
    scale = 0.35
    q, k, v, more_k, more_v = (
        normal(shape, i, dtype) for i, shape in enumerate((size.q, size.k, size.k, size.k, size.k))
    )
    dout, dlse = normal(size.q, 7, dtype), normal(size.q[:-1], 8)
    first, second = tile_of(mask, size), tile_of(Mask.FULL, size)
    # The second tile is kept from the rows of fold 0, so that a row that sees nothing stays one.
    unseen = torch.cat([hidden(first, size), hidden(second, size)], -1)
    unseen[0, ..., size.keys :] = True
    leaves = [x.double().requires_grad_() for x in (q, torch.cat([k, more_k], 4), torch.cat([v, more_v], 4))]
    out, lse = dense(leaves[0], leaves[1], leaves[2], unseen, scale)
    loss = (out * dout.double()).sum()
    if with_dlse:
        loss = loss + (lse.masked_fill(lse == -INF, 0.0) * dlse).sum()
    wanted = torch.autograd.grad(loss, leaves)

    work = accumulator_dtype(dtype)
    delta = (dout.double() * out.detach()).sum(-1) - (dlse if with_dlse else 0.0)
    saved = SavedRows(dout, out.detach().to(dtype), lse.detach().to(work), delta.to(work))
    got = kernels.backward(name, q, k, v, saved, first, scale)
    assert saved.delta is not None
    rest = SavedRows(saved.dout[1:], saved.out[1:], saved.lse[1:], saved.delta[1:])
    others = kernels.backward(name, q[1:], more_k[1:], more_v[1:], rest, second, scale) if size.folds > 1 else None
    dq = got[0].double()
    if others is not None:
        dq[1:] += others[0].double()
    bound = 4 * gradient_tolerance(name, dtype)
    torch.testing.assert_close(dq, wanted[0], rtol=bound, atol=bound)
    for i in (1, 2):
        assert got[i].shape == size.k
        torch.testing.assert_close(got[i].double(), wanted[i][..., : size.keys, :], rtol=bound, atol=bound)
        if others is not None:
            torch.testing.assert_close(others[i].double(), wanted[i][1:, ..., size.keys :, :], rtol=bound, atol=bound)
    if mask is Mask.POSITION:
        assert got[0][0, :, :, :, 0].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", Mask)
def test_strided_views_give_the_same(mask: Mask, dtype: torch.dtype) -> None:
    """Tiles are views of shards: heads interleaved, rows dilated. Not a bit may depend on the strides."""
    size = Size(share=2, queries=6, keys=6)
    q, k, v, dout = (normal(shape, i, dtype) for i, shape in enumerate((size.q, size.k, size.k, size.q)))
    tile = tile_of(mask, size)
    out, lse = dense(q, k, v, hidden(tile, size), 0.35)
    work = accumulator_dtype(dtype)
    saved = SavedRows(dout, out.to(dtype), lse.to(work), (dout.double() * out).sum(-1).to(work))

    def strided(x: torch.Tensor) -> torch.Tensor:
        dims = (1, 0, 4, 2, 3, 5) if x.dim() == 6 else (1, 2, 3, 0, 4)
        wide = x.permute(dims).contiguous().repeat_interleave(3, 2)[:, :, ::3]  # as a shard (B, N, H, D) has it
        back = tuple(dims.index(d) for d in range(len(dims)))
        view = wide.permute(back)
        assert view.equal(x) and not view.is_contiguous()
        return view

    for name in names(mask):
        plain = kernels.forward(name, q, k, v, tile, 0.35)
        viewed = kernels.forward(name, strided(q), strided(k), strided(v), tile, 0.35)
        for a, b in zip(plain, viewed, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=4 * ROUNDING[work] * 16)
        assert saved.delta is not None
        before = [x.clone() for x in (q, k, v, saved.dout, saved.out, saved.lse, saved.delta)]
        gradients = kernels.backward(name, q, k, v, saved, tile, 0.35)
        views = SavedRows(strided(saved.dout), strided(saved.out), strided(saved.lse), strided(saved.delta))
        again = kernels.backward(name, strided(q), strided(k), strided(v), views, tile, 0.35)
        bound = 4 * ROUNDING[work] * 64 if name == "math" else gradient_tolerance(name, dtype)
        for a, b in zip(gradients, again, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=bound)
        for a, b in zip(before, (q, k, v, saved.dout, saved.out, saved.lse, saved.delta), strict=True):
            assert a.equal(b), "a kernel changed its arguments"


@pytest.mark.parametrize("name", ("math", "flash"))
def test_fp16_scores_beyond_its_range(name: str) -> None:
    """Products of 2^22, where fp16 ends at 65504. Every number is a power of two, so nothing rounds: exact."""
    size = Size(1, 1, 1, 1, 2, 3, 64)
    q = torch.full(size.q, 256.0, dtype=torch.float16)
    k = torch.tensor([256.0, 256.0, 128.0], dtype=torch.float16)[:, None].expand(3, 64).view(size.k).contiguous()
    v = torch.tensor([1.0, 3.0, 100.0], dtype=torch.float16)[:, None].expand(3, 64).view(size.k).contiguous()
    tile = tile_of(Mask.FULL, size)
    out, lse = kernels.forward(name, q, k, v, tile, 1.0)
    assert out.eq(2.0).all()
    assert lse.sub(2.0**22).abs().max() <= 1.0  # log 2 and an ulp of 2^22 in fp32
    dout = torch.full(size.q, 0.5, dtype=torch.float16)
    saved = SavedRows(dout, out.half(), lse, (dout.float() * out).sum(-1))
    dq, dk, dv = kernels.backward(name, q, k, v, saved, tile, 1.0)
    # exp(s - lse) with lse rounded to a half: between e^-1 and 1; what matters is that it is finite and in place.
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert dv[..., 2, :].eq(0).all() and dk[..., 2, :].eq(0).all() and dv[..., 0, :].gt(0).all()


@pytest.mark.parametrize("name", ("math", "flash"))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("size_of_scores", (1e4, -1e4))
def test_scores_of_ten_thousand(size_of_scores: float, dtype: torch.dtype, name: str) -> None:
    """No sentinel: -1e4 is a score like any other, and a row in which all scores are such sees its keys."""
    size = Size(1, 1, 1, 1, 1, 3, 1)
    q = torch.ones(size.q, dtype=dtype)
    k = torch.full(size.k, size_of_scores, dtype=dtype)
    v = torch.tensor([1.0, 2.0, 6.0], dtype=dtype).view(size.k)
    out, lse = kernels.forward(name, q, k, v, tile_of(Mask.FULL, size), 1.0)
    assert out.item() == pytest.approx(3.0, abs=8 * ROUNDING[dtype])
    assert lse.item() == pytest.approx(size_of_scores + 1.0986122886681098, abs=2e4 * ROUNDING[dtype])


@pytest.mark.parametrize("name", ("math", "flash"))
@pytest.mark.parametrize("mask", (Mask.FULL, Mask.CAUSAL))
def test_nan_reaches_the_rows_that_see_it(mask: Mask, name: str) -> None:
    size = Size(1, 1, 2, 1, 6, 6, 4)
    q, k, v = (normal(shape, i) for i, shape in enumerate((size.q, size.k, size.k)))
    k[0, 0, 1, 0, 3, 2] = float("nan")
    out, lse = kernels.forward(name, q, k, v, tile_of(mask, size), 0.5)
    sees = torch.zeros(2, 6, dtype=torch.bool)
    sees[1, 3 if mask is Mask.CAUSAL else 0 :] = True
    assert out[0, 0, :, 0].isnan().any(-1).equal(sees) and lse[0, 0, :, 0].isnan().equal(sees)


@pytest.mark.parametrize("name", ["math", "flash"])
def test_rows_whose_scores_are_all_minus_infinity_weigh_nothing(name: str) -> None:
    """Keys padded by -inf in a dim of their own, or scores beyond fp32: such a row has out 0, lse -inf and no gradient;
    beside it is a row with a single score of 0, whose lse is 0."""
    size = Size(queries=20, keys=20)
    q, k, v, dout = (normal(shape, seed, torch.float32) for seed, shape in enumerate((size.q, size.k, size.k, size.q)))
    q[..., -1], k[..., -1] = 0.0, -3e38
    q[..., 5, -1], q[..., 0, :] = 8.0, 0.0
    tile = tile_of(Mask.CAUSAL, size)
    with picked_kernels() as count:
        out, lse = kernels.forward(name, q, k, v, tile, 1.0)
    assert count[name] == 1 and count["math"] == 1
    assert (out[..., 5, :] == 0).all() and (lse[..., 5] == -INF).all()
    assert torch.allclose(out[..., 0, :], v[..., 0, :].expand(out[..., 0, :].shape)) and (lse[..., 0] == 0).all()
    exact, exact_lse = kernels.forward("math", q.double(), k.double(), v.double(), tile, 1.0)
    others = [i for i in range(20) if i != 5]
    assert torch.allclose(out[..., others, :].double(), exact[..., others, :], atol=1e-5)
    assert torch.allclose(lse[..., others].double(), exact_lse[..., others], atol=1e-5)
    delta = (dout * out).sum(-1)
    dq, dk, dv = kernels.backward(name, q, k, v, SavedRows(dout, out, lse, delta), tile, 1.0)
    assert (dq[..., 5, :] == 0).all()
    assert all(x.isfinite().all() for x in (dk, dv))


def test_rows_that_see_nothing_at_all() -> None:
    size = Size(1, 1, 1, 2, 3, 4, 5)
    at = torch.tensor([[0, 1, 2]]), torch.tensor([[5, 6, 7, 8]])
    tile = replace(tile_of(Mask.POSITION, size), query_positions=at[0], key_positions=at[1])
    q, k, v, dout = (normal(shape, i) for i, shape in enumerate((size.q, size.k, size.k, size.q)))
    out, lse = kernels.forward("math", q, k, v, tile, 0.5)
    assert out.eq(0).all() and lse.eq(-INF).all()
    for global_lse in (lse, torch.zeros_like(lse)):  # nothing seen anywhere, and nothing in this tile
        saved = SavedRows(dout, out, global_lse, torch.zeros_like(lse))
        assert all(x.eq(0).all() for x in kernels.backward("math", q, k, v, saved, tile, 0.5))


@pytest.mark.parametrize("device", ("cpu", "cuda", "meta"))
@pytest.mark.parametrize("keys", (1, 15, 16, 40))
def test_which_kernel_takes_a_tile(keys: int, device: str) -> None:
    """Keys of one fold count, though there are three."""
    size, rows = Size(queries=keys, keys=keys), Rows(0, 1, keys, keys, 3)
    for kernel, mask, dlse, scale, dtype in itertools.product(
        kernels.KERNELS, Mask, (False, True), (0.5, 0.0, -0.5), (torch.float32, torch.bfloat16)
    ):
        wanted = "math"
        if kernel != "math" and mask is not Mask.POSITION and not dlse and scale > 0:
            if device == "cpu" and keys >= 16:
                wanted = "flash"
            if device == "cuda" and dtype == torch.bfloat16:
                wanted = "flash" if kernel == "flash" else "cudnn" if keys > 1 else "math"
        tile = replace(tile_of(mask, size), query_rows=rows, key_rows=rows)
        chosen = kernels.choose(kernel, torch.device(device), dtype, 64, tile, scale, dlse)
        assert chosen == wanted, (kernel, mask, dlse, scale, dtype)


def test_sums_in_any_order_are_not_repeatable() -> None:
    tile = tile_of(Mask.FULL, Size(queries=16, keys=16))
    for kernel in kernels.KERNELS:
        for device in ("cpu", "cuda"):
            chosen = kernels.choose(kernel, torch.device(device), torch.bfloat16, 64, tile, 0.5, repeatable=True)
            assert chosen == ("math" if kernel == "math" else "flash")


@pytest.mark.parametrize(("dim", "taken"), [(8, True), (64, True), (128, True), (4, False), (20, False), (136, False)])
def test_head_dims_of_fused_kernels_on_gpus(dim: int, taken: bool) -> None:
    for dtype in kernels.HALF:
        assert kernels.fused("auto", torch.device("cuda"), dtype, dim) == ("cudnn" if taken else "math")
        assert kernels.fused("flash", torch.device("cuda"), dtype, dim) == ("flash" if taken else "math")
    assert kernels.fused("auto", torch.device("cuda"), torch.float32, dim) == "math"
    assert kernels.fused("auto", torch.device("cpu"), torch.float32, dim) == "flash"


def test_what_was_picked_is_counted() -> None:
    """Blocks within each other count alike, whatever they have counted; backwards count too, and nothing afterwards."""
    size, tile = Size(), tile_of(Mask.FULL, Size())
    q, k, v, dout = (normal(shape, i) for i, shape in enumerate((size.q, size.k, size.k, size.q)))
    with picked_kernels() as outer:
        with picked_kernels() as first:
            out, lse = kernels.forward("math", q, k, v, tile, 1.0)
        with picked_kernels() as inner:
            kernels.backward("flash", q, k, v, SavedRows(dout, out, lse, None), tile, 1.0)
            with pytest.raises(KeyError), picked_kernels() as ended:
                raise KeyError
        kernels.forward("math", q, k, v, tile, 1.0)
    kernels.forward("math", q, k, v, tile, 1.0)
    assert (outer, first, inner, ended) == ({"math": 2, "flash": 1}, {"math": 1}, {"flash": 1}, {})


# --- several sequences, and bits of rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", (Mask.FULL, Mask.CAUSAL))
def test_sequences_of_a_tile_see_nothing_of_each_other(mask: Mask) -> None:
    """Each has the bits that it has by itself."""
    queries, keys = (3, 1, 20), (3, 1, 20) if mask is Mask.CAUSAL else (2, 17, 5)
    size = Size(folds=1, share=2, queries=sum(queries), keys=sum(keys))
    tile = replace(tile_of(mask, size), sequences=Sequences.of(np.array(queries), np.array(keys)))
    q, k, v, dout, out = (normal(x, i) for i, x in enumerate((size.q, size.k, size.k, size.q, size.q)))
    lse, delta = normal(size.q[:-1], 7), normal(size.q[:-1], 8)
    found = kernels.forward("math", q, k, v, tile, 0.3)
    dq, dk, dv = kernels.backward("math", q, k, v, SavedRows(dout, out, lse, delta), tile, 0.3)
    assert tile.sequences is not None and tile.sequences.longest == (20, max(keys))
    for rows, of_keys in tile.sequences.slices():
        one, two, three = q[..., rows, :], k[..., of_keys, :], v[..., of_keys, :]
        alone = tile_of(mask, replace(size, queries=one.shape[4], keys=two.shape[4]))
        whole = kernels.forward("math", one, two, three, alone, 0.3)
        saved = SavedRows(dout[..., rows, :], out[..., rows, :], lse[..., rows], delta[..., rows])
        grads = kernels.backward("math", one, two, three, saved, alone, 0.3)
        parts = found[0][..., rows, :], found[1][..., rows], dq[..., rows, :], dk[..., of_keys, :], dv[..., of_keys, :]
        assert all(torch.equal(x, y) for x, y in zip(parts, (*whole, *grads), strict=True))


@pytest.mark.parametrize("name", ["math", "flash"])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(name: str) -> None:
    """A row with a single score of 0 has lse 0, as a row of -inf by the fused kernel, and is computed again by the
    plain one; the rows beside it, of the same fold and of others, are not."""
    size = Size(2, 1, 1, 1, 20, 20, 8)
    q, k, v = (normal(shape, i) for i, shape in enumerate((size.q, size.k, size.k)))
    before = kernels.forward(name, q, k, v, tile_of(Mask.CAUSAL, size), 1.0)
    q[1, ..., 0, :] = 0.0
    after = kernels.forward(name, q, k, v, tile_of(Mask.CAUSAL, size), 1.0)
    assert (after[1][1, ..., 0] == 0).all()
    for a, b in zip(before, after, strict=True):
        assert a[0].equal(b[0]) and a[1, :, :, :, 1:].equal(b[1, :, :, :, 1:])
