"""`exchange="all-to-all"` against the oracle, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference import Branch, Pattern
from reference.oracle import attention_and_gradients
from reference.pattern import multiplicity
from ring import Layout
from ring.comm.transport import Transport
from ring.plan.head_shares import head_shares
from tests.support.attention_cases import call, normal
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

HEADS = ((1, 1), (3, 1), (4, 2), (6, 2), (8, 8), (5, 5))
DOCUMENTS = (5, 0, 9, 7)  # 21 tokens


def patterns(heads: int) -> dict[str, Pattern]:
    offsets = tuple(head % 3 for head in range(heads))
    return {
        "dense": Pattern.dense(),
        "documents": Pattern.dense(causal=True, documents=DOCUMENTS),
        "window": Pattern.dense(causal=True, window=3),
        "longnet": Pattern.longnet((6, 12, None), (1, 2, 4), heads, causal=True),
        "few heads": Pattern((Branch(8, 3, offsets), Branch(None, 2, 1, range(1))), causal=True),
        "last head": Pattern((Branch(8, 2, 1, range(heads - 1, heads)),)),
    }


def layout_of(name: str, n: int, p: int) -> Layout:
    if name == "uneven":
        return (
            Layout.from_cuts(range(n), (*[0] * p, n)) if p < 3 else Layout.from_cuts(range(n), (0, *[4] * (p - 1), n))
        )
    if name == "listed":
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
        return Layout.from_cuts(order, [rank * n // p for rank in range(p + 1)])
    return getattr(Layout, name)(n, p)


def check(
    pattern: Pattern, heads: tuple[int, int], layout: Layout, keys: Layout | None = None,
    wrap: Callable[[SimulatedTransport], Transport] = lambda transport: transport, **options: Any,
) -> None:  # fmt: skip
    """Output, lse and all gradients of every simulated rank are the oracle's. wrap: makes the group's transport."""
    n, key_layout = layout.n, layout if keys is None else keys
    shapes = (2, n, heads[0], 5), (2, key_layout.n, heads[1], 5), (2, key_layout.n, heads[1], 3)
    q, k, v = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    dout, dlse, sinks = normal(2, n, heads[0], 3, seed=4), normal(2, heads[0], n, seed=5), normal(heads[0], seed=6)
    positions: dict[str, Any] = {"q_positions": torch.arange(n), "k_positions": torch.arange(key_layout.n)}
    wanted = attention_and_gradients(q, k, v, pattern, dout, dlse, sinks=sinks, softcap=2.0, **positions)

    def step(transport: SimulatedTransport) -> list[torch.Tensor]:
        rank = transport.rank
        leaves = [layout.shard(q, rank), *(key_layout.shard(x, rank) for x in (k, v)), sinks.clone()]
        leaves = [x.requires_grad_() for x in leaves]
        settings = {"sinks": leaves[3], "softcap": 2.0, "group": wrap(transport), "exchange": "all-to-all", **options}
        out, lse = call(*leaves[:3], pattern, layout, key_layout=keys, **settings)
        incoming = [layout.shard(dout, rank), layout.shard(dlse, rank, 2)]
        return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, incoming)]

    found = Simulation(layout.world_size, 0).run(step)
    for rank, results in enumerate(found):
        for x, y, on, dim in zip(results, wanted, (layout,) * 3 + (key_layout,) * 2, (1, 2, 1, 1, 1), strict=False):
            torch.testing.assert_close(x, on.shard(y, rank, dim), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(sum(results[5] for results in found), wanted[5], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("order", ("zigzag", "uneven", "listed"))
@pytest.mark.parametrize("p", (2, 4))
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_oracle_agrees(heads: tuple[int, int], p: int, order: str) -> None:
    for bucket, pattern in zip((None, 4, 30, 5, 21, 4), patterns(heads[0]).values(), strict=True):
        check(pattern, heads, layout_of(order, 21, p), bucket=bucket)


BETWEEN = ("all-to-all:2+ring", "ring+all-to-all:2", "direct+all-to-all:3", "all-to-all:3+gather", "all-to-all:6+ring",
           "gather+all-to-all:1")  # fmt: skip
# Heads, bucket and pattern. The first three have several stages.
CASES = (
    ((5, 5), 4, "dense"), ((8, 8), 5, "documents"), ((6, 6), 5, "window"), ((6, 2), 4, "longnet"),
    ((3, 1), 4, "few heads"), ((1, 1), None, "last head"),
)  # fmt: skip


@pytest.mark.parametrize("order", ("striped", "listed"))
@pytest.mark.parametrize("exchange", BETWEEN)
def test_some_ranks_divide_the_heads(exchange: str, order: str) -> None:
    for heads, bucket, name in CASES:
        check(patterns(heads[0])[name], heads, layout_of(order, 21, 6), bucket=bucket, exchange=exchange)


@pytest.mark.parametrize("p", (2, 3))
def test_keys_of_another_sequence(p: int) -> None:
    check(Pattern.longnet((6, None), (1, 3), 6, causal=True), (6, 2), layout_of("zigzag", 21, p),
          layout_of("listed", 8, p), bucket=3)  # fmt: skip


@pytest.mark.parametrize("p", (1, 2, 3, 4, 7))
@pytest.mark.parametrize("most", (1, 2, 9))
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_shares_have_every_head_once(heads: tuple[int, int], most: int, p: int) -> None:
    group, seen = heads[0] // heads[1], [0] * p
    computed: list[int] = []
    for stage in head_shares(*heads, p, most):
        assert len(stage) == p and any(block.queries for block in stage)
        for rank, (queries, keys) in enumerate(stage):
            assert [head // group for head in queries] == [
                key for key in keys for _ in range(len(queries) // len(keys))
            ]
            assert len(keys) <= most
            seen[rank] += len(queries)
            computed += queries
    assert sorted(computed) == list(range(heads[0])) and max(seen) - min(seen) <= 1


@pytest.mark.parametrize("name", patterns(5))
def test_a_pattern_of_some_heads_is_a_part_of_the_whole(name: str) -> None:
    pattern, positions = patterns(5)[name], torch.arange(21)
    whole = multiplicity(pattern, positions, positions, 5)
    for start in range(5):
        for stop in range(start + 1, 6):
            part = multiplicity(pattern.of_heads(range(start, stop)), positions, positions, stop - start)
            assert torch.equal(part, whole[start:stop])
