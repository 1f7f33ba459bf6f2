"""`ring_attention` with a layout of the keys' own against the oracle, both ways; errors that name `key_layout`."""

from __future__ import annotations

import re
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from reference import Branch, Pattern
from reference.oracle import attention_and_gradients
from ring import Layout
from tests.support.attention_cases import call, normal, plain
from verification.run.simulation.simulated_transport import SimulatedTransport
from verification.run.simulation.simulation import Simulation

DOCUMENTS = (5, 0, 9, 7)  # 21 tokens
PATTERNS = {
    "dense": Pattern.dense(),
    "causal": Pattern.dense(causal=True),
    "window": Pattern.dense(window=4),
    "causal window": Pattern.dense(causal=True, window=3),
    "longnet": Pattern.longnet((4, None), (1, 3), 4),
    "longnet causal": Pattern.longnet((6, 12, None), (1, 2, 4), 4, causal=True),
    "per head": Pattern((Branch(8, 3, (2, 0, 1, 2), window=5), Branch(None, 2, 1, range(1, 3))), causal=True),
}
LENGTHS = [(21, 8), (8, 21), (13, 1), (0, 5), (5, 0)]
ORDERS = [("contiguous", "zigzag"), ("zigzag", "striped"), ("striped", "listed"), ("hilbert", "contiguous"),
          ("uneven", "last"), ("first", "uneven")]  # fmt: skip


