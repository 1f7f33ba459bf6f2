"""The kernels, tile by tile, against a dense softmax in fp64 and its gradients by autograd."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ring.compute import kernel_calls, kernel_choice
from ring.compute.kernel_counts import count_kernels
from ring.compute.kernels import FLASH_CPU, MATH, NAMES, candidates, fa4, math
from ring.compute.kernels.kernel import KernelSetting, SavedRows, Scores
from ring.plan.blocks import Heads
from ring.plan.rows import Rows
from ring.plan.tile import Mask, Sequences, Tile
from ring.precision import accumulator_dtype

INF = float("inf")
ON_CPUS = {kernel.name: kernel for kernel in (MATH, FLASH_CPU)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Inputs are of size 1, with 8 dims and up to 33 keys: the kernels round some tens of operations.
ROUNDING = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


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


def drawn(size: Size, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    return [normal(shape, seed, dtype) for seed, shape in enumerate((size.q, size.k, size.k, size.q))]


def tile_of(mask: Mask, size: Size, window: int | None = None) -> Tile:
    """Positions ascend, in no step at all; the first query row of a fold sees nothing."""
    heads, q, k = Heads.of(((0,),)), None, None
    if mask is Mask.POSITION:
        generator, n = torch.Generator().manual_seed(3), 40 + 2 * max(size.queries, size.keys)
        q, k = (
            torch.stack([torch.randperm(n, generator=generator)[:count].sort().values for _ in range(size.folds)])
            for count in (size.queries, size.keys)
        )
        q[:, 0], k = 0, k.clamp(min=1)
    return Tile(Rows(0, 1, size.queries), Rows(0, 1, size.keys), heads, heads, mask, q, k, window=window)


def hidden(tile: Tile, size: Size) -> torch.Tensor:
    """(F, 1, 1, 1, Lq, Lk), true where a key is not seen."""
    if tile.query_positions is not None and tile.key_positions is not None:
        found = tile.key_positions[:, None] > tile.query_positions[:, :, None]
    else:
        first = 1 if tile.mask is Mask.CAUSAL else size.keys
        found = torch.ones(size.folds, size.queries, size.keys, dtype=torch.bool).triu(first)
        if tile.window is not None:
            ones = torch.ones_like(found)
            found |= ones.triu(tile.window + 1) | ones.tril(-tile.window - 1)
        if tile.mask is Mask.ANTICAUSAL:
            found |= torch.ones_like(found).tril(-1)
    return found[:, None, None, None]


def scores_of(q: torch.Tensor, k: torch.Tensor, scale: float, unseen: torch.Tensor) -> torch.Tensor:
    return (q.double() @ k.double().mT * scale).masked_fill(unseen, -INF)


def dense(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in fp64, differentiable; a row that sees nothing has out 0, lse -inf, and no gradient."""
    dead = (scores == -INF).all(-1, keepdim=True)
    safe = scores.masked_fill(dead, 0.0)
    lse = safe.logsumexp(-1).masked_fill(dead.squeeze(-1), -INF)
    return safe.softmax(-1).masked_fill(dead, 0.0) @ v.double(), lse


def laid(x: torch.Tensor) -> torch.Tensor:
    """The same as a view of a shard (B, N, H, D), as tiles are: heads interleaved, rows dilated."""
    dims = (1, 0, 4, 2, 3, 5)[: x.dim()]
    wide = x.permute(dims).contiguous().repeat_interleave(3, 2)[:, :, ::3]
    return wide.permute([dims.index(dim) for dim in range(x.dim())])


