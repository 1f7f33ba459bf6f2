"""The bounds are the formulas as written; an emulation of a kernel keeps within them, and a broken one does not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import Branch, Pattern, attention, fast_oracle, gradients
from reference.fast_oracle import QUANTITIES, Expectation, Inputs, evaluate, multiplicity
from reference.roundoff import Arithmetic, Counts, max_partials
from tests.support.plain_case import plain
from verification.case import DTYPES, Case
from verification.check.expectation import arithmetic_of, expect

B, N, H, HK, D = 1, 48, 4, 2, 8
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


def problem(dtype: str, size: float) -> list[Tensor]:
    """q, k, v, dout, dlse."""
    draw = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(B, N, H, D, generator=draw, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(B, N, HK, D, generator=draw, dtype=torch.float64) for _ in range(2))
    dlse = torch.randn(B, H, N, generator=draw)
    return [x.to(DTYPES[dtype]) for x in (q * size, k, v, dout)] + [dlse]


def inputs_of(tensors: list[Tensor], pattern: Pattern, scale: float = D**-0.5) -> Inputs:
    """tensors: as `problem` gives them; without dlse, it takes no part."""
    q, k, v, dout, *dlse = (x.double().numpy() for x in tensors)
    return Inputs(q, k, v, dout, dlse[0] if dlse else None, pattern, scale)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def finite(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0.0)


def emulate(tensors: list[Tensor], pattern: Pattern, kernel: str, fault: str = "") -> dict[str, Tensor]:
    """Return out, lse, dq, dk, dv in fp32, with the 16-bit roundings of the kernel."""
    dtype = tensors[0].dtype
    half = dtype if kernel == "half" else torch.float32  # of P, dS and partial results
    q, k, v, dout = (x.float().transpose(1, 2) for x in tensors[:4])  # (B, H or HK, N, D)
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    count = torch.from_numpy(multiplicity(pattern, H, N)).float()
    scale = D**-0.5 * (1.001 if fault == "scale" else 1.0)
    s = (q @ k.mT * scale).masked_fill(count == 0, -torch.inf)
    top = finite(s.amax(-1, keepdim=True))
    p = count * torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    out = rounded(rounded(p, half) @ v / total.masked_fill(total == 0, 1.0), half)
    lse = (top + total.log()).squeeze(-1)
    if fault == "accumulator in bf16":
        out = rounded(out, torch.bfloat16)
    if fault == "lse in bf16":
        lse = rounded(lse, torch.bfloat16)
    saved = rounded(out, dtype) * (1.01 if fault == "D of a wrong O" else 1.0)
    delta = (dout * saved).sum(-1) - tensors[4]
    p = count * torch.exp(s - finite(lse)[..., None])
    ds = rounded(p * (dout @ v.mT - delta[..., None]), half)
    found = {"out": out, "dq": scale * ds @ k, "dk": scale * ds.mT @ q, "dv": rounded(p, half).mT @ dout}
    found = {name: rounded(x, half) for name, x in found.items()}
    for name in ("dk", "dv"):
        found[name] = found[name].view(B, HK, H // HK, N, D).sum(2)
    return {name: x.transpose(1, 2).to(dtype) for name, x in found.items()} | {"lse": lse}


def expected(tensors: list[Tensor], pattern: Pattern, kernel: str) -> Expectation:
    count = multiplicity(pattern, H, N)
    keys, rows = int(count.sum(-1).max()), int(count.reshape(HK, -1, N).sum(1).max())
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    r = Arithmetic.of(dtype, kernel, D, D**-0.5, Counts(keys, rows, row_merges=H // HK))
    return evaluate(inputs_of(tensors, pattern), r)


def worst_ratio(results: dict[str, Tensor], expectation: Expectation) -> float:
    """Return the worst error / bound; where the bound is 0 the result must be exact."""
    worst = 0.0
    for name in QUANTITIES:
        seen, right, bound = results[name].double().numpy(), expectation.exact[name], expectation.bound[name]
        live = bound > 0
        assert np.array_equal(seen[~live], right[~live]), name
        worst = max(worst, float((np.abs(seen[live] - right[live]) / bound[live]).max(initial=0.0)))
    return worst


@pytest.mark.parametrize("way", EMULATED)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_an_emulation_never_exceeds_the_bounds(pattern: Pattern, way: str) -> None:
    """Scores of hundreds too, and in fp16 its smallest numbers: 2^-25 is lost wherever something is rounded."""
    dtype, kernel = way.split("-")
    sizes = [(1.0, 0), (12.0, 0), (300.0, 0), *((1.0, x) for x in (9, 13, 17, 20) if dtype == "float16")]
    for size, exponent in sizes:
        tensors = problem(dtype, size)
        tensors[2] *= 2.0**-exponent
        tensors[4] *= 2.0**-exponent
        worst = worst_ratio(emulate(tensors, pattern, kernel), expected(tensors, pattern, kernel))
        assert worst <= 1.0, (size, exponent)


@pytest.mark.parametrize("fault", ["scale", "lse in bf16", "accumulator in bf16", "D of a wrong O"])
@pytest.mark.parametrize("size", [1.0, 12.0])
def test_in_fp32_each_fault_exceeds_the_bounds(fault: str, size: float) -> None:
    tensors, pattern = problem("float32", size), PATTERNS["causal"]
    assert worst_ratio(emulate(tensors, pattern, "math", fault), expected(tensors, pattern, "math")) > 10.0


def literal(r: Arithmetic, c: Tensor, tensors: list[Tensor]) -> list[Any]:
    """The bounds of the module's docstring, first order, term by term. q, k, v, dout: (H, N, D), equal heads."""
    a, u, n, g = r.scale, r.u, r.counts, r.gamma
    q, k, v, dout, *dlse = tensors
    s = a * q @ k.mT
    top = s.masked_fill(c == 0, -torch.inf).amax(-1, keepdim=True)
    lse = (c * (s - top).exp()).sum(-1, keepdim=True).log() + top
    p = c * (s - lse).exp()
    out, dp = p @ v, dout @ v.mT
    delta = (dout * out).sum(-1, keepdim=True)
    incoming = dlse[0].unsqueeze(-1) if dlse else torch.zeros_like(delta)
    t = dp - delta + incoming
    ds = p * t
    size = g(r.dim + 2) * a * q.abs() @ k.abs().mT
    eps = size + u * (s - top).abs() + r.u_exp
    mean = (p * eps).sum(-1, keepdim=True)
    mu = n.merges * u * (2 * lse.abs() + 2 * top.abs() + 4)
    t_lse = mean + g(n.keys + 1) + mu + u * lse.abs()
    t_out = (p * (eps + r.u_prob)) @ v.abs() + (mean + 2 * g(n.keys + 2) + mu + r.u_prob + r.u_partial) * (p @ v.abs())
    t_out = t_out + r.u_out * out.abs()
    e = size + t_lse + u * (s - lse).abs() + r.u_exp
    t_delta = g(r.dim) * (dout.abs() * out.abs()).sum(-1, keepdim=True)
    t_delta = t_delta + (dout.abs() * t_out).sum(-1, keepdim=True)
    if dlse:
        t_delta = t_delta + u * (delta.abs() + incoming.abs())
    roundings = 3 if dlse else 2
    t_ds = p * (e * t.abs() + g(r.dim) * dout.abs() @ v.abs().mT + t_delta + roundings * u * t.abs())
    t_ds = t_ds + r.u_prob * ds.abs()
    over_q = g(n.keys) + n.merges * r.u_buf + 2 * u + n.key_blocks * r.u_partial
    over_k = g(n.rows) + n.row_merges * r.u_buf + n.row_blocks * r.u_partial + r.u_returned
    t_dq = a * (t_ds + over_q * ds.abs()) @ k.abs() + r.u_out * (a * ds @ k).abs()
    t_dk = a * (t_ds + (over_k + 2 * u) * ds.abs()).mT @ q.abs() + r.u_out * (a * ds.mT @ q).abs()
    t_dv = (p * (e + r.u_prob + over_k)).mT @ dout.abs() + r.u_out * (p.mT @ dout).abs()
    return [t_out.transpose(0, 1), t_lse.squeeze(-1), *(x.transpose(0, 1) for x in (t_dq, t_dk, t_dv))]


