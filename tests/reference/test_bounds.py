"""The bounds are the formulas as written; an emulation of a kernel keeps within them, and a broken one does not."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import Branch, Pattern, attention, fast_oracle, gradients
from reference.fast_oracle import QUANTITIES, Expectation, Inputs, evaluate, multiplicity
from reference.roundoff import Arithmetic, Counts, MaskParts, mask_parts, max_pairs, max_partials
from reference.slices import Slice
from tests.support import drawn_patterns
from tests.support.plain_case import plain
from verification.case import DTYPES, Case
from verification.check.expectation import arithmetic_of, expect

B, N, H, HK, D, DV = 1, 48, 4, 2, 8, 5
LONGNET = Pattern.longnet((8, None), (1, 2), H, causal=True)
MIXED = (Branch(7, 3, (0, 1, 2, 2)), Branch(None, 2, 1, range(1, 3)), Branch(4, 6, (5, 1), range(2, 4)))
PATTERNS = {
    "full": Pattern.dense(),
    "causal": Pattern.dense(causal=True),
    "dilated": Pattern((Branch(20, 3, 1),), causal=True),  # two rows in three are dead
    "mixture": LONGNET,
    "thrice": Pattern((Branch(), Branch(), Branch())),
    "mixed": Pattern(MIXED, causal=True),
}
EMULATED = ("float32-math", "bfloat16-math", "bfloat16-half", "float16-math", "float16-half")


class Scores(NamedTuple):
    """Softcap and sinks, (H,)."""

    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Scores()


def problem(dtype: str, size: float, value_dim: int = D) -> list[Tensor]:
    """q, k, v, dout, dlse."""
    draw = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(B, N, H, dim, generator=draw, dtype=torch.float64) for dim in (D, value_dim))
    k, v = (torch.randn(B, N, HK, dim, generator=draw, dtype=torch.float64) for dim in (D, value_dim))
    dlse = torch.randn(B, H, N, generator=draw)
    return [x.to(DTYPES[dtype]) for x in (q * size, k, v, dout)] + [dlse]


def inputs_of(tensors: list[Tensor], pattern: Pattern, scale: float = D**-0.5, scores: Scores = PLAIN) -> Inputs:
    """tensors: as `problem` gives them; without dlse, it takes no part."""
    q, k, v, dout, *dlse = (x.double().numpy() for x in tensors)
    sinks = None if scores.sinks is None else scores.sinks.double().numpy()
    return Inputs(q, k, v, dout, dlse[0] if dlse else None, pattern, scale, sinks=sinks, softcap=scores.softcap)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def finite(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0.0)


def emulate(
    tensors: list[Tensor], pattern: Pattern, kernel: str, fault: str = "", scores: Scores = PLAIN
) -> dict[str, Tensor]:
    """Return out, lse, dq, dk, dv and, with sinks, dsinks in fp32, with the 16-bit roundings of the kernel."""
    dtype, softcap = tensors[0].dtype, scores.softcap
    half = torch.float32 if kernel == "math" else dtype  # of P, dS and partial results
    q, k, v, dout = (x.float().transpose(1, 2) for x in tensors[:4])  # (B, H or HK, N, D)
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    count = torch.from_numpy(multiplicity(pattern, H, N)).float()
    scale = D**-0.5 * (1.001 if fault == "scale" else 1.0)
    s = q @ k.mT * scale
    slope = torch.ones(())
    if softcap is not None:
        y = torch.tanh(s / softcap)
        if kernel == "gpu":  # tanh.approx, by its error at most, of either sign
            y *= 1 + 2.0**-11 * (-1) ** torch.arange(N)
        s = softcap * (1.001 if fault == "softcap" else 1.0) * y
        slope = 1 - (s / softcap) ** 2 if fault != "no slope" else slope
    s = s.masked_fill(count == 0, -torch.inf)
    sinks = torch.full((H,), -torch.inf) if scores.sinks is None or fault == "no sinks" else scores.sinks.float()
    sinks = sinks[:, None, None]
    top = finite(torch.maximum(s.amax(-1, keepdim=True), sinks))
    p = count * torch.exp(s - top)
    total = p.sum(-1, keepdim=True) + torch.exp(sinks - top) * (2 if fault == "sinks twice" else 1)
    out = rounded(rounded(p, half) @ v / total.masked_fill(total == 0, 1.0), half)
    lse = (top + total.log()).squeeze(-1)
    if fault == "accumulator in bf16":
        out = rounded(out, torch.bfloat16)
    if fault == "lse in bf16":
        lse = rounded(lse, torch.bfloat16)
    saved = rounded(out, dtype) * (1.01 if fault == "D of a wrong O" else 1.0)
    delta = (dout * saved).sum(-1) - tensors[4]
    p = count * torch.exp(s - finite(lse)[..., None])
    ds = rounded(p * (dout @ v.mT - delta[..., None]) * slope, half)
    found = {"out": out, "dq": scale * ds @ k, "dk": scale * ds.mT @ q, "dv": rounded(p, half).mT @ dout}
    found = {name: rounded(x, half) for name, x in found.items()}
    for name in ("dk", "dv"):
        found[name] = found[name].view(B, HK, H // HK, N, -1).sum(2)
    found = {name: x.transpose(1, 2).to(dtype) for name, x in found.items()} | {"lse": lse}
    if scores.sinks is not None:
        through = torch.exp(sinks.squeeze(-1) - finite(lse)) * (
            tensors[4] if fault == "dsinks by dlse alone" else -delta
        )
        found["dsinks"] = through.sum((0, 2)).to(scores.sinks.dtype)
    return found


def expected(tensors: list[Tensor], pattern: Pattern, kernel: str, scores: Scores = PLAIN) -> Expectation:
    count = multiplicity(pattern, H, N)
    keys, rows = int(count.sum(-1).max()), int(count.reshape(HK, -1, N).sum(1).max())
    dtype, *others = (str(x.dtype).removeprefix("torch.") for x in (tensors[0], scores.sinks) if x is not None)
    counts = Counts(keys, rows, row_merges=H // HK)
    r = Arithmetic.of(dtype, kernel, D, D**-0.5, counts, sinks=others[0] if others else None)
    return evaluate(inputs_of(tensors, pattern, scores=scores), r)


def worst_ratio(results: dict[str, Tensor], expectation: Expectation) -> float:
    """Return the worst error / bound; where the bound is 0 the result must be exact."""
    return max(ratios(results, expectation).values())


def ratios(results: dict[str, Tensor], expectation: Expectation) -> dict[str, float]:
    """Return the worst error / bound of each quantity."""
    worst = {}
    for name, right in expectation.exact.items():
        seen, bound = results[name].double().numpy(), expectation.bound[name]
        live = bound > 0
        assert np.array_equal(seen[~live], right[~live]), name
        worst[name] = float((np.abs(seen[live] - right[live]) / bound[live]).max(initial=0.0))
    return worst


@pytest.mark.parametrize("way", EMULATED)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_emulation_stays_within_bounds(pattern: Pattern, way: str) -> None:
    """Scores of hundreds too, and in fp16 its smallest numbers: 2^-25 is lost wherever something is rounded."""
    dtype, kernel = way.split("-")
    sizes = [(1.0, 0), (12.0, 0), (300.0, 0), *((1.0, x) for x in (9, 13, 17, 20) if dtype == "float16")]
    for size, exponent in sizes:
        tensors = problem(dtype, size)
        tensors[2] *= 2.0**-exponent
        tensors[4] *= 2.0**-exponent
        worst = worst_ratio(emulate(tensors, pattern, kernel), expected(tensors, pattern, kernel))
        assert worst <= 1.0, (size, exponent)


SINKS = torch.tensor([0.5, -torch.inf, -3.0, 4.0])
WITH_SCORES = {
    "softcap": Scores(softcap=2.0),
    "small softcap": Scores(softcap=0.5),  # most scores are at the cap
    "large softcap": Scores(softcap=1e6),
    "sinks": Scores(sinks=SINKS),
    "extreme sinks": Scores(sinks=torch.tensor([1e4, -1e4, 60.0, -40.0])),
    "both": Scores(30.0, SINKS),
}


@pytest.mark.parametrize("way", [*EMULATED, "bfloat16-gpu", "float16-gpu"])
@pytest.mark.parametrize("pattern", [PATTERNS[name] for name in ("dilated", "mixed")])
@pytest.mark.parametrize("scores", WITH_SCORES.values(), ids=WITH_SCORES)
def test_emulation_with_softcap_or_sinks_stays_within_bounds(scores: Scores, pattern: Pattern, way: str) -> None:
    """Sinks in fp32 and in the working type; values of another head dim."""
    dtype, kernel = way.split("-")
    for size, exponent in [(1.0, 0), (12.0, 0), (300.0, 0), *((1.0, x) for x in (9, 17) if dtype == "float16")]:
        tensors = problem(dtype, size, DV)
        tensors[2] *= 2.0**-exponent
        tensors[4] *= 2.0**-exponent
        for sinks in (torch.float32, DTYPES[dtype]):
            typed = scores._replace(sinks=None if scores.sinks is None else scores.sinks.to(sinks))
            found = emulate(tensors, pattern, kernel, scores=typed)
            assert worst_ratio(found, expected(tensors, pattern, kernel, typed)) <= 1.0, (size, exponent)


def test_worst_tanh_uses_up_the_bound_of_lse() -> None:
    """All else is 2^-13 of it or less."""
    for softcap in (0.5, 2.0, 30.0):
        tensors, scores = problem("bfloat16", 12.0, DV), Scores(softcap)
        found = ratios(emulate(tensors, LONGNET, "gpu", scores=scores), expected(tensors, LONGNET, "gpu", scores))
        assert 0.9 < found["lse"] <= 1.0


@pytest.mark.parametrize(
    ("fault", "scores"),
    [
        ("softcap", Scores(softcap=2.0)),
        ("no slope", Scores(softcap=30.0)),
        ("no sinks", Scores(sinks=SINKS)),
        ("sinks twice", Scores(sinks=SINKS)),
        ("dsinks by dlse alone", Scores(sinks=SINKS)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_faults_of_softcap_or_sinks_exceed_the_bounds(fault: str, scores: Scores, dtype: str) -> None:
    tensors = problem(dtype, 2.0, DV)
    found = emulate(tensors, LONGNET, "math", fault, scores)
    assert worst_ratio(found, expected(tensors, LONGNET, "math", scores)) > (10.0 if dtype == "float32" else 1.0)


@pytest.mark.parametrize("fault", ["scale", "lse in bf16", "accumulator in bf16", "D of a wrong O"])
@pytest.mark.parametrize("size", [1.0, 12.0])
def test_faults_exceed_the_bounds_in_fp32(fault: str, size: float) -> None:
    tensors, pattern = problem("float32", size), PATTERNS["causal"]
    assert worst_ratio(emulate(tensors, pattern, "math", fault), expected(tensors, pattern, "math")) > 10.0


def literal_softcap(r: Arithmetic, x: Tensor, error: Tensor, cap: float) -> tuple[Tensor, ...]:
    """s, its error, f and T_f. x, error: the scores before the softcap."""
    y = torch.tanh(x / cap)
    f = 1 - y**2
    t_x = f * (error / cap + 3 * r.u * x.abs() / cap)
    t_y = t_x + (r.u_tanh + 4 * r.u) * y.abs()
    t_f = 2 * y.abs() * t_y + t_y**2 + r.u * (y**2 + f)
    return cap * y, cap * (t_x + (r.u_tanh + 2 * r.u) * y.abs()), f, t_f


def literal(r: Arithmetic, c: Tensor, tensors: list[Tensor], scores: Scores = PLAIN) -> list[Any]:
    """The bounds of the module's docstring, first order, term by term. q, k, v, dout: (H, N, D), equal heads."""
    a, u, n, g = r.scale, r.u, r.counts, r.gamma
    q, k, v, dout, *dlse = tensors
    s = a * q @ k.mT
    score = g(r.dim + 2) * a * q.abs() @ k.abs().mT
    cap = scores.softcap
    s, score, f, t_f = (s, score, torch.ones(()), 0 * s) if cap is None else literal_softcap(r, s, score, cap)
    b = torch.full((H, 1, 1), -torch.inf).double() if scores.sinks is None else scores.sinks[:, None, None]
    absent = b == -torch.inf
    top = torch.maximum(s.masked_fill(c == 0, -torch.inf).amax(-1, keepdim=True), b)
    lse = ((c * (s - top).exp()).sum(-1, keepdim=True) + (b - top).exp()).log() + top
    p, p_sink = c * (s - lse).exp(), (b - lse).exp()
    out, dp = p @ v, dout @ v.mT
    delta = (dout * out).sum(-1, keepdim=True)
    incoming = dlse[0].unsqueeze(-1) if dlse else torch.zeros_like(delta)
    t = dp - delta + incoming
    ds = p * t
    eps = score + u * (s - top).abs() + r.u_exp
    sink = (2 * u * b.abs() + r.u_exp).masked_fill(absent, 0.0)
    eps_sink = sink + (u * (b - top).abs()).masked_fill(absent, 0.0)
    mean = (p * eps).sum(-1, keepdim=True) + p_sink * eps_sink
    mu = n.merges * u * (2 * lse.abs() + 2 * top.abs() + 4)
    t_lse = mean + g(n.keys + 1) + mu + u * lse.abs()
    t_out = (p * (eps + r.u_prob)) @ v.abs() + (mean + 2 * g(n.keys + 2) + mu + r.u_prob + r.u_partial) * (p @ v.abs())
    t_out = t_out + r.u_out * out.abs()
    e = score + t_lse + u * (s - lse).abs() + r.u_exp
    e_sink = sink + t_lse + (u * (b - lse).abs()).masked_fill(absent, 0.0)
    t_delta = g(v.shape[-1]) * (dout.abs() * out.abs()).sum(-1, keepdim=True)
    t_delta = t_delta + (dout.abs() * t_out).sum(-1, keepdim=True)
    if dlse:
        t_delta = t_delta + u * (delta.abs() + incoming.abs())
    roundings = 3 if dlse else 2
    t_ds = p * (e * t.abs() + g(v.shape[-1]) * dout.abs() @ v.abs().mT + t_delta + roundings * u * t.abs())
    t_ds = t_ds + r.u_prob * ds.abs()
    t_ds, ds = (f + t_f) * t_ds + (t_f + (0.0 if cap is None else u)) * ds.abs(), f * ds
    over_q = g(n.keys) + n.merges * r.u_buf + 2 * u + n.key_blocks * r.u_partial
    over_k = g(n.rows) + n.row_merges * r.u_buf + n.row_blocks * r.u_partial + r.u_returned
    t_dq = a * (t_ds + over_q * ds.abs()) @ k.abs() + r.u_out * (a * ds @ k).abs()
    t_dk = a * (t_ds + (over_k + 2 * u) * ds.abs()).mT @ q.abs() + r.u_out * (a * ds.mT @ q).abs()
    t_dv = (p * (e + r.u_prob + over_k)).mT @ dout.abs() + r.u_out * (p.mT @ dout).abs()
    t_sink = incoming - delta
    ds_sink = (p_sink * t_sink).abs()
    t_ds_sink = p_sink * (e_sink * t_sink.abs() + t_delta + roundings * u * t_sink.abs()) + r.u_prob * ds_sink
    if cap is not None:
        t_ds_sink = t_ds_sink + u * ds_sink
    t_db = (t_ds_sink + (g(N) + r.u_sinks) * ds_sink).sum((1, 2))
    found = [t_out.transpose(0, 1), t_lse.squeeze(-1), *(x.transpose(0, 1) for x in (t_dq, t_dk, t_dv))]
    return found if scores.sinks is None else [*found, t_db]