# So many rows that the math kernel takes them in several blocks, the last of them a short one.
MANY = 2 * math._MIN_ROWS + 5
SQUARES = Size(keys=7), Size(share=3, queries=5, keys=5), Size(1, 1, 1, 1, 1, 1, 1), Size(2, 1, 1, 2, MANY, MANY, 2)
OTHERS = (
    Size(), Size(share=3), Size(1, 1, 1, queries=1, keys=1), Size(queries=1, keys=33, dim=3),
    Size(2, 1, 1, 2, MANY, MANY + 9, 2),
)  # fmt: skip
# kernel, scale, and whether there is a gradient through lse: fused ones are given neither that nor a scale <= 0.
WAYS = (("flash", 0.35, False), ("math", 0.35, False), ("math", 0.35, True), ("math", -0.5, True), ("math", 0.0, True))
TRIANGLES = Mask.CAUSAL, Mask.ANTICAUSAL
CASES = [
    (mask, None, size, *way)
    for mask in Mask
    for size in (SQUARES if mask in TRIANGLES else OTHERS)
    for way in WAYS[mask in (Mask.ANTICAUSAL, Mask.POSITION) :]
] + [(mask, 2, size, *way) for mask in (Mask.FULL, Mask.CAUSAL) for size in SQUARES for way in WAYS[1:]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mask", "window", "size", "name", "scale", "with_dlse"), CASES)
def test_tiles_equal_dense_attention_and_gradients(
    mask: Mask, window: int | None, size: Size, name: str, scale: float, with_dlse: bool, dtype: torch.dtype
) -> None:
    """Gradients are those of one softmax over the tile's keys and as many others, which rows of fold 0 do not see."""
    given = drawn(size, dtype)
    q, k, v, dout = (laid(x) if size.share > 1 else x for x in given)  # may be strided, and is not changed
    tile, work = tile_of(mask, size, window), accumulator_dtype(dtype)
    out, lse = kernel_calls.forward(ON_CPUS[name], q, k, v, tile, Scores(scale))
    assert out.dtype is work and lse.dtype is work
    unseen = hidden(tile, size)
    bound = 400 * ROUNDING[work]  # whatever the inputs are
    for found, exact in zip((out, lse), dense(scores_of(q, k, scale, unseen), v), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound)
    assert mask is not Mask.POSITION or (out[..., 0, :].eq(0).all() and lse[..., 0].eq(-INF).all())

    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    more_k, more_v = (normal(size.k, seed) for seed in (4, 5))
    elsewhere = torch.zeros_like(unseen)
    elsewhere[0] = True
    scores = scores_of(leaves[0], leaves[1], scale, unseen), scores_of(q, more_k, scale, elsewhere)
    whole, whole_lse = dense(torch.cat(scores, -1), torch.cat([leaves[2], more_v], 4))
    dlse = normal(size.q[:-1], 8) * with_dlse
    wanted = torch.autograd.grad(
        (whole * dout).sum() + (whole_lse.masked_fill(whole_lse == -INF, 0) * dlse).sum(), leaves
    )

    delta = (dout * whole.detach()).sum(-1) - dlse
    rest = whole.detach().to(dtype), whole_lse.detach().to(work), delta.to(work)
    whole_out, lse, delta = (laid(x) if size.share > 1 else x for x in rest)
    saved = SavedRows(dout, whole_out, lse, delta)
    # The fused kernel forms delta by itself, from an output that was rounded to the inputs' type.
    bound = 4 * (16 * ROUNDING[dtype] if name == "flash" and dtype.itemsize == 2 else bound)
    gradients = kernel_calls.backward(ON_CPUS[name], q, k, v, saved, tile, Scores(scale))
    for found, exact in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound)
    assert mask is not Mask.POSITION or gradients[0][..., 0, :].eq(0).all()
    for now, before in zip((q, k, v, dout, saved.out, saved.lse, saved.delta), (*given, *rest), strict=True):
        assert now is not None and now.equal(before)


@pytest.mark.parametrize("name", ("math", "flash"))
def test_fp16_scores_beyond_its_range(name: str) -> None:
    """Products of 2^22, where fp16 ends at 65504. Every number is a power of two, so nothing rounds: exact."""
    size = Size(1, 1, 1, 1, 2, 3, 64)
    q = torch.full(size.q, 256.0, dtype=torch.float16)
    k, v = torch.tensor([[256, 256, 128], [1, 3, 100]]).half().repeat_interleave(64).view(2, *size.k)
    tile = tile_of(Mask.FULL, size)
    out, lse = kernel_calls.forward(ON_CPUS[name], q, k, v, tile, Scores(1.0))
    assert out.eq(2.0).all()
    assert lse.sub(2.0**22).abs().max() <= 1.0  # log 2 and an ulp of 2^22 in fp32
    dout = torch.full(size.q, 0.5, dtype=torch.float16)
    saved = SavedRows(dout, out.half(), lse, (dout.float() * out).sum(-1))
    dq, dk, dv = kernel_calls.backward(ON_CPUS[name], q, k, v, saved, tile, Scores(1.0))
    # exp(s - lse) with lse rounded to a half: between e^-1 and 1; what matters is that it is finite and in place.
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert dv[..., 2, :].eq(0).all() and dk[..., 2, :].eq(0).all() and dv[..., 0, :].gt(0).all()


