"""Sinks, softcap and a value head dim of its own, held to their formula in one process in fp64."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from reference.pattern import Branch, Pattern
from ring import Layout, Transport, count_kernels, ring_attention
from ring.comm.buffer_meter import measure
from ring.comm.transport import RecordingTransport
from tests.support.attention_cases import LAYOUTS, PACKED, PATTERNS, call, normal, plain
from tests.support.dense_scores import results
from tests.support.ranks import Ranks
from verification.run.simulation.simulation import Simulation

EXACT = 1e-12  # fp64, results of the order of 1 to 100
INF = math.inf
TOKENS = 17
SINKS = torch.tensor([0.3, -INF, 2.5, -4.0], dtype=torch.float64)
ALL_PATTERNS = PATTERNS | {
    "documents": PACKED,
    "window": Pattern.dense(causal=True, window=3),
    "window and documents": Pattern((Branch(None, 2, window=4), Branch(6)), True, (5, 0, 9, 3)),
}


def drawn(
    sinks: Tensor | None, kv_heads: int = 2, dims: tuple[int, int] = (5, 3), through_lse: bool = True
) -> list[Any]:
    """q, k, v, sinks, dout, dlse; 4 query heads. dims: head dims of keys and of values."""
    shapes = (4, dims[0]), (kv_heads, dims[0]), (kv_heads, dims[1]), (4, dims[1])
    q, k, v, dout = (normal(2, TOKENS, *shape, seed=seed) for seed, shape in enumerate(shapes))
    return [q, k, v, sinks, dout, normal(2, 4, TOKENS, seed=4) if through_lse else None]


def converted(given: list[Any], dtype: torch.dtype) -> list[Any]:
    return [None if x is None else x.to(dtype) for x in given]


def of_rank(
    transport: Transport | None, rank: int, given: list[Any], pattern: Pattern, layout: Layout, **options: Any
) -> dict[str, Tensor]:
    """Return the results of one rank, without dlse without lse. given: whole q, k, v, sinks, dout and dlse; sinks and
    dlse may be None.
    """
    q, k, v, sinks, dout, dlse = given
    names = {"dq": q, "dk": k, "dv": v}
    leaves = [layout.shard(x, rank).requires_grad_() for x in names.values() if x is not None]
    if sinks is not None:
        leaves.append(sinks.detach().requires_grad_())
        names["dsinks"] = sinks
    options |= {"group": transport, "sinks": leaves[3] if leaves[3:] else None}
    outputs, slopes = {}, [layout.shard(dout, rank)]
    if dlse is None:
        outputs["out"] = plain(*leaves[:3], pattern, layout, **options)
    else:
        outputs["out"], outputs["lse"] = call(*leaves[:3], pattern, layout, **options)
        slopes.append(layout.shard(dlse, rank, 2))
    grads = torch.autograd.grad([*outputs.values()], leaves, slopes)
    return {name: x.detach() for name, x in outputs.items()} | dict(zip(names, grads, strict=True))


def whole(layout: Layout, by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the results of the whole sequence: the gradients of sinks are sums over the ranks' own rows."""
    wholes = {}
    for name in by_rank[0]:
        shards = [one[name] for one in by_rank]
        is_sum, dim = name == "dsinks", 2 if name == "lse" else 1
        wholes[name] = torch.stack(shards).sum(0) if is_sum else layout.unshard(shards, dim)
    return wholes