@pytest.mark.parametrize("scores", [PLAIN, Scores(1.5), Scores(1.5, SINKS.double()), Scores(None, SINKS.double())])
@pytest.mark.parametrize("way", ["float64-math", "float32-math", "float32-flash", *EMULATED[1:3], "bfloat16-gpu"])
def test_fused_computation_equals_the_formulas(way: str, scores: Scores) -> None:
    dtype, kernel = way.split("-")
    counts = Counts(30, 40, merges=7, row_merges=9, key_blocks=2, row_blocks=3)
    r = replace(Arithmetic.of(dtype, kernel, D, 0.3, counts, sinks="float32"), u_returned=2.0**-9)
    taken = r if scores.sinks is None else replace(r, counts=replace(counts, keys=31, merges=8))
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, N, H, dim, generator=draw, dtype=torch.float64) for dim in (D, D, DV, DV)]
    some = torch.randn(1, H, N, generator=draw, dtype=torch.float64)
    count, rows = torch.from_numpy(multiplicity(LONGNET, H, N)), [x[0].transpose(0, 1) for x in tensors]
    for dlse in ([], [0 * some], [some]):
        found = evaluate(inputs_of([*tensors, *dlse], LONGNET, 0.3, scores), r)
        wanted = dict(
            zip(
                ("out", "lse", "dq", "dk", "dv", "dsinks"),
                literal(taken, count, [*rows, *(x[0] for x in dlse)], scores),
                strict=False,
            )
        )
        assert wanted.keys() == found.bound.keys()
        for name, bound in wanted.items():
            # What is left out above is second order in e <= 2^-10 or so, and underflow.
            actual = found.bound[name] if name == "dsinks" else found.bound[name][0]
            np.testing.assert_allclose(actual, r.sides * bound.numpy(), rtol=2e-3)