@pytest.mark.parametrize("name", ("math", "flash"))
@pytest.mark.parametrize("score", (1e4, -1e4))
def test_scores_of_ten_thousand(score: float, name: str) -> None:
    """No sentinel: -1e4 is a score like any other, and a row in which all scores are such sees its keys alone."""
    q, k, v = torch.tensor([[1.0, 1.0], [score, score], [1.0, 3.0]]).view(3, 1, 1, 1, 1, 2, 1)
    out, lse = kernel_calls.forward(ON_CPUS[name], q, k, v, tile_of(Mask.CAUSAL, Size(queries=2, keys=2)), Scores(1.0))
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(lse.flatten(), score + torch.tensor([0.0, 0.6931]))


@pytest.mark.parametrize("name", ["math", "flash"])
def test_rows_of_minus_infinity_weigh_nothing(name: str) -> None:
    """Scores beyond fp32: such a row has out 0, lse -inf and no gradient; beside it is one with a single score of 0,
    whose lse is 0, as torch's fused kernel says of both.
    """
    size = Size(queries=20, keys=20)
    q, k, v, dout = drawn(size, torch.float32)
    q[..., -1], k[..., -1], q[..., 0, :] = 0.0, -3e38, 0.0
    tile = tile_of(Mask.CAUSAL, size)
    unseen = hidden(tile, size).index_fill(4, torch.tensor(5), True)
    exact, exact_lse = dense(scores_of(q, k, 1.0, unseen), v)
    q[..., 5, -1] = 8.0
    with count_kernels() as count:
        out, lse = kernel_calls.forward(ON_CPUS[name], q, k, v, tile, Scores(1.0))
    assert count[name] == count["math"] == 1 and (lse[..., 0] == 0).all()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)
    dq, dk, dv = kernel_calls.backward(
        ON_CPUS[name], q, k, v, SavedRows(dout, out, lse, (dout * out).sum(-1)), tile, Scores(1.0)
    )
    assert (dq[..., 5, :] == 0).all() and all(x.isfinite().all() for x in (dk, dv))