def layout_of(name: str, n: int, p: int) -> Layout:
    """A layout by name; all tokens on the first or the last rank, most on one, or a listed order."""
    cuts = {"first": (0, *[n] * p), "last": (*[0] * p, n), "uneven": (0, *[n - n // 4] * (p - 1), n)}
    if name in cuts:
        return Layout.from_cuts(range(n), cuts[name])
    if name == "listed":
        order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
        return Layout.from_cuts(order, [rank * n // p for rank in range(p + 1)])
    return getattr(Layout, name)(n, p)


def tensors(queries: int, keys: int, value_dim: int = 5) -> list[torch.Tensor]:
    """q, k, v, dout, dlse, sinks"""
    shapes = (2, queries, 4, 5), (2, keys, 2, 5), (2, keys, 2, value_dim), (2, queries, 4, value_dim), (2, 4, queries)
    return [normal(*shape, seed=seed) for seed, shape in enumerate((*shapes, (4,)))]


def check(pattern: Pattern, layout: Layout, key_layout: Layout, exchange: str, **options: Any) -> None:
    """Output, lse and all gradients of every simulated rank are the oracle's."""
    q, k, v, dout, dlse, sinks = tensors(layout.n, key_layout.n, options.pop("value_dim", 5))
    scoring = {name: options[name] for name in ("softcap", "sinks") if name in options}
    if scoring.get("sinks"):
        options["sinks"] = scoring["sinks"] = sinks
    positions: dict[str, Any] = {"q_positions": torch.arange(layout.n), "k_positions": torch.arange(key_layout.n)}
    wanted = attention_and_gradients(q, k, v, pattern, dout, dlse, **positions, **scoring)

    def step(transport: SimulatedTransport) -> list[torch.Tensor]:
        rank, given = transport.rank, dict(options)
        leaves = [x.requires_grad_() for x in (layout.shard(q, rank), *(key_layout.shard(x, rank) for x in (k, v)))]
        if "sinks" in options:
            given["sinks"] = sinks.clone().requires_grad_()
            leaves.append(given["sinks"])
        settings = {"key_layout": key_layout, "group": transport, "exchange": exchange}
        out, lse = call(*leaves[:3], pattern, layout, **settings, **given)
        incoming = [layout.shard(dout, rank), layout.shard(dlse, rank, 2)]
        return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, incoming)]

    found = Simulation(layout.world_size, 0).run(step)
    for rank, results in enumerate(found):
        for x, y, on, dim in zip(results, wanted, (layout,) * 3 + (key_layout,) * 2, (1, 2, 1, 1, 1), strict=False):
            torch.testing.assert_close(x, on.shard(y, rank, dim), rtol=1e-11, atol=1e-11)
    if "sinks" in options:
        torch.testing.assert_close(sum(results[5] for results in found), wanted[5], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("orders", ORDERS, ids="-".join)
@pytest.mark.parametrize("p", (1, 2, 3, 4))
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_oracle_agrees(lengths: tuple[int, int], p: int, orders: tuple[str, str]) -> None:
    layout, key_layout = (layout_of(name, n, p) for name, n in zip(orders, lengths, strict=True))
    exchanges = cycle(("ring", "direct", "gather", "all-to-all") if p > 1 else ("ring",))
    for pattern, exchange in zip(PATTERNS.values(), exchanges, strict=False):
        check(pattern, layout, key_layout, exchange, bucket=5)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
@pytest.mark.parametrize("options", ({"softcap": 0.5}, {"sinks": True}, {"value_dim": 3}, {"kernel": "math"}), ids=str)
def test_scores_and_values(options: dict[str, Any], exchange: str) -> None:
    check(PATTERNS["longnet causal"], Layout.zigzag(21, 3), Layout.striped(8, 3), exchange, **options)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
@pytest.mark.parametrize("lengths", [(9, 21), (1, 21), (2, 3)], ids=str)
def test_queries_at_the_end_of_a_cache(lengths: tuple[int, int], exchange: str) -> None:
    queries, keys = lengths
    pattern, turns = (
        Pattern.slices([((0, queries), (0, keys), "causal")]),
        sorted(range(keys), key=lambda p: p // 4 % 3),
    )
    cuts = [0, *(sum(p // 4 % 3 <= rank for p in turns) for rank in range(3))]
    for order in ("contiguous", "first", "last", "listed"):
        check(pattern, layout_of(order, queries, 3), Layout.from_cuts(turns, cuts), exchange, bucket=5)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
def test_documents_of_both_sequences(exchange: str) -> None:
    pattern = Pattern.longnet((4, None), (1, 3), 4, causal=True, documents=DOCUMENTS)
    check(pattern, Layout.zigzag(21, 3, documents=DOCUMENTS), Layout.striped(21, 3), exchange, bucket=3)


@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
def test_the_same_layout_is_self_attention(exchange: str) -> None:
    """Bit for bit, in another object, whose plan is the same."""
    layout, tensors_of = Layout.zigzag(21, 3), tensors(21, 21)[:3]

    def step(transport: SimulatedTransport) -> list[torch.Tensor]:
        arguments = [*(layout.shard(x, transport.rank) for x in tensors_of), PATTERNS["longnet causal"], layout]
        given = {"group": transport, "exchange": exchange}
        return [*call(*arguments, **given), *call(*arguments, key_layout=Layout.zigzag(21, 3), **given)]

    for out, lse, same_out, same_lse in Simulation(3, 0).run(step):
        assert torch.equal(out, same_out) and torch.equal(lse, same_lse)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"key_layout": 8}, "key_layout must be a Layout"),
    "ranks": ({"key_layout": Layout.zigzag(8, 2)}, "key_layout must be for the 3 ranks of the group, got one for 2"),
    "rows": (
        {"key_layout": Layout.from_cuts(range(8), (0, 8, 8, 8))},
        "k must have the [08] tokens that the key_layout",
    ),
    "no key_layout": ({"key_layout": None}, "k must have the 7 tokens that the layout .*take key_layout="),
    "documents": ({"pattern": Pattern.dense(documents=DOCUMENTS)}, "key_layout must have the 21 tokens of"),
    "differs": ({"key_layout": Layout.from_cuts(range(8)[::-1], (0, 2, 5, 8))}, "key_layout must be the same on every"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("culprit", (None, 0, 2))
def test_a_wrong_key_layout_is_one_error_on_every_rank(name: str, culprit: int | None) -> None:
    """And the group can be used afterwards."""
    changes, message = REFUSED[name]
    layout, key_layout = Layout.zigzag(21, 3), Layout.contiguous(8, 3)
    q, k, v, *_ = tensors(21, 8)
    if name == "differs" and culprit is None:
        changes, message = {}, "fine"

    def step(transport: SimulatedTransport) -> str:
        rank = transport.rank
        shards = layout.shard(q, rank), key_layout.shard(k, rank), key_layout.shard(v, rank)
        right = {"pattern": Pattern.dense(), "layout": layout, "key_layout": key_layout, "group": transport}
        wrong = culprit in (None, rank)
        try:
            plain(*shards, **right | (changes if wrong else {}))
        except Exception as error:
            plain(*shards, **right)
            return f"{type(error).__name__}: {error}"
        return "fine"

    first, *others = Simulation(3, 0).run(step)
    assert re.search(message, first) and others == [first] * 2


def test_compiled_and_recomputed() -> None:
    """The operator of a graph, and a recomputed forward, give the bits of a call."""
    layout, key_layout = Layout.contiguous(13, 1), Layout.from_cuts(range(8)[::-1], (0, 8))
    *given, dout, _, _ = tensors(13, 8)

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return plain(*x, PATTERNS["longnet causal"], layout, key_layout=key_layout)

    def results(function: Any) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in given]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    wanted = results(attend)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for found in (results(compiled), results(lambda *x: checkpoint(attend, *x, use_reentrant=False))):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