@pytest.mark.parametrize("error", [0.01, 0.7, 3.0])
def test_large_relative_errors_of_exp_are_bounded_exactly(error: float) -> None:
    """To first order an error of 0.7 moves a weight by 1.4 times itself; it can move it by e^1.4 - 1 = 3.05 times."""
    tensors = problem("float64", 4.0)[:4]
    r = replace(Arithmetic.of("float32", "math", D, D**-0.5, Counts(N, N)), u_exp=error)
    found = evaluate(inputs_of(tensors, PATTERNS["full"]), r)
    sign = torch.where(torch.arange(N) == 5, error, -error).double()
    k, v = (x.repeat_interleave(H // HK, 2) for x in tensors[1:3])
    s = D**-0.5 * torch.einsum("bihd,bjhd->bhij", tensors[0], k) + sign
    off = np.abs(torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v).numpy() - found.exact["out"])
    assert (off <= found.bound["out"]).all()
    assert (np.abs(s.logsumexp(-1).numpy() - found.exact["lse"]) <= found.bound["lse"]).all()
    assert error > 1 or (off / found.bound["out"]).max() > 0.2


def test_bounds_count_underflow_once_a_branch() -> None:
    """Three branches, each with a dS of just below 2^-25: in fp16 all three are rounded to 0."""
    r = Arithmetic.of("float16", "half", D, 1.0, Counts(3 * N, 3 * N))
    q, k, v, dout, _ = (x.double().numpy() for x in problem("float16", 1.0))
    found = evaluate(Inputs(q, k, 0 * v, 0 * dout, None, PATTERNS["thrice"], 1.0), r)
    per_key = np.abs(q).reshape(B, N, HK, H // HK, D).sum((1, 3))  # (B, HK, D): every row sees every key
    np.testing.assert_allclose(found.bound["dk"], np.broadcast_to(3 * r.eta * per_key[:, None] + r.floor_dk, k.shape))


def test_gradient_of_fp32_sinks_stays_fp32() -> None:
    """Without dout the rows' lse alone is in their gradient, so nothing else of it is rounded to bf16 either."""
    tensors = problem("bfloat16", 1.0)
    tensors[3] *= 0
    fine, coarse = (Scores(sinks=SINKS.to(dtype)) for dtype in (torch.float32, torch.bfloat16))
    found, rough = (emulate(tensors, LONGNET, "math", scores=scores) for scores in (fine, coarse))
    assert ratios(found, expected(tensors, LONGNET, "math", fine))["dsinks"] <= 1.0
    assert ratios(rough, expected(tensors, LONGNET, "math", coarse))["dsinks"] <= 1.0
    assert ratios(rough, expected(tensors, LONGNET, "math", fine))["dsinks"] > 10.0


def test_fp64_bounds_count_both_sides() -> None:
    sides = {x: Arithmetic.of(x, "math", D, 1.0, Counts(1, 1)).sides for x in DTYPES}
    assert sides == {"float64": 2, "float32": 1, "bfloat16": 1, "float16": 1}


def small(**changes: Any) -> Case:
    sizes = {"tokens": 24, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 4, "seed": 5}
    world: int = changes.pop("world", 2)
    return plain(world, **sizes | {"lse": "differentiated"} | changes)


def test_counts_of_partial_results() -> None:
    assert max_partials("contiguous", False, ranks=4, tokens=24, bucket=32, branches=1) == 4
    assert max_partials("zigzag", False, ranks=4, tokens=24, bucket=32, branches=1) == 8
    assert max_partials("contiguous", False, ranks=4, tokens=24, bucket=5, branches=3) == 3 * (4 + 4 + 4)
    assert max_partials("striped", True, ranks=4, tokens=24, bucket=32, branches=1) == 7
    assert arithmetic_of(small(world=4)).counts.merges == 4
    long = arithmetic_of(small(world=4, tokens=240, bucket=5)).counts
    assert (long.merges, long.row_merges) == (4 + 48 + 4, 2 * (4 + 48 + 4))
    assert arithmetic_of(small(world=4, order="striped", cuts=(0, 1, 1, 9, 24))).counts.merges == 7
    assert arithmetic_of(small(world=8, order="zigzag", tokens=3)).counts.merges == 3


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 14).flatmap(lambda n: st.tuples(st.just(n), drawn_patterns.patterns(H, sliced=n))))
def test_slices_leave_no_more_pairs_than_counted(drawn: tuple[int, Pattern]) -> None:
    n, pattern = drawn
    count = multiplicity(pattern, H, n)
    keys, rows = max_pairs(pattern, n, H, HK)
    assert keys >= count.sum(-1).max() and rows >= count.reshape(HK, -1, n).sum(1).max()