def assert_close(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    assert set(exact) - set(ours) <= {"lse"}
    for name, x in ours.items():
        torch.testing.assert_close(x, exact[name], rtol=EXACT, atol=EXACT, msg=f"{name}: {x} is not {exact[name]}")


def alone(given: list[Any], pattern: Pattern, order: str = "contiguous", **options: Any) -> dict[str, Tensor]:
    layout = LAYOUTS[order](TOKENS)
    return whole(layout, [of_rank(None, 0, given, pattern, layout, **options)])


# --- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sinks", "softcap", "dims", "through_lse"),
    [
        (SINKS, None, (5, 5), True), (SINKS, None, (5, 3), False), (None, 0.7, (5, 5), True),
        (None, None, (2, 7), True), (SINKS, 0.7, (5, 3), True), (SINKS, 0.7, (2, 7), False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pattern", ALL_PATTERNS.values(), ids=ALL_PATTERNS)
def test_results_are_those_of_the_formula(
    pattern: Pattern, sinks: Tensor | None, softcap: float | None, dims: tuple[int, int], through_lse: bool
) -> None:
    given = drawn(sinks, dims=dims, through_lse=through_lse)
    exact = results(given, pattern, softcap=softcap)
    for order in ("contiguous", "hilbert"):
        assert_close(alone(given, pattern, order, softcap=softcap), exact)


@pytest.mark.parametrize("kernel", ("flash", "math", "auto"))
@pytest.mark.parametrize("scale", (None, 1.5))
def test_every_kernel_takes_every_score(kernel: str, scale: float | None) -> None:
    """The fused kernel of the CPU merges with a sink. By name it is refused a softcap and two head dims; else they are
    for the math kernel.
    """
    pattern = Pattern.dense(causal=True)
    for (sinks, softcap), value_dim in itertools.product(((SINKS, None), (SINKS, 0.4), (None, 3.0)), (5, 8)):
        given = drawn(sinks, dims=(5, value_dim), through_lse=False)
        lacking = softcap is not None or value_dim != 5
        if kernel == "flash" and lacking:
            with pytest.raises(NotImplementedError, match="'flash' (has no softcap|takes one head dim)"):
                alone(given, pattern, kernel=kernel, scale=scale, softcap=softcap)
            continue
        with count_kernels() as count:
            ours = alone(given, pattern, kernel=kernel, scale=scale, softcap=softcap)
        assert set(count) == {"math" if kernel == "math" or lacking else "flash"}
        assert_close(ours, results(given, pattern, scale=scale, softcap=softcap))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("pattern", (Pattern.dense(causal=True), PATTERNS["longnet causal"], PATTERNS["gaps"]))
def test_no_sinks_for_any_head_are_no_sinks_bit_for_bit(pattern: Pattern, dtype: torch.dtype) -> None:
    q, k, v, _, dout, dlse = converted(drawn(None), dtype)
    dlse = dlse.double() if dtype is torch.float64 else dlse.float()
    without = alone([q, k, v, None, dout, dlse], pattern)
    ours = alone([q, k, v, torch.full((4,), -INF, dtype=dlse.dtype), dout, dlse], pattern)
    assert ours.pop("dsinks").tolist() == [0.0] * 4
    for name, x in ours.items():
        assert x.equal(without[name]), name


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_large_sinks_take_all_the_weight(dtype: torch.dtype) -> None:
    q, k, v, _, dout, dlse = converted(drawn(None), dtype)
    work = torch.float64 if dtype is torch.float64 else torch.float32
    sinks = torch.full((4,), 1e4, dtype=work)
    ours = alone([q, k, v, sinks, dout, dlse.to(work)], PATTERNS["longnet"])
    assert all((ours[name] == 0.0).all() for name in ("out", "dq", "dk", "dv")) and (ours["lse"] == 1e4).all()
    torch.testing.assert_close(ours["dsinks"], dlse.to(work).sum((0, 2)))


def test_a_row_that_sees_nothing_sees_its_sink() -> None:
    given = drawn(SINKS)
    ours = alone(given, PATTERNS["gaps"])
    unseen = results([*given[:3], None, *given[4:]], PATTERNS["gaps"])["lse"] == -INF
    assert unseen.any() and (ours["out"].transpose(1, 2)[unseen] == 0.0).all()
    assert (ours["lse"] == SINKS[:, None])[unseen].all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("in_16_bits", (False, True))
@pytest.mark.parametrize("softcap", (None, 0.5))
def test_in_16_bits_everything_is_computed_in_fp32(dtype: torch.dtype, in_16_bits: bool, softcap: float | None) -> None:
    """Results are those of fp32, rounded; the gradient of sinks is that by the rounded output."""
    q, k, v, sinks, dout, dlse = converted(drawn(SINKS), dtype)
    pattern, dlse = PATTERNS["longnet causal"], dlse.float()
    given: list[Any] = [q, k, v, sinks if in_16_bits else sinks.float(), dout, dlse]
    ours = alone(given, pattern, softcap=softcap)
    wide = alone(converted(given, torch.float32), pattern, softcap=softcap)
    assert ours["out"].equal(wide["out"].to(dtype)) and ours["lse"].equal(wide["lse"])
    assert ours["dsinks"].dtype is (dtype if in_16_bits else torch.float32)
    weights = (sinks.double()[:, None] - ours["lse"].double()).exp()
    products = (ours["out"].double() * dout.double()).sum(-1).transpose(1, 2)
    exact = (weights * (dlse.double() - products)).sum((0, 2))
    tolerance = 0.5 * torch.finfo(dtype).eps if in_16_bits else 1e-5  # fp32: 34 summands and an exponential
    torch.testing.assert_close(ours["dsinks"].double(), exact, rtol=1.01 * tolerance, atol=1e-5)


@pytest.mark.parametrize("only", (False, True))
def test_sinks_or_all_else_may_go_without_gradients(only: bool) -> None:
    q, k, v, sinks, dout, _ = drawn(SINKS)
    exact = results([q, k, v, sinks, dout, None], PATTERNS["longnet"])
    leaves = [x.detach().requires_grad_(only == (x is sinks)) for x in (q, k, v, sinks)]
    (plain(*leaves[:3], PATTERNS["longnet"], Layout.contiguous(TOKENS, 1), sinks=leaves[3]) * dout).sum().backward()
    for name, x in zip(("dq", "dk", "dv", "dsinks"), leaves, strict=True):
        assert (x.grad is not None) == x.requires_grad
        if x.grad is not None:
            torch.testing.assert_close(x.grad, exact[name], rtol=EXACT, atol=EXACT)


def test_gradcheck() -> None:
    q, k, v, sinks = (normal(1, 6, h, d, seed=h + d).requires_grad_() for h, d in ((2, 2), (1, 2), (1, 3), (1, 2)))
    sinks = sinks.detach()[0, 0, 0].requires_grad_()

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return call(q, k, v, PATTERNS["gaps"], Layout.contiguous(6, 1), sinks=sinks, softcap=0.8)

    assert torch.autograd.gradcheck(function, (q, k, v, sinks))


def test_a_second_derivative_is_refused_by_name() -> None:
    *leaves, dout, _ = drawn(SINKS)
    leaves = [x.detach().requires_grad_() for x in leaves if x is not None]
    out = plain(*leaves[:3], Pattern.dense(), Layout.contiguous(TOKENS, 1), sinks=leaves[3], softcap=2.0)
    grads = torch.autograd.grad(out, leaves, dout, create_graph=True)
    assert len(grads) == 4
    for grad, leaf in itertools.product(grads, leaves):
        with pytest.raises(NotImplementedError, match="ring_attention: double backward"):
            torch.autograd.grad(grad.sum(), leaf, retain_graph=True)


def test_autocast_leaves_sinks_in_fp32() -> None:
    q, k, v, sinks, dout, _ = converted(drawn(SINKS), torch.float32)
    pattern = PATTERNS["longnet causal"]
    with torch.autocast("cpu", torch.bfloat16):
        ours = alone([q, k, v, sinks, dout.bfloat16(), None], pattern, softcap=1.5)
    halves = [x.bfloat16() for x in (q, k, v)]
    exact = alone([*halves, sinks, dout.bfloat16(), None], pattern, softcap=1.5)
    assert ours["dsinks"].dtype is torch.float32
    for name, x in ours.items():
        assert x.equal(exact[name].to(x.dtype)), name


@pytest.mark.parametrize("reentrant", (None, False, True))
def test_checkpointing_gives_the_same_bits(reentrant: bool | None) -> None:
    """Reentrant or not; None: selective, which keeps the forward's results."""
    q, k, v, sinks, dout, _ = drawn(SINKS)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    options: dict[str, Any] = {"use_reentrant": bool(reentrant)}
    if reentrant is None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, [torch.ops.ring.attention.default])

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        layout = Layout.contiguous(TOKENS, 1)
        return plain(q.sin(), k, v, PATTERNS["longnet"], layout, sinks=2 * sinks, softcap=0.9)

    wanted = torch.autograd.grad(attend(*leaves), leaves, dout)
    checkpointed = checkpoint(attend, *leaves, **options)
    assert isinstance(checkpointed, Tensor) and dout is not None
    checkpointed.backward(dout)
    for leaf, exact in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None and leaf.grad.equal(exact)


def test_the_products_of_dout_and_out_are_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn(SINKS)
    exact = alone(given, PATTERNS["longnet"], softcap=2.0)
    for most in (1, 60):  # one token at a time, and two
        monkeypatch.setattr("ring.execute._PRODUCTS", most)
        for name, x in alone(given, PATTERNS["longnet"], softcap=2.0).items():
            assert x.equal(exact[name])


# --- compiled graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("differentiated", (False, True))
@pytest.mark.parametrize("sinks", (None, SINKS))
def test_a_graph_gives_the_same_bits(sinks: Tensor | None, differentiated: bool) -> None:
    """differentiated: sinks too."""
    torch._dynamo.reset()
    q, k, v, _, dout, dlse = drawn(None)
    layout = Layout.contiguous(TOKENS, 1)
    runs = []
    compiled = torch.compile(ring_attention, fullgraph=True, backend="aot_eager")
    attend: Any
    for attend in (ring_attention, compiled):
        leaves = [x.detach().requires_grad_() for x in (q, k, v) if x is not None]
        b = None if sinks is None else sinks.clone().requires_grad_(differentiated)
        out, lse = attend(*leaves, PACKED, layout, sinks=b, softcap=0.9, return_lse=True)
        wanted = leaves if b is None or not differentiated else [*leaves, b]
        runs.append([out, lse, *torch.autograd.grad([out, lse], wanted, [dout, dlse])])
    assert all(x.equal(y) and x.stride() == y.stride() for x, y in zip(*runs, strict=True))


def test_a_graph_refuses_what_a_call_refuses() -> None:
    torch._dynamo.reset()
    q, k, v, *_ = drawn(None)
    compiled = torch.compile(ring_attention, fullgraph=True, backend="aot_eager")
    for options, said in (
        ({"softcap": -1.0}, "softcap must be None or a number from 1e-30 to 1e30, got -1.0"),
        ({"sinks": SINKS[:3]}, r"sinks must be None or a dense \(4,\) tensor"),
        ({"sinks": SINKS * -INF}, "sinks must be finite, or -inf for no sink, got inf for query head 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            compiled(q, k, v, Pattern.dense(), Layout.contiguous(TOKENS, 1), **options)


# --- ranks ------------------------------------------------------------------------------------------------------------


def layout_of(order: str, world: int) -> Layout:
    if order == "empty":  # one shard has nothing, the last almost everything
        return Layout.from_cuts(range(TOKENS), (0, *(2 * i for i in range(world - 1)), TOKENS))
    return getattr(Layout, order)(TOKENS, world)


@pytest.mark.ranks
@pytest.mark.parametrize("order", ("zigzag", "empty", "hilbert"))
@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
@pytest.mark.parametrize("world", (2, 4))
def test_ranks_give_the_results_of_one(world: int, exchange: str, order: str) -> None:
    """In buckets of a few keys and of all, with key/value heads for each query head and for several."""
    layout = layout_of(order, world)
    for number, (name, pattern) in enumerate(ALL_PATTERNS.items()):
        dims, kv_heads = ((5, 3), (2, 7), (4, 4))[number % 3], (2, 1, 4)[number % 3]
        options: dict[str, Any] = {"bucket": (3, None)[number % 2], "exchange": exchange}
        softcap = (0.7, None)[number // 2 % 2]
        given = drawn(SINKS, kv_heads, dims, through_lse=number % 2 == 0)

        def step(transport: Transport, given: Any = given, pattern: Pattern = pattern) -> dict[str, Tensor]:
            return of_rank(transport, transport.rank, given, pattern, layout, softcap=softcap, **options)  # noqa: B023

        try:
            assert_close(whole(layout, Simulation(world, number).run(step)), results(given, pattern, softcap=softcap))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def _of_gloo(exchange: str) -> dict[str, Tensor]:
    layout = layout_of("zigzag", dist.get_world_size())
    pattern = PATTERNS["longnet causal"]
    return of_rank(None, dist.get_rank(), drawn(SINKS), pattern, layout, exchange=exchange, bucket=4, softcap=0.7)


@pytest.mark.ranks
@pytest.mark.parametrize("exchange", ("ring", "direct", "gather", "all-to-all"))
def test_processes_give_the_results_of_one(ranks: Ranks, exchange: str) -> None:
    exact = results(drawn(SINKS), PATTERNS["longnet causal"], softcap=0.7)
    assert_close(whole(layout_of("zigzag", 4), ranks(4).run(_of_gloo, exchange)), exact)


@pytest.mark.ranks
def test_a_slot_has_the_numbers_of_a_key_and_of_a_value_and_sinks_are_not_sent() -> None:
    """Every rank sends all its 4 keys of 2 heads to the other: 8 slots of a batch of 2."""
    layout = Layout.contiguous(8, 2)

    def step(transport: Transport, dims: tuple[int, int], sinks: Tensor | None) -> tuple[int, int, int]:
        recording = RecordingTransport(transport)
        given = [None if x is None else x[:, :8] if x.dim() == 4 else x for x in drawn(sinks, dims=dims)]
        with measure(recording) as meter:
            of_rank(recording, transport.rank, [*given[:5], None], Pattern.dense(), layout)
        there, back = (sum(size for _, size, label in recording.sent if label.startswith(x)) for x in ("keys", "grad"))
        return there, back, meter.bytes

    for dims, sinks in itertools.product(((5, 5), (5, 3), (2, 7)), (None, SINKS)):
        slots = 8 * 2 * sum(dims) * 8  # in bytes of fp64
        for there, back, held in Simulation(2, 0).run(partial(step, dims=dims, sinks=sinks)):
            assert (there, back) == (2 * slots, slots)  # keys in forward and backward
            assert held % slots == 0


@pytest.mark.ranks
def test_another_sink_on_one_rank_is_refused_and_the_next_call_right() -> None:
    layout = layout_of("zigzag", 2)
    given = drawn(SINKS)

    def step(transport: Transport) -> dict[str, Tensor]:
        mine = [x if i != 3 or x is None else x + transport.rank for i, x in enumerate(given)]
        with pytest.raises(ValueError, match="sinks must be the same on every rank: rank 0 has 0.3 as number 0 of 4"):
            of_rank(transport, transport.rank, mine, Pattern.dense(), layout)
        return of_rank(transport, transport.rank, given, Pattern.dense(), layout)

    assert_close(whole(layout, Simulation(2, 0).run(step)), results(given, Pattern.dense()))
