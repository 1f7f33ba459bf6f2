"""The kernels and the one-pass merge of GPUs, held to the plain versions. They need one GPU:

python -m pytest tests/ring/test_on_gpu.py
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ring.execute
from reference import Branch, Pattern
from ring import Layout
from ring.caching.bounded_cache import BoundedCache
from ring.comm.symmetric_memory import SymmetricTransport, transport_of
from ring.compute import kernel_calls
from ring.compute.accumulator import Accumulator, Sum
from ring.compute.kernel_counts import count_kernels
from ring.compute.kernels import fa4
from ring.plan.blocks import Heads
from ring.plan.exchange import key_exchange
from ring.plan.plan import plan_of
from ring.plan.rows import Rows
from ring.plan.tile import Mask
from ring.strided_view import Slot, StridedView
from tests.support.attention_cases import plain
from tests.support.gpu_tiles import UNIT, check_kernel, close, tensors, tile_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPES = tuple(itertools.product((1, 2, 7, 16, 129), (1, 5, 16, 130)))


@pytest.fixture(autouse=True)
def _without_fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" chooses among torch's kernels, if FlashAttention-4 is installed or not."""
    monkeypatch.setattr(fa4, "installed_version", lambda: None)


@pytest.mark.parametrize("name", ["cudnn", "flash"])
@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("dim", [8, 16, 40, 64, 128, 256])
def test_fused_kernels_equal_the_math_kernel_within_rounding(name: str, dtype: torch.dtype, dim: int) -> None:
    for mask, (folds, groups, share) in itertools.product((Mask.FULL, Mask.CAUSAL), ((1, 1, 1), (3, 2, 1), (2, 2, 4))):
        for queries, keys in SHAPES if mask is Mask.FULL else [(n, n) for n, _ in SHAPES[::4]]:
            if queries == keys == 1:
                continue  # never given to a fused kernel: see `kernel_choice.choose`
            q, k, v, dout = tensors(dtype, folds, 1, groups, share, queries, keys, dim)
            what = name, mask, folds, groups, share, queries, keys, dim
            check_kernel(name, q, k, v, dout, tile_of(mask, queries, keys, folds, groups, share), what)


@pytest.mark.parametrize("name", ["cudnn", "flash"])
@pytest.mark.parametrize("strides", [(7, 3), (1, 1), (16, 48), (96, 32), (0, 0)])
def test_strides_of_single_heads_and_rows_do_not_matter(name: str, strides: tuple[int, int]) -> None:
    """(head, row): of a tile with one head, and of keys of which there is one."""
    generator = torch.Generator("cuda").manual_seed(1)
    memory = [torch.randn(4096, device="cuda", generator=generator).bfloat16() for _ in range(4)]
    head, row = strides
    for queries, keys, mask in ((4, 1, Mask.FULL), (1, 4, Mask.FULL), (4, 4, Mask.CAUSAL), (17, 1, Mask.FULL)):
        q, dout, k, v = (
            x.as_strided((1, 1, 1, 1, length, 16), (3, 5, head, 11, 96 if length > 1 else row, 1))
            for x, length in zip(memory, (queries, queries, keys, keys), strict=True)
        )
        check_kernel(name, q, k, v, dout, tile_of(mask, queries, keys), (strides, queries, keys))


Leaves = list[torch.Tensor]


def drawn(n: int, heads: int, kv_heads: int, device: str = "cuda") -> tuple[Leaves, torch.Tensor]:
    """q, k and v, and the gradient of the output."""
    torch.manual_seed(n)
    shapes = ((1, n, count, 64) for count in (heads, kv_heads, kv_heads, heads))
    *leaves, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    return [x.requires_grad_() for x in leaves], dout


