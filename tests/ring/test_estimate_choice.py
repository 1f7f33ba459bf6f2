"""`ring.estimate.choose`, and `exchange="auto"` on ranks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from reference.pattern import Pattern
from ring import consensus
from ring.estimate import Rates, choice, choose, default_rates, estimate
from ring.layout import Layout
from ring.nn import ContextParallel
from ring.plan.exchange import parse
from tests.ring.test_hosts import call, group_on
from tests.support.attention_cases import normal, plain
from tests.support.ranks import Ranks
from verification.run.simulation.simulation import Simulation

SIZES: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
CAUSAL = Pattern.dense(causal=True)


def test_rows_are_those_of_estimates_in_order_of_time() -> None:
    rates = Rates(6e14, 5e14, 1e11, 1e-5, ranks_per_host=4, link_between=1e10, stage=1e-5)
    for backward in (False, True):
        rows = choose(CAUSAL, tokens=2**15, ranks=8, rates=rates, backward=backward, **SIZES)
        assert sorted(row.exchange for row in rows) == sorted(choice.candidates(8))
        seconds = [choice._seconds(row, backward) for row in rows]
        assert np.all(np.diff(seconds) > -0.01 * seconds[0])
        for row in rows:
            assert estimate(CAUSAL, tokens=2**15, ranks=8, rates=rates, exchange=row.exchange, **SIZES) == (row,)
            parse(row.exchange, 8)  # a call would take it
    (alone,) = choose(CAUSAL, tokens=64, ranks=1, **SIZES)
    assert alone.exchange == "direct"
    empty = choose(CAUSAL, tokens=1, ranks=4, rates=Rates(1, 1, 1), **SIZES)
    assert len(empty) == len(choice.candidates(4))


def test_balance_windows_and_slow_links_decide_the_exchange() -> None:
    def first(layout: Layout, pattern: Pattern = CAUSAL, **options: Any) -> str:
        return choose(pattern, layout, **(SIZES | options))[0].exchange

    assert first(Layout.zigzag(2**17, 2)) == "direct"
    assert first(Layout.contiguous(2**18, 8)) == "all-to-all"  # which alone balances a causal mask
    assert first(Layout.contiguous(2**18, 8), Pattern.dense(True, window=1023)) == "direct"
    assert "gather" not in {row.exchange for row in choose(CAUSAL, tokens=512, ranks=4, **SIZES)}
    # Over a slow link keys should cross once for each host, not once for each rank.
    far = Rates.of("NVIDIA H200", ranks_per_host=8, link_between=5e9, latency_between=3e-5)
    slow = {
        row.exchange: choice._seconds(row, True) for row in choose(CAUSAL, Layout.zigzag(2**17, 16), rates=far, **SIZES)
    }
    assert min(slow, key=slow.__getitem__) in ("ring:8+direct", "all-to-all:8+ring", "all-to-all:8+direct")
    assert slow["ring:8+direct"] < slow["direct"] / 2


def test_a_call_that_no_measured_kernel_takes_is_ordered_too() -> None:
    rows = choose(CAUSAL, tokens=64, ranks=2, heads=2, head_dim=1, dtype=torch.float64, rates=default_rates("cuda"))
    assert {row.exchange for row in rows} == set(choice.candidates(2))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": [8, 16]}, "tokens is \\[8, 16\\]; it must be an integer"),
        ({"ranks": None}, "layout must be given"),
        ({"backward": 1}, "backward is 1"),
        ({"rates": 3}, "rates is 3; it must be Rates"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"pattern": None}, "pattern must be a Pattern"),
    ],
)
def test_refuses(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        choose(**{"pattern": CAUSAL, "tokens": 64, "ranks": 2, **SIZES, **change})


def _auto(check: bool) -> tuple[str, int]:
    """Return the exchange of a call, and how often it was chosen in three."""
    consensus._settings.clear()
    with group_on("aaaa") as group, patch.object(choice, "chosen", side_effect=choice.chosen) as chosen:
        results = [call(group, "auto", check=check) for _ in range(3)]
        x = normal(1, 3, 4, 4, seed=0)
        rows = choose(CAUSAL, Layout.zigzag(12, 4), heads=4, kv_heads=2, head_dim=4, dtype=x.dtype, device="cpu")
        expected = call(group, rows[0].exchange, check=check)
        for grads, sent in results:
            assert sent == expected[1] and all(map(torch.equal, grads, expected[0]))
    return rows[0].exchange, chosen.call_count


@pytest.mark.ranks
@pytest.mark.parametrize("check", (True, False))
def test_every_rank_takes_the_first_and_chooses_once(ranks: Ranks, check: bool) -> None:
    exchange, _ = first = ranks(4).run(_auto, check)[0]
    assert first == (exchange, 1) and exchange in choice.candidates(4)


def test_a_choice_and_its_reason_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    x = normal(1, 6, 4, 4, seed=0)
    with caplog.at_level("INFO", "ring"):
        Simulation(2, 0).run(lambda group: plain(x, x, x, CAUSAL, Layout.zigzag(12, 2), group=group, exchange="auto"))
    (line, *others) = [record.getMessage() for record in caplog.records]
    assert set(others) <= {line}
    assert line.startswith("exchange 'auto' takes direct; predicted seconds: direct ") and ", all-to-all " in line


def _refused(hosts: str, tokens: int) -> str:
    x = torch.zeros(1, tokens // len(hosts), 1, 1)
    with group_on(hosts) as group, pytest.raises(ValueError) as error:
        plain(x, x, x, CAUSAL, Layout.zigzag(tokens, len(hosts)), group=group, exchange="auto", bucket=1)
    return str(error.value)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("hosts", "tokens", "said"),
    [
        (
            "aabb",
            8,
            "must have all ranks on one host, got ranks on 2, between which no rate was measured: write the fi",
        ),
        ("aaab", 8, "must have all ranks on one host, got ranks on 2"),
        ("aaaa", 2**19, "cannot predict this call: bucket is 1; it must be large enough for at most 2**18 stages"),
    ],
)
def test_calls_of_which_no_time_is_known_are_refused(ranks: Ranks, hosts: str, tokens: int, said: str) -> None:
    first, *others = ranks(4).run(_refused, hosts, tokens)
    assert others == [first] * 3 and f"exchange 'auto' {said}" in first and first.endswith(", as 'direct'")


def _disagreeing() -> str:
    exchange = "direct" if dist.get_rank() == 0 else "all-to-all"
    x = torch.ones(1, 4, 4, 4)
    pick = patch.object(choice, "candidates", lambda ranks: [exchange])
    with group_on("aa") as group, pick, pytest.raises(ValueError) as error:
        plain(x, x, x, CAUSAL, Layout.zigzag(8, 2), group=group, exchange="auto")
    return str(error.value)


@pytest.mark.ranks
def test_ranks_that_choose_differently_are_refused(ranks: Ranks) -> None:
    said = "exchange must be the same on every rank: rank 0 has direct, rank 1 all-to-all"
    assert ranks(2).run(_disagreeing) == [said] * 2


def _unlike(argument: str) -> str:
    """Return the error where rank 0 alone has no gradients, or another bucket, and so chooses otherwise."""
    first = dist.get_rank() == 0
    x = torch.ones(1, 4, 4, 4, requires_grad=not (first and argument == "requires_grad"))
    pick = patch.object(choice, "chosen", lambda call, hosts: "direct" if first else "all-to-all")
    consensus._settings.clear()
    with group_on("aa") as group, pick, pytest.raises(ValueError) as error:
        plain(
            x, x, x, CAUSAL, Layout.zigzag(8, 2), group=group, exchange="auto",
            bucket=3 + (first and argument == "bucket"),
        )  # fmt: skip
    return str(error.value)


@pytest.mark.ranks
@pytest.mark.parametrize(("argument", "had"), [("requires_grad", "False, rank 1 True"), ("bucket", "4, rank 1 3")])
def test_an_argument_that_changes_the_choice_is_named_before_it(ranks: Ranks, argument: str, had: str) -> None:
    said = f"{argument} must be the same on every rank: rank 0 has {had}"
    assert ranks(2).run(_unlike, argument) == [said] * 2


def test_one_rank_and_modules() -> None:
    q, k, v = (normal(1, 6, 2, 4, seed=seed) for seed in range(3))
    context = ContextParallel(Layout.contiguous(6, 1), exchange="auto")
    out = context.attention(q, k, v, CAUSAL)
    assert torch.equal(out, plain(q, k, v, CAUSAL, Layout.contiguous(6, 1), exchange="direct"))
    with pytest.raises(ValueError, match="dtype must be one of"):
        plain(q.int(), k.int(), v.int(), CAUSAL, Layout.contiguous(6, 1), exchange="auto")


def _compiled(exchange: str) -> float:
    """Return how far results of a graph are from those without one."""
    layout, rank = Layout.zigzag(12, 2), dist.get_rank()
    q, k, v = (layout.shard(normal(1, 12, 2, 4, seed=seed), rank).requires_grad_() for seed in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return plain(q, k, v, CAUSAL, layout, group=dist.group.WORLD, exchange=exchange)

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out = function(q, k, v)
        results.append(torch.cat([x.flatten() for x in (out, *torch.autograd.grad(out.sum(), (q, k, v)))]))
    return float((results[0] - results[1]).abs().max())


@pytest.mark.ranks
@pytest.mark.parametrize("exchange", ("auto", "all-to-all+ring"))
def test_graphs_take_the_same_exchange(ranks: Ranks, exchange: str) -> None:
    assert ranks(2).run(_compiled, exchange) == [0.0, 0.0]


def test_the_first_choice_of_a_process_draws_no_random_numbers() -> None:
    code = "import random, ring; before = random.getstate(); import ring.estimate; assert random.getstate() == before"
    subprocess.run([sys.executable, "-c", code], check=True)