@pytest.mark.parametrize("with_fa4", (False, True))
@pytest.mark.parametrize("device", ("cpu", "cuda", "meta"))
@pytest.mark.parametrize("keys", (1, 15, 16, 40))
def test_kernels_are_chosen_by_tile(keys: int, device: str, with_fa4: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of one fold count, though there are three. Sums in any order are not repeatable."""
    monkeypatch.setattr(fa4, "installed_version", lambda: fa4.VERSION if with_fa4 else None)
    size, rows = Size(queries=keys, keys=keys), Rows(0, 1, keys, keys, 3)
    for kernel, mask, dlse, scale, dtype, dims, softcap, repeatable in itertools.product(
        NAMES, Mask, (False, True), (0.5, 0.0, -0.5), (torch.float32, torch.bfloat16, torch.float16),
        ((4, 4), (8, 8), (128, 128), (192, 128), (264, 264)), (None, 30.0), (False, True),
    ):  # fmt: skip
        takers, windowed = set(), mask is Mask.ANTICAUSAL
        if device == "cpu" and keys >= 16 and dims[0] == dims[1] and softcap is None and not dlse and not windowed:
            takers = {"flash"} if kernel in ("auto", "flash") else set()
        if device == "cuda" and dtype != torch.float32:
            if dims not in ((4, 4), (264, 264)) and softcap is None and not dlse:
                takers |= {"cudnn"} if keys > 1 and not repeatable else set()
                takers |= {"flash"} if dims[0] == dims[1] and (kernel != "cudnn" or repeatable) else set()
            if with_fa4 and dims in ((128, 128), (192, 128)):
                takers |= {"fa4"}
            takers -= {"cudnn"} if windowed else set()
            asked = {"auto": {"cudnn", "flash", "fa4"}, "cudnn": {"cudnn", "flash"}}
            takers &= asked.get(kernel, {kernel})
        if kernel == "math" or mask is Mask.POSITION or scale <= 0:
            takers = set()
        tile = replace(tile_of(mask, size), query_rows=rows, key_rows=rows)
        setting = KernelSetting(candidates(kernel), device, (9, 0), dtype, dims, 1, 2, Scores(scale, softcap))
        chosen = kernel_choice.choose(setting, tile, True, dlse, repeatable).name
        assert chosen in (takers or {"math"}), (kernel, mask, dlse, scale, dtype, dims, softcap, repeatable)


def test_picked_kernels_are_counted() -> None:
    """Blocks within each other count alike, whatever they have counted; backwards count too, and nothing afterwards."""
    (q, k, v, dout), tile = drawn(Size()), tile_of(Mask.FULL, Size())
    with count_kernels() as outer:
        with count_kernels() as first:
            out, lse = kernel_calls.forward(MATH, q, k, v, tile, Scores(1.0))
        with count_kernels() as inner:
            kernel_calls.backward(FLASH_CPU, q, k, v, SavedRows(dout, out, lse, None), tile, Scores(1.0))
            with pytest.raises(KeyError), count_kernels() as ended:
                raise KeyError
        kernel_calls.forward(MATH, q, k, v, tile, Scores(1.0))
    kernel_calls.forward(MATH, q, k, v, tile, Scores(1.0))
    assert (outer, first, inner, ended) == ({"math": 2, "flash": 1}, {"math": 1}, {"flash": 1}, {})


@pytest.mark.parametrize("mask", (Mask.FULL, *TRIANGLES))
def test_sequences_of_a_tile_are_isolated(mask: Mask) -> None:
    """Each has the bits that it has by itself."""
    queries, keys = (3, 1, 20), (3, 1, 20) if mask in TRIANGLES else (2, 17, 5)
    size = Size(folds=1, share=2, queries=sum(queries), keys=sum(keys))
    tile = replace(tile_of(mask, size), sequences=Sequences.of(np.array(queries), np.array(keys)))
    (q, k, v, dout), out = drawn(size), normal(size.q, 4)
    lse, delta = normal(size.q[:-1], 7), normal(size.q[:-1], 8)
    found = kernel_calls.forward(MATH, q, k, v, tile, Scores(0.3))
    dq, dk, dv = kernel_calls.backward(MATH, q, k, v, SavedRows(dout, out, lse, delta), tile, Scores(0.3))
    assert tile.sequences is not None and tile.sequences.longest == (20, max(keys))
    for rows, of_keys in tile.sequences.slices():
        one, two, three = q[..., rows, :], k[..., of_keys, :], v[..., of_keys, :]
        alone = tile_of(mask, replace(size, queries=one.shape[4], keys=two.shape[4]))
        whole = kernel_calls.forward(MATH, one, two, three, alone, Scores(0.3))
        saved = SavedRows(dout[..., rows, :], out[..., rows, :], lse[..., rows], delta[..., rows])
        grads = kernel_calls.backward(MATH, one, two, three, saved, alone, Scores(0.3))
        parts = found[0][..., rows, :], found[1][..., rows], dq[..., rows, :], dk[..., of_keys, :], dv[..., of_keys, :]
        assert all(torch.equal(x, y) for x, y in zip(parts, (*whole, *grads), strict=True))


@pytest.mark.parametrize("name", ["math", "flash"])
def test_bits_of_a_row_do_not_depend_on_others(name: str) -> None:
    """A row with a single score of 0 is computed again by the plain kernel; the rows beside it, of the same fold and of
    others, are not.
    """
    size = Size(2, 1, 1, 1, 20, 20, 8)
    q, k, v, _ = drawn(size)
    before = kernel_calls.forward(ON_CPUS[name], q, k, v, tile_of(Mask.CAUSAL, size), Scores(1.0))
    q[1, ..., 0, :] = 0.0
    after = kernel_calls.forward(ON_CPUS[name], q, k, v, tile_of(Mask.CAUSAL, size), Scores(1.0))
    assert (after[1][1, ..., 0] == 0).all()
    for a, b in zip(before, after, strict=True):
        assert a[0].equal(b[0]) and a[1, :, :, :, 1:].equal(b[1, :, :, :, 1:])


class Operations(TorchDispatchMode):
    """The most numbers of a tensor that an operation gave back."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        made = [x for x in (found if isinstance(found, tuple | list) else [found]) if isinstance(x, torch.Tensor)]
        self.most = max([self.most, *(x.numel() for x in made)])
        return found


SIZES = [  # folds, batch, groups, share, queries, keys, dim
    (2, 1, 3, 3, 64, 256, 16), (2, 1, 3, 1, 1, 1000, 8), (2, 1, 3, 1, 40, 8, 40), (40, 1, 1, 1, 64, 64, 4),
    (1, 40, 1, 1, 64, 64, 4),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_scores_of_the_math_kernel_fit_its_operands(size: tuple[int, ...]) -> None:
    """But for 8 query rows, which it takes at least at a time."""
    folds, batch, groups, share, queries, keys, dim = size
    q, k = torch.randn(folds, batch, groups, share, queries, dim), torch.randn(folds, batch, groups, 1, keys, dim)
    tile = tile_of(Mask.FULL, Size(queries=queries, keys=keys))
    with Operations() as seen:
        out, lse = kernel_calls.forward(MATH, q, k, k, tile, Scores(0.5))
        kernel_calls.backward(MATH, q, k, k, SavedRows(q, out, lse, (q * out).sum(-1)), tile, Scores(0.5))
    least = folds * batch * groups * share * min(8, queries) * keys
    assert seen.most == max(q.numel(), k.numel(), least)