def both_ways(
    leaves: Leaves, dout: torch.Tensor, pattern: Pattern, layout: Layout, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Output and gradients."""
    out = plain(*leaves, pattern, layout, **options)
    return out, *torch.autograd.grad(out, leaves, dout)


def held_to_math(
    inputs: Sequence[torch.Tensor], dout: torch.Tensor, pattern: Pattern, layout: Layout, kernel: str = "auto"
) -> list[set[str]]:
    """Hold output and gradients of a call to those of the math kernel in fp64. Returns the kernels of both."""
    results, kernels_of = [], []
    for name, dtype in ((kernel, dout.dtype), ("math", torch.float64)):
        leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
        with count_kernels() as picked:
            results.append(both_ways(leaves, dout.to(dtype), pattern, layout, kernel=name))
        kernels_of.append(set(picked))
    for found, exact in zip(*results, strict=True):
        close(found, exact, 8 * UNIT[dout.dtype], pattern)
    return kernels_of


SINKS = torch.tensor([0.5, -torch.inf, 30.0, -2.0, 0.0, 1e4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("dim", "sinks"), [(8, None), (20, None), (128, None), (20, SINKS), (128, SINKS)])
def test_the_one_pass_merge_is_the_plain_one(dtype: torch.dtype, dim: int, sinks: torch.Tensor | None) -> None:
    from ring.compute.gpu.gpu_accumulator import CombinedAccumulator, CombinedSum

    torch.manual_seed(1)
    like = torch.empty(2, 150, 6, 1, dtype=dtype, device="cuda").expand(-1, -1, -1, dim)
    sinks = None if sinks is None else sinks.to(dtype).cuda()
    step_by_step, one_pass = Accumulator(like, sinks), CombinedAccumulator(like, sinks)
    plain_sum, one_sum = Sum(like), CombinedSum(like)
    parts = [
        (Rows(0, 1, 150), Heads(6, 1, 0, 1, 1)),
        (Rows(3, 4, 5, 20, 7), Heads(2, 3, 0, 3, 1)),
        (Rows(1, 7, 20), Heads(3, 1, 1, 2, 1)),
        (Rows.of(torch.randperm(150)[None, :40].numpy()), Heads(2, 1, 4, 1, 1)),
        (Rows(149, 1, 1), Heads(1, 2, 2, 1, 3)),
        (Rows(10, 2, 30), Heads.of(((0,), (1,), (5,)))),
        (Rows(0, 1, 75, 75, 2), Heads(6, 1, 0, 1, 1)),
    ]
    for number, (rows, heads) in enumerate(parts):
        shape = (rows.folds, 2, heads.groups, heads.per_group, rows.length, dim)
        out = torch.randn(shape, device="cuda").to(dtype if number % 2 else torch.float32)
        lse = 3 * torch.randn(shape[:-1], device="cuda")
        lse[torch.rand_like(lse) < 0.1] = -torch.inf
        out[lse == -torch.inf] = 0.0
        for accumulator in (step_by_step, one_pass):
            accumulator.merge(rows, heads, out, lse)
        for total in (plain_sum, one_sum):
            total.add(rows, heads, out)
    for found, exact in zip(one_pass.result(torch.float32), step_by_step.result(torch.float32), strict=True):
        assert torch.allclose(found, exact, rtol=1e-5, atol=1e-5)
    assert torch.allclose(one_sum.result(torch.float32), plain_sum.result(torch.float32), rtol=1e-5, atol=1e-5)


LAST = (Rows(1400, 1, 100), Heads(6, 1, 0, 1, 1))
STRIDED = [(Rows(3, 32, 40), Heads(2, 3, 0, 3, 1)), (Rows(700, 4, 100, 400, 2), Heads(3, 1, 1, 2, 1)), LAST]
FRONTS = [(Rows(0, 1, length), Heads(6, 1, 0, 1, 1)) for length in (700, 33, 1499, 1)]


@pytest.mark.parametrize("folds", [1, 3], ids="{} folds".format)
@pytest.mark.parametrize("others", [[], STRIDED[:1], STRIDED, [LAST], [LAST, *FRONTS[:2]], [LAST, *FRONTS]], ids=len)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_full_parts_become_the_output(sinks: torch.Tensor | None, others: list[tuple[Rows, Heads]], folds: int) -> None:
    from ring.compute.gpu.gpu_accumulator import CombinedAccumulator, CombinedSum

    torch.manual_seed(2)
    batch, tokens, heads, dim = 1 if folds > 1 else 2, 1500, 6, 40
    like = torch.empty(batch, tokens, heads, dim, dtype=torch.bfloat16, device="cuda")
    memory = torch.randn(batch, tokens, heads, dim, device="cuda").to(torch.bfloat16)
    whole = memory.view(batch, folds, tokens // folds, 2, 3, dim).permute(1, 0, 3, 4, 2, 5)
    parts = [(Rows(0, 1, tokens // folds, tokens // folds, folds), Heads(2, 3, 0, 3, 1), whole)]
    for rows, these in others:
        shape = (rows.folds, batch, these.groups, these.per_group, rows.length, dim)
        parts.insert(0, (rows, these, torch.randn(shape, device="cuda").to(torch.bfloat16)))
    sinks = None if sinks is None else sinks.cuda()
    step_by_step, one_pass = Accumulator(like, sinks), CombinedAccumulator(like, sinks)
    for rows, these, out in parts:
        lse = 3 * torch.randn(out.shape[:-1], device="cuda")
        step_by_step.merge(rows, these, out.clone(), lse)
        one_pass.merge(rows, these, out, lse)
    found, lse = one_pass.result(torch.bfloat16)
    exact, exact_lse = step_by_step.result(torch.float32)
    assert found.is_contiguous() and found.data_ptr() == memory.data_ptr()
    close(found, exact.double(), 1.01 * UNIT[torch.bfloat16], "out")
    assert torch.allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)
    plain_sum, one_sum = Sum(like), CombinedSum(like)
    for rows, these, out in parts:
        for total in (plain_sum, one_sum):
            total.add(rows, these, out.clone())
    del parts, out
    close(one_sum.result(torch.bfloat16), plain_sum.result(torch.float32).double(), 1.01 * UNIT[torch.bfloat16], "sum")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("exchange", ["direct", "ring", "gather"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "shuffled"])
@pytest.mark.parametrize(("documents", "value_dim"), [(None, 20), (None, 36), ((5, 2) * 13 + (0, 5), 20)])
def test_packing_in_one_pass_is_the_plain_one(
    documents: tuple[int, ...] | None, value_dim: int, order: str, exchange: str, dtype: torch.dtype
) -> None:
    from ring.comm.packing import pack

    n, p, heads, kv_heads, dim = 96, 3, 6, 2, 20
    slot = Slot(2, dim, value_dim)
    shuffled = Layout.from_cuts(torch.randperm(n, generator=torch.Generator().manual_seed(1)), (0, 20, 61, n))
    layout = shuffled if order == "shuffled" else getattr(Layout, order)(n, p)
    branches = (Branch(16, 1), Branch(None, 3, (0, 1, 2, 0, 1, 2)), Branch(50, 2, 0, range(2, 4)))
    pattern = Pattern(branches, True, documents)
    steps = 0
    for rank in range(p):
        plan = plan_of(pattern, layout, rank, heads, kv_heads, key_exchange(exchange), 8)
        k = torch.randn(2, plan.tokens, kv_heads, dim, device="cuda").to(dtype)
        v = torch.randn(2, kv_heads, value_dim, plan.tokens, device="cuda").to(dtype).permute(0, 3, 1, 2)  # any strides
        for packs in (step.gathers for step in plan.steps if step.gathers):
            steps += 1
            found, exact = torch.full((2, plan.sizes.send, slot.numbers), 7.0, device="cuda", dtype=dtype)
            pack(packs, k, v, found)
            for x, slots in zip((k, v), StridedView.of_slots(exact, slot), strict=True):
                for one in packs:
                    slots.put(one.slots, one.columns, StridedView(x).view(one.rows, one.heads))
            assert torch.equal(found, exact)
    assert steps >= 2


def test_merge_of_empty_parts_is_zero_and_minus_infinity() -> None:
    from ring.compute.gpu.gpu_accumulator import CombinedAccumulator, CombinedSum

    like = torch.empty(1, 40, 2, 16, dtype=torch.bfloat16, device="cuda")
    for sinks in (None, torch.tensor([-torch.inf, 2.5], device="cuda")):
        out, lse = CombinedAccumulator(like, sinks).result(torch.bfloat16)
        wanted = torch.full_like(lse, -torch.inf) if sinks is None else sinks[:, None].expand_as(lse)
        assert not out.any() and lse.equal(wanted)
    assert not CombinedSum(like).result(torch.bfloat16).any()


WHOLE = {
    "longnet": Pattern.longnet([64, 256, 1024], [1, 4, 8], 8, True),
    "one branch": Pattern((Branch(64, 3, 1),), True),
    "a window": Pattern.dense(True, window=99),
    "two windows": Pattern((Branch(None, 3, window=200), Branch(window=9))),
}


@pytest.mark.parametrize("pattern", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("kernel", ["auto", "flash"])
def test_whole_calls_are_the_math_kernel_s(pattern: Pattern, kernel: str) -> None:
    leaves, dout = drawn(1024, 8, 8)
    picked = kernel_of(pattern, "cudnn" if kernel == "auto" else kernel)
    assert held_to_math(leaves, dout, pattern, Layout.contiguous(1024, 1), kernel) == [{picked}, {"math"}]


def kernel_of(pattern: Pattern, otherwise: str, dims: tuple[int, int] = (64, 64)) -> str:
    """Return the kernel of a pattern whose calls cuDNN would take, were they without a window."""
    windowed = any(branch.window is not None for branch in pattern.branches)
    return "flash" if otherwise == "cudnn" and windowed and dims[0] == dims[1] else otherwise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("in_16_bits", [False, True])
@pytest.mark.parametrize(
    ("dims", "softcap", "kernel", "picked"),
    [
        ((64, 64), None, "auto", "cudnn"), ((64, 64), None, "flash", "flash"), ((64, 128), None, "auto", "cudnn"),
        ((128, 64), None, "auto", "cudnn"), ((64, 64), 1.5, "auto", "math"), ((192, 128), 1.5, "auto", "math"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pattern", WHOLE.values(), ids=WHOLE)
def test_whole_calls_with_sinks_are_the_math_kernel_s(
    pattern: Pattern, dims: tuple[int, int], softcap: float | None, kernel: str, picked: str, in_16_bits: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Values may have a head dim of their own."""
    torch.manual_seed(3)
    shapes = ((1, 1024, 8, dim) for dim in (dims[0], *dims, dims[1]))
    *inputs, dout = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    inputs.append(torch.randn(8, device="cuda").to(dtype if in_16_bits else torch.float32))
    inputs[3][1] = -torch.inf
    results, kernels_of = [], []
    for name, kind in ((kernel, dtype), ("math", torch.float64)):
        leaves = [x.to(kind if x.dim() == 4 or in_16_bits or kind is torch.float64 else x.dtype) for x in inputs]
        *leaves, sinks = (x.detach().requires_grad_() for x in leaves)
        with count_kernels() as counted:
            out = plain(*leaves, pattern, Layout.contiguous(1024, 1), kernel=name, sinks=sinks, softcap=softcap)
            results.append([out, *torch.autograd.grad(out, (*leaves, sinks), dout.to(kind))])
        kernels_of.append(set(counted))
    assert kernels_of == [{kernel_of(pattern, picked, dims)}, {"math"}]
    for found, exact in zip(*results, strict=True):
        close(found, exact, 8 * UNIT[dtype], (pattern, found.shape))
    assert results[0][4][1] == 0.0


@pytest.mark.parametrize("most", [1, 3 * 2**19])
def test_a_backward_by_groups_of_heads_is_the_whole_one(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = kernel_calls.MAX_WORKSPACE
    for pattern, kv_heads in ((Pattern.dense(True), 4), (Pattern.longnet([64, 256], [1, 4], 8, True), 8)):
        (leaves, dout), results, calls = drawn(512, 8, kv_heads), [], []
        for limit in (usual, most):
            monkeypatch.setattr(kernel_calls, "MAX_WORKSPACE", limit)
            monkeypatch.setattr(ring.execute, "_programs", BoundedCache(8))  # what was lowered before is kept
            out = plain(*leaves, pattern, Layout.contiguous(512, 1))
            with count_kernels() as picked:
                results.append(torch.autograd.grad(out, leaves, dout))
            calls.append(picked["cudnn"])
        assert calls[1] > calls[0]
        for found, exact in zip(results[1], results[0], strict=True):
            close(found, exact.double(), 4 * UNIT[torch.bfloat16], pattern)


@pytest.mark.parametrize("kernel", ["auto", "flash"])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_tensors_that_begin_anywhere(kernel: str, tokens: int) -> None:
    torch.manual_seed(5)
    count = tokens * 16
    memory = torch.randn(4, count + 8, device="cuda").to(torch.float16)
    *inputs, dout = (x[1 : 1 + count].view(1, tokens, 1, 16) for x in memory)
    held_to_math(inputs, dout, Pattern.dense(False), Layout.contiguous(tokens, 1), kernel)


def test_calls_differ_by_output_layout() -> None:
    """q, k and v of two calls have the same strides: every other row of one tensor, and every row of wider ones."""
    n, heads, dim = 128, 2, 64
    torch.manual_seed(7)
    narrow = [torch.randn(1, n, heads, dim, device="cuda", dtype=torch.float16) for _ in range(4)]
    wide = [torch.randn(1, n // 2, 2, heads, dim, device="cuda", dtype=torch.float16)[:, :, 0] for _ in range(4)]
    for (*inputs, dout), rate in ((narrow, 2), (wide, 1), (narrow, 2)):
        assert inputs[0].stride(1) * rate == 2 * heads * dim
        held_to_math(inputs, dout.contiguous(), Pattern((Branch(None, rate),)), Layout.contiguous(dout.shape[1], 1))


def test_deterministic_kernels_repeat_their_bits() -> None:
    leaves, dout = drawn(4096, 8, 2)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(4):
            with count_kernels() as picked:
                runs.append(both_ways(leaves, dout, Pattern.dense(True), Layout.zigzag(4096, 1)))
            assert set(picked) == {"cudnn", "flash"}
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for other in runs[1:] for x, y in zip(runs[0], other, strict=True))


def test_a_captured_call_replays() -> None:
    leaves, dout = drawn(512, 8, 2)
    pattern, layout = Pattern.longnet([64, 256], [1, 4], 8, True), Layout.contiguous(512, 1)
    step = partial(both_ways, leaves, dout, pattern, layout, check=False)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (*leaves, dout):
            x.copy_(torch.randn_like(x))
    graph.replay()
    replayed = [x.clone() for x in captured]
    for found, exact in zip(replayed, step(), strict=True):
        close(found, exact.double(), 2.0**-7, "replayed")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_current_device_may_differ_from_the_tensors() -> None:
    leaves, dout = drawn(256, 4, 2, "cuda:1")
    assert torch.cuda.current_device() == 0
    held_to_math(leaves, dout, Pattern.longnet([64, 256], [1, 4], 4, True), Layout.zigzag(256, 1))
    assert torch.cuda.current_device() == 0


def test_groups_without_a_named_backend_work_on_gpus() -> None:
    """Torch then makes gloo for the CPU and NCCL for GPUs."""
    x = torch.ones(1, 8, 1, 8, device="cuda", dtype=torch.bfloat16)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert plain(x, x, x, Pattern.dense(True), Layout.zigzag(8, 1)).equal(x)
        assert isinstance(transport_of(None), SymmetricTransport)
        on_cpu = x.cpu()
        assert plain(on_cpu, on_cpu, on_cpu, Pattern.dense(True), Layout.zigzag(8, 1)).equal(on_cpu)
    finally:
        dist.destroy_process_group()
