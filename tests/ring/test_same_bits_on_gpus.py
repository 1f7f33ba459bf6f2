"""`same_bits` on GPUs: no bit depends on the rest of a batch, other heads, other documents, ranks, or a captured graph.
It needs one GPU, and two or four for ranks:

python -m pytest tests/ring/test_same_bits_on_gpus.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from reference import Branch, Pattern
from ring import Layout
from ring.compute.accumulator import merge
from ring.compute.gpu import graph_replay
from ring.compute.kernels import FA4
from tests.ring.compute.gpu.test_graph_replay import called, captured_anew
from tests.support.attention_cases import call, normal
from tests.support.ranks import Ranks
from verification.run.rank import same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CHUNK, DOCUMENTS = 128, (300, 77, 0, 128, 263)  # 768 tokens
N = sum(DOCUMENTS)
DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
CALLS = [("math", dtype) for dtype in DTYPES] + [(name, dtype) for name in ("flash", "fa4") for dtype in DTYPES[:2]]
KERNELS = [
    pytest.param(
        *one, marks=pytest.mark.skipif(one[0] == "fa4" and FA4.missing() is not None, reason=str(FA4.missing()))
    )
    for one in CALLS
]
PATTERNS = {
    "causal": Pattern.dense(causal=True),
    "documents": Pattern.dense(causal=True, documents=DOCUMENTS),
    "window": Pattern.dense(causal=True, window=200),
    "longnet": Pattern((Branch(256, 1), Branch(None, 2, 1)), causal=True),
}


def drawn(dtype: torch.dtype, heads: int = 6, kv_heads: int = 2, batch: int = 2) -> list[Tensor]:
    """q, k, v, dout, dlse"""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    counts = heads, kv_heads, kv_heads, heads
    x = [normal(batch, N, count, 64, seed=seed, dtype=dtype).cuda() for seed, count in enumerate(counts)]
    return [*x, normal(batch, heads, N, seed=9, dtype=work).cuda()]


def results(x: Sequence[Tensor], pattern: Pattern, layout: Layout | None = None, **options: Any) -> list[Tensor]:
    """Return out, lse, dq, dk, dv of this rank."""
    layout = layout or Layout.contiguous(x[0].shape[1], 1)
    leaves = [t.detach().requires_grad_() for t in x[:3]]
    out, lse = call(*leaves, pattern, layout, same_bits=CHUNK, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, x[3:])]


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    names = ("out", "lse", "dq", "dk", "dv")
    assert [name for name, x, y in zip(names, found, wanted, strict=True) if not same_bits(x, y)] == []


@pytest.mark.parametrize("name, dtype", KERNELS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_an_entry_has_the_bits_of_a_batch(name: str, dtype: torch.dtype, pattern: Pattern) -> None:
    x = drawn(dtype, batch=3)
    batch, alone = (results(some, pattern, kernel=name) for some in (x, [t[1:2] for t in x]))
    assert_same(alone, [t[1:2] for t in batch])


@pytest.mark.parametrize("name, dtype", KERNELS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_heads_alone_have_the_bits_of_all(name: str, dtype: torch.dtype, pattern: Pattern) -> None:
    x = drawn(dtype)
    q, k, v, dout, dlse = x
    every = results(x, pattern, kernel=name)
    alone = results([q[:, :, 3:], k[:, :, 1:], v[:, :, 1:], dout[:, :, 3:], dlse[:, 3:]], pattern, kernel=name)
    assert_same(alone, [every[0][:, :, 3:], every[1][:, 3:], every[2][:, :, 3:], *(t[:, :, 1:] for t in every[3:])])


@pytest.mark.parametrize("name, dtype", KERNELS)
def test_a_document_alone_has_the_bits_of_the_packed_one(name: str, dtype: torch.dtype) -> None:
    x, packed, begin = drawn(dtype), results(drawn(dtype), PATTERNS["documents"], kernel=name), 0
    for length in filter(None, DOCUMENTS):
        rows = slice(begin, begin + length)
        alone = [*(t[:, rows] for t in x[:4]), x[4][:, :, rows]]
        found = results(alone, PATTERNS["causal"], kernel=name)
        assert_same(found, [packed[0][:, rows], packed[1][:, :, rows], *(t[:, rows] for t in packed[2:])])
        begin += length


def replayed(step: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Return the results of a call that a caller's graph replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    return [x.clone() for x in captured]


@pytest.mark.parametrize("name, dtype", KERNELS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_captured_calls_have_the_bits_of_others(name: str, dtype: torch.dtype, pattern: Pattern) -> None:
    step = partial(results, drawn(dtype), pattern, kernel=name, check=False)
    wanted = step()
    assert_same(replayed(step), wanted)


def test_short_calls_that_repeat_have_the_bits_of_the_first() -> None:
    """They are replayed."""
    q, k, v, dout, _ = drawn(torch.bfloat16)
    with captured_anew(1) as graphs:
        torch.use_deterministic_algorithms(False)
        step = partial(called, (q, k, v, dout), PATTERNS["causal"], Layout.contiguous(N, 1), same_bits=CHUNK)
        wanted = step()
        for _ in range(graph_replay.WARMUP_CALLS + 2):
            assert all(map(same_bits, step(), wanted))
        assert len(graphs) == 2, "forward and backward"


def _differing(exchange: str) -> list[str]:
    """Settings whose bits on this rank are not those of a rank alone."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    alone = [dist.new_group([one]) for one in range(world)][rank]
    for name, dtype in CALLS:
        if name == "fa4" and FA4.missing() is not None:
            continue
        x = drawn(dtype, heads=8, kv_heads=4)
        for what, pattern in PATTERNS.items():
            whole = results(x, pattern, group=alone, kernel=name)
            layout = Layout.whole_chunks(N, world, CHUNK, pattern.documents)
            shard = [layout.shard(t, rank, dim) for t, dim in zip(x, (1, 1, 1, 1, 2), strict=True)]
            step = partial(results, shard, pattern, layout, kernel=name, exchange=exchange, check=False)
            own = [layout.shard(t, rank, dim) for t, dim in zip(whole, (1, 2, 1, 1, 1), strict=True)]
            found = {"called": step()} | ({} if exchange == "gather" else {"captured": replayed(step)})
            wrong += [f"{name}, {dtype}, {what}, {how}" for how, x in found.items() if not all(map(same_bits, x, own))]
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("exchange", ["ring", "direct", "gather", "all-to-all"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_have_the_bits_of_one(ranks: Ranks, world: int, exchange: str) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    assert ranks(world, "nccl").run(_differing, exchange, timeout=180.0) == [[]] * world


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("length, dim", [(1, 8), (16, 64), (131, 40), (300, 128)])
def test_pairs_are_merged_as_by_the_plain_version(length: int, dim: int, dtype: torch.dtype) -> None:
    """Rows that see nothing, infinities, NaN and other strides too."""
    from ring.compute.gpu.pair_kernel import merge_pair

    shape = (1, 2, 3, 2, length, dim)
    left, right = (normal(*shape, seed=seed, dtype=dtype).cuda() for seed in (1, 2))
    a, b = (20 * normal(*shape[:-1], seed=seed, dtype=torch.float32).cuda() for seed in (3, 4))
    for row, (of_left, of_right) in enumerate(((-torch.inf, 0.5), (-torch.inf, -torch.inf), (torch.nan, 1.0))):
        a[..., row % length], b[..., row % length] = of_left, of_right
    left = left.mT.contiguous().mT
    found, wanted = merge_pair(left, a, right, b), merge(left.float(), a, right.float(), b)
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6, equal_nan=True)