TIGHT = {
    "first tokens": Pattern.first_tokens(2, 3),
    "a tree": Pattern.tree([None, 0, 0, 1], [4, 8, 6, 6]),
    "both": Pattern.slices([((0, 9), (4, 20), "both")]),
    "anticausal": Pattern.slices([((2, 9), (4, 20), "anticausal")]),
    "a grid": Pattern((Branch(None, 4, 1, slices=(Slice(3, 24, 0, 20, -7, 6),)),)),
    "open ends": Pattern.slices([((9, None), (14, None), "full")]),
    "counted": Pattern.slices([((0, 24), (0, 9), "full"), ((3, 12), (5, 24), "causal")], counted=True),
}


@pytest.mark.parametrize("pattern", TIGHT.values(), ids=TIGHT)
def test_slices_leave_as_many_pairs_as_counted(pattern: Pattern) -> None:
    count = multiplicity(pattern, H, 24)
    assert max_pairs(pattern, 24, H, HK) == (count.sum(-1).max(), count.reshape(HK, -1, 24).sum(1).max())


PARTS = {
    "two frames": (Pattern.frames([4, 8]), (2, 2, True, 6)),
    "first tokens": (Pattern.first_tokens(2, 3), (9, 27, True, 4)),
    "a tree": (Pattern.tree([None, 0, 0], [4, 3, 3]), (2, 2, True, 8)),
    "cut keys": (Pattern.slices([((0, 24), (0, 9), (None, 0)), ((0, 24), (9, 24), (None, 0))]), (6, 3, False, 4)),
    "a grid": (Pattern((Branch(None, 4, slices=(Slice(0, 24, 0, 24, -3, 2),)),)), (1, 1, True, 0)),
    "crossed": (Pattern.slices([((0, 9), (4, 20), "both")]), (5, 5, False, 2)),
    "causal": (Pattern.dense(causal=True, window=5), (3, 3, True, 1)),
    "nothing": (Pattern.slices([]), (1, 1, False, 0)),
}


