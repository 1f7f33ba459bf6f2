"""Sinks, softcap and a value head dim of its own, held to their formula in one process in fp64.

`test_attention_cross.py` and `test_all_to_all.py` have them on several ranks.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from reference.pattern import Branch, Pattern
from ring import Layout, count_kernels, ring_attention
from tests.support.attention_cases import LAYOUTS, PACKED, PATTERNS, call, normal, plain
from tests.support.dense_scores import results

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


def alone(given: list[Any], pattern: Pattern, order: str = "contiguous", **options: Any) -> dict[str, Tensor]:
    """Return the results on one rank, in the order of the sequence; without dlse without lse. given: q, k, v, sinks,
    dout and dlse; sinks and dlse may be None.
    """
    layout = LAYOUTS[order](TOKENS)
    q, k, v, sinks, dout, dlse = given
    names = {"dq": q, "dk": k, "dv": v}
    leaves = [layout.shard(x, 0).requires_grad_() for x in names.values() if x is not None]
    if sinks is not None:
        leaves.append(sinks.detach().requires_grad_())
        names["dsinks"] = sinks
    options["sinks"] = leaves[3] if leaves[3:] else None
    outputs, slopes = {}, [layout.shard(dout, 0)]
    if dlse is None:
        outputs["out"] = plain(*leaves[:3], pattern, layout, **options)
    else:
        outputs["out"], outputs["lse"] = call(*leaves[:3], pattern, layout, **options)
        slopes.append(layout.shard(dlse, 0, 2))
    grads = torch.autograd.grad([*outputs.values()], leaves, slopes)
    results = {name: x.detach() for name, x in outputs.items()} | dict(zip(names, grads, strict=True))
    return {
        name: x if name == "dsinks" else layout.unshard([x], 2 if name == "lse" else 1) for name, x in results.items()
    }


def assert_close(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    assert set(exact) - set(ours) <= {"lse"}
    for name, x in ours.items():
        torch.testing.assert_close(x, exact[name], rtol=EXACT, atol=EXACT, msg=f"{name}: {x} is not {exact[name]}")


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
        monkeypatch.setattr("ring.attend._PRODUCTS", most)
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
    ):
        with pytest.raises(ValueError, match=said):
            compiled(q, k, v, Pattern.dense(), Layout.contiguous(TOKENS, 1), **options)
