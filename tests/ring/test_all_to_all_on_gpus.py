"""`exchange="all-to-all"` by copy engines through symmetric memory. It needs two GPUs of one host, and four for two
exchanges:

python -m pytest tests/ring/test_all_to_all_on_gpus.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from reference import Pattern
from reference.oracle import attention_and_gradients
from ring import Layout
from ring.comm.process_group import ProcessGroupTransport
from ring.comm.symmetric_memory import SymmetricTransport, transport_of
from ring.compute.kernel_counts import count_kernels
from tests.ring.compute.gpu.test_graph_replay import called, captured_anew, drawn, equal, replays
from tests.ring.test_all_to_all import CASES, layout_of, patterns
from tests.support.attention_cases import call, normal
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]
EXCHANGES = [
    pytest.param(
        world, exchange, id=f"{world} ranks, {exchange}",
        marks=pytest.mark.skipif(torch.cuda.device_count() < world, reason=f"needs {world} GPUs"),
    )
    for world, exchange in (
        (2, "all-to-all"), (2, "all-to-all-kept"), (4, "all-to-all"), (4, "all-to-all:2+ring"),
        (4, "ring+all-to-all:2"), (4, "direct+all-to-all:2"), (4, "all-to-all:2+gather"),
    )
]  # fmt: skip
TIMEOUT = 180.0  # seconds; a rank compiles kernels at its first call


@contextmanager
def without_nccl() -> Iterator[None]:
    """Refuse messages through the process group."""
    with patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("a message goes through NCCL")):
        yield
    transport = transport_of(None)
    assert isinstance(transport, SymmetricTransport) and not transport.by_nccl


def _oracle(exchange: str, order: str) -> list[str]:
    """Settings in which some result of this rank is not the oracle's, of every setting twice, by turns."""
    rank, world, n, wrong = dist.get_rank(), dist.get_world_size(), 21, []
    layout, positions = layout_of(order, n, world), torch.arange(n)
    for turn in range(2):
        for (heads, kv_heads), bucket, name in CASES:
            pattern, seeds = patterns(heads)[name], range(10 * turn, 10 * turn + 6)
            shapes = (
                (2, n, heads, 5),
                (2, n, kv_heads, 5),
                (2, n, kv_heads, 3),
                (heads,),
                (2, n, heads, 3),
                (2, heads, n),
            )
            q, k, v, sinks, dout, dlse = (normal(*shape, seed=seed) for shape, seed in zip(shapes, seeds, strict=True))
            exact = attention_and_gradients(
                q, k, v, pattern, dout, dlse, sinks=sinks, q_positions=positions, k_positions=positions
            )
            leaves = [x.cuda().requires_grad_() for x in (*(layout.shard(x, rank) for x in (q, k, v)), sinks)]
            with without_nccl():
                out, lse = call(*leaves[:3], pattern, layout, sinks=leaves[3], exchange=exchange, bucket=bucket)
                incoming = layout.shard(dout, rank).cuda(), layout.shard(dlse, rank, 2).cuda()
                grads = torch.autograd.grad((out, lse), leaves, incoming)
            total = grads[3].clone()
            dist.all_reduce(total)
            results = [x.detach().cpu() for x in (out, lse, *grads[:3], total)]
            wanted = [layout.shard(x, rank, dim) for x, dim in zip(exact, (1, 2, 1, 1, 1), strict=False)]
            for what, x, y in zip(
                ("out", "lse", "dq", "dk", "dv", "dsinks"), results, (*wanted, exact[5]), strict=True
            ):
                if not torch.allclose(x, y, rtol=1e-11, atol=1e-11):
                    wrong.append(f"{what} of {name!r}, {heads} and {kv_heads} heads, turn {turn}")
    return wrong


@pytest.mark.parametrize("order", ["zigzag", "uneven"])
@pytest.mark.parametrize(("world", "exchange"), EXCHANGES)
def test_the_oracle_agrees(world: int, exchange: str, order: str, ranks: Ranks) -> None:
    assert ranks(world, "nccl").run(_oracle, exchange, order, timeout=TIMEOUT) == [[]] * world


def _by_nccl(exchange: str) -> int:
    """Calls whose results differ in some bit from those over NCCL."""
    rank, world, tokens, wrong = dist.get_rank(), dist.get_world_size(), 512, 0
    longnet = Pattern.longnet([256, 512, 1024], [1, 2, 4], heads=8, causal=True)
    cuts = 0, *(tokens * at - 100 for at in range(1, world)), tokens * world
    layouts = Layout.zigzag(tokens * world, world), Layout.from_cuts(range(tokens * world), cuts)
    with captured_anew(rank), count_kernels():  # whoever counts kernels replays no graph
        for bucket in (None, 256) * 2:
            for pattern, layout, kv_heads in ((Pattern.dense(True), layouts[0], 2), (longnet, layouts[1], 8)):
                tensors = drawn(layout.counts[rank], kv_heads)
                with without_nccl():
                    found = called(tensors, pattern, layout, exchange=exchange, bucket=bucket)
                by_nccl = ProcessGroupTransport()
                exact = called(tensors, pattern, layout, exchange=exchange, bucket=bucket, group=by_nccl)
                wrong += not equal(found, exact)
    return wrong


@pytest.mark.parametrize(("world", "exchange"), EXCHANGES)
def test_the_bits_are_those_over_nccl(world: int, exchange: str, ranks: Ranks) -> None:
    """Calls of bf16 tensors, in one stage and in several."""
    assert ranks(world, "nccl").run(_by_nccl, exchange, timeout=TIMEOUT) == [0] * world


def _in_a_graph(exchange: str) -> int:
    """Replays of the user's own graph whose results differ in some bit from those of a call."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), 0
    pattern, layout = Pattern.dense(True), Layout.zigzag(512 * world, world)
    with captured_anew(rank), without_nccl():
        tensors = drawn(512, 8)
        step = partial(called, tensors, pattern, layout, exchange=exchange, bucket=256, check=False)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(3):
            with torch.no_grad():
                for x in tensors:
                    x.copy_(torch.randn_like(x))
            graph.replay()
            wrong += not equal(tuple(x.clone() for x in captured), step())
    return wrong


@pytest.mark.parametrize(("world", "exchange"), EXCHANGES)
def test_a_captured_call_replays(world: int, exchange: str, ranks: Ranks) -> None:
    assert ranks(world, "nccl").run(_in_a_graph, exchange, timeout=TIMEOUT) == [0] * world


@pytest.mark.parametrize("bucket", [None, 256])
@pytest.mark.parametrize(("world", "exchange"), EXCHANGES)
def test_ranks_replay_short_calls_separately(world: int, exchange: str, bucket: int | None, ranks: Ranks) -> None:
    """Forward and backward of two settings."""
    for replaying in ([True] * world, [rank % 2 == 0 for rank in range(world)]):
        found = ranks(world, "nccl").run(replays, replaying, exchange, bucket, timeout=TIMEOUT)
        assert found == [(4 * replays_here, 0) for replays_here in replaying]