@pytest.mark.parametrize("way", ["float64-math", "float32-math", "float32-flash", *EMULATED[1:3], "bfloat16-gpu"])
def test_the_fused_computation_is_the_formulas_as_written(way: str) -> None:
    dtype, kernel = way.split("-")
    counts = Counts(30, 40, merges=7, row_merges=9, key_blocks=2, row_blocks=3)
    r = replace(Arithmetic.of(dtype, kernel, D, 0.3, counts), u_returned=2.0**-9)
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, N, H, D, generator=draw, dtype=torch.float64) for _ in range(4)]
    some = torch.randn(1, H, N, generator=draw, dtype=torch.float64)
    count, rows = torch.from_numpy(multiplicity(LONGNET, H, N)), [x[0].transpose(0, 1) for x in tensors]
    for dlse in ([], [0 * some], [some]):
        found = evaluate(inputs_of([*tensors, *dlse], LONGNET, 0.3), r)
        for name, wanted in zip(QUANTITIES, literal(r, count, [*rows, *(x[0] for x in dlse)]), strict=True):
            # What is left out above is second order in e <= 2^-10 or so, and underflow.
            np.testing.assert_allclose(found.bound[name][0], r.sides * wanted.numpy(), rtol=2e-3)


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


def test_each_branch_that_sees_a_pair_may_lose_its_gradient_to_underflow() -> None:
    """Three branches, each with a dS of just below 2^-25: in fp16 all three are rounded to 0."""
    r = Arithmetic.of("float16", "half", D, 1.0, Counts(3 * N, 3 * N))
    q, k, v, dout, _ = (x.double().numpy() for x in problem("float16", 1.0))
    found = evaluate(Inputs(q, k, 0 * v, 0 * dout, None, PATTERNS["thrice"], 1.0), r)
    per_key = np.abs(q).reshape(B, N, HK, H // HK, D).sum((1, 3))  # (B, HK, D): every row sees every key
    np.testing.assert_allclose(found.bound["dk"], np.broadcast_to(3 * r.eta * per_key[:, None] + r.floor_dk, k.shape))


def test_only_fp64_has_an_oracle_as_coarse_as_itself() -> None:
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
