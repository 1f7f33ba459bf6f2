"""Calls that are replayed as CUDA graphs, held to plain ones, bit for bit. They need a GPU, some of them two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from reference import Pattern
from ring import Layout, ring_attention
from ring.compute.gpu import replay
from ring.compute.gpu.replay import BEFORE
from ring.compute.kernel_counts import picked_kernels
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def called(
    tensors: Sequence[torch.Tensor], dout: torch.Tensor, *what: Any, **settings: Any
) -> tuple[torch.Tensor, ...]:
    """Output and gradients of a call whose tensors stay where they are. what: pattern and layout."""
    q, k, v = (x.requires_grad_() for x in tensors)
    out = ring_attention(q, k, v, *what, **settings)
    assert isinstance(out, torch.Tensor)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


def attended(tensors: Sequence[torch.Tensor], dout: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, ...]:
    pattern, layout = Pattern.longnet([64, 256], [1, 4], 8, True), Layout.contiguous(tensors[0].shape[1], 1)
    return called(tensors, dout, pattern, layout, **settings)


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Sums come in the same order in every run, and what nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def graphs(repeatable: None) -> dict[Any, Any]:
    """What is captured from now on."""
    torch.manual_seed(4)
    replay._seen.clear()
    replay._replays.clear()
    return replay._replays


def random_tensors(tokens: int) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the output."""
    return tuple(torch.randn(1, tokens, h, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2, 8))


def plainly(*arguments: Any, **settings: Any) -> tuple[torch.Tensor, ...]:
    """Whoever counts kernels sees plain calls."""
    with picked_kernels():
        return attended(*arguments, **settings)


def equal(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, exact, strict=True))


def test_a_call_that_comes_again_is_replayed_bit_for_bit(graphs: dict[Any, Any]) -> None:
    """Other numbers, at other places, give what a plain call gives, and stay when the graph runs again."""
    kept = []
    for turn in range(BEFORE + 4):
        *tensors, dout = random_tensors(512)
        if turn % 2:
            dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
        found = attended(tensors, dout)
        assert len(graphs) == (2 if turn + 1 >= BEFORE else 0), "forward and backward"
        kept.append((found, plainly(tensors, dout)))
    assert all(equal(found, plain) for found, plain in kept)


def test_what_is_replayed_is_what_was_asked_for(graphs: dict[Any, Any]) -> None:
    """Settings by turns, each with a graph of its own, in memory that all of them use; also after inference."""
    settings: tuple[dict[str, Any], ...] = ({}, {"scale": 0.5}, {"kernel": "flash"}, {"bucket": 100})
    sizes = (256, 1024, 512)
    with torch.inference_mode():
        for tokens in sizes:
            q, k, v, _ = random_tensors(tokens)
            for _ in range(BEFORE + 2):
                ring_attention(q, k, v, Pattern.longnet([64, 256], [1, 4], 8, True), Layout.contiguous(tokens, 1))
    assert len(graphs) == len(sizes)
    for turn in range(BEFORE + 3):
        for one in settings:
            for tokens in sizes:
                *tensors, dout = random_tensors(tokens)
                found = attended(tensors, dout, **one)
                assert turn < BEFORE or equal(found, plainly(tensors, dout, **one)), (tokens, one)
    assert len(graphs) == len(sizes) * (1 + 2 * len(settings))


def test_long_calls_and_calls_of_changing_settings_are_not_captured(
    graphs: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for tokens in range(256, 256 + 2 * replay.BEFORE):
        *tensors, dout = random_tensors(tokens)
        attended(tensors, dout)
    *tensors, dout = random_tensors(256)
    monkeypatch.setattr(replay, "MOST_BYTES", tensors[0].nbytes - 1)
    for _ in range(2 * replay.BEFORE):
        attended(tensors, dout)
    assert not graphs


def test_calls_are_captured_anew_after_all_graphs_are_gone(graphs: dict[Any, Any]) -> None:
    """Their memory is gone with them."""
    *tensors, dout = random_tensors(512)
    exact = plainly(tensors, dout)
    for _ in range(2):
        for _ in range(BEFORE + 2):
            assert equal(attended(tensors, dout), exact)
        assert len(graphs) == 2
        graphs.clear()
        torch.cuda.empty_cache()


def test_a_stream_of_its_own_has_graphs_of_its_own(graphs: dict[Any, Any]) -> None:
    *tensors, dout = random_tensors(512)
    exact = plainly(tensors, dout)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for _ in range(BEFORE + 3):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(attended(tensors, dout))
    torch.cuda.synchronize()
    assert len(graphs) == 2 * len(streams)
    assert all(equal(one, exact) for one in found)


def _replays(replaying: list[bool], exchange: str) -> tuple[int, int]:
    """Graphs, and calls whose result differs in some bit from the plain one. replaying: by rank, whether it may."""
    rank, world, tokens, wrong = dist.get_rank(), dist.get_world_size(), 512, 0
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(rank)
    replay._seen.clear()
    replay._replays.clear()
    zigzag, contiguous = Layout.zigzag(tokens * world, world), Layout.contiguous(tokens * world, world)
    longnet = Pattern.longnet([256, 512, 1024], [1, 2, 4], heads=8, causal=True)
    try:
        for _ in range(BEFORE + 3):
            for pattern, layout, kv_heads in ((Pattern.dense(True), zigzag, 2), (longnet, contiguous, 8)):
                shapes = [(1, tokens, heads, 64) for heads in (8, kv_heads, kv_heads, 8)]
                *qkv, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
                with pytest.MonkeyPatch.context() as patch:
                    if not replaying[rank]:
                        patch.setattr(replay, "MOST_BYTES", 0)
                    found = called(qkv, dout, pattern, layout, exchange=exchange)
                with picked_kernels():
                    wrong += not equal(found, called(qkv, dout, pattern, layout, exchange=exchange))
    finally:
        torch.use_deterministic_algorithms(False)
    return len(replay._replays), wrong


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("exchange", ["direct", "ring", "gather"])
def test_ranks_replay_each_for_itself(exchange: str, ranks: Ranks) -> None:
    """Messages of a graph meet those of a plain call."""
    for replaying in ([True, True], [True, False], [False, True]):
        found = ranks(2, "nccl").run(_replays, replaying, exchange, timeout=120.0)
        assert found == [(4 * replays_here, 0) for replays_here in replaying]
