"""Calls that are replayed as CUDA graphs, held to plain ones, bit for bit. They need a GPU, some of them two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from reference import Pattern
from ring import Layout, ring_attention
from ring.compute.gpu import graph_replay
from ring.compute.gpu.graph_replay import WARMUP_CALLS
from ring.compute.kernel_counts import count_kernels
from ring.compute.kernels import fa4
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def _without_fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep to torch's kernels, if FlashAttention-4 is installed or not."""
    monkeypatch.setattr(fa4, "installed_version", lambda: None)


LONGNET = Pattern.longnet([64, 256], [1, 4], 8, True)
Tensors = tuple[torch.Tensor, ...]


def called(tensors: Tensors, *what: Any, **settings: Any) -> Tensors:
    """Output and gradients of a call whose tensors stay where they are. what: pattern and layout."""
    q, k, v, dout = tensors
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = ring_attention(q, k, v, *what, **settings)
    assert isinstance(out, torch.Tensor)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


def attended(tensors: Tensors, **settings: Any) -> Tensors:
    return called(tensors, LONGNET, Layout.contiguous(tensors[0].shape[1], 1), **settings)


@contextmanager
def captured_anew(seed: int) -> Iterator[dict[Any, Any]]:
    """Settings for captures. Sums come in the same order in every run, and what nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    graph_replay._call_counts.clear()
    graph_replay._replays.clear()
    try:
        yield graph_replay._replays
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def graphs() -> Iterator[dict[Any, Any]]:
    with captured_anew(4) as found:
        yield found


def drawn(tokens: int, kv_heads: int = 2) -> Tensors:
    """q, k, v and the gradient of the output."""
    heads = 8, kv_heads, kv_heads, 8
    return tuple(torch.randn(1, tokens, h, 64, device="cuda", dtype=torch.bfloat16) for h in heads)


def plainly(tensors: Tensors, **settings: Any) -> Tensors:
    """Whoever counts kernels sees plain calls."""
    with count_kernels():
        return attended(tensors, **settings)


def equal(found: Tensors, exact: Tensors) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, exact, strict=True))


def test_repeated_calls_are_replayed_bit_for_bit(graphs: dict[Any, Any]) -> None:
    """Other numbers, at other places, give what a plain call gives, and stay when the graph runs again."""
    kept = []
    for turn in range(WARMUP_CALLS + 4):
        *qkv, dout = drawn(512)
        tensors = *qkv, dout.transpose(1, 2).contiguous().transpose(1, 2) if turn % 2 else dout
        found = attended(tensors)
        assert len(graphs) == (2 if turn + 1 >= WARMUP_CALLS else 0), "forward and backward"
        kept.append((found, plainly(tensors)))
    assert all(equal(found, plain) for found, plain in kept)


def test_replays_match_their_calls(graphs: dict[Any, Any]) -> None:
    """Settings by turns, each with a graph of its own, in memory that all of them use; also after inference."""
    settings: tuple[dict[str, Any], ...] = ({}, {"scale": 0.5}, {"kernel": "flash"}, {"bucket": 100})
    sizes = (256, 1024, 512)
    with torch.inference_mode():
        for tokens in sizes:
            q, k, v, _ = drawn(tokens)
            for _ in range(WARMUP_CALLS + 2):
                ring_attention(q, k, v, LONGNET, Layout.contiguous(tokens, 1))
    assert len(graphs) == len(sizes)
    for turn in range(WARMUP_CALLS + 3):
        for one, tokens in product(settings, sizes):
            tensors = drawn(tokens)
            found = attended(tensors, **one)
            assert turn < WARMUP_CALLS or equal(found, plainly(tensors, **one)), (tokens, one)
    assert len(graphs) == len(sizes) * (1 + 2 * len(settings))


def test_sinks_are_inputs_of_graphs(graphs: dict[Any, Any]) -> None:
    layout, numbers = Layout.contiguous(512, 1), (torch.randn(8, device="cuda") for _ in range(WARMUP_CALLS + 3))
    for turn, sinks in enumerate(numbers):
        *inputs, dout = drawn(512)
        q, k, v, _ = leaves = [x.requires_grad_() for x in (*inputs, sinks)]
        runs = []
        for counts in (nullcontext, count_kernels):  # whoever counts kernels sees plain calls
            with counts():
                out = ring_attention(q, k, v, LONGNET, layout, sinks=sinks)
                assert isinstance(out, torch.Tensor)
                grads = torch.autograd.grad(out, leaves, dout)
                fixed = ring_attention(q, k, v, LONGNET, layout, sinks=sinks.detach())
                assert isinstance(fixed, torch.Tensor)
                runs.append((out, *grads, *torch.autograd.grad(fixed, leaves[:3], dout)))
        assert equal(*runs), turn
    assert len(graphs) == 4  # forward and backward, with and without the gradient of sinks


def test_long_or_changing_calls_are_not_captured(graphs: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens in range(256, 256 + 2 * graph_replay.WARMUP_CALLS):
        attended(drawn(tokens))
    tensors = drawn(256)
    monkeypatch.setattr(graph_replay, "MOST_BYTES", tensors[0].nbytes - 1)
    for _ in range(2 * graph_replay.WARMUP_CALLS):
        attended(tensors)
    assert not graphs


def test_calls_are_captured_anew_without_graphs(graphs: dict[Any, Any]) -> None:
    """The memory of graphs is gone with them."""
    tensors = drawn(512)
    exact = plainly(tensors)
    for _ in range(2):
        for _ in range(WARMUP_CALLS + 2):
            assert equal(attended(tensors), exact)
        assert len(graphs) == 2
        graphs.clear()
        torch.cuda.empty_cache()


def test_streams_have_separate_graphs(graphs: dict[Any, Any]) -> None:
    tensors = drawn(512)
    exact = plainly(tensors)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for stream in (WARMUP_CALLS + 3) * streams:
        with torch.cuda.stream(stream):
            found.append(attended(tensors))
    torch.cuda.synchronize()
    assert len(graphs) == 2 * len(streams)
    assert all(equal(one, exact) for one in found)


def replays(replaying: list[bool], exchange: str, bucket: int | None = None) -> tuple[int, int]:
    """Graphs, and calls whose result differs in some bit from the plain one. replaying: by rank, whether it may."""
    rank, world, tokens, wrong = dist.get_rank(), dist.get_world_size(), 512, 0
    zigzag, contiguous = Layout.zigzag(tokens * world, world), Layout.contiguous(tokens * world, world)
    longnet = Pattern.longnet([256, 512, 1024], [1, 2, 4], heads=8, causal=True)
    settings = {"exchange": exchange, "bucket": bucket}
    with captured_anew(rank) as graphs:
        for _ in range(WARMUP_CALLS + 3):
            for pattern, layout, kv_heads in ((Pattern.dense(True), zigzag, 2), (longnet, contiguous, 8)):
                tensors = drawn(tokens, kv_heads)
                with nullcontext() if replaying[rank] else patch.object(graph_replay, "MOST_BYTES", 0):
                    found = called(tensors, pattern, layout, **settings)
                with count_kernels():
                    wrong += not equal(found, called(tensors, pattern, layout, **settings))
        return len(graphs), wrong


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("exchange", ["direct", "direct-kept", "ring", "gather"])
def test_ranks_replay_each_for_itself(exchange: str, ranks: Ranks) -> None:
    """Messages of a graph meet those of plain calls."""
    for replaying in ([True, True], [True, False], [False, True]):
        found = ranks(2, "nccl").run(replays, replaying, exchange, timeout=120.0)
        assert found == [(4 * replays_here, 0) for replays_here in replaying]