@pytest.mark.parametrize("mask", PARTS)
def test_parts_of_a_mask_by_hand(mask: str) -> None:
    pattern, parts = PARTS[mask]
    assert mask_parts(pattern, 24) == MaskParts(*parts)


def cut_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_oracle, "WHOLE", 0)
    monkeypatch.setitem(fast_oracle.BLOCK, "cpu", 300)


PACKED = replace(LONGNET, documents=(9, 0, 14, 1))


@pytest.mark.parametrize("pattern", [*PATTERNS.values(), PACKED], ids=[*PATTERNS, "packed"])
@pytest.mark.parametrize("values", ["normal", "huge", "tiny", "ties"])
@pytest.mark.parametrize("lse", ["unused", "differentiated"])
def test_exact_values_are_the_oracles(pattern: Pattern, values: str, lse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides come from fp64, and so does the bound: they agree to it."""
    case = small(pattern=pattern, values=values, lse=lse, dtype="float64", scale=-0.7)
    q, k, v, dout, dlse = case.tensors()
    wanted = *attention(q, k, v, pattern, scale=-0.7), *gradients(q, k, v, pattern, dout, dlse, scale=-0.7)
    count = multiplicity(pattern, 4, 24)
    for blocks in (False, True):
        if blocks:
            cut_in_blocks(monkeypatch)
        found = expect(case)
        assert [found.exact[name].shape for name in QUANTITIES] == [x.shape for x in wanted]
        assert worst_ratio(dict(zip(QUANTITIES, wanted, strict=True)), found) <= 1.0
        assert np.array_equal(found.dead_rows, ~count.any(-1))
        assert np.array_equal(found.dead_keys, ~count.reshape(2, -1, 24).any(1))
